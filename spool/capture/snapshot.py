"""Copies of a call's values in the arena, as they are at this moment.

CPU tensors are copied at once. Device tensors go into pinned host memory on the
current stream without waiting; a thread waits for the event behind the copies and
brings them into the arena, so the trainer never waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from spool.capture.arena import Arena, Block
from spool.capture.writers import Span
from spool.dtypes import STORAGE
from spool.tensors import Plan, copy_bytes, copy_memory, flat_bytes

_CODES = {name: dtype.str.replace("|", "<") for name, dtype in STORAGE.items()}
_STEP = 1 << 20


class PinnedPool:
    """Pinned host buffers, used again and again: pinning memory is slow.

    Takes no lock (deques are safe by themselves), because a signal handler may
    interrupt the trainer in here and then wait for writers.

    Parameters
    ----------
    keep_bytes : int
        How much may lie idle, about.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep = keep_bytes
        self._idle_bytes = 0
        self._idle: dict[int, deque[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """A pinned uint8 tensor of at least `nbytes`."""
        size = _rounded(nbytes)
        try:
            buffer = self._idle[size].pop()
        except (KeyError, IndexError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._idle_bytes -= size
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; freed if enough lie idle."""
        size = buffer.numel()
        if self._idle_bytes + size <= self._keep:
            self._idle_bytes += size
            self._idle.setdefault(size, deque()).append(buffer)


def _rounded(nbytes: int) -> int:
    """Few sizes, so that buffers fit again: powers of two, then whole MiB."""
    if nbytes <= _STEP:
        return 1 << max(9, (nbytes - 1).bit_length())
    return -(-nbytes // _STEP) * _STEP


class Transfers:
    """The copies of one call into the arena.

    Parameters
    ----------
    arena : Arena
    pool : PinnedPool
    """

    __slots__ = ("_arena", "_devices", "_events", "_landings", "_next", "_pool")

    def __init__(self, arena: Arena, pool: PinnedPool) -> None:
        self._arena = arena
        self._pool = pool
        self._next = 0
        self._devices: set[torch.device] = set()
        self._events: list[Any] = []
        self._landings: list[tuple[torch.Tensor, int, int]] = []

    def copy(self, plan: Plan, block: Block) -> list[Span]:
        """Copy what is planned into a block of at least its size; where each region is.

        Values are those of now. What a device holds arrives by `land`.
        """
        self._next = block.offset
        spans = [
            (_CODES[dtype], offset, nbytes) for dtype, (offset, nbytes) in plan.copy(self._copy)
        ]
        for device in self._devices:
            backend = getattr(torch, device.type)
            event = backend.Event()
            event.record(backend.current_stream(device))
            self._events.append(event)
        self._devices.clear()
        return spans

    def _copy(self, source: torch.Tensor, nbytes: int) -> tuple[int, int]:
        offset = self._next
        self._next += nbytes
        if not nbytes:
            return offset, 0
        if source.is_cpu:
            copy_bytes(self._arena.address(offset), source, nbytes)
            return offset, nbytes
        buffer = self._pool.take(nbytes)
        buffer[:nbytes].copy_(flat_bytes(source, nbytes), non_blocking=True)
        self._landings.append((buffer, offset, nbytes))
        self._devices.add(source.device)
        return offset, nbytes

    @property
    def pending(self) -> bool:
        """Whether `land` has something to do."""
        return bool(self._landings)

    def land(self) -> None:
        """Wait until all copies are in host memory and bring them into the arena.

        Called where it may block: whoever trains goes on meanwhile.
        """
        for event in self._events:
            event.synchronize()
        for buffer, offset, nbytes in self._landings:
            copy_memory(self._arena.address(offset), buffer.data_ptr(), nbytes)
        self._give_back()

    def drop(self) -> None:
        """Give the buffers back unread."""
        for event in self._events:
            event.synchronize()  # a late copy must not land in another call's buffer
        self._give_back()

    def _give_back(self) -> None:
        for buffer, _, _ in self._landings:
            self._pool.give(buffer)
        self._landings.clear()
        self._events.clear()


class Landings:
    """A thread that brings what devices held into the arena, in order; begun when needed.

    Parameters
    ----------
    landed : callable
        Called with what was given to `add`, and why it failed, else "".
    """

    def __init__(self, landed: Callable[[Any, str], None]) -> None:
        self._landed = landed
        self._queue: queue.SimpleQueue[tuple[Transfers, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, transfers: Transfers, what: object) -> None:
        """Land `transfers`, then tell about `what`."""
        self._queue.put((transfers, what))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spool-landing", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, after what was given to it."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            transfers, what = item
            error = ""
            try:
                transfers.land()
            except Exception as caught:  # a device that is lost
                error = f"the copy from the device failed: {caught}"
            self._landed(what, error)
