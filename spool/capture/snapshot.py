"""Copies of a call's values in host memory, as they are at this moment.

CPU tensors are copied at once. Device tensors go into pinned host memory on the
current stream without waiting; the writer waits for the event behind the copies
before it reads them, so the trainer never does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from spool.call import Region, Tree
from spool.tensors import copy_to_host, freeze

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
    """The copies of one call, and what must have happened before they are read."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._buffers: list[torch.Tensor] = []
        self._devices: set[torch.device] = set()
        self._events: list[Any] = []

    def freeze(
        self, values: Sequence[object], first_region: int = 0
    ) -> tuple[list[Tree], list[Region]]:
        """Snapshot values together; see `spool.tensors.freeze`."""
        trees, regions = freeze(values, self._copy, first_region)
        for device in self._devices:
            backend = getattr(torch, device.type)
            event = backend.Event()
            event.record(backend.current_stream(device))
            self._events.append(event)
        self._devices.clear()
        return trees, regions

    def _copy(self, flat: torch.Tensor) -> npt.NDArray[Any]:
        if flat.device.type == "cpu":
            return copy_to_host(flat)
        buffer = self._pool.take(flat.numel() * flat.element_size())
        self._buffers.append(buffer)
        self._devices.add(flat.device)
        host = buffer[: flat.numel() * flat.element_size()].view(flat.dtype)
        host.copy_(flat, non_blocking=True)
        array: npt.NDArray[Any] = host.numpy()
        return array

    def wait(self) -> None:
        """Wait until all copies are in host memory; called where it may block."""
        for event in self._events:
            event.synchronize()

    def release(self) -> None:
        """Give the buffers back; the arrays must not be read any more."""
        if self._buffers:
            self.wait()  # a copy that is still under way must not land in another call's buffer
        for buffer in self._buffers:
            self._pool.give(buffer)
        self._buffers.clear()
