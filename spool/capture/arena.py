"""The memory that captured tensors wait in: one mapping, shared with the writer process.

Blocks are taken from the lowest hole that is large enough, so that the same few pages are
used again and again and no fresh ones have to be found while a step runs.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from typing import Any, NamedTuple

import numpy as np

from spool.errors import StoreError, is_of_system
from spool.files import above_standard

NAME = "spool-arena"
"""By which the system's list of a process's memory shows an arena."""

_ALIGNMENT = 64
# Address space costs nothing, and with more of it than is ever held a hole is always found;
# where it is limited there is less.
_SLACK = (4, 2, 1)

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Of Linux, on every processor that torch runs on; Python's module does not name them all.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_ssize_t,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Block(NamedTuple):
    """Bytes of the arena that a call holds; `nbytes` is a multiple of the alignment."""

    offset: int
    nbytes: int


class Arena:
    """Memory that several processes can map.

    Callers keep to one thread at a time, by a lock of theirs. An exception of a signal
    handler, wherever it strikes, loses a block at worst: a change is one assignment.

    Parameters
    ----------
    limit : int
        Most bytes that are held at a time.

    Attributes
    ----------
    file : int
        Descriptor of the memory, for another process to map; -1 if the system gives memory to
        this one only.
    size : int
        Bytes of the mapping; memory is used where something was written.

    Raises
    ------
    StoreError
        If the system gives none.
    """

    def __init__(self, limit: int) -> None:
        page = mmap.PAGESIZE
        smallest = -(-(limit + page) // page) * page
        self.file, memory = _memory([n * smallest for n in _SLACK])
        self._is_shared = self.file >= 0
        self.size = memory.nbytes
        self._view = memory.data
        self._address = memory.ctypes.data
        self._holes: list[tuple[int, int]] = [(0, self.size)]

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, None if no hole is large enough."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for number, (start, stop) in enumerate(self._holes):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._holes = [*self._holes[:number], *rest, *self._holes[number + 1 :]]
                return Block(start, size)
        return None

    def give(self, block: Block) -> None:
        """Take a block back."""
        start, stop = block.offset, block.offset + block.nbytes
        if start == stop:
            return
        holes = self._holes
        first = last = bisect.bisect(holes, (start, stop))
        if first and holes[first - 1][1] == start:
            first -= 1
            start = holes[first][0]
        if last < len(holes) and holes[last][0] == stop:
            stop = holes[last][1]
            last += 1
        self._holes = [*holes[:first], (start, stop), *holes[last:]]

    def close_file(self) -> None:
        """Close the descriptor; the memory stays as long as this object does."""
        if self.file >= 0:
            file, self.file = self.file, -1
            os.close(file)

    def retire(self) -> None:
        """Give nothing out any more, and the memory back to the system.

        The addresses stay: somebody may be copying to one. What lies behind them is memory
        of this process alone then, which starts empty.
        """
        self._holes = []
        if self._is_shared:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            _libc.mmap(self._address, self.size, _READ_WRITE, flags, -1, 0)

    def address(self, offset: int) -> int:
        """Where in this process's memory a byte is."""
        return self._address + offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes, not copied."""
        return self._view[offset : offset + nbytes]


def _memory(sizes: list[int]) -> tuple[int, np.ndarray[Any, Any]]:
    """Memory of the first of some sizes that there is, and its descriptor."""
    error: OSError | None = None
    for is_shared in (True, False):
        for size in sizes:
            try:
                return _shared(size) if is_shared else (-1, _bytes(mmap.mmap(-1, size)))
            except OSError as caught:
                if not is_of_system(caught):
                    raise
                error = caught
            except AttributeError:  # a Python that was built where there was no memfd
                break
    raise StoreError(f"no memory of {sizes[-1]} bytes ({error}): set a lower queue_bytes")


def _shared(size: int) -> tuple[int, np.ndarray[Any, Any]]:
    file = above_standard(os.memfd_create(NAME, os.MFD_CLOEXEC))
    try:
        os.ftruncate(file, size)
        # Not Python's own mapping, which keeps a copy of the descriptor and closes that number
        # at its end, whosever it is by then.
        address = _libc.mmap(None, size, _READ_WRITE, mmap.MAP_SHARED, file, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        memory = (ctypes.c_char * size).from_address(address)
        # When nobody has a view of it any more; but not at exit, where threads may still write.
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        return file, _bytes(memory)
    except BaseException:
        os.close(file)
        raise


def _bytes(memory: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(memory, np.uint8)
