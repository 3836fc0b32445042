"""What an HDF5 file can do to who opens it: edits for `shardmaker.write_with_h5py`."""

from __future__ import annotations

import h5py
import numpy as np


def replace(file, name, **options):
    """Replace a dataset by one of the same contents with other options."""
    data = file[name][:]
    del file[name]
    return file.create_dataset(name, data=data, **options)


def external_storage(file):
    del file["storage/0"]
    space = h5py.h5s.create_simple((6,))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_external(b"/etc/passwd", 0, 24)
    h5py.h5d.create(file["storage"].id, b"0", h5py.h5t.IEEE_F32LE, space, plist)


def virtual(file):
    del file["storage/0"]
    layout = h5py.VirtualLayout((6,), np.float32)
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (6,))
    file.create_virtual_dataset("storage/0", layout)


def compact(file):
    del file["storage/0"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((6,))
    h5py.h5d.create(file["storage"].id, b"0", h5py.h5t.IEEE_F32LE, space, plist)


def soft_link(file):
    del file["storage/0"]
    file["storage/0"] = h5py.SoftLink("/call")


def external_link(file):
    del file["storage/0"]
    file["storage/0"] = h5py.ExternalLink("/tmp/other.h5", "/x")


def second_hard_link(file):
    del file["storage/1"]
    file["storage/1"] = file["storage/0"]


def cycle(file):
    file["storage/up"] = file["storage"]


def committed_type(file):
    file["type"] = np.dtype(np.float32)
    del file["storage/0"]
    file.create_dataset("storage/0", data=np.zeros(6), dtype=file["type"])


def odd_type(dtype):
    def change(file):
        del file["storage/0"]
        file.create_dataset("storage/0", shape=(6,), dtype=dtype)

    return change


def huge(file):
    del file["storage/0"]
    file.create_dataset("storage/0", shape=(1 << 40,), dtype=np.float32)


def shapeless(file):
    del file["storage/0"]
    file.create_dataset("storage/0", data=np.zeros((2, 3), np.float32))


def deep(file):
    group = file["storage"]
    for _ in range(500):
        group = group.create_group("g")


def many(file):
    for number in range(300):
        file.create_group(f"storage/x{number}")


# Edits of a shard made by the HDF5 library, by words of the reason for which it is refused.
HOSTILE = {
    "external raw storage": external_storage,
    "virtual": virtual,
    "compact": compact,
    "chunked": lambda file: replace(file, "storage/0", chunks=(2,)),
    "filter": lambda file: replace(file, "storage/0", compression="gzip", chunks=(6,)),
    "soft link": soft_link,
    "external link": external_link,
    "two links": second_hard_link,
    "two links lead": cycle,
    "committed": committed_type,
    "reference": odd_type(h5py.ref_dtype),
    "variable-length": odd_type(h5py.string_dtype()),
    "compound": odd_type(np.dtype([("a", "<f4")])),
    "opaque": odd_type(np.dtype("V4")),
    "enumeration": odd_type(bool),
    "array": odd_type(np.dtype(("<f4", (2,)))),
    "heap": many,
    "attributes": lambda file: file["storage"].attrs.update(x=1),
}


def huge_attribute(file):
    file.attrs.create("more", np.zeros(8000))


def dense_attributes(file):
    for number in range(40):
        file["storage"].attrs[f"x{number}"] = np.zeros(1000)


def compressed_bomb(file):
    del file["storage/0"]
    zeros = np.zeros(1 << 24, np.float32)
    file.create_dataset("storage/0", data=zeros, compression="gzip", chunks=(1 << 20,))


# What the reader finds no name for, by what it is.
OTHERS = {
    "other library": None,
    "huge shape": huge,
    "two axes": shapeless,
    "deep groups": deep,
    "huge attribute": huge_attribute,
    "dense attributes": dense_attributes,
    "compressed bomb": compressed_bomb,
    "big-endian": odd_type(">f4"),
    "extra group": lambda file: file.create_group("extra"),
    "no call": lambda file: file.__delitem__("call"),
    "no storage": lambda file: file.__delitem__("storage"),
    "no region": lambda file: file.__delitem__("storage/1"),
    "renamed region": lambda file: file.move("storage/0", "storage/7"),
    "extra attribute": lambda file: file.attrs.update(extra=1),
    "no checksum": lambda file: file.attrs.__delitem__("crc"),
    "wide text": lambda file: replace(file, "call", dtype=np.uint16),
}
