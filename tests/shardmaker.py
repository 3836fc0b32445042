"""Calls and hand-made HDF5 files for the tests of the shard format."""

from __future__ import annotations

import json
import zlib

import h5py
import numpy as np

from spool._hdf5 import Identity, compose
from spool._json import dump_call, identity_of
from spool.call import Call, CallContext, TensorRef


def make_call(**changes):
    """A small call with two regions; `changes` replace members."""
    members = {
        "api": "Functional.linear",
        "index": 2,
        "rank": 0,
        "step": 3,
        "order": 17,
        "direction": "forward",
        "args": (TensorRef(0, "float32", (2, 3), (1, 2), 0, "npu:0", True), None, 1.5),
        "kwargs": {"bias": TensorRef(1, "bfloat16", (3,), (1,), 1, "npu:0")},
        "outputs": TensorRef(2, "float32", (2,), (1,), 0),
        "mutated": {},
        "context": CallContext(autocast={"npu": "bfloat16"}, stack=("train.py:3 in step",)),
        "regions": [
            np.arange(6, dtype=np.float32),
            np.arange(4, dtype=np.uint16),
            np.array([1.5, np.nan], np.float32),
        ],
    }
    return Call(**{**members, **changes})


def same_call(one, other):
    """Whether two calls are equal, bytes included."""
    fields = [name for name in Call.__dataclass_fields__ if name != "regions"]
    return (
        all(repr(getattr(one, name)) == repr(getattr(other, name)) for name in fields)
        and [region.dtype for region in one.regions] == [r.dtype for r in other.regions]
        and [region.tobytes() for region in one.regions] == [r.tobytes() for r in other.regions]
    )


def text_of(path):
    """The JSON record of a shard."""
    with h5py.File(path, locking=False) as file:
        return json.loads(file["call"][:].tobytes())


def write_with_h5py(path, record, regions, change=None, attributes=None):
    """Write what a shard holds through the HDF5 library; `change` edits the file."""
    text = json.dumps(record).encode()
    with h5py.File(path, "w", libver=("v110", "v110"), locking=False) as file:
        names = ("api", "index", "rank", "step", "order", "direction")
        values = {"spool_format": 1, **{name: record[name] for name in names}}
        values["crc"] = zlib.crc32(text)
        values.update(attributes or {})
        for name, value in values.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
        file["call"] = np.frombuffer(text, np.uint8)
        storage = file.create_group("storage")
        for number, region in enumerate(regions):
            storage[str(number)] = region
        if change is not None:
            change(file)


def forge(path, change, regions=None, crc=None, call=None):
    """Write a shard that is sound but for its text, which `change` edits."""
    call = make_call() if call is None else call
    data = call.regions if regions is None else regions
    kinds = [[region.dtype.str.replace("|", "<"), region.nbytes] for region in data]
    described = [
        [*kind, zlib.crc32(region.tobytes())] for kind, region in zip(kinds, data, strict=True)
    ]
    record = json.loads(dump_call(call, described))
    edited = change(record)
    text = edited if isinstance(edited, bytes) else json.dumps(record).encode()
    identity = Identity(**identity_of(call), crc=zlib.crc32(text) if crc is None else crc)
    structure = compose(identity, tuple((code, size) for code, size in kinds), len(text))
    image = bytearray(structure.total)
    image[: len(structure.head)] = structure.head
    for offset, region in zip(structure.offsets, data, strict=True):
        image[offset : offset + region.nbytes] = region.tobytes()
    image[structure.text_offset :] = text
    path.write_bytes(image)
