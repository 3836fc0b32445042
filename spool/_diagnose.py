"""What is wrong with an HDF5 file that is not a shard, in one line.

Only for messages: whatever this finds or fails to find, the file has already been
refused. It walks object headers within a fixed number of steps, follows nothing out
of the file, and decodes no more than it must to name what it sees.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator

from spool._hdf5 import SIGNATURE, UNDEFINED

Reader = Callable[[int, int], bytes]

_MAX_OBJECTS = 256
_MAX_MESSAGES = 4096
_MAX_CHUNK = 1 << 20

_LINK_INFO, _DATATYPE, _EXTERNAL, _LAYOUT, _FILTERS = 0x02, 0x03, 0x07, 0x08, 0x0B
_LINK, _ATTRIBUTE, _CONTINUATION = 0x06, 0x0C, 0x10
_LAYOUTS = {0: "compact", 2: "chunked", 3: "virtual"}
_LINKS = {1: "a soft link", 64: "an external link"}
_TYPES = {
    2: "time",
    4: "bit field",
    5: "opaque",
    6: "compound",
    7: "reference",
    8: "enumeration",
    9: "variable-length",
    10: "array",
    11: "complex",
}


def diagnose(read: Reader, size: int) -> tuple[str, int | None]:
    """Look for what no shard has.

    Parameters
    ----------
    read : callable
        Returns the bytes at an offset, of a length; may raise if they are not there.
    size : int
        Bytes of the file.

    Returns
    -------
    reason : str
        Empty if nothing was recognised.
    version : int or None
        The attribute ``spool_format`` of the root group, if it was found.
    """
    walk = _Walk(read, size)
    try:
        reason = walk.run()
    except (struct.error, IndexError, ValueError, OverflowError, EOFError):
        reason = "the structure of the file is damaged"
    return reason, walk.version


class _Walk:
    def __init__(self, read: Reader, size: int) -> None:
        self.read = read
        self.size = size
        self.version: int | None = None
        self.steps = 0
        self.queue: deque[int] = deque()
        self.seen: set[int] = set()
        self.root = True

    def run(self) -> str:
        block = self._bytes(0, 48)
        if not block.startswith(SIGNATURE) or block[8] not in (2, 3):
            return "an HDF5 file of another kind, not a shard"
        end, root = struct.unpack_from("<QQ", block, 28)
        reason = ""
        if end != self.size:
            reason = f"the file has {self.size} bytes, but should have {end}"
        self.queue.append(root)
        while self.queue and len(self.seen) < _MAX_OBJECTS:
            address = self.queue.popleft()
            if address in self.seen:
                return "two links lead to one object"
            self.seen.add(address)
            found = self._object(address)
            self.root = False
            if found:
                return found
        return reason

    def _bytes(self, offset: int, length: int) -> bytes:
        if offset + length > self.size or length > _MAX_CHUNK:
            raise EOFError
        return self.read(offset, length)

    def _object(self, address: int) -> str:
        head = self._bytes(address, 16 if address + 16 <= self.size else 8)
        if head[:4] != b"OHDR":
            return "an object of the file has an old kind of header"
        found = ""
        for kind, flags, data in self._messages(address):
            # To the end of the header: an attribute may tell that the format is newer.
            found = found or self._message(kind, flags, data)
        return found

    def _messages(self, address: int) -> Iterator[tuple[int, int, bytes]]:
        flags = self._bytes(address, 6)[5]
        start = address + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        length = int.from_bytes(self._bytes(start, width), "little")
        chunks = deque([(start + width, length)])
        while chunks:
            offset, length = chunks.popleft()
            data, place = self._bytes(offset, length), 0
            while place + 4 <= len(data):
                self.steps += 1
                if self.steps > _MAX_MESSAGES:
                    raise EOFError
                kind, size, message_flags = struct.unpack_from("<BHB", data, place)
                place += 4 + (2 if flags & 0x04 else 0)
                body = data[place : place + size]
                place += size
                if kind == _CONTINUATION:
                    where, much = struct.unpack_from("<QQ", body)
                    # A continuation has a signature before and a checksum behind.
                    chunks.append((where + 4, much - 8))
                else:
                    yield kind, message_flags, body

    def _message(self, kind: int, flags: int, data: bytes) -> str:
        if kind == _EXTERNAL:
            return "a dataset keeps its bytes in another file (external raw storage)"
        if kind == _FILTERS:
            return "a dataset has filters"
        if kind == _LAYOUT:
            name = _LAYOUTS.get(data[1])
            return f"a dataset has {name} layout, not contiguous" if name else ""
        if kind == _DATATYPE:
            if flags & 0x02:
                return "a dataset has a committed datatype"
            name = _TYPES.get(data[0] & 0x0F)
            return f"a dataset has a {name} datatype" if name else ""
        if kind == _LINK_INFO:
            heap = 2 + (8 if data[1] & 1 else 0)
            dense = struct.unpack_from("<Q", data, heap)[0] != UNDEFINED
            return "a group keeps its links in a heap" if dense else ""
        if kind == _LINK:
            return self._link(data)
        if kind == _ATTRIBUTE:
            if not self.root:
                return "an object other than the root has attributes"
            self._attribute(data)
        return ""

    def _link(self, data: bytes) -> str:
        flags, place = data[1], 2
        if flags & 0x08:
            if data[place]:
                return f"there is {_LINKS.get(data[place], 'a link of an unknown kind')}"
            place += 1
        place += (8 if flags & 0x04 else 0) + (1 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        length = int.from_bytes(data[place : place + width], "little")
        (address,) = struct.unpack_from("<Q", data, place + width + length)
        self.queue.append(address)
        return ""

    def _attribute(self, data: bytes) -> None:
        version, _, name_size, type_size, space_size = struct.unpack_from("<BBHHH", data)
        place = 9 if version == 3 else 8
        name = data[place : place + name_size].rstrip(b"\0")
        value = data[place + name_size + type_size + space_size :]
        if name == b"spool_format" and len(value) in (1, 2, 4, 8):
            self.version = int.from_bytes(value, "little", signed=True)
