"""The published checker's own values, and hand-made cases with the rule that decides them.

`tests/data/golden/peer.json` and `.npz` hold 520 seeded cases with what the published
checker computes for them; `special.json` holds 64 small ones with status and reason.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spool import standards
from spool.standards import measure, rows, three_way, two_way

DATA = Path(__file__).parents[1] / "data" / "golden"
PEER = json.loads((DATA / "peer.json").read_text(encoding="utf-8"))["cases"]
SPECIAL = json.loads((DATA / "special.json").read_text(encoding="utf-8"))
ARRAYS = np.load(DATA / "peer.npz")
OVERRIDES = {"test_api": "accumulative"}
COUNTED = ("错误率", "占比", "双百指标", "双千指标", "双万指标", "误差均衡性")


def tensor(name: str, dtype: str) -> torch.Tensor:
    array = ARRAYS[name]
    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def agree(got: Any, want: Any, header: str, count: int, fp16: bool) -> bool:
    if want is None or got is None or isinstance(want, str):
        return got == want or (want is None and got is None)
    if math.isnan(want):
        # In fp16 the scale of an ULP overflows, and zero times infinity is NaN (D1).
        return math.isnan(got) or fp16
    if any(word in header for word in COUNTED) and "比值" not in header:
        return abs(got - want) <= 1.01 / count
    return got == pytest.approx(want, rel=5e-3 if fp16 else 2e-5, abs=1e-9)


def differences(
    got: dict[str, Any], want: dict[str, Any], count: int, fp16: bool
) -> dict[str, tuple[Any, Any]]:
    return {
        header: (got[header], value)
        for header, value in want.items()
        if not agree(got[header], value, header, count, fp16)
    }


def case_id(index: int) -> str:
    case = PEER[index]
    return f"{index}-{case['kind']}-{case['api']}-{case.get('device_dtype') or case['dtype']}"


def by_kind(kind: str) -> list[int]:
    return [index for index, case in enumerate(PEER) if case["kind"] == kind]


@pytest.mark.parametrize("index", by_kind("two-way"), ids=case_id)
def test_published_two_way(index: int) -> None:
    case = PEER[index]
    bench = tensor(case["bench"], case["bench_dtype"])
    device = tensor(case["device"], case["device_dtype"])
    judged = standards.check(case["api"], bench, device, overrides=OVERRIDES)
    (row,) = judged.rows
    assert not differences(row, case["details"], bench.numel(), case.get("fp16_arithmetic", False))
    assert str(judged.status) == case["status"]


@pytest.mark.parametrize("index", by_kind("three-way"), ids=case_id)
def test_published_three_way(index: int) -> None:
    case = PEER[index]
    npu, gpu = (tensor(case[side], case["dtype"]) for side in ("npu", "gpu"))
    golden = tensor(case["golden"], case["golden_dtype"])
    judged = standards.compare(case["api"], npu, gpu, golden, overrides=OVERRIDES)
    count, fp16 = npu.numel(), case.get("fp16_arithmetic", False)
    assert judged.npu_rows is not None
    assert judged.gpu_rows is not None
    assert not differences(judged.npu_rows[0], case["npu_row"], count, fp16)
    assert not differences(judged.gpu_rows[0], case["gpu_row"], count, fp16)
    assert not differences(judged.rows[0], case["details"], count, fp16)
    assert str(judged.status) == case["status"]


def build(value: Any) -> Any:
    """A value of `special.json`."""
    if value is None:
        return None
    if "py" in value:
        return math.nan if value["py"] == "nan" else value["py"]
    if "tuple" in value:
        return tuple(build(item) for item in value["tuple"])
    if "dict" in value:
        return {key: build(item) for key, item in value["dict"].items()}
    for key, mark in (("ones_with_zeros", 0.0), ("ones_with_nan", math.nan)):
        if key in value:
            count, marked = value[key]
            ones = torch.ones(count)
            ones[:marked] = mark
            return ones
    dtype = getattr(torch, value["dtype"])
    data = numbers(value["data"])
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(data)).to(dtype)
    return torch.tensor(data, dtype=dtype)


def numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [numbers(item) for item in data]
    return float(data) if isinstance(data, str) else data


@pytest.mark.parametrize("case", SPECIAL["two_way"], ids=lambda case: case["name"])
def test_special_two_way(case: dict[str, Any]) -> None:
    judged = standards.check(case["api"], build(case["bench"]), build(case["device"]))
    assert str(judged.status) == case["status"], judged.message
    if "standard_verdict" in case:
        assert str(judged.standard_verdict) == case["standard_verdict"], judged.message


@pytest.mark.parametrize("case", SPECIAL["three_way"], ids=lambda case: case["name"])
def test_special_three_way(case: dict[str, Any]) -> None:
    values = [build(case[side]) for side in ("npu", "gpu", "golden")]
    judged = standards.compare(case["api"], *values)
    assert str(judged.status) == case["status"], judged.message


def test_every_case_is_there() -> None:
    assert len(PEER) == 520
    assert len(SPECIAL["two_way"]) + len(SPECIAL["three_way"]) == 64


@pytest.mark.parametrize("index", range(0, len(PEER), 7), ids=case_id)
def test_judging_needs_only_the_record(index: int) -> None:
    case = PEER[index]
    if case["kind"] == "two-way":
        values = [tensor(case[side], case[f"{side}_dtype"]) for side in ("bench", "device")]
        measured, judge = measure.measure_two_way(case["api"], *values), two_way.judge
    else:
        values = [tensor(case[side], case["dtype"]) for side in ("npu", "gpu")]
        values.append(tensor(case["golden"], case["golden_dtype"]))
        measured, judge = measure.measure_three_way(case["api"], *values), three_way.judge
    again = [rows.OutputMeasurement.from_record(output.to_record()) for output in measured]
    assert again == measured
    assert judge(case["api"], again, OVERRIDES) == judge(case["api"], measured, OVERRIDES)
