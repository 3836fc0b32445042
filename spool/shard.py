"""One call, one HDF5 file: the format, and how it is written.

::

    /            attributes: spool_format, api, direction, rank, step, index, order
                 (which call it is) and crc (zlib.crc32 of /call)
    /call        uint8, the call as JSON with tags (`spool._json`): arguments,
                 results, context; per region its type, bytes and zlib.crc32
    /storage/0   the bytes that tensors look into, one contiguous dataset per
    /storage/1   region, as little-endian numbers of 1 to 8 bytes
    ...

Any HDF5 tool opens it (``h5dump``, ``h5py``). Nothing is chunked, filtered,
linked or pickled: a shard is data.

Writing composes the structure (`spool._hdf5`) and hands the regions to the kernel
where they lie, in one gathering write: nothing is copied, and the GIL is not held
while a large tensor is checksummed or written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spool._hdf5 import FORMAT_VERSION, Identity, compose
from spool._json import IDENTITY, add_regions, body_of, identity_of
from spool._json_read import check_identity
from spool._shard_read import DEFAULT_LIMITS, Limits, NewerShard, read
from spool.call import Call, Region
from spool.dtypes import STORAGE_CODES
from spool.errors import BadShard, about, ignoring_refusals
from spool.files import opener

__all__ = [
    "FORMAT_VERSION",
    "Draft",
    "Limits",
    "NewerShard",
    "draft_of",
    "encode",
    "read",
    "write",
]

_CODES = {dtype: code for code, dtype in STORAGE_CODES.items()}

# What one writev() takes (IOV_MAX is 1024 on Linux, and 2 GiB per call).
_MAX_BUFFERS = 512
_MAX_WRITE = 1 << 30


@dataclass(frozen=True, slots=True)
class Draft:
    """A call that is ready to be written: its text, but for the regions, and their bytes.

    Parameters
    ----------
    api, index, rank, step, order, direction
        As in `Call`.
    body : bytes
        From `spool._json.dump_body`.
    regions : sequence of (str, memoryview)
        Type code (a key of `spool.dtypes.STORAGE_CODES`) and bytes of each.
    """

    api: str
    index: int
    rank: int
    step: int
    order: int
    direction: str
    body: bytes
    regions: Sequence[tuple[str, memoryview]]

    @property
    def name(self) -> str:
        """The call's name: `api` and counter."""
        return f"{self.api}.{self.index}"


def draft_of(call: Call) -> Draft:
    """Return the draft of `call`.

    Raises
    ------
    ValueError
        If a region is not 1-D, contiguous and of a storage type.
    """
    regions = [_bytes_of(region) for region in call.regions]
    return Draft(**identity_of(call), body=body_of(call), regions=regions)


def encode(call: Call) -> bytes:
    """Return the shard of `call`.

    Raises
    ------
    ValueError
        If a region is not 1-D, contiguous and of a storage type, or if the call
        is one that a reader would refuse for its name or size.
    """
    return b"".join(_parts(draft_of(call)))


def write(call: Call | Draft, path: Path) -> int:
    """Write the shard of `call` to a new file, durably, and return its size in bytes.

    The file is created exclusively with mode 0640 (less the umask) and removed
    again if writing fails. The directory entry is not synchronised.

    Raises
    ------
    ValueError
        As for `encode`.
    OSError
        As the system reports it (disk full, file exists, ...).
    """
    parts = _parts(draft_of(call) if isinstance(call, Call) else call)
    file = opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with about(path):
            size = _write_all(file, parts)
            os.fsync(file)
    except BaseException:
        with ignoring_refusals():
            os.unlink(path)
        raise
    finally:
        os.close(file)
    return size


def _parts(draft: Draft) -> list[memoryview]:
    """The shard as a list of buffers, in file order."""
    identity = {name: getattr(draft, name) for name in IDENTITY}
    try:
        check_identity(identity)
    except BadShard as error:
        raise ValueError(error.reason) from error
    buffers = [data for _, data in draft.regions]
    kinds = [(code, data.nbytes) for code, data in draft.regions]
    described = [[code, data.nbytes, zlib.crc32(data)] for code, data in draft.regions]
    text = add_regions(draft.body, described)
    if len(text) > DEFAULT_LIMITS.text_bytes or len(kinds) > DEFAULT_LIMITS.regions:
        raise ValueError(f"{draft.name} holds too many values or tensors for a shard")
    structure = compose(Identity(**identity, crc=zlib.crc32(text)), tuple(kinds), len(text))
    parts, end = [memoryview(structure.head)], len(structure.head)
    offsets = (*structure.offsets, structure.text_offset)
    for offset, data in zip(offsets, (*buffers, memoryview(text)), strict=True):
        if offset > end:
            parts.append(memoryview(bytes(offset - end)))
        parts.append(data)
        end = offset + data.nbytes
    return parts


def _bytes_of(region: Region) -> tuple[str, memoryview]:
    """Type code and bytes of a region."""
    if region.ndim != 1 or not region.flags.c_contiguous:
        raise ValueError("a region is not one-dimensional and contiguous")
    code = _CODES.get(region.dtype)
    if code is None:
        raise ValueError(f"a region is of type {region.dtype}, which is not a storage type")
    return code, region.view(np.uint8).data


def _write_all(file: int, parts: list[memoryview]) -> int:
    """Write all buffers in few calls; a large one goes in pieces the system takes."""
    total = sum(part.nbytes for part in parts)
    pieces = [
        part[start : start + _MAX_WRITE]
        for part in parts
        for start in range(0, part.nbytes, _MAX_WRITE)
    ]
    first = 0
    while first < len(pieces):
        stop, size = first, 0
        while stop < len(pieces) and stop - first < _MAX_BUFFERS and size < _MAX_WRITE:
            size += pieces[stop].nbytes
            stop += 1
        written = os.writev(file, pieces[first:stop])
        while first < stop and written >= pieces[first].nbytes:
            written -= pieces[first].nbytes
            first += 1
        if written:
            pieces[first] = pieces[first][written:]
    return total
