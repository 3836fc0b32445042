"""Judging by absolute limits: the standards that need no second measurement.

`three_way` adds the two that compare a device with a bench by ratio.
"""

from __future__ import annotations

from typing import Any

from spool.standards import columns as col
from spool.standards.precheck import Finding
from spool.standards.rows import PairMeasurement, Standard, Status
from spool.standards.thresholds import constants_of

# limit's name, measurement's name, cell of the value, cell of the result, worst element
_ABSOLUTE = (
    ("inf_nan_share", "inf_nan_share", col.INF_NAN, col.INF_NAN_RESULT, "abs"),
    ("rel_error_share", "rel_error_share", col.REL_ERROR, col.REL_ERROR_RESULT, "rel"),
    ("abs_error_share", "abs_error_share", col.ABS_ERROR, col.ABS_ERROR_RESULT, "abs"),
)
_ACCUMULATIVE = (
    ("inf_nan_share", "acc_inf_nan_share", col.INF_NAN, col.INF_NAN_RESULT, "abs"),
    ("rel_error_share", "acc_rel_error_share", col.REL_ERROR, col.REL_ERROR_RESULT, "rel"),
    ("abs_error_share", "acc_abs_error_share", col.ABS_ERROR, col.ABS_ERROR_RESULT, "abs"),
    ("balance", "balance", col.BALANCE_RATIO, col.BALANCE_RESULT, "abs"),
)
_BINARY = (("error_rate", "error_rate", col.ERROR_RATE, col.ERROR_RATE_RESULT, "abs"),)
_METRICS = {
    Standard.ABSOLUTE: _ABSOLUTE,
    Standard.ACCUMULATIVE: _ACCUMULATIVE,
    Standard.BINARY: _BINARY,
}


def judge_by_limits(pair: PairMeasurement, standard: Standard, limits: Any) -> Finding:
    """Verdict of an absolute, binary, thousandth or accumulative output.

    Parameters
    ----------
    pair : PairMeasurement
        Device against bench (two-way) or golden (three-way).
    standard : Standard
    limits : limits dataclass
        Of that standard, see `thresholds.limits_of`.
    """
    if standard is Standard.THOUSANDTH:
        return _thousandth(pair, limits.within_thousandth)
    cells: dict[str, Any] = {}
    failed: list[Finding] = []
    nearest: Finding | None = None
    for limit_name, field, value_cell, result_cell, element in _METRICS[standard]:
        bound = getattr(limits, limit_name)
        if bound is None:
            bound = constants_of(pair.device_dtype).acc_balance
        value = getattr(pair, field)
        passed = value <= bound
        cells[value_cell] = value
        cells[result_cell] = str(Status.PASS if passed else Status.ERROR)
        index = getattr(pair, f"worst_{element}_index")
        message = "" if passed else f"{field} {value:.6g} (up to {bound:.6g} allowed)"
        status = Status.PASS if passed else Status.ERROR
        found = Finding(status, message, cells, field, value, bound, index)
        nearest = nearest or found
        if not passed:
            failed.append(found)
    if failed:
        first = failed[0]
        message = ", ".join(found.message for found in failed)
        return Finding(
            Status.ERROR, message, cells, first.metric, first.value, first.limit, first.index
        )
    assert nearest is not None
    return nearest


def _thousandth(pair: PairMeasurement, bound: float) -> Finding:
    share = pair.within_thousandth or 0.0
    passed = share >= bound
    status = Status.PASS if passed else Status.ERROR
    cells: dict[str, Any] = {col.THOUSANDTH: share, col.THOUSANDTH_RESULT: str(status)}
    message = "" if passed else f"within_thousandth {share:.6g} (at least {bound:.6g} allowed)"
    return Finding(status, message, cells, "within_thousandth", share, bound, pair.worst_rel_index)
