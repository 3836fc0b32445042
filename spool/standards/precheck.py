"""Pre-check status of one pair: the published rule that both routes' first table uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from spool.standards import columns as col
from spool.standards import thresholds as limit
from spool.standards.rows import Kind, OutputMeasurement, PairMeasurement, Status, Worst

RANK = {Status.SKIP: 0, Status.PASS: 1, Status.WARNING: 2, Status.ERROR: 3}


@dataclass(frozen=True)
class Finding:
    """A verdict on one output, with the cells it fills and what decided it.

    `metric`, `value` and `limit` name what failed, or what is nearest to failing;
    `index` is the flat index of the worst element by that metric.
    """

    status: Status
    message: str = ""
    cells: dict[str, float | None] = field(default_factory=dict)
    metric: str = ""
    value: float | None = None
    limit: float = 0.0
    index: int | None = None

    def worst(self, output: OutputMeasurement) -> Worst | None:
        """The finding as the summary's worst element."""
        if self.value is None:
            return None
        index = None
        if self.index is not None and output.shape is not None:
            index = unravel(self.index, output)
        return Worst(output.index, self.metric, self.value, self.limit, index)


def combine(statuses: list[Status]) -> Status:
    """A call's status: the worst of its outputs; SKIP only if all are."""
    return max(statuses, key=RANK.__getitem__, default=Status.SKIP)


def unravel(index: int, output: OutputMeasurement) -> list[int]:
    """Index per axis of a flat row-major index into an output.

    A complex output was measured as pairs of reals; both parts have its index.
    """
    if output.device_dtype.startswith("torch.complex"):
        index //= 2
    position = []
    for size in reversed(output.shape or []):
        index, rest = divmod(index, size)
        position.append(rest)
    return position[::-1]


def where(output: OutputMeasurement) -> str:
    """How a message names an output."""
    return f"output {output.index}" + (f" ({output.path})" if output.path else "")


def special_finding(output: OutputMeasurement) -> Finding | None:
    """Verdict of whatever is not judged by a pair's numbers; None for a measured tensor."""
    kind = output.kind
    if kind is Kind.STRUCTURE:
        return Finding(Status.ERROR, output.message or "structure differs", metric="structure")
    if kind is Kind.PLAIN:
        status = Status.PASS if output.equal else Status.ERROR
        return Finding(status, output.message or "", metric="value")
    if kind is Kind.DROPOUT:
        return _dropout(output)
    reasons = {
        Kind.NONE: "no value to compare",
        Kind.EMPTY: "no elements to compare",
        Kind.RANDOM: "random values cannot be compared",
        Kind.GOLDEN: f"no golden to compare with: {output.message}",
    }
    return Finding(Status.SKIP, reasons[kind]) if kind in reasons else None


def _dropout(output: OutputMeasurement) -> Finding:
    what = "elements" if math.prod(output.shape or []) == output.count else "channels"
    if output.count < limit.DROPOUT_MIN_COUNT:
        return Finding(Status.PASS, f"random dropout of {output.count} {what}, too few to judge")
    zeros = (output.zeros_bench or 0, output.zeros_device or 0)
    share = abs(zeros[0] - zeros[1]) / output.count
    passed = share < limit.DROPOUT_LIMIT
    message = (
        f"random dropout: {zeros[1]} of {output.count} {what} are zero, {zeros[0]} on the bench "
        f"(shares may differ by less than {limit.DROPOUT_LIMIT})"
    )
    return Finding(
        Status.PASS if passed else Status.ERROR,
        "" if passed else message,
        metric="zero_share",
        value=share,
        limit=limit.DROPOUT_LIMIT,
    )


def pair_status(pair: PairMeasurement) -> Finding:
    """The published status of a measured pair, in the published order of steps."""
    if pair.error_rate is not None and pair.max_abs is None:
        status = Status.PASS if pair.different == 0 else Status.ERROR
        return Finding(
            status,
            "" if status is Status.PASS else f"{_share_text(pair.different, pair.count)} differ",
            {col.ERROR_RATE: pair.error_rate},
            "error_rate",
            pair.error_rate,
            0.0,
            pair.worst_abs_index,
        )
    if pair.count == 0:
        return Finding(Status.PASS, "", {})
    return _float_status(pair)


def _float_status(pair: PairMeasurement) -> Finding:
    cells: dict[str, float | None] = {col.COSINE: pair.cosine}

    def finding(status: Status, metric: str, bound: float, message: str = "") -> Finding:
        value = getattr(pair, metric)
        return Finding(status, message, cells, metric, value, bound, pair.worst_abs_index)

    if pair.one_side_zero:
        largest = max(pair.bench_max or 0.0, pair.device_max or 0.0)
        message = f"one side is all zero, the other up to {largest:.6g}"
        return finding(Status.ERROR, "max_abs", 0.0, message)
    if pair.cosine is not None and pair.cosine <= limit.COSINE_LIMIT:
        message = f"cosine {pair.cosine:.6g} (above {limit.COSINE_LIMIT} allowed)"
        return finding(Status.ERROR, "cosine", limit.COSINE_LIMIT, message)
    cells[col.MAX_ABS] = pair.max_abs
    if pair.max_abs is not None and pair.max_abs < limit.MAX_ABS_LIMIT:
        return finding(Status.PASS, "max_abs", limit.MAX_ABS_LIMIT)
    if pair.device_dtype in limit.HALVES or pair.device_dtype == "complex32":
        cells[col.HUNDREDTH] = pair.within_hundredth
        if not _above(pair.within_hundredth, limit.HUNDREDTH_LIMIT):
            message = _within(pair, "within_hundredth", "0.01", limit.HUNDREDTH_LIMIT)
            return finding(Status.ERROR, "within_hundredth", limit.HUNDREDTH_LIMIT, message)
        cells[col.THOUSANDTH] = pair.within_thousandth
        if _above(pair.within_thousandth, limit.THOUSANDTH_LIMIT):
            return finding(Status.PASS, "within_thousandth", limit.THOUSANDTH_LIMIT)
        message = _within(pair, "within_thousandth", "0.001", limit.THOUSANDTH_LIMIT)
        return finding(Status.WARNING, "within_thousandth", limit.THOUSANDTH_LIMIT, message)
    cells[col.THOUSANDTH] = pair.within_thousandth
    cells[col.TEN_THOUSANDTH] = pair.within_ten_thousandth
    if not _above(pair.within_thousandth, limit.THOUSANDTH_LIMIT):
        message = _within(pair, "within_thousandth", "0.001", limit.THOUSANDTH_LIMIT)
        return finding(Status.ERROR, "within_thousandth", limit.THOUSANDTH_LIMIT, message)
    if not _above(pair.within_ten_thousandth, limit.TEN_THOUSANDTH_LIMIT):
        message = _within(pair, "within_ten_thousandth", "0.0001", limit.TEN_THOUSANDTH_LIMIT)
        return finding(Status.WARNING, "within_ten_thousandth", limit.TEN_THOUSANDTH_LIMIT, message)
    return finding(Status.PASS, "within_ten_thousandth", limit.TEN_THOUSANDTH_LIMIT)


def nonfinite_finding(pair: PairMeasurement) -> Finding | None:
    """An error if the device has inf or NaN where the bench has something else."""
    if not pair.device_nonfinite:
        return None
    return Finding(
        Status.ERROR,
        f"{_share_text(pair.device_nonfinite, pair.count)} are inf or NaN on the device "
        "and not the same on the bench",
        metric="device_nonfinite",
        value=float(pair.device_nonfinite),
        index=pair.device_nonfinite_index,
    )


def checked(pair: PairMeasurement) -> Finding:
    """The status of a measured pair: `pair_status`, or an error by `nonfinite_finding`."""
    status, nonfinite = pair_status(pair), nonfinite_finding(pair)
    if nonfinite is None:
        return status
    message = "; ".join(filter(None, (nonfinite.message, status.message)))
    return replace(nonfinite, message=message, cells=status.cells)


def evidence(pair: PairMeasurement, output: OutputMeasurement, reference: str = "bench") -> str:
    """The worst elements of a pair, each with its index and both values."""
    if pair.worst_abs is None or pair.worst_abs_index is None:
        return ""
    same = pair.worst_rel is not None and pair.worst_rel_index == pair.worst_abs_index
    relative = f" (relative {pair.worst_rel:.6g})" if same else ""
    text = f"largest absolute difference {pair.worst_abs:.6g}{relative} at index " + _element(
        output, pair.worst_abs_index, pair.worst_abs_device, pair.worst_abs_bench, reference
    )
    if pair.worst_rel is None or pair.worst_rel_index is None or same:
        return text
    return f"{text}; largest relative difference {pair.worst_rel:.6g} at index " + _element(
        output, pair.worst_rel_index, pair.worst_rel_device, pair.worst_rel_bench, reference
    )


def _element(
    output: OutputMeasurement, at: int, device: str | None, bench: str | None, reference: str
) -> str:
    index = tuple(unravel(at, output))
    return f"{index} (device {_number(device)}, {reference} {_number(bench)})"


def _number(text: str | None) -> str:
    """An element's exact text, short enough to read; integers stay whole."""
    text = text or ""
    return text if text.lstrip("-").isdigit() else f"{float(text):.9g}"


def _above(value: float | None, bound: float) -> bool:
    return value is not None and value > bound


def _within(pair: PairMeasurement, metric: str, step: str, bound: float) -> str:
    share = getattr(pair, metric)
    off = round((1 - share) * pair.count)
    return (
        f"{_share_text(off, pair.count)} are off by a relative {step} or more "
        f"(share {share:.6g} within, above {bound} allowed)"
    )


def _share_text(part: int, whole: int) -> str:
    return f"{part} of {whole} elements ({100 * part / whole:.3g}%)"
