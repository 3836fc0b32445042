"""Precision standards: is a device's output as good as it must be?

A library of its own, to be used without a spool or a workflow::

    from spool import standards

    verdict = standards.check("mul", bench, device)
    verdict.status, verdict.standard_verdict, verdict.rows, verdict.message

    verdict = standards.compare("matmul", npu, gpu, golden)
    verdict.status, verdict.rows, verdict.npu_rows, verdict.gpu_rows

Importing it is light; torch is imported by the first measurement.
"""

from __future__ import annotations

from typing import Any

from spool.standards.rows import Judged, Route, Standard, Status
from spool.standards.select import route_of, standard_of
from spool.standards.thresholds import Overrides, validate_overrides

__all__ = [
    "Judged",
    "Route",
    "Standard",
    "Status",
    "check",
    "compare",
    "route_of",
    "standard_of",
]


def check(
    api: str,
    bench: Any,
    device: Any,
    *,
    dropout: bool | None = None,
    overrides: Overrides | None = None,
) -> Judged:
    """Check a device's outputs against a bench's (two-way).

    Parameters
    ----------
    api : str
        Base name (``mul``) or call name (``Tensor.mul.3``).
    bench, device : object
        Tensors of any dtype, device and strides, plain values, or any nesting.
    dropout : bool, optional
        Whether a dropout really drew random zeros (p > 0, training); by default
        every dropout is taken for random.
    overrides : mapping, optional
        Standards and limits to use instead of the published ones, see
        `spool.standards.thresholds.validate_overrides`.

    Returns
    -------
    Judged
        `status` is the published pre-check, `standard_verdict` the verdict by the
        API's own standard, `rows` has one dict per output by CSV header.

    Raises
    ------
    ConfigError
        If `overrides` is not usable.
    """
    from spool.standards import measure, two_way

    validate_overrides(overrides)
    return two_way.judge(
        api, measure.measure_two_way(api, bench, device, dropout=dropout), overrides
    )


def compare(
    api: str,
    npu: Any,
    gpu: Any,
    golden: Any,
    *,
    dropout: bool | None = None,
    overrides: Overrides | None = None,
) -> Judged:
    """Compare a device's outputs with a bench's, both measured against a golden (three-way).

    The golden is the same call at raised precision: fp32 for fp16 and bf16, fp64
    for fp32. For the other parameters see `check`; `npu_rows` and `gpu_rows` hold
    each side's measurement against the golden.
    """
    from spool.standards import measure, three_way

    validate_overrides(overrides)
    return three_way.judge(
        api, measure.measure_three_way(api, npu, gpu, golden, dropout=dropout), overrides
    )
