"""Error statistics of one block of floating point values.

`BlockStatistics` holds exact counts, fp64 sums and maxima that `accumulate.FloatPair`
adds up, so nothing here depends on how a tensor was cut. Two things keep a block
cheap. Counts that its maximum already decides are not counted: the common block,
all within tolerance, costs a handful of passes. And elements are chosen with
indicators of 0.0 and 1.0, because torch compares and masks several times slower
than it multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from spool.standards.rows import HISTOGRAM_BINS, HISTOGRAM_LOW
from spool.standards.structure import dtype_name
from spool.standards.thresholds import (
    ACC_SMALL,
    BFLOAT16_EPS,
    BFLOAT16_MAX,
    Constants,
    constants_of,
)

METRICS = ("abs", "rel", "ulp")
SHARES = (0.01, 0.001, 0.0001)
_EXPONENT_BITS = 0x7FF0000000000000
_SAFE = (2.0**-200, 2.0**200)  # the product of two sums of squares stays inside fp64


@dataclass(frozen=True)
class PairKind:
    """What the dtypes of a pair fix before any value is seen.

    Parameters
    ----------
    bench, device : torch.dtype
        Real floating dtypes.
    """

    bench: torch.dtype
    device: torch.dtype
    wide: torch.dtype = field(init=False)
    constants: Constants = field(init=False)
    eps: float = field(init=False)
    largest: float = field(init=False)
    ulp: bool = field(init=False)
    casts: bool = field(init=False)

    def __post_init__(self) -> None:
        wide = torch.float64 if torch.float64 in (self.bench, self.device) else torch.float32
        name = dtype_name(self.device)
        # fp8 is compared after its exact upcast to fp32, so fp32 is what the bench is.
        is_float8 = self.bench.itemsize == 1
        bench_eps = torch.finfo(torch.float32 if is_float8 else self.bench).eps
        bf16 = self.device is torch.bfloat16
        values = {
            "wide": wide,
            "constants": constants_of(name),
            "eps": BFLOAT16_EPS if bf16 else bench_eps,
            "largest": BFLOAT16_MAX if bf16 else torch.finfo(self.device).max,
            # bf16 and fp8 devices are upcast before anything else, so the bench stays.
            "casts": self.bench is not self.device and name in ("float16", "float32"),
            "ulp": name in ("float16", "bfloat16", "float32"),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)


@dataclass
class BlockStatistics:
    """Statistics of one block; the names are those of `rows.PairMeasurement`.

    The tensors at the end are kept only to look up the worst element.
    """

    count: int
    bench_max: float
    device_max: float
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    exponents: tuple[int, int] = (0, 0)
    within: tuple[int, int, int] = (0, 0, 0)
    different: int = 0
    above: int = 0
    below: int = 0
    small: int = 0
    normal: int = 0
    small_bench_bad: int = 0
    abs_bad: int = 0
    rel_bad: int = 0
    acc_abs_bad: int = 0
    acc_rel_bad: int = 0
    acc_small: int = 0
    acc_normal: int = 0
    ulp_bad: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: float = 0.0
    sum_square: float = 0.0
    sum_rel: float = 0.0
    sum_ulp: float = 0.0
    sum_diff: float = 0.0
    sum_abs_diff: float = 0.0
    specials: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    odd: int = 0
    odd_bad: int = 0
    acc_odd_bad: int = 0
    nonfinite_different: int = 0
    device_nonfinite: int = 0
    first_device_nonfinite: int | None = None
    octaves: npt.NDArray[np.int64] | None = None
    bad: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


@lru_cache(maxsize=64)
def pair_kind(bench: torch.dtype, device: torch.dtype) -> PairKind:
    """The `PairKind` of two dtypes."""
    return PairKind(bench, device)


def finite_statistics(
    bench: torch.Tensor, device: torch.Tensor, kind: PairKind
) -> BlockStatistics | None:
    """Measure one flat block of finite values.

    Parameters
    ----------
    bench, device : torch.Tensor
        1-D, equally long, not empty, of the dtypes of `kind`, on one device.

    Returns
    -------
    BlockStatistics or None
        None if a value is not finite (`special_statistics` measures those).
    """
    b, d = bench.to(kind.wide), device.to(kind.wide)
    size = b.abs()
    bench_max = float(size.max())
    if not math.isfinite(bench_max):
        return None
    stats = BlockStatistics(count=b.numel(), bench_max=bench_max, device_max=bench_max)
    if torch.equal(b, d):
        _sizes(stats, size, kind)
        wide = b.double()
        (scaled, _), stats.exponents = _scaled(wide, wide, stats)
        product = _dot(scaled, scaled)
        stats.products = (product, product, product)
        stats.within = (stats.count, stats.count, stats.count)
        return stats
    stats.device_max = float(d.abs().max())
    if not math.isfinite(stats.device_max):
        return None
    difference = d - b
    stats.different = int(difference.count_nonzero())
    if kind.casts:
        _cast_signs(stats, b, d, bench.to(kind.device).to(kind.wide), kind)
    else:
        _signs(stats, difference, stats.different)
    b64 = b.double()
    exact = _products(stats, b64, d.double())
    normal = _sizes(stats, size, kind)
    relative = _errors(stats, difference.abs_(), size, normal, kind)
    if kind.ulp:
        _distances(stats, exact, b64, kind.constants)
    stats.octaves = _octaves({**stats.metrics, "rel": relative})
    return stats


def special_statistics(
    bench: torch.Tensor, device: torch.Tensor, kind: PairKind
) -> BlockStatistics:
    """Measure the elements of a block that are not finite on at least one side.

    The same infinity and NaN on both sides are equal; every other pair is without
    bound, neither small nor normal. For the parameters see `finite_statistics`.
    """
    b, d = bench.to(kind.wide), device.to(kind.wide)
    cast = bench.to(kind.device).to(kind.wide) if kind.casts else b
    size = b.abs()
    stats = BlockStatistics(b.numel(), float(size.max()), float(d.abs().max()))
    same = (b == d) | (b.isnan() & d.isnan())
    stats.different = stats.nonfinite_different = stats.count - _count(same)
    stats.above, stats.below = _count(d > cast), _count(d < cast)
    stats.within = (stats.count - stats.different,) * 3
    stats.specials = tuple(
        _count(mask)
        for side in (b, d)
        for mask in (side.isnan(), side == math.inf, side == -math.inf)
    )
    device_only = ~d.isfinite() & ~same
    stats.device_nonfinite = _count(device_only)
    if stats.device_nonfinite:
        stats.first_device_nonfinite = int(device_only.to(torch.uint8).argmax())
    _overflows(stats, b, d, cast, kind)
    difference = (d - b).masked_fill_(same, 0.0)
    absolute = difference.abs()
    relative = (absolute / size).masked_fill_(same, 0.0).abs_()
    stats.max_abs = float(absolute.max())
    stats.bad = ~same
    stats.metrics = {"abs": absolute}
    if kind.ulp:
        ulp = absolute.double()  # an infinite or undefined distance is that in any unit
        stats.max_ulp, stats.sum_ulp = stats.max_abs, float(ulp.sum())
        stats.ulp_bad = _count(ulp > kind.constants.ulp_limit)
        stats.metrics["ulp"] = ulp
    stats.octaves = _octaves({**stats.metrics, "rel": relative})
    return stats


def _cast_signs(
    stats: BlockStatistics, b: torch.Tensor, d: torch.Tensor, cast: torch.Tensor, kind: PairKind
) -> None:
    """Signs against the bench as the device's dtype holds it, and what overflows in it."""
    difference = d - cast
    _signs(stats, difference, int(difference.count_nonzero()))
    if stats.bench_max > kind.largest:
        _overflows(stats, b, d, cast, kind)


def _signs(stats: BlockStatistics, difference: torch.Tensor, different: int) -> None:
    # A sum of up to 2^24 ones is exact in fp32; blocks are smaller.
    balance = int(difference.sign().sum())
    stats.above, stats.below = (different + balance) // 2, (different - balance) // 2


def _overflows(
    stats: BlockStatistics, b: torch.Tensor, d: torch.Tensor, cast: torch.Tensor, kind: PairKind
) -> None:
    """The inf/nan share: elements where device or cast bench is not finite, clipped."""
    chosen = ~(d.isfinite() & cast.isfinite())
    clip_d = d[chosen].clamp(-kind.largest, kind.largest)
    clip_b = cast[chosen].clamp(-kind.largest, kind.largest)
    relative = (clip_d - clip_b).abs() / (b[chosen].abs() + kind.eps)
    both_nan = clip_d.isnan() & clip_b.isnan()
    stats.odd = clip_d.numel()
    stats.odd_bad = _count(~(relative <= kind.constants.rtol) & ~both_nan)
    stats.acc_odd_bad = _count(~(relative <= kind.constants.acc_bound) & ~both_nan)


def _products(stats: BlockStatistics, b64: torch.Tensor, d64: torch.Tensor) -> torch.Tensor:
    """The cosine's products and the signed bias; returns the exact distances."""
    (b, d), stats.exponents = _scaled(b64, d64, stats)
    stats.products = (_dot(b, d), _dot(b, b), _dot(d, d))
    difference = d64 - b64
    stats.sum_diff = float(difference.sum())
    distance = difference.abs_()
    stats.sum_abs_diff = float(distance.sum())
    return distance


def _sizes(stats: BlockStatistics, size: torch.Tensor, kind: PairKind) -> torch.Tensor:
    """Count small and normal values of both kinds; returns the indicator of normal ones."""
    normal = torch.threshold(size, kind.constants.small, 0.0).sign_()
    stats.normal = int(normal.sum())
    stats.small = stats.count - stats.normal
    if stats.bench_max > ACC_SMALL:
        stats.acc_normal = int(torch.threshold(size, ACC_SMALL, 0.0).count_nonzero())
    stats.acc_small = stats.count - stats.acc_normal
    return normal


def _errors(
    stats: BlockStatistics,
    absolute: torch.Tensor,
    size: torch.Tensor,
    normal: torch.Tensor,
    kind: PairKind,
) -> torch.Tensor:
    """Maxima, sums and shares of absolute and relative errors; returns the relative ones."""
    constants = kind.constants
    relative = absolute / (size + kind.eps)
    worst = float(relative.max())
    stats.max_abs = float(absolute.max())
    normal_abs = _chosen(absolute, normal, stats.max_abs)
    normal_rel = _chosen(relative, normal, worst)
    stats.max_rel = float(normal_rel.max())
    stats.sum_rel = float(normal_rel.sum(dtype=torch.float64))
    normal64 = normal_abs.double()
    stats.sum_square = _dot(normal64, normal64)
    stats.within = tuple(  # type: ignore[assignment]
        stats.count if worst < limit else _count(relative < limit) for limit in SHARES
    )
    if stats.max_rel > constants.rtol:
        stats.bad = normal_rel > constants.rtol
        stats.rel_bad = _count(stats.bad)
    if stats.small:
        _small_errors(stats, _chosen(absolute, 1.0 - normal, stats.max_abs), constants)
    # Above magnitude 1 a relative error is below the absolute one.
    if stats.max_abs > constants.acc_bound:
        above_one = size > ACC_SMALL
        stats.acc_abs_bad = _count((absolute > constants.acc_bound) & ~above_one)
        stats.acc_rel_bad = _count((relative > constants.acc_bound) & above_one)
    stats.metrics = {"abs": absolute, "rel": normal_rel}
    return relative


def _chosen(values: torch.Tensor, indicator: torch.Tensor, largest: float) -> torch.Tensor:
    """Values where the indicator is 1.0, else 0.0."""
    if math.isfinite(largest):
        return values * indicator
    return values.masked_fill(indicator == 0.0, 0.0)  # inf times zero would be NaN


def _small_errors(stats: BlockStatistics, small_abs: torch.Tensor, constants: Constants) -> None:
    if not float(small_abs.max()) > min(constants.atol_abs, constants.atol_bench):
        return
    beyond = small_abs > constants.atol_abs
    stats.abs_bad = stats.small_bench_bad = _count(beyond)
    if constants.atol_bench != constants.atol_abs:
        stats.small_bench_bad = _count(small_abs > constants.atol_bench)
    if stats.abs_bad:
        stats.bad = beyond if stats.bad is None else stats.bad | beyond


def _distances(
    stats: BlockStatistics, distance: torch.Tensor, b64: torch.Tensor, constants: Constants
) -> None:
    """Distances in units of the last place of the bench's value.

    The exponent field of an fp64 is floor(log2 |b|) exactly, for every value of a
    narrower dtype too; what is subnormal in fp64 is below every least exponent.
    """
    power = (b64.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    power.clamp_min_(2.0**constants.ulp_min_exponent)
    if int(b64.count_nonzero()) < stats.count:
        power.masked_fill_(b64 == 0, 1.0)  # the exponent of zero counts as 0
    ulp = distance.div_(power).mul_(2.0**constants.ulp_mantissa)
    stats.max_ulp, stats.sum_ulp = float(ulp.max()), float(ulp.sum())
    if stats.max_ulp > constants.ulp_limit:
        stats.ulp_bad = _count(ulp > constants.ulp_limit)
    stats.metrics["ulp"] = ulp


def _octaves(values: dict[str, torch.Tensor]) -> npt.NDArray[np.int64]:
    """Count magnitudes by octave: one row per metric, bins as in `rows.HISTOGRAM_LOW`."""
    parts = []
    for row, name in enumerate(METRICS):
        if name not in values:
            continue
        tensor = values[name]
        if tensor.dtype is torch.float64:
            exponents, bias = tensor.view(torch.int64) >> 52, 1023
        else:
            exponents, bias = tensor.view(torch.int32) >> 23, 127
        first = bias + HISTOGRAM_LOW[name] - 2
        exponents.clamp_(first + 1, first + HISTOGRAM_BINS - 1)
        parts.append(exponents.sub_(first - row * HISTOGRAM_BINS))
    found = torch.bincount(torch.cat(parts), minlength=len(METRICS) * HISTOGRAM_BINS)
    return found.cpu().numpy().reshape(len(METRICS), HISTOGRAM_BINS)


def _scaled(
    b: torch.Tensor, d: torch.Tensor, stats: BlockStatistics
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Both sides with magnitudes whose squares neither overflow nor vanish in fp64.

    Returns the tensors and the exponents k by which they were divided (2^k).
    """
    exponents = (_exponent(stats.bench_max), _exponent(stats.device_max))
    if exponents == (0, 0):
        return (b, d), exponents
    return (b * 2.0 ** -exponents[0], d * 2.0 ** -exponents[1]), exponents


def _exponent(largest: float) -> int:
    if not math.isfinite(largest) or largest == 0 or _SAFE[0] < largest < _SAFE[1]:
        return 0
    return min(1000, max(-1000, math.frexp(largest)[1]))


def _dot(left: torch.Tensor, right: torch.Tensor) -> float:
    # Not torch.dot: its last bits depend on the number of threads, and tables must not.
    return float((left * right).sum())


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())
