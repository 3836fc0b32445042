"""Adding up blocks into one `PairMeasurement`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from spool.standards.blocks import AxisCounter, Block
from spool.standards.rows import HISTOGRAM_BINS, PairMeasurement
from spool.standards.statistics import (
    METRICS,
    BlockStatistics,
    PairKind,
    finite_statistics,
    pair_kind,
    special_statistics,
)
from spool.standards.structure import dtype_name
from spool.standards.thresholds import STANDARD_DTYPES, ZERO_MAX

Measure: TypeAlias = Callable[[torch.Tensor, torch.Tensor, PairKind], BlockStatistics | None]
_COUNTS = (
    "count",
    "different",
    "above",
    "below",
    "small",
    "normal",
    "small_bench_bad",
    "abs_bad",
    "rel_bad",
    "acc_abs_bad",
    "acc_rel_bad",
    "acc_small",
    "acc_normal",
    "ulp_bad",
    "odd",
    "odd_bad",
    "acc_odd_bad",
    "nonfinite_different",
    "device_nonfinite",
)
_SUMS = ("sum_square", "sum_rel", "sum_ulp", "sum_diff", "sum_abs_diff")
_SPECIALS = (
    *("bench_nan", "bench_posinf", "bench_neginf"),
    *("device_nan", "device_posinf", "device_neginf"),
)
_MAXIMA = ("bench_max", "device_max", "max_abs", "max_rel", "max_ulp")


_KEPT_COUNTS = (
    *("count", "different", "above", "below", "small", "normal"),
    *("nonfinite_different", "device_nonfinite"),
)
_KEPT_VALUES = ("max_abs", "bench_max", "device_max", "sum_diff", "sum_abs_diff")
_WITHIN = ("within_hundredth", "within_thousandth", "within_ten_thousandth")
_GET_COUNTS = operator.attrgetter(*_COUNTS)
_GET_SUMS = operator.attrgetter(*_SUMS)
_GET_MAXIMA = operator.attrgetter(*_MAXIMA)


class Cosine:
    """Scalar products of two sides, kept as ``value * 2^exponent``.

    The published rule divides each side by its own maximum first. Known only at
    the end of the pass, that maximum is replaced by a power of two that grows
    with what was seen; the quotient is the same.
    """

    def __init__(self) -> None:
        self._exponents: tuple[int, int] | None = None
        self._products = (0.0, 0.0, 0.0)

    def add(self, products: tuple[float, float, float], exponents: tuple[int, int]) -> None:
        """Add a block's dot, |b|^2 and |d|^2, of sides divided by 2^exponents."""
        old = self._exponents or exponents
        new = (max(old[0], exponents[0]), max(old[1], exponents[1]))
        kept = _rescale(self._products, old, new)
        added = _rescale(products, exponents, new)
        self._products = (kept[0] + added[0], kept[1] + added[1], kept[2] + added[2])
        self._exponents = new

    def value(self) -> float:
        """The cosine, clipped to [-1, 1]; NaN if a value was not finite."""
        dot, bench, device = self._products
        norm = math.sqrt(bench * device)
        return max(-1.0, min(1.0, dot / norm)) if norm == norm and norm > 0 else math.nan


def _rescale(
    products: tuple[float, float, float], old: tuple[int, int], new: tuple[int, int]
) -> tuple[float, float, float]:
    if old == new:
        return products
    left, right = old[0] - new[0], old[1] - new[1]
    dot, bench, device = products
    return (
        math.ldexp(dot, left + right),
        math.ldexp(bench, 2 * left),
        math.ldexp(device, 2 * right),
    )


class FloatPair:
    """Statistics of a pair of real floating point tensors, block by block.

    Parameters
    ----------
    bench, device : torch.dtype
    shape : sequence of int
        Of the whole tensors.
    complex_names : (str, str), optional
        Dtype names of bench and device if the reals are parts of complex values,
        which no standard judges.
    """

    def __init__(
        self,
        bench: torch.dtype,
        device: torch.dtype,
        shape: Sequence[int],
        complex_names: tuple[str, str] | None = None,
    ) -> None:
        self._names = complex_names or (dtype_name(bench), dtype_name(device))
        self.kind = pair_kind(bench, device)
        self._counts = [0] * len(_COUNTS)
        self._sums = [0.0] * len(_SUMS)
        self._maxima = [0.0] * len(_MAXIMA)
        self._within = [0, 0, 0]
        self._specials = [0] * 6
        self._cosine = Cosine()
        self._octaves = np.zeros((len(METRICS), HISTOGRAM_BINS), dtype=np.int64)
        self._worst: dict[str, tuple[float, int, float, float]] = {}
        self._axes = AxisCounter(shape)
        self._bad = 0
        self._first_nonfinite: int | None = None

    def add(
        self,
        block: Block,
        bench: torch.Tensor,
        device: torch.Tensor,
        kept: torch.Tensor | None = None,
    ) -> BlockStatistics | None:
        """Measure a block and add it.

        Parameters
        ----------
        block : Block
        bench, device : torch.Tensor
            Flat parts of both tensors.
        kept : torch.Tensor, optional
            Bool mask of the elements to measure; all by default.

        Returns
        -------
        BlockStatistics or None
            What `merge` may add to a second pair of the same values and dtypes; None
            if the block had none or had values that are not finite.
        """
        if kept is not None:
            bench, device = bench[kept], device[kept]
            if bench.numel() == 0:
                return None
        stats = finite_statistics(bench, device, self.kind)
        if stats is None:
            self._add_special(block, bench, device, kept)
        else:
            self.merge(block, bench, device, stats, kept)
        return stats

    def _add_special(
        self,
        block: Block,
        bench: torch.Tensor,
        device: torch.Tensor,
        kept: torch.Tensor | None,
    ) -> None:
        """Add a block by parts: what is finite on both sides, and the rest."""
        wide = self.kind.wide
        finite = bench.to(wide).isfinite() & device.to(wide).isfinite()
        parts: tuple[tuple[torch.Tensor, Measure], ...] = (
            (finite, finite_statistics),
            (~finite, special_statistics),
        )
        for mask, measure in parts:
            part = bench[mask], device[mask]
            if part[0].numel() == 0:
                continue
            stats = measure(*part, self.kind)
            where = mask if kept is None else torch.zeros_like(kept).masked_scatter_(kept, mask)
            if stats is not None:
                self.merge(block, *part, stats, where)

    def merge(
        self,
        block: Block,
        bench: torch.Tensor,
        device: torch.Tensor,
        stats: BlockStatistics,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Add a block's statistics; `bench` and `device` are the measured elements."""
        self._counts = list(map(operator.add, self._counts, _GET_COUNTS(stats)))
        self._sums = list(map(operator.add, self._sums, _GET_SUMS(stats)))
        self._maxima = list(map(_larger, self._maxima, _GET_MAXIMA(stats)))
        self._within = list(map(operator.add, self._within, stats.within))
        self._specials = list(map(operator.add, self._specials, stats.specials))
        self._cosine.add(stats.products, stats.exponents)
        if stats.octaves is not None:
            self._octaves += stats.octaves
        if stats.first_device_nonfinite is not None and self._first_nonfinite is None:
            self._first_nonfinite = _position(block, stats.first_device_nonfinite, kept)
        self._find_worst(block, bench, device, stats, kept)
        if stats.bad is not None:
            marked = stats.bad
            self._bad += int(marked.count_nonzero())
            if kept is not None:
                marked = torch.zeros_like(kept).masked_scatter_(kept, marked)
            self._axes.add(block, marked)

    def _find_worst(
        self,
        block: Block,
        bench: torch.Tensor,
        device: torch.Tensor,
        stats: BlockStatistics,
        kept: torch.Tensor | None,
    ) -> None:
        for name, values in stats.metrics.items():
            largest = getattr(stats, f"max_{name}")
            best = self._worst[name][0] if name in self._worst else 0.0
            if best != best or largest <= best:
                continue
            at = int(values.argmax())
            position = _position(block, at, kept)
            self._worst[name] = (largest, position, float(bench[at]), float(device[at]))

    def finish(self) -> PairMeasurement:
        """The measurement of everything added."""
        found: dict[str, Any] = dict(zip(_COUNTS, self._counts, strict=True))
        found |= zip(_SUMS, self._sums, strict=True)
        found |= zip(_MAXIMA, self._maxima, strict=True)
        bench, device = self._names
        columns: dict[str, Any] = {name: found[name] for name in _KEPT_COUNTS}
        columns |= self._cosine_columns(found)
        if found["count"]:
            columns |= {name: found[name] for name in _KEPT_VALUES}
            shares = [within / found["count"] for within in self._within]
            columns |= zip(_WITHIN, shares, strict=True)
        if device in STANDARD_DTYPES:
            columns |= self._standard_columns(found)
        columns |= dict(zip(_SPECIALS, self._specials, strict=True))
        for name, (value, index, left, right) in self._worst.items():
            columns[f"worst_{name}"] = value
            columns[f"worst_{name}_index"] = index
            columns[f"worst_{name}_bench"] = repr(left)
            columns[f"worst_{name}_device"] = repr(right)
        return PairMeasurement(
            bench_dtype=bench,
            device_dtype=device,
            device_nonfinite_index=self._first_nonfinite,
            histogram_abs=self._histogram("abs", found),
            histogram_rel=self._histogram("rel", found),
            histogram_ulp=self._histogram("ulp", found) if self.kind.ulp else None,
            bad=self._bad,
            axis_bad=self._axes.counts(),
            **columns,
        )

    def _cosine_columns(self, found: dict[str, Any]) -> dict[str, Any]:
        sides = found["bench_max"], found["device_max"]
        zero = [largest <= ZERO_MAX for largest in sides]
        if found["count"] <= 1 or all(zero):
            return {"cosine": None}
        if any(zero):
            return {"cosine": None, "one_side_zero": True}
        return {"cosine": self._cosine.value() if all(map(math.isfinite, sides)) else math.nan}

    def _standard_columns(self, found: dict[str, Any]) -> dict[str, Any]:
        count = max(found["count"], 1)
        square = found["sum_square"] / count
        square *= count / (found["normal"] + 0.0001) + 0.0001
        columns: dict[str, Any] = {
            "error_rate": found["different"] / count,
            "balance": abs(found["above"] - found["below"]) / count,
            "rmse": math.sqrt(square),
            "small_error_share": _share(found["small_bench_bad"], found["small"]),
            "max_rel": found["max_rel"],
            "mean_rel": _share(found["sum_rel"], found["normal"]),
            "inf_nan_share": _share(found["odd_bad"], found["odd"]),
            "rel_error_share": _share(found["rel_bad"], found["normal"]),
            "abs_error_share": _share(found["abs_bad"], found["small"]),
            "acc_inf_nan_share": _share(found["acc_odd_bad"], found["odd"]),
            "acc_rel_error_share": _share(found["acc_rel_bad"], found["acc_normal"]),
            "acc_abs_error_share": _share(found["acc_abs_bad"], found["acc_small"]),
        }
        if self.kind.ulp:
            columns["ulp_max"] = found["max_ulp"]
            columns["ulp_mean"] = found["sum_ulp"] / count
            columns["ulp_share"] = found["ulp_bad"] / count
        return columns

    def _histogram(self, name: str, found: dict[str, Any]) -> list[int]:
        """64 bins, with what is equal moved into the first; see `rows.HISTOGRAM_LOW`."""
        bins: list[int] = self._octaves[METRICS.index(name)].tolist()
        # Equal elements are in the lowest octave, or in no block's histogram at all.
        bins[0] = found["count"] - found["different"]
        bins[1] = found["different"] - sum(bins[2:])
        return bins


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0


def _larger(left: float, right: float) -> float:
    return left if left != left or left >= right else right


def _position(block: Block, at: int, kept: torch.Tensor | None) -> int:
    if kept is not None:
        at = int(kept.nonzero()[at])
    return block.start + at
