"""Integer and bool tensors: equal or not, never through a float."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spool.standards.blocks import AxisCounter, Block
from spool.standards.rows import PairMeasurement
from spool.standards.structure import dtype_name

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mask of elements with different values, exact for every pair of integer dtypes."""
    if left.dtype is right.dtype:
        if left.dtype is torch.bool:
            return left ^ right
        # torch cannot compare every unsigned dtype, and equal bits are equal values.
        signed = _SIGNED[left.dtype.itemsize]
        return left.view(signed) != right.view(signed)
    wide_left, wide_right = left.to(torch.int64), right.to(torch.int64)
    unequal = wide_left != wide_right
    if torch.uint64 in (left.dtype, right.dtype):
        # What wraps to a negative number as int64 equals no value of another dtype.
        unequal |= (wide_left if left.dtype is torch.uint64 else wide_right) < 0
    return unequal


def _integer(element: torch.Tensor) -> int:
    # Through numpy, because torch itself cannot give out every uint64.
    return int(element.cpu().numpy())


class ExactPair:
    """Statistics of a pair of integer or bool tensors, block by block.

    Parameters
    ----------
    bench, device : torch.dtype
    shape : sequence of int
        Of the whole tensors.
    """

    def __init__(self, bench: torch.dtype, device: torch.dtype, shape: Sequence[int]) -> None:
        self._dtypes = (dtype_name(bench), dtype_name(device))
        self._axes = AxisCounter(shape)
        self._count = 0
        self._different = 0
        self._first: tuple[int, int, int] | None = None

    def add(self, block: Block, bench: torch.Tensor, device: torch.Tensor) -> None:
        """Compare a block and add it."""
        self._count += bench.numel()
        unequal = differing(bench, device)
        found = int(unequal.count_nonzero())
        if not found:
            return
        self._different += found
        self._axes.add(block, unequal)
        if self._first is None:
            at = int(unequal.to(torch.uint8).argmax())
            self._first = (block.start + at, _integer(bench[at]), _integer(device[at]))

    def finish(self) -> PairMeasurement:
        """The measurement of everything added."""
        first: dict[str, int | float | str] = {}
        if self._first is not None:
            index, bench, device = self._first
            first = {
                "worst_abs": float(abs(device - bench)),
                "worst_abs_index": index,
                "worst_abs_bench": str(bench),
                "worst_abs_device": str(device),
            }
        return PairMeasurement(
            bench_dtype=self._dtypes[0],
            device_dtype=self._dtypes[1],
            count=self._count,
            different=self._different,
            error_rate=self._different / self._count,
            bad=self._different,
            axis_bad=self._axes.counts(),
            **first,  # type: ignore[arg-type]
        )
