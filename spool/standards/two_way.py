"""Verdict of a two-way call: device against bench.

A call has two verdicts. Its *status* is the published pre-check, which does not
see differences below 0.001. Its *standard verdict* judges the same measurement
by the API's own standard.
"""

from __future__ import annotations

from collections.abc import Sequence

from spool.names import base_name
from spool.standards import columns as col
from spool.standards import precheck
from spool.standards.limits import judge_by_limits
from spool.standards.precheck import Finding
from spool.standards.rows import Judged, OutputMeasurement, Row, Standard, Status, Worst
from spool.standards.select import standard_of
from spool.standards.thresholds import STANDARD_DTYPES, Overrides, limits_of


def judge(
    api: str, outputs: Sequence[OutputMeasurement], overrides: Overrides | None = None
) -> Judged:
    """Judge a call's two-way measurements.

    Parameters
    ----------
    api : str
        Base name or call name.
    outputs : sequence of OutputMeasurement
        As `measure.measure_two_way` gave them.
    overrides : mapping, optional
        A user's ``standards``, see `thresholds.validate_overrides`.
    """
    standard = standard_of(api, overrides)
    rows: list[Row] = []
    statuses: list[Status] = []
    verdicts: list[Status] = []
    messages: list[str] = []
    worst: tuple[int, Worst] | None = None
    for output in outputs:
        status, verdict = _judge_output(api, output, standard, overrides)
        statuses.append(status.status)
        verdicts.append(verdict.status)
        message = _message(output, status, verdict)
        rows.append(_row(output, standard, status, message))
        if message:
            messages.append(f"{precheck.where(output)}: {message}")
        decisive = max(status, verdict, key=lambda found: precheck.RANK[found.status])
        candidate = decisive.worst(output)
        rank = precheck.RANK[decisive.status]
        if candidate is not None and (worst is None or rank > worst[0]):
            worst = (rank, candidate)
    return Judged(
        status=precheck.combine(statuses),
        standard=standard,
        standard_verdict=precheck.combine(verdicts),
        rows=rows,
        message=". ".join(messages) if outputs else "no outputs to compare",
        worst=worst[1] if worst else None,
    )


def _judge_output(
    api: str, output: OutputMeasurement, standard: Standard, overrides: Overrides | None
) -> tuple[Finding, Finding]:
    special = precheck.special_finding(output)
    if special is not None:
        return special, special
    pair = output.two_way
    if pair is None:
        raise ValueError(f"{precheck.where(output)} of {api} has no two-way measurement")
    status = precheck.checked(pair)
    if pair.max_abs is None:
        return status, status
    if pair.device_dtype not in STANDARD_DTYPES:
        return status, Finding(Status.SKIP, f"no standard for {output.device_dtype}")
    nonfinite = precheck.nonfinite_finding(pair)
    if nonfinite is not None:
        return status, nonfinite
    if standard in (Standard.BENCHMARK, Standard.ULP):
        return status, Finding(Status.SKIP, f"the {standard} standard needs a golden")
    limits = limits_of(base_name(api), standard, overrides)
    return status, judge_by_limits(pair, standard, limits)


def _message(output: OutputMeasurement, status: Finding, verdict: Finding) -> str:
    parts = [status.message] if status.message else []
    # Why there is no verdict by the standard is worth a word only if nothing is wrong.
    skipped = verdict.status is Status.SKIP and status.status is not Status.PASS
    if verdict.message and verdict.message not in status.message and not skipped:
        parts.append(verdict.message)
    bad = Status.ERROR in (status.status, verdict.status) or status.status is Status.WARNING
    if bad and output.two_way is not None:
        shown = precheck.evidence(output.two_way, output)
        parts.extend([shown] if shown else [])
    return "; ".join(parts)


def _row(output: OutputMeasurement, standard: Standard, status: Finding, message: str) -> Row:
    cells: dict[str, float | str | None] = dict(status.cells)
    pair = output.two_way
    if pair is not None and pair.max_abs is not None and pair.device_dtype in STANDARD_DTYPES:
        cells |= col.standard_columns(pair, standard)
    cells |= {col.STATUS: str(status.status), col.MESSAGE: message or None}
    return col.check_row(output.bench_dtype, output.device_dtype, output.shape, cells)
