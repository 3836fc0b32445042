"""Verdicts, rows and messages, beyond the golden cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spool import standards
from spool.standards import Standard, Status, columns, measure, three_way, two_way
from spool.standards.rows import Judged, OutputMeasurement

INF, NAN = math.inf, math.nan


def fp32(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def fp64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- two-way -----------------------------------------------------------------------------------


def test_rows_have_exactly_the_headers() -> None:
    for value in (fp32(1.0, 2.0), torch.tensor([1]), 3, None, fp32()):
        (row,) = standards.check("mul", value, value).rows
        assert tuple(row) == columns.CHECK_HEADERS
        judged = standards.compare("mul", value, value, value)
        assert tuple(judged.rows[0]) == columns.COMPARE_HEADERS
        assert judged.npu_rows is not None
        assert judged.gpu_rows is not None
        assert tuple(judged.npu_rows[0]) == columns.CHECK_HEADERS
        assert tuple(judged.gpu_rows[0]) == columns.CHECK_HEADERS


def test_one_row_per_leaf_in_order() -> None:  # D3
    bench = {"w": [fp32(1.0), (fp32(2.0), 3)], "b": None}
    device = {"b": None, "w": [fp32(1.0), (fp32(9.0), 4)]}
    judged = standards.check("mul", bench, device)
    assert [row["Status"] for row in judged.rows] == ["pass", "error", "error", "SKIP"]
    assert "output 1 (['w'][1][0])" in judged.message
    assert "output 2 (['w'][1][1]): values differ: device 4, bench 3" in judged.message
    assert judged.worst is not None
    assert judged.worst.output == 1


def test_message_names_counts_index_and_allowed_value() -> None:
    bench = torch.ones(3, 100)
    device = bench.clone()
    device[1, 7] = 1.5
    judged = standards.check("mul", bench, device)
    assert judged.message == (
        "output 0: 1 of 300 elements (0.333%) are off by a relative 0.001 or more (share 0.996667 "
        "within, above 0.999 allowed); rel_error_share 0.00333333 (up to 0 allowed); largest "
        "absolute difference 0.5 (relative 0.5) at index (1, 7) (device 1.5, bench 1)"
    )
    assert judged.worst is not None
    assert judged.worst.index == [1, 7]
    assert "\n" not in judged.message


def test_a_pass_is_silent() -> None:
    judged = standards.check("mul", fp32(1.0, 2.0), fp32(1.0, 2.0))
    assert judged.message == ""
    assert judged.rows[0]["Message"] is None
    assert standards.compare("gelu", fp32(1.0), fp32(1.0), fp64(1.0)).message == ""


def test_nothing_to_compare() -> None:
    judged = standards.check("mul", (), ())
    assert judged.status is Status.SKIP
    assert judged.message == "no outputs to compare"
    assert standards.compare("mul", [], [], []).status is Status.SKIP


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ([1.0], "lengths differ: device 1, bench 2"),
        ((1.0, 2.0), "kinds differ: device tuple, bench list"),
        ({"a": 1.0}, "kinds differ: device dict, bench list"),
        (None, "kinds differ: device NoneType, bench list"),
    ],
)
def test_structures_that_differ(device: Any, message: str) -> None:
    judged = standards.check("mul", [1.0, 2.0], device)
    assert judged.status is Status.ERROR
    assert judged.standard_verdict is Status.ERROR
    assert judged.message == f"output 0: {message}"


@pytest.mark.parametrize(
    ("bench", "device", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "shapes differ: device (3, 2), bench (2, 3)"),
        (torch.zeros(2), torch.zeros(2).int(), "dtypes differ: device int32, bench float32"),
        (torch.zeros(2).bool(), torch.zeros(2).int(), "dtypes differ: device int32, bench bool"),
        (torch.zeros(2), torch.zeros(2) * 1j, "dtypes differ: device complex64, bench float32"),
        ({"a": 1}, {"b": 1}, "keys differ: device ['b'], bench ['a']"),
        (True, 1, "kinds differ: device int, bench bool"),
        ("a", "b", "values differ: device 'b', bench 'a'"),
    ],
)
def test_places_that_differ(bench: Any, device: Any, message: str) -> None:
    judged = standards.check("mul", bench, device)
    assert judged.status is Status.ERROR
    assert judged.message == f"output 0: {message}"


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (complex(NAN, 1), complex(NAN, 1), True),
        (complex(NAN, 1), complex(NAN, 2), False),
        (NAN, 1.0, False),
        (INF, INF, True),
        (0.0, -0.0, True),
        (torch.float32, torch.float32, True),
        (torch.Size([1]), torch.Size([2]), False),
        (Ellipsis, Ellipsis, True),
    ],
)
def test_plain_values(left: Any, right: Any, equal: bool) -> None:
    assert (standards.check("mul", left, right).status is Status.PASS) is equal


def test_named_results_are_compared_as_tuples() -> None:
    bench = torch.max(torch.ones(2, 2), dim=0)
    assert standards.check("max", bench, tuple(bench)).status is Status.PASS
    parameter = torch.nn.Parameter(torch.ones(2))
    assert standards.check("mul", parameter, torch.ones(2)).status is Status.PASS


@pytest.mark.parametrize("api", ["mul", "conv2d", "relu", "softmax"])
def test_one_nan_on_the_device_is_an_error(api: str) -> None:  # D15
    bench = torch.ones(20_000)
    device = bench.clone()
    device[12_345] = NAN
    judged = standards.check(api, bench, device)
    assert (judged.status, judged.standard_verdict) == (Status.ERROR, Status.ERROR)
    assert judged.worst is not None
    assert (judged.worst.metric, judged.worst.index) == ("device_nonfinite", [12_345])


def test_nan_of_the_bench_alone_is_no_device_fault_by_itself() -> None:
    bench = torch.ones(20_000)
    bench[5] = NAN
    judged = standards.check("conv2d", bench, torch.ones(20_000))
    assert judged.standard_verdict is Status.PASS


def test_cosine_is_nan_and_does_not_fail() -> None:  # D2
    judged = standards.check("mul", fp32(1.0, -INF, NAN), fp32(1.0, -INF, NAN))
    assert judged.status is Status.PASS
    assert math.isnan(judged.rows[0][columns.COSINE])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
def test_dtypes_without_a_standard(dtype: str) -> None:
    value = torch.ones(3, dtype=getattr(torch, dtype))
    judged = standards.check("mul", value, value)
    assert (judged.status, judged.standard_verdict) == (Status.PASS, Status.SKIP)
    assert judged.rows[0][columns.REL_ERROR] is None
    assert judged.message == f"output 0: no standard for torch.{dtype}"


def test_complex_index_is_of_the_element() -> None:
    bench = torch.ones(2, 3, dtype=torch.complex64)
    device = bench.clone()
    device[1, 2] += 1j
    judged = standards.check("mul", bench, device)
    assert judged.worst is not None
    assert judged.worst.index == [1, 2]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_status_goes_by_the_half_rule(dtype: str) -> None:  # D8
    bench = torch.linspace(1, 4, 300).to(getattr(torch, dtype))
    device = bench.float()
    device[3] += 1
    judged = standards.check("mul", bench, device.to(bench.dtype))
    assert judged.status is Status.WARNING
    assert judged.rows[0][columns.HUNDREDTH] == pytest.approx(299 / 300)


def test_zero_half_is_no_zero_by_zero() -> None:
    zero = torch.zeros(1, dtype=torch.float16)
    assert standards.check("mul", zero, zero.clone()).status is Status.PASS


@pytest.mark.parametrize(
    ("ones", "zeros", "status"),
    [(99, 99, Status.PASS), (100, 10, Status.ERROR), (100, 9, Status.PASS)],
)
def test_random_dropout(ones: int, zeros: int, status: Status) -> None:
    bench = torch.ones(ones)
    device = bench.clone()
    device[:zeros] = 0
    assert standards.check("Functional.dropout.3", bench, device).status is status
    judged = standards.compare("dropout", device, bench, bench)
    assert judged.status is status
    assert len(judged.rows) == 1  # D14


def test_dropout_with_a_golden_of_another_shape() -> None:
    judged = standards.compare("dropout", torch.ones(200), torch.ones(200), torch.ones(100))
    assert judged.status is Status.SKIP


def test_dropout_that_draws_nothing_is_an_ordinary_call() -> None:
    bench, device = torch.ones(200), torch.full((200,), 1.5)
    assert standards.check("dropout", bench, device).status is Status.PASS
    assert standards.check("dropout", bench, device, dropout=False).status is Status.ERROR


def test_mask_of_a_dropout_and_alpha_dropout_are_random() -> None:
    bench = (torch.ones(200), torch.ones(200).bool())
    device = (torch.ones(200), torch.zeros(200).bool())
    judged = standards.check("native_dropout", bench, device)
    assert [row["Status"] for row in judged.rows] == ["pass", "SKIP"]
    judged = standards.compare("alpha_dropout", fp32(1.0), fp32(2.0), fp64(3.0))
    assert judged.status is Status.SKIP
    assert len(judged.rows) == 1


# --- three-way ---------------------------------------------------------------------------------


def test_same_infinity_is_not_judged_and_said() -> None:
    judged = standards.compare("softmax", fp32(-INF, 1.0), fp32(-INF, 1.0), fp64(-INF, 1.0))
    assert judged.status is Status.PASS
    assert "1 of 2 elements are not judged" in judged.message


def test_all_alike_and_not_finite() -> None:
    for api in ("softmax", "matmul"):
        judged = standards.compare(api, fp32(NAN, NAN), fp32(NAN, NAN), fp64(NAN, NAN))
        assert judged.status is Status.PASS
        assert "2 of 2 elements are not judged" in judged.message


@pytest.mark.parametrize("api", ["softmax", "matmul", "my_op"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_not_finite_on_the_device_alone(api: str, bad: float) -> None:  # D9
    overrides = {"my_op": "accumulative"}
    judged = standards.compare(
        api, fp32(1.0, bad), fp32(1.0, 2.0), fp64(1.0, 2.0), overrides=overrides
    )
    assert judged.status is Status.ERROR
    assert "1 of 2 elements are inf or NaN on the device" in judged.message
    assert judged.worst is not None
    assert judged.worst.index == [1]


def test_other_infinity_than_the_bench() -> None:
    judged = standards.compare("gelu", fp32(-INF, 1.0), fp32(INF, 1.0), fp64(2.0, 1.0))
    assert judged.status is Status.ERROR


@pytest.mark.parametrize(
    ("npu", "gpu", "golden", "status"),
    [
        (7, 7, 8, Status.PASS),
        (7, 8, 7, Status.PASS),
        (7, 8, 8, Status.ERROR),
        ("a", "a", "a", Status.PASS),
        (7.0, 7, 7, Status.ERROR),
        (7, 7, 7.0, Status.SKIP),
    ],
)
def test_plain_values_of_three(npu: Any, gpu: Any, golden: Any, status: Status) -> None:  # D10
    assert standards.compare("numel", npu, gpu, golden).status is status


def test_golden_of_another_shape_cannot_judge() -> None:
    judged = standards.compare("gelu", fp32(1.0), fp32(1.0), fp64(1.0, 2.0))
    assert judged.status is Status.SKIP
    assert judged.message == (
        "output 0: no golden to compare with: shapes differ: golden (2,), bench (1,)"
    )


def test_float8_is_judged_by_benchmark() -> None:  # D8
    npu = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn)
    judged = standards.compare("matmul", npu, npu, npu.float())
    assert judged.rows[0][columns.ALGORITHM] == "标杆比对法"
    assert judged.status is Status.PASS


def test_integers_are_judged_by_binary() -> None:
    same = torch.tensor([1, 2])
    judged = standards.compare("matmul", same, same, same)
    assert judged.rows[0][columns.ALGORITHM] == "二进制一致法"
    assert judged.rows[0][columns.ERROR_RATE] == 0.0


def test_topk_error_says_what_the_npu_does() -> None:
    values = torch.tensor([1, 2]), torch.tensor([2, 1])
    judged = standards.compare("topk", values[0], values[1], values[1])
    assert judged.status is Status.ERROR
    assert judged.message.endswith(three_way.TOPK_NOTE)


@pytest.mark.parametrize(
    ("standard", "good", "bad"),
    [
        ("absolute", 1.0, 1.00001),
        ("binary", 1.0, 1.0000002),
        ("thousandth", 1.0005, 1.002),
        ("accumulative", 1.0, 1.01),
        ("benchmark", 1.0, 1.01),
        ("ulp", 1.000001, 1.01),
    ],
)
def test_every_standard_judges_three_ways(standard: str, good: float, bad: float) -> None:
    for value, status in ((good, Status.PASS), (bad, Status.ERROR)):
        judged = standards.compare(
            "my_op", fp32(value, 2.0), fp32(1.0, 2.0), fp64(1, 2), overrides={"my_op": standard}
        )
        assert judged.status is status, judged.message
        assert judged.rows[0][columns.COMPARE_RESULT] == str(status)
        assert judged.rows[0][columns.ALGORITHM] == columns.ALGORITHMS[Standard(standard)]


def test_limits_can_be_overridden() -> None:
    values = fp32(1.01), fp32(1.0), fp64(1.0)
    assert standards.compare("sum", *values).status is Status.ERROR
    loose = {"sum": {"benchmark": {"rmse": 1e9, "max_rel": 1e9, "mean_rel": 1e9}}}
    assert standards.compare("sum", *values, overrides=loose).status is Status.PASS
    tight = {"sum": {"ulp": {"single_mean": 0, "single_share": 0, "single_ratio": 0}}}
    assert standards.compare("sum", *values, overrides=tight).status is Status.ERROR


def test_ratio_rules() -> None:
    assert three_way._ratio(4.0, 2.0, 1e-3) == (2.0, True)
    assert three_way._ratio(1.0, 0.0, 0.5) == (2.0, True)
    for device, bench, sound in (
        (NAN, NAN, True),
        (INF, INF, True),
        (INF, 1.0, False),
        (1.0, NAN, False),
        (INF, NAN, False),
    ):
        ratio, passed = three_way._ratio(device, bench, 1.0)
        assert math.isnan(ratio)
        assert passed is sound


# --- properties --------------------------------------------------------------------------------

VALUES = st.one_of(st.sampled_from([0.0, 1.0, -1.0, INF, -INF, NAN]), st.floats(-9, 9, width=16))
VECTORS = st.lists(VALUES, min_size=1, max_size=20)
APIS = st.sampled_from(["mul", "relu", "conv2d", "softmax", "matmul", "my_op"])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
OVERRIDES = {"my_op": "accumulative"}


@settings(max_examples=80, deadline=None)
@given(APIS, VECTORS, DTYPES)
def test_a_value_equals_itself(api: str, values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values).to(dtype)
    judged = standards.check(api, tensor, tensor.clone(), overrides=OVERRIDES)
    assert judged.status is Status.PASS
    assert judged.standard_verdict is not Status.ERROR
    wide = tensor.to(torch.float64 if dtype is torch.float32 else torch.float32)
    judged = standards.compare(api, tensor, tensor.clone(), wide, overrides=OVERRIDES)
    assert judged.status is Status.PASS, judged.message


@settings(max_examples=60, deadline=None)
@given(APIS, VECTORS, DTYPES, st.data())
def test_one_more_nan_is_never_missed(
    api: str, values: list[float], dtype: torch.dtype, data: Any
) -> None:
    values = [value if math.isfinite(value) else 1.0 for value in values]
    bench = torch.tensor(values).to(dtype)
    device = bench.clone()
    device[data.draw(st.integers(0, len(values) - 1))] = NAN
    assert standards.check(api, bench, device).status is Status.ERROR
    wide = bench.to(torch.float64 if dtype is torch.float32 else torch.float32)
    assert standards.compare(api, device, bench, wide, overrides=OVERRIDES).status is Status.ERROR


@settings(max_examples=60, deadline=None)
@given(APIS, st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=9), DTYPES)
def test_verdicts_come_from_records_alone(
    api: str, values: list[tuple[float, float, float]], dtype: torch.dtype
) -> None:
    npu, gpu, golden = (torch.tensor(column) for column in zip(*values, strict=True))
    two = measure.measure_two_way(api, gpu.to(dtype), npu.to(dtype))
    three = measure.measure_three_way(api, npu.to(dtype), gpu.to(dtype), golden.double())
    cases: list[tuple[Callable[..., Judged], list[OutputMeasurement]]] = [
        (two_way.judge, two),
        (three_way.judge, three),
    ]
    for judge, measured in cases:
        again = [OutputMeasurement.from_record(row.to_record()) for row in measured]
        assert repr(judge(api, again, OVERRIDES)) == repr(judge(api, measured, OVERRIDES))
