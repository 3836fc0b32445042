"""Walking equally shaped tensors in blocks that fit into cache.

A block is a range of one axis with everything inside it, under one index of the
axes outside it, so a block of any strided tensor is a plain slice: only a block
is ever copied, whatever the strides (expanded and transposed ones included).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spool.standards.rows import AXIS_BINS

# Below torch's grain of 2^15 elements a sum runs in one thread, so its last bits do
# not depend on how many there are: the same data gives the same tables everywhere.
CPU_BLOCK = 3 << 13
ACCELERATOR_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block lies.

    Parameters
    ----------
    start : int
        Flat (row-major) index of its first element.
    prefix : tuple of int
        Index of the axes outside the sliced one.
    first, last : int
        Range of the sliced axis, ``last`` excluded.
    """

    start: int
    prefix: tuple[int, ...]
    first: int
    last: int


def compute_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where to compute: an accelerator that already holds one of the tensors, else the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def blocks(
    tensors: Sequence[torch.Tensor], limit: int | None = None
) -> Iterator[tuple[Block, list[torch.Tensor]]]:
    """Go through equally shaped tensors once, in row-major order.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Any strides, any devices, at least one element.
    limit : int, optional
        Most elements of a block; by default what suits the computing device.

    Yields
    ------
    (Block, list of torch.Tensor)
        The block and each tensor's part, flat and contiguous, on one device.
    """
    shape = tuple(tensors[0].shape) or (1,)
    where = compute_device(tensors)
    limit = limit or (CPU_BLOCK if where.type == "cpu" else ACCELERATOR_BLOCK)
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= limit:
        inner *= shape[axis]
        axis -= 1
    rows = max(1, limit // inner)
    rows = -(-shape[axis] // -(-shape[axis] // rows))  # as many blocks, of even size
    shaped = [
        tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach() for tensor in tensors
    ]
    start = 0
    prefixes: Iterator[tuple[int, ...]] = itertools.product(*map(range, shape[:axis]))
    for prefix in prefixes:
        for first in range(0, shape[axis], rows):
            last = min(first + rows, shape[axis])
            yield (
                Block(start, prefix, first, last),
                [
                    _part(tensor, prefix, first, last).to(where).reshape(-1).resolve_neg()
                    for tensor in shaped
                ],
            )
            start += (last - first) * inner


def _part(tensor: torch.Tensor, prefix: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    for index in prefix:
        tensor = tensor.select(0, index)
    return tensor if last - first == tensor.shape[0] else tensor.narrow(0, first, last - first)


class AxisCounter:
    """Counts marked elements along each axis, in at most 64 bins per axis.

    Index i of an axis of n > 64 falls into bin ``i * 64 // n``.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape) or (1,)
        self.bins = [np.zeros(min(AXIS_BINS, size), dtype=np.int64) for size in self.shape]

    def add(self, block: Block, marked: torch.Tensor) -> None:
        """Count a block's marked elements (bool, flat, one per element)."""
        axis = len(block.prefix)
        grid = marked.view(block.last - block.first, -1)
        by_row = grid.sum(1).cpu().numpy()
        total = int(by_row.sum())
        for outer, index in enumerate(block.prefix):
            self.bins[outer][self._bin(outer, index)] += total
        self._spread(axis, by_row, block.first)
        inner = self.shape[axis + 1 :]
        if not inner:
            return
        columns = grid.sum(0).cpu().numpy().reshape(inner)
        for offset in range(len(inner)):
            others = tuple(i for i in range(len(inner)) if i != offset)
            self._spread(axis + 1 + offset, columns.sum(axis=others), 0)

    def counts(self) -> list[int]:
        """All axes' bins, one after the other."""
        return [int(count) for bins in self.bins for count in bins]

    def _bin(self, axis: int, index: int) -> int:
        size = self.shape[axis]
        return index if size <= AXIS_BINS else index * AXIS_BINS // size

    def _spread(self, axis: int, counts: npt.NDArray[np.int64], first: int) -> None:
        size = self.shape[axis]
        positions = np.arange(first, first + len(counts))
        if size > AXIS_BINS:
            positions = positions * AXIS_BINS // size
        np.add.at(self.bins[axis], positions, counts)
