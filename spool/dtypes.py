"""Every torch dtype by name, with how its bytes are stored; torch is not needed.

HDF5 and numpy share the plain integers and IEEE floats, which are stored as
themselves. The rest keep their bits: bfloat16 as uint16, float8 and the
sub-byte types as uint8, a complex number as its two floats, a bool as uint8
(which keeps the bits of an invalid bool, too).
"""

from __future__ import annotations

import re

import numpy as np


def _table() -> dict[str, tuple[int, np.dtype[np.generic]]]:
    kinds = {
        "<u1": "uint8 bool bits8 bits1x8 bits2x4 bits4x2 float8_e4m3fn float8_e4m3fnuz "
        "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
        "<i1": "int8",
        "<u2": "uint16 bits16 bfloat16",
        "<i2": "int16",
        "<f2": "float16",
        "<u4": "uint32",
        "<i4": "int32",
        "<f4": "float32",
        "<u8": "uint64",
        "<i8": "int64",
        "<f8": "float64",
    }
    table = {}
    for code, names in kinds.items():
        dtype: np.dtype[np.generic] = np.dtype(code)
        table.update(dict.fromkeys(names.split(), (dtype.itemsize, dtype)))
    for name, code in (("complex32", "<f2"), ("complex64", "<f4"), ("complex128", "<f8")):
        part: np.dtype[np.generic] = np.dtype(code)
        table[name] = (2 * part.itemsize, part)
    return table


_TABLE = _table()

ITEMSIZE: dict[str, int] = {name: size for name, (size, _) in _TABLE.items()}
"""Bytes of one element, by torch's name of the dtype without prefix."""

STORAGE: dict[str, np.dtype[np.generic]] = {name: dtype for name, (_, dtype) in _TABLE.items()}
"""The numpy type whose numbers are stored; two of them make one complex element."""

STORAGE_CODES: dict[str, np.dtype[np.generic]] = {
    d.str.replace("|", "<"): d for d in STORAGE.values()
}
"""The types that a region may have, by a code that is the same on every machine."""

# Quantized tensors are not stored, but their dtypes may be arguments.
CONSTANTS: dict[str, frozenset[str]] = {
    "dtype": frozenset((*ITEMSIZE, "qint8", "quint8", "qint32", "quint4x2", "quint2x4")),
    "layout": frozenset(
        (
            *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
            *("_mkldnn", "jagged"),
        )
    ),
    "memory_format": frozenset(
        ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
    ),
}
"""Names of torch's constants that may be arguments, by kind; devices are named by pattern."""

DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:(0|[1-9][0-9]{0,4}))?")
"""What a device name looks like, e.g. ``npu:0``."""
