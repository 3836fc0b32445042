"""What the two ends say to each other: frames of a header, a JSON object and bytes.

::

    magic "SPOL" | version | kind | 0 | sequence | bytes of JSON | bytes after it
    | crc32 of the JSON and the bytes | crc32 of all before

all big-endian. The bytes of a shard are left out of the checksum: it has its own, and is
read before it is published. A reader looks at the header before it takes anything in, and
hangs up at the first frame that is not one: the other end connects again and sends again
what was not acknowledged.

=============  =========  ===========================================================
kind           from       JSON
=============  =========  ===========================================================
``HELLO``      client     rank, session, resume, versions
``WELCOME``    receiver   run (as ``run.json``), kept (closed steps)
``REFUSED``    receiver   why, and whether to try again
``SHARD``      client     step, file; the bytes are the shard's
``STEP``       client     step; the bytes are its ``closed.json``
``RANK``       client     the bytes are the rank's ``closed.json``
``BEAT``       both       the bytes are the rank's ``heartbeat.json``, if it has one
``ACK``        receiver   nothing: what has this sequence is durable
``BUSY``       receiver   why: what has this sequence must be sent again, later
``BAD``        receiver   why: what has this sequence is refused for good
=============  =========  ===========================================================
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

VERSION = 1
MAGIC = b"SPOL"
_FIELDS = struct.Struct(">4sBBHQIQI")
HEADER = struct.Struct(f">{_FIELDS.size}sI")
MAX_META = 1 << 20
# Of what is no shard.
MAX_SMALL = 16 << 20


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    SHARD = 4
    STEP = 5
    RANK = 6
    BEAT = 7
    ACK = 8
    BUSY = 9
    BAD = 10


class FrameError(ValueError):
    """What comes is no frame, is damaged, or is larger than allowed."""


@dataclass(frozen=True)
class Header:
    """The fixed part of a frame.

    Parameters
    ----------
    kind : Kind
    sequence : int
        Of the client's frame that this is, or answers.
    meta, body : int
        Bytes of JSON, and bytes after it.
    crc : int
    """

    kind: Kind
    sequence: int
    meta: int
    body: int
    crc: int


@dataclass(frozen=True)
class Frame:
    """A frame that was taken in whole.

    Parameters
    ----------
    kind : Kind
    sequence : int
    meta : dict
    body : bytes
    """

    kind: Kind
    sequence: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        """As it is sent."""
        meta = encode_meta(self.meta)
        crc = checksum(meta, b"" if self.kind == Kind.SHARD else self.body)
        return pack(self.kind, self.sequence, meta, len(self.body), crc) + meta + self.body


def checksum(meta: bytes, body: bytes) -> int:
    """What a header says of what follows."""
    return zlib.crc32(body, zlib.crc32(meta))


def encode_meta(meta: dict[str, Any]) -> bytes:
    """The JSON of a frame; nothing at all for an empty object."""
    return json.dumps(meta, separators=(",", ":")).encode() if meta else b""


def pack(kind: Kind, sequence: int, meta: bytes, body: int, crc: int) -> bytes:
    """The header of a frame whose body follows in pieces."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, 0, sequence, len(meta), body, crc)
    return HEADER.pack(fields, zlib.crc32(fields))


def unpack(data: bytes, max_body: int) -> Header:
    """Read a header, and look whether what follows may be taken in.

    Parameters
    ----------
    data : bytes
        As many as `HEADER` has.
    max_body : int
        Most bytes of a shard.

    Raises
    ------
    FrameError
    """
    fields, own = HEADER.unpack(data)
    magic, version, kind, zero, sequence, meta, body, crc = _FIELDS.unpack(fields)
    if magic != MAGIC or zero:
        what = "TLS" if data[:2] == b"\x16\x03" else "something else"
        raise FrameError(f"the other end speaks {what}, not Spool's protocol")
    if zlib.crc32(fields) != own:
        raise FrameError("a header does not match its checksum")
    if version != VERSION:
        raise FrameError(f"the other end speaks version {version}, this one {VERSION}: update both")
    if kind not in Kind.__members__.values():
        raise FrameError(f"there is no frame of kind {kind}")
    most = max_body if kind == Kind.SHARD else MAX_SMALL
    if meta > MAX_META or body > most:
        raise FrameError(f"a frame of {meta} and {body} bytes; {most} are allowed")
    return Header(Kind(kind), sequence, meta, body, crc)


def decode_meta(data: bytes) -> dict[str, Any]:
    """The JSON of a frame.

    Raises
    ------
    FrameError
        If it is no object.
    """
    if not data:
        return {}
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise FrameError("a frame whose JSON is no object")
    return meta
