"""The HDF5 structure of a shard, byte for byte.

A shard always has the same few objects, so its structure is composed here
instead of by the HDF5 library: it takes a fraction of the time, holds no lock of a
library while a training loop waits, and is *canonical*. A reader does not
interpret foreign structure, it composes what the contents call for and compares,
which leaves no room for links, filters, external or virtual storage.

In the file, one after the other:

* superblock, version 3;
* root group: links ``call`` and ``storage``, the attributes;
* ``/call``, then ``/storage`` and its datasets: object headers, version 2;
* the regions, each from a multiple of 8;
* the JSON text, from a multiple of 8 to the end of the file.

Source of every layout below: HDF5 File Format Specification, version 3.0.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

FORMAT_VERSION = 1
SIGNATURE = b"\x89HDF\r\n\x1a\n"
ROOT = 48
UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF
ALIGNMENT = 8

# Datatype messages of the number types that a region may have (IV.A.2.d).
_INTEGER = "<BBBBIHH"
_FLOAT = "<BBBBIHHBBBBI"
DATATYPES: dict[str, bytes] = {
    f"<{'i' if signed else 'u'}{size}": struct.pack(
        _INTEGER, 0x10, 8 * signed, 0, 0, size, 0, 8 * size
    )
    for size in (1, 2, 4, 8)
    for signed in (False, True)
} | {
    code: struct.pack(
        _FLOAT, 0x11, 0x20, bits - 1, 0, bits // 8, 0, bits, mantissa, exponent, 0, mantissa, bias
    )
    for code, bits, mantissa, exponent, bias in (
        ("<f2", 16, 10, 5, 15),
        ("<f4", 32, 23, 8, 127),
        ("<f8", 64, 52, 11, 1023),
    )
}

# No fractal heap and no B-tree: links and attributes are in the header itself.
_NOT_DENSE = struct.pack("<BBQQ", 0, 0, UNDEFINED, UNDEFINED)
_SCALAR = bytes((2, 0, 0, 0))
# A layout of more regions is not kept for the next call: thousands may come, all different.
_MAX_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """The attributes of the root group; `crc` is ``zlib.crc32`` of the JSON text."""

    api: str
    index: int
    rank: int
    step: int
    order: int
    direction: str
    crc: int


@dataclass(frozen=True, slots=True)
class Structure:
    """Where everything is.

    Parameters
    ----------
    head : bytes
        The file up to the first region, without padding.
    offsets : tuple of int
        First byte of each region.
    text_offset, total : int
        First byte of the JSON text; size of the file.
    """

    head: bytes
    offsets: tuple[int, ...]
    text_offset: int
    total: int


def compose(identity: Identity, regions: tuple[tuple[str, int], ...], text: int) -> Structure:
    """Compose the structure of one shard.

    Parameters
    ----------
    identity : Identity
    regions : tuple of (str, int)
        Type code (a key of `DATATYPES`) and bytes of each.
    text : int
        Bytes of the JSON text.
    """
    fixed, varying = _attributes(identity)
    # Two bytes of size: header prefix 8, checksum 4.
    call_at = ROOT + 8 + _GROUP_MESSAGES + _ROOT_LINKS + len(fixed) + len(varying) + 4
    storage_at = call_at + CALL_SIZE
    lay_out = _storage if len(regions) <= _MAX_REMEMBERED else _storage.__wrapped__
    storage, offsets, end = lay_out(storage_at, regions)
    text_offset = align(end)
    fixed = _group(True) + _link("storage", storage_at) + _link("call", call_at) + fixed
    prefix = b"OHDR\x02\x01" + struct.pack("<H", len(fixed) + len(varying)) + fixed
    head = (
        _superblock(text_offset + text),
        prefix,
        varying,
        struct.pack("<I", _checksum_after(prefix, varying)),
        _dataset("<u1", text, text_offset),
        storage,
    )
    return Structure(b"".join(head), offsets, text_offset, text_offset + text)


def align(offset: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _superblock(end: int) -> bytes:
    block = SIGNATURE + struct.pack("<BBBBQQQQ", 3, 8, 8, 0, 0, UNDEFINED, end, ROOT)
    return block + struct.pack("<I", checksum(block))


def _message(kind: int, data: bytes, constant: bool = False) -> bytes:
    return struct.pack("<BHB", kind, len(data), constant) + data


def _group(with_attributes: bool = False) -> bytes:
    messages = _message(0x02, _NOT_DENSE) + _message(0x0A, b"\0\0", constant=True)
    return messages + _message(0x15, _NOT_DENSE) if with_attributes else messages


def _link(name: str, address: int) -> bytes:
    return _message(0x06, struct.pack("<BBB", 1, 0, len(name)) + name.encode() + _u64(address))


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number)


_GROUP_MESSAGES = len(_group(True))
_ROOT_LINKS = len(_link("storage", 0) + _link("call", 0))


def _attributes(identity: Identity) -> tuple[bytes, bytes]:
    """Attribute messages: those that calls of one API share, then the others."""
    return (
        _common_attributes(identity.api, identity.direction, identity.rank, identity.step),
        b"".join(
            prefix + _u64(value)
            for prefix, value in zip(
                _VARYING, (identity.index, identity.order, identity.crc), strict=True
            )
        ),
    )


def _attribute(name: str, datatype: bytes, value: bytes) -> bytes:
    label = name.encode() + b"\0"
    sizes = struct.pack("<BBHHHB", 3, 0, len(label), len(datatype), len(_SCALAR), 0)
    return _message(0x0C, sizes + label + datatype + _SCALAR + value)


def _number_attribute(name: str, value: int) -> bytes:
    return _attribute(name, DATATYPES["<i8"], _u64(value))


def _text_attribute(name: str, value: str) -> bytes:
    # String, padded with nulls, ASCII.
    datatype = struct.pack("<BBBBI", 0x13, 1, 0, 0, len(value))
    return _attribute(name, datatype, value.encode("ascii"))


_VARYING = tuple(_number_attribute(name, 0)[:-8] for name in ("index", "order", "crc"))


@functools.lru_cache(maxsize=4096)
def _common_attributes(api: str, direction: str, rank: int, step: int) -> bytes:
    return (
        _number_attribute("spool_format", FORMAT_VERSION)
        + _text_attribute("api", api)
        + _text_attribute("direction", direction)
        + _number_attribute("rank", rank)
        + _number_attribute("step", step)
    )


def _dataset(code: str, nbytes: int, address: int) -> bytes:
    """Object header of a contiguous dataset."""
    datatype = DATATYPES[code]
    count = nbytes // int(code[2:])
    messages = (
        _message(0x01, struct.pack("<BBBBQ", 2, 1, 0, 1, count))
        + _message(0x03, datatype, constant=True)
        # Space allocated early, never filled.
        + _message(0x05, b"\x03\x05", constant=True)
        + _message(0x08, struct.pack("<BBQQ", 3, 1, address if nbytes else UNDEFINED, nbytes))
    )
    header = b"OHDR\x02\x00" + bytes((len(messages),)) + messages
    return header + struct.pack("<I", checksum(header))


@functools.lru_cache(maxsize=4096)
def _storage(
    address: int, regions: tuple[tuple[str, int], ...]
) -> tuple[bytes, tuple[int, ...], int]:
    """Headers of ``/storage`` and its datasets, offsets of the regions, end of the last."""
    # Links have the same size wherever they lead, and headers of one type, too.
    links = sum(len(_link(str(number), 0)) for number in range(len(regions)))
    place = address + 10 + len(_group()) + links + 4
    places = []
    for code, _ in regions:
        places.append(place)
        place += _DATASET_SIZES[code]
    messages = _group() + b"".join(_link(str(n), place) for n, place in enumerate(places))
    header = b"OHDR\x02\x02" + struct.pack("<I", len(messages)) + messages
    parts = [header, struct.pack("<I", checksum(header))]
    offsets = []
    for code, nbytes in regions:
        place = align(place)
        offsets.append(place)
        parts.append(_dataset(code, nbytes, place))
        place += nbytes
    return b"".join(parts), tuple(offsets), place


def checksum(data: bytes) -> int:
    """Bob Jenkins's lookup3 (``hashlittle`` with initial value 0), as HDF5 uses it."""
    return _finish(_absorb(_start(len(data)), data, 0), data)


def _checksum_after(prefix: bytes, rest: bytes) -> int:
    """Checksum of ``prefix + rest``, remembering the work on `prefix`."""
    size = len(prefix) + len(rest)
    whole = len(prefix) // 12 * 12
    data = prefix[whole:] + rest
    return _finish(_absorb(_absorbed(prefix[:whole], size), data, 0), data)


_MASK = 0xFFFF_FFFF
_State = tuple[int, int, int]


def _start(size: int) -> _State:
    word = (0xDEADBEEF + size) & _MASK
    return word, word, word


@functools.lru_cache(maxsize=4096)
def _absorbed(data: bytes, size: int) -> _State:
    # The last block is mixed differently; here more follows, so take all of it.
    return _absorb(_start(size), data, len(data))


def _absorb(state: _State, data: bytes, stop: int) -> _State:
    """Mix in all blocks of 12 bytes up to `stop`, by default all but the last block."""
    a, b, c = state
    stop = stop or (len(data) - 1) // 12 * 12
    words = struct.unpack_from(f"<{stop // 4}I", data)
    for i in range(0, len(words), 3):
        a, b, c = a + words[i], b + words[i + 1], (c + words[i + 2]) & _MASK
        a = ((a - c) ^ (c << 4) ^ (c >> 28)) & _MASK
        c = (c + b) & _MASK
        b = ((b - a) ^ (a << 6) ^ (a >> 26)) & _MASK
        a = (a + c) & _MASK
        c = ((c - b) ^ (b << 8) ^ (b >> 24)) & _MASK
        b = (b + a) & _MASK
        a = ((a - c) ^ (c << 16) ^ (c >> 16)) & _MASK
        c = (c + b) & _MASK
        b = ((b - a) ^ (a << 19) ^ (a >> 13)) & _MASK
        a = (a + c) & _MASK
        c = ((c - b) ^ (b << 4) ^ (b >> 28)) & _MASK
        b = (b + a) & _MASK
    return a & _MASK, b & _MASK, c


def _finish(state: _State, data: bytes) -> int:
    """Mix in the last block, of 1 to 12 bytes."""
    x, y, z = struct.unpack("<3I", data[(len(data) - 1) // 12 * 12 :].ljust(12, b"\0"))
    a, b, c = state[0] + x, state[1] + y, state[2] + z
    c = ((c ^ b) - (b << 14 | b >> 18)) & _MASK
    a = ((a ^ c) - (c << 11 | c >> 21)) & _MASK
    b = ((b ^ a) - (a << 25 | a >> 7)) & _MASK
    c = ((c ^ b) - (b << 16 | b >> 16)) & _MASK
    a = ((a ^ c) - (c << 4 | c >> 28)) & _MASK
    b = ((b ^ a) - (a << 14 | a >> 18)) & _MASK
    return int((c ^ b) - (b << 24 | b >> 8)) & _MASK


_DATASET_SIZES = {code: len(_dataset(code, 0, 0)) for code in DATATYPES}
CALL_SIZE = _DATASET_SIZES["<u1"]
