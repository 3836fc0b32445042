"""Counting what a random dropout has zeroed."""

from __future__ import annotations

import torch


class ZeroCounter:
    """Counts the groups of a tensor that are zero throughout, block by block.

    Parameters
    ----------
    groups : int
        Into which the elements fall, equally many consecutive ones into each: the
        channels of a channel dropout, else the elements.
    elements : int
        Of the whole tensor; at least one.
    """

    def __init__(self, groups: int, elements: int) -> None:
        self._groups = groups
        self._size = elements // groups
        self._alive = 0
        self._last = -1  # the last group that was found alive

    def add(self, start: int, values: torch.Tensor) -> None:
        """Add the elements from flat index `start` on; blocks come in order.

        Parameters
        ----------
        start : int
        values : torch.Tensor
            One-dimensional.
        """
        if self._size == 1:
            self._alive += int(values.count_nonzero())
            return
        first = start // self._size
        last = (start + values.numel() - 1) // self._size
        alive = torch.zeros(last - first + 1, dtype=torch.bool, device=values.device)
        positions = values.reshape(-1).nonzero().view(-1)
        alive[(positions + start % self._size) // self._size] = True
        count = int(alive.count_nonzero())
        # The block before may have ended in the middle of this one's first group.
        self._alive += count - int(self._last == first and bool(alive[0]))
        if bool(alive[-1]):
            self._last = last

    def zeros(self) -> int:
        """How many groups are zero throughout."""
        return self._groups - self._alive
