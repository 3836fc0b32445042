"""Verdict of a three-way call: device and bench, each against the golden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spool.names import base_name
from spool.standards import columns as col
from spool.standards import precheck
from spool.standards.limits import judge_by_limits
from spool.standards.precheck import Finding
from spool.standards.rows import (
    Judged,
    Kind,
    OutputMeasurement,
    PairMeasurement,
    Row,
    Standard,
    Status,
    Worst,
)
from spool.standards.select import standard_of
from spool.standards.thresholds import (
    FLOAT8,
    STANDARD_DTYPES,
    UNJUDGED_DTYPES,
    BenchmarkLimits,
    Overrides,
    UlpLimits,
    constants_of,
    limits_of,
)

# measurement's name, cell of the ratio, cell of the result, worst element, judged
_RATIOS = (
    ("small_error_share", col.SMALL_RATIO, col.SMALL_RESULT, "abs", True),
    ("rmse", col.RMSE_RATIO, col.RMSE_RESULT, "abs", True),
    ("max_rel", col.MAX_REL_RATIO, col.MAX_REL_RESULT, "rel", True),
    ("mean_rel", col.MEAN_REL_RATIO, col.MEAN_REL_RESULT, "rel", True),
    ("balance", col.BALANCE_RATIO, col.BALANCE_RESULT, "abs", False),
)
# Ratios are published as quotients of the table's cells, so they are formed from
# values with that many decimals: whoever recomputes them from the tables agrees.
DECIMALS = 14
TOPK_NOTE = "the NPU sorts the values even with sorted=False, so their order may differ"


def judge(
    api: str, outputs: Sequence[OutputMeasurement], overrides: Overrides | None = None
) -> Judged:
    """Judge a call's three-way measurements.

    Parameters
    ----------
    api : str
        Base name or call name.
    outputs : sequence of OutputMeasurement
        As `measure.measure_three_way` gave them.
    overrides : mapping, optional
        A user's ``standards``, see `thresholds.validate_overrides`.
    """
    name = base_name(api)
    standard = standard_of(name, overrides)
    rows: list[Row] = []
    npu_rows: list[Row] = []
    gpu_rows: list[Row] = []
    statuses: list[Status] = []
    messages: list[str] = []
    worst: tuple[int, Worst] | None = None
    for output in outputs:
        used = _used_standard(output, standard)
        found = _judge_output(name, output, used, overrides)
        message = _message(name, output, found)
        statuses.append(found.status)
        rows.append(_compare_row(output, used, found, message))
        npu_rows.append(_check_row(output, output.npu, used, found, output.device_dtype))
        gpu_rows.append(_check_row(output, output.gpu, used, found, output.bench_dtype))
        if message:
            messages.append(f"{precheck.where(output)}: {message}")
        candidate = found.worst(output)
        rank = precheck.RANK[found.status]
        if candidate is not None and (worst is None or rank > worst[0]):
            worst = (rank, candidate)
    return Judged(
        status=precheck.combine(statuses),
        standard=standard,
        standard_verdict=None,
        rows=rows,
        message=". ".join(messages) if outputs else "no outputs to compare",
        worst=worst[1] if worst else None,
        npu_rows=npu_rows,
        gpu_rows=gpu_rows,
    )


def _used_standard(output: OutputMeasurement, standard: Standard) -> Standard:
    """The rule for one output: its dtype may ask for another one than the API's."""
    dtype = output.device_dtype.removeprefix("torch.")
    if dtype in FLOAT8:
        return Standard.BENCHMARK
    judged = dtype in STANDARD_DTYPES or dtype in UNJUDGED_DTYPES
    return standard if judged else Standard.BINARY


def _judge_output(
    name: str, output: OutputMeasurement, standard: Standard, overrides: Overrides | None
) -> Finding:
    special = precheck.special_finding(output)
    if special is not None:
        return special
    npu, gpu = output.npu, output.gpu
    if npu is None or gpu is None:
        raise ValueError(f"{precheck.where(output)} of {name} has no three-way measurement")
    if npu.device_dtype in UNJUDGED_DTYPES:
        found = Finding(Status.SKIP, f"no standard for {output.device_dtype}")
        return _with_nonfinite(output, found) if output.device_nonfinite else found
    limits = limits_of(name, standard, overrides)
    if npu.count == 0:  # left out to the last element, which is no difference
        found = Finding(Status.PASS)
    elif standard is Standard.BENCHMARK:
        found = _benchmark(npu, gpu, limits)
    elif standard is Standard.ULP:
        found = _ulp(npu, gpu, limits, identical=bool(output.identical))
    else:
        found = judge_by_limits(npu, standard, limits)
    return _with_nonfinite(output, found)


def _with_nonfinite(output: OutputMeasurement, found: Finding) -> Finding:
    """Add what is not finite: an error on the device alone, a note where it saturates."""
    if output.device_nonfinite:
        # A complex output is measured as pairs of reals.
        parts = output.device_dtype.startswith("torch.complex")
        whole = (
            f"{2 * output.count} real and imaginary parts" if parts else f"{output.count} elements"
        )
        message = (
            f"{output.device_nonfinite} of {whole} are inf or NaN on the device, "
            "finite in the golden and not the same on the bench"
        )
        return replace(
            found,
            status=Status.ERROR,
            message="; ".join(filter(None, (message, found.message))),
            metric="device_nonfinite",
            value=float(output.device_nonfinite),
            limit=0.0,
            index=output.device_nonfinite_index,
        )
    notes = [found.message] if found.message else []
    if output.saturated:
        notes.append(f"{output.saturated} elements are finite on the device and not on the bench")
    if output.left_out:
        notes.append(
            f"{output.left_out} of {output.count} elements are not judged: "
            "bench or golden is not finite there"
        )
    return replace(found, message="; ".join(notes))


def _written(pair: PairMeasurement, metric: str) -> float:
    """A column's value as the table shows it; 0 where nothing was left to measure."""
    return round(getattr(pair, metric) or 0.0, DECIMALS)


def _ratio(device: float, bench: float, floor: float) -> tuple[float, bool]:
    """Ratio of two errors, and whether both are finite or the same.

    Not finite on one side only, or differently, is NaN and a failure.
    """
    if math.isfinite(device) and math.isfinite(bench):
        return abs(device) / max(abs(bench), floor), True
    both_nan = math.isnan(device) and math.isnan(bench)
    return math.nan, both_nan or device == bench


def _benchmark(npu: PairMeasurement, gpu: PairMeasurement, limits: BenchmarkLimits) -> Finding:
    floor = constants_of(npu.device_dtype).ratio_floor
    cells: dict[str, Any] = {}
    failed: list[str] = []
    decisive: tuple[float, Finding] | None = None
    for metric, ratio_cell, result_cell, element, judged in _RATIOS:
        device, bench = _written(npu, metric), _written(gpu, metric)
        bound = getattr(limits, metric)
        ratio, sound = _ratio(device, bench, floor)
        passed = sound and not ratio > bound
        cells[ratio_cell] = ratio
        cells[result_cell] = str(Status.PASS if passed else Status.ERROR)
        if not judged:
            continue
        if not passed:
            failed.append(
                f"{metric} ratio {ratio:.6g} (up to {bound:.6g} allowed; device {device:.6g}, "
                f"bench {bench:.6g})"
            )
        share = math.inf if not sound else ratio / bound if bound else ratio
        if decisive is None or share > decisive[0]:
            index = getattr(npu, f"worst_{element}_index")
            decisive = (
                share,
                Finding(Status.PASS, "", cells, f"{metric}_ratio", ratio, bound, index),
            )
    assert decisive is not None
    status = Status.ERROR if failed else Status.PASS
    return replace(decisive[1], status=status, message=", ".join(failed))


def _ulp(
    npu: PairMeasurement, gpu: PairMeasurement, limits: UlpLimits, *, identical: bool
) -> Finding:
    floor = constants_of(npu.device_dtype).ratio_floor
    mean, share = _written(npu, "ulp_mean"), _written(npu, "ulp_share")
    bench_mean = _written(gpu, "ulp_mean")
    _, mean_sound = _ratio(mean, bench_mean, floor)
    ratio, sound = _ratio(share, _written(gpu, "ulp_share"), floor)
    if npu.device_dtype == "float32":
        bounds = (limits.single_share, limits.single_ratio)
        passed = mean < limits.single_mean or share < bounds[0] or ratio < bounds[1]
    else:
        bounds = (limits.half_share, limits.half_ratio)
        passed = share < bounds[0] or ratio < bounds[1]
    finite = math.isfinite(mean) and math.isfinite(bench_mean)
    passed = identical or (passed if finite else mean_sound and sound)
    status = Status.PASS if passed else Status.ERROR
    cells: dict[str, Any] = {
        col.ULP_MEAN: mean,
        col.ULP_SHARE: share,
        col.ULP_SHARE_RATIO: ratio,
        col.ULP_RESULT: str(status),
    }
    constants = constants_of(npu.device_dtype)
    message = (
        f"{100 * share:.3g}% of elements are off by more than {constants.ulp_limit:g} ULP, "
        f"{ratio:.6g} times the bench's share (below {bounds[0]:g}, or below {bounds[1]:g} times, "
        f"allowed); mean {mean:.6g} ULP"
    )
    return Finding(
        status,
        "" if passed else message,
        cells,
        "ulp_share",
        share,
        bounds[0],
        npu.worst_ulp_index,
    )


def _message(name: str, output: OutputMeasurement, found: Finding) -> str:
    parts = [found.message] if found.message else []
    if found.status is Status.ERROR and output.npu is not None:
        shown = precheck.evidence(output.npu, output, reference="golden")
        parts.extend([shown] if shown else [])
    if found.status is Status.ERROR and name == "topk":
        parts.append(TOPK_NOTE)
    return "; ".join(parts)


def _compare_row(
    output: OutputMeasurement, standard: Standard, found: Finding, message: str
) -> Row:
    row: Row = dict.fromkeys(col.COMPARE_HEADERS)
    algorithm = None
    if output.kind is Kind.PLAIN:
        algorithm = col.ALGORITHMS[Standard.BINARY]
    elif output.kind is Kind.TENSOR and found.status is not Status.SKIP:
        algorithm = col.ALGORITHMS[standard]
        row |= found.cells
    row |= {
        col.COMPARE_RESULT: str(found.status),
        col.ALGORITHM: algorithm,
        col.MESSAGE: message or None,
    }
    return row


def _check_row(
    output: OutputMeasurement,
    pair: PairMeasurement | None,
    standard: Standard,
    found: Finding,
    device_dtype: str,
) -> Row:
    """A side's row against the golden, in the form of the checking details."""
    if pair is None:
        cells: dict[str, Any] = {col.STATUS: str(found.status), col.MESSAGE: found.message or None}
        return col.check_row(output.golden_dtype, device_dtype, output.shape, cells)
    status = precheck.checked(pair)
    cells = dict(status.cells)
    if pair.device_dtype in STANDARD_DTYPES:
        cells |= col.standard_columns(pair, standard)
    cells |= {col.STATUS: str(status.status), col.MESSAGE: status.message or None}
    return col.check_row(output.golden_dtype, device_dtype, output.shape, cells)
