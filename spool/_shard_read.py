"""Reading a shard that anybody may have written.

The HDF5 library is not involved: a file is accepted only if its structure is,
byte for byte, the one that `spool._hdf5` composes for its contents. What a file
could do to a library (links out of the file, external or virtual storage, filters,
loops, sizes that lie) it therefore cannot do here. `spool._diagnose` then finds out
what it tried, for the message.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spool._diagnose import diagnose
from spool._hdf5 import (
    CALL_SIZE,
    FORMAT_VERSION,
    ROOT,
    SIGNATURE,
    Identity,
    Structure,
    compose,
)
from spool._json import identity_of
from spool._json_read import CallReader
from spool.call import Call, Region
from spool.dtypes import STORAGE_CODES
from spool.errors import BadShard
from spool.files import Refused, open_regular


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader is willing to hold.

    Parameters
    ----------
    file_bytes : int
        Largest file (default 256 GiB); its regions come into memory.
    text_bytes : int
        Largest JSON text (default 64 MiB).
    regions : int
        Most regions (default 10,000).
    region_bytes : int
        Most bytes of all regions together (default: as many as there are).
    """

    file_bytes: int = 256 << 30
    text_bytes: int = 64 << 20
    regions: int = 10_000
    region_bytes: int = 256 << 30


DEFAULT_LIMITS = Limits()

# The structure of most shards and all of many are in the first read.
_FIRST_READ = 64 << 10
_MAX_READ = 1 << 30


class NewerShard(BadShard):
    """The shard is of a format version that this program does not know."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"shard format {version}, but this Spool reads format {FORMAT_VERSION}: update Spool"
        )
        self.version = version


def read(path: Path, limits: Limits = DEFAULT_LIMITS) -> Call:
    """Read and check one shard.

    Parameters
    ----------
    path : Path
        A regular file; a symbolic link is refused.
    limits : Limits

    Returns
    -------
    Call
        Its regions are writable arrays that nothing else refers to.

    Raises
    ------
    BadShard
        Whenever the file is not exactly what `spool.shard.write` makes of the
        returned call. `NewerShard` if it declares a newer format.
    MemoryError
        If its regions take more than `limits` or the system allow.
    OSError
        If the system cannot open or read it (absent, no permission, input/output
        error, stale handle): that says nothing about the shard.
    """
    try:
        file = open_regular(path)
    except Refused as error:
        raise BadShard(str(error.strerror)) from error
    try:
        return _Reader(file, limits).read()
    finally:
        os.close(file)


class _Reader:
    def __init__(self, file: int, limits: Limits) -> None:
        self.file = file
        self.limits = limits
        self.size = os.fstat(file).st_size
        if self.size == 0:
            raise BadShard("the file is empty")
        if self.size > limits.file_bytes:
            raise BadShard(f"the file is larger than {limits.file_bytes} bytes")
        self.head = self._bytes(0, min(self.size, _FIRST_READ))

    def read(self) -> Call:
        if not self.head.startswith(SIGNATURE):
            raise BadShard("not an HDF5 file")
        text, crc = self._text()
        reader = CallReader(text, self.limits.regions)
        call = reader.call()
        identity = Identity(**identity_of(call), crc=crc)
        kinds = tuple([(code, nbytes) for code, nbytes, _ in reader.regions])
        if sum(nbytes for _, nbytes in kinds) > self.size:
            raise BadShard("the regions are larger than the file")
        structure = compose(identity, kinds, len(text))
        self._check(structure, [nbytes for _, nbytes in kinds])
        # A sparse file takes no room on a disk, and all of its size in memory.
        needed = sum(nbytes for _, nbytes in kinds)
        if needed > self.limits.region_bytes:
            raise MemoryError(
                f"the tensors take {needed} bytes, the limit is {self.limits.region_bytes}"
            )
        for number, (code, nbytes, expected) in enumerate(reader.regions):
            region = self._region(code, structure.offsets[number], nbytes)
            if zlib.crc32(region.view(np.uint8).data) != expected:
                raise BadShard(f"the bytes of region {number} do not match their checksum")
            call.regions.append(region)
        return call

    def _text(self) -> tuple[bytes, int]:
        """The JSON text, found where a shard has it, and its checksum."""
        try:
            (size,) = struct.unpack_from("<H", self.head, ROOT + 6)
            call_at = ROOT + 8 + size + 4
            (crc,) = struct.unpack_from("<Q", self.head, call_at - 12)
            offset, length = struct.unpack_from("<QQ", self.head, call_at + CALL_SIZE - 20)
        except struct.error:
            raise self._refusal("the file ends within its header") from None
        if offset + length != self.size or length > self.limits.text_bytes:
            raise self._refusal("the file is not as long as it says, or not laid out as a shard")
        text = self._bytes(offset, length)
        if zlib.crc32(text) != crc:
            raise self._refusal("the text of the call does not match its checksum")
        return text, crc

    def _check(self, structure: Structure, sizes: list[int]) -> None:
        size = len(structure.head)
        head = self.head[:size] if size <= len(self.head) else self._bytes(0, size)
        if head != structure.head or structure.total != self.size:
            raise self._refusal("the structure of the file does not match its contents")
        end = size
        for offset, length in zip(
            (*structure.offsets, structure.text_offset), (*sizes, 0), strict=True
        ):
            if offset > end and any(self._bytes(end, offset - end)):
                raise BadShard("there are bytes between the regions")
            end = offset + length

    def _refusal(self, otherwise: str) -> BadShard:
        found, version = diagnose(self._bytes, self.size)
        if version is not None and version > FORMAT_VERSION:
            return NewerShard(version)
        return BadShard(found or otherwise)

    def _bytes(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def _region(self, code: str, offset: int, size: int) -> Region:
        region: Region = np.empty(size // STORAGE_CODES[code].itemsize, STORAGE_CODES[code])
        if size:
            self._fill(region.view(np.uint8).data, offset)
        return region

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self.file, [view[:_MAX_READ]], offset)
            if count == 0:
                raise BadShard("the file ends too early")
            view, offset = view[count:], offset + count
