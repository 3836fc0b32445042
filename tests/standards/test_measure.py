from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standards_oracle as oracle
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spool.standards.blocks import AxisCounter, blocks
from spool.standards.measure import measure_three_way, measure_two_way
from spool.standards.rows import Kind, PairMeasurement

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
COMBINATIONS = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float64", "float32"),
    ("float64", "float64"),
]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2**-10, 2**-20, 1e-30, 1e-41, 6e-8, 65504.0, 70000.0, 3e38]
SPECIAL += [math.inf, -math.inf, math.nan]
FINITE = [value for value in SPECIAL if math.isfinite(value) and abs(value) < 1e4]
RELATIVE = [0.0, 1e-7, -1e-7, 2**-20, -(2**-10), 1e-3, 0.009, 0.02, -1.0, 3.0]


@st.composite
def pairs(draw: Any, special: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    bench_name, device_name = draw(st.sampled_from(COMBINATIONS))
    count = draw(st.integers(1, 60))
    pool = st.one_of(
        st.sampled_from(SPECIAL if special else FINITE),
        st.floats(-100, 100, width=32),
    )
    values = draw(st.lists(pool, min_size=count, max_size=count))
    factors = draw(st.lists(st.sampled_from(RELATIVE), min_size=count, max_size=count))
    bench = torch.tensor(values, dtype=torch.float64).to(DTYPES[bench_name])
    device = bench.double() * (1 + torch.tensor(factors, dtype=torch.float64))
    if special and draw(st.booleans()):
        at = draw(st.integers(0, count - 1))
        device[at] = draw(st.sampled_from(SPECIAL))
    return bench, device.to(DTYPES[device_name])


def measured(bench: torch.Tensor, device: torch.Tensor, **options: Any) -> PairMeasurement:
    (row,) = measure_two_way("mul", bench, device, **options)
    assert row.kind is Kind.TENSOR
    assert row.two_way is not None
    return row.two_way


def same(got: Any, want: Any, rel: float = 1e-6) -> bool:
    if want is None or got is None:
        return got is want
    if isinstance(want, float) and math.isnan(want):
        return math.isnan(got)
    return got == pytest.approx(want, rel=rel, abs=1e-300)


@settings(max_examples=120, deadline=None)
@given(pairs())
@example((torch.zeros(2), torch.tensor([3e38, 0.0])))
@example((torch.tensor([3e38, 1e-8]), torch.tensor([-3e38, 2e-8])))
def test_columns_are_those_of_the_definitions(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    bench, device = pair
    got = measured(bench, device)
    for name, want in oracle.columns(bench, device).items():
        if name in ("ulp_max", "ulp_mean") and not math.isfinite(want):
            assert not math.isfinite(getattr(got, name)), name
            continue
        assert same(getattr(got, name), want), (name, getattr(got, name), want)


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(1, 17))
def test_result_does_not_depend_on_the_block(
    pair: tuple[torch.Tensor, torch.Tensor], limit: int
) -> None:
    whole, cut = measured(*pair), measured(*pair, block=limit)
    for name in PairMeasurement.__dataclass_fields__:
        left, right = getattr(whole, name), getattr(cut, name)
        if name == "sum_diff":
            scale = whole.sum_abs_diff or 0.0
            assert abs(left - right) <= 1e-12 * scale or math.isinf(scale)
        elif isinstance(left, float):
            assert same(right, left, rel=1e-12), name
        else:
            assert left == right, name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_strides_do_not_matter(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bench = torch.randn(shape, generator=generator).permute(order)
    device = (bench * (1 + 1e-3 * torch.randn(shape, generator=generator).permute(order))).clone()
    limit = data.draw(st.integers(1, 40))
    assert measured(bench, device, block=limit) == measured(
        bench.contiguous(), device.contiguous(), block=limit
    )


@pytest.mark.parametrize("shape", [(), (5,), (200,), (3, 130), (2, 3, 70), (65, 1, 2, 3)])
@pytest.mark.parametrize("limit", [1, 7, 64, None])
def test_bad_elements_per_axis(shape: tuple[int, ...], limit: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    marked = torch.rand(shape, generator=generator) < 0.3
    bench = torch.ones(shape)
    device = torch.where(marked, torch.tensor(1.5), bench)
    got = measured(bench, device, block=limit)
    assert got.axis_bad == oracle.axis_bad(marked.numpy(), shape or (1,))
    assert got.bad == int(marked.sum())


def test_axis_counter_takes_whole_blocks_of_outer_axes() -> None:
    counter = AxisCounter((2, 3, 4))
    tensor = torch.zeros(2, 3, 4, dtype=torch.bool)
    tensor[1, 2, 3] = True
    for block, (part,) in blocks([tensor], 4):
        counter.add(block, part)
    assert counter.counts() == [0, 1, 0, 0, 1, 0, 0, 0, 1]


def test_blocks_copy_only_what_they_show() -> None:
    wide = torch.arange(1000.0).expand(500, 1000)
    seen = 0
    for _, (part,) in blocks([wide.t()], 64):
        assert part.numel() <= 64
        assert part.untyped_storage().nbytes() <= max(64 * 4, 4000)
        seen += part.numel()
    assert seen == 500_000


def test_blocks_go_in_row_major_order() -> None:
    tensor = torch.arange(60).view(3, 4, 5)
    for limit in (1, 3, 5, 7, 20, 59, 60, 100):
        flat = [(block.start, part.tolist()) for block, (part,) in blocks([tensor], limit)]
        assert [x for _, values in flat for x in values] == list(range(60))
        assert all(start == values[0] for start, values in flat)
        assert all(len(values) <= limit for _, values in flat)


def test_worst_elements_are_named() -> None:
    bench = torch.ones(3, 4)
    device = bench.clone()
    device[1, 2], device[2, 3] = 1.5, 1.25
    got = measured(bench, device)
    assert (got.worst_abs, got.worst_abs_index) == (0.5, 6)
    assert (got.worst_abs_bench, got.worst_abs_device) == ("1.0", "1.5")
    assert (got.worst_ulp, got.worst_ulp_index) == (0.5 * 2**23, 6)
    assert got.worst_rel == pytest.approx(0.5)


def test_worst_element_is_the_first_nan() -> None:
    bench = torch.ones(6)
    device = torch.tensor([1.0, math.inf, math.nan, 2.0, math.nan, 1.0])
    for limit in (1, 2, 4, 6):
        got = measured(bench, device, block=limit)
        assert got.worst_abs_index == 2
        assert math.isnan(got.worst_abs or 0.0)
        assert got.device_nonfinite == 3
        assert got.device_nonfinite_index == 1


def test_identical_has_no_worst_element() -> None:
    got = measured(torch.ones(4), torch.ones(4))
    assert got.worst_abs is None
    assert got.cosine == 1.0
    assert got.histogram_abs == [4] + [0] * 63


def test_histograms() -> None:
    bench = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    device = torch.tensor([1.0, 1.5, 1.75, 1 + 2**-23, math.nan])
    got = measured(bench, device)
    assert got.histogram_abs is not None
    assert got.histogram_ulp is not None
    filled = {index: count for index, count in enumerate(got.histogram_abs) if count}
    # 0.5 and 0.75 are in octave -1, 2^-23 in octave -23; bin 2 is octave -44.
    assert filled == {0: 1, 44 - 23 + 2: 1, 44 - 1 + 2: 2, 63: 1}
    filled = {index: count for index, count in enumerate(got.histogram_ulp) if count}
    assert filled == {0: 1, 24 + 0 + 2: 1, 24 + 22 + 2: 2, 63: 1}


def test_histogram_ends() -> None:
    bench = torch.zeros(2, dtype=torch.float64)
    device = torch.tensor([1e-300, 1e300], dtype=torch.float64)
    got = measured(bench, device)
    assert got.histogram_abs is not None
    assert (got.histogram_abs[1], got.histogram_abs[63]) == (1, 1)
    assert got.histogram_ulp is None


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-12, 1.0, 1e60, 1e100, 1e200, 1e300])
def test_cosine_of_extreme_magnitudes(scale: float) -> None:
    bench = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * scale
    device = torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)
    if scale < 1e-100:
        assert measured(bench, device).one_side_zero
        return
    assert measured(bench, device).cosine == pytest.approx(24 / 25)
    assert measured(bench, device, block=1).cosine == pytest.approx(24 / 25)


def test_overflowing_errors_do_not_spoil_the_others() -> None:
    # r = 3e38 / eps and a = 6e38 are infinite in fp32; the rest is measured all the same.
    bench = torch.tensor([0.0, 1e-8, 3e38, 1.0])
    device = torch.tensor([3e38, 2e-8, -3e38, 1.0])
    got = measured(bench, device)
    assert (got.max_abs, got.max_rel) == (math.inf, math.inf)
    assert (got.small, got.normal, got.abs_error_share) == (2, 2, 1.0)
    assert (got.rel_error_share, got.bad) == (0.5, 3)
    assert got.ulp_max == pytest.approx(3e38 * 2.0**23)


def test_exponent_is_exact_just_below_a_power_of_two() -> None:  # D16
    bench = torch.tensor([math.nextafter(1.0, 0.0)]).double()
    device = torch.tensor([1.0])
    assert measured(bench, device).ulp_max == (1 - bench.item()) * 2**24


def test_ulp_of_zero_and_subnormals() -> None:
    got = measured(torch.tensor([0.0, 1e-41]), torch.tensor([2.0**-23, 1e-41 + 2.0**-149]))
    assert got.ulp_max == 1.0
    assert got.ulp_mean == pytest.approx(1.0)


def test_half_is_measured_in_single() -> None:  # D1
    bench = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    device = torch.tensor([-60000.0, 1.0], dtype=torch.float16)
    assert measured(bench, device).max_abs == 119_936.0 + (2 * bench[0].item() - 119_936.0)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_is_pairs_of_reals(dtype: torch.dtype) -> None:  # D7
    bench = torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex64).to(dtype)
    device = torch.tensor([1 + 1j, 2 + 1j], dtype=torch.complex64).to(dtype)
    got = measured(bench, device)
    assert (got.count, got.different, got.max_abs) == (4, 1, 2.0)
    assert got.device_dtype == str(dtype).removeprefix("torch.")
    assert got.rmse is None
    assert got.ulp_max is None


def test_complex_conjugate_view() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert measured(value.conj(), value.conj().clone()).different == 0
    assert measured(value.conj(), value).different == 2


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_float8(dtype: str) -> None:  # D8
    bench = torch.tensor([1.0, 0.5, -2.0]).to(getattr(torch, dtype))
    device = torch.tensor([1.0, 0.5, -2.5]).to(getattr(torch, dtype))
    got = measured(bench, device)
    assert got.max_abs == 0.5
    assert got.max_rel == pytest.approx(0.25)
    assert got.ulp_max is None


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
)
def test_integers_are_exact(dtype: str) -> None:  # D4
    bench = torch.tensor([0, 1, 1, 0], dtype=torch.int64).to(getattr(torch, dtype))
    device = torch.tensor([0, 1, 0, 0], dtype=torch.int64).to(getattr(torch, dtype))
    got = measured(bench, device, block=3)
    assert (got.different, got.error_rate, got.worst_abs_index) == (1, 0.25, 2)
    assert (got.worst_abs_bench, got.worst_abs_device) in (("1", "0"),)
    assert got.axis_bad == [0, 0, 1, 0]
    assert measured(bench, bench.clone()).different == 0


def test_unsigned_64_bits_against_signed() -> None:
    bench = torch.tensor([-1, 5], dtype=torch.int64)
    device = torch.tensor([2**64 - 1, 5], dtype=torch.uint64)
    assert measured(bench, device).different == 1
    assert measured(device, bench).different == 1


def test_negated_view_and_untouched_inputs() -> None:
    golden = torch.tensor([-1.0, 2.0, 0.0], dtype=torch.float64)
    device = torch.tensor([1.5, -2.0, 0.0])
    got = measured(torch._neg_view(golden), device)
    assert (got.different, got.max_abs, got.worst_ulp) == (1, 0.5, 2.0**22)
    assert golden.tolist() == [-1.0, 2.0, 0.0]
    assert device.tolist() == [1.5, -2.0, 0.0]


def test_sparse_is_compared_densely() -> None:
    bench = torch.eye(3).to_sparse()
    assert measured(bench, torch.eye(3).to_sparse()).different == 0
    assert measured(bench, torch.ones(3, 3).to_sparse()).different == 6


def test_gradients_and_views_are_left_alone() -> None:
    bench = torch.ones(4, requires_grad=True)
    device = (bench * 1.0)[1:]
    got = measured(bench[1:], device)
    assert got.different == 0
    assert bench.grad is None


# --- three-way ---------------------------------------------------------------------------------


def triple(npu: Any, gpu: Any, golden: Any, dtype: torch.dtype, **options: Any) -> Any:
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    values = torch.tensor(npu, dtype=dtype), torch.tensor(gpu, dtype=dtype)
    (row,) = measure_three_way("gelu", *values, torch.tensor(golden, dtype=wide), **options)
    return row


@pytest.mark.parametrize("limit", [1, 2, None])
def test_elements_that_cannot_be_compared_are_left_out(limit: int | None) -> None:  # D9
    inf, nan = math.inf, math.nan
    row = triple(
        [inf, nan, nan, 1.5, 2.0, inf],
        [inf, nan, 1.0, 1.0, inf, 1.0],
        [70000.0, nan, 1.0, 1.0, 2.0, 1.0],
        torch.float16,
        block=limit,
    )
    assert row.left_out == 3
    assert row.device_nonfinite == 2
    assert row.device_nonfinite_index == 2
    assert row.saturated == 1
    assert row.identical is False
    assert (row.npu.count, row.gpu.count) == (3, 3)
    assert row.gpu.max_abs == 0.0


def test_shared_overflow_leaves_the_rest_measured() -> None:
    row = triple([math.inf, 1.5], [math.inf, 1.0], [70000.0, 1.0], torch.float16)
    assert row.npu.max_abs == 0.5
    assert row.npu.worst_abs_index == 1
    assert row.npu.axis_bad == [0, 1]


def test_everything_left_out() -> None:
    row = triple([math.inf], [math.inf], [math.inf], torch.float32)
    assert (row.npu.count, row.left_out, row.identical) == (0, 1, True)
    assert row.npu.rmse == 0.0


def test_identical_device_and_bench_have_equal_statistics() -> None:
    generator = torch.Generator().manual_seed(1)
    golden = torch.randn(3, 500, generator=generator, dtype=torch.float64)
    npu = golden.float() * 1.0001
    (row,) = measure_three_way("gelu", npu, npu.clone(), golden, block=64)
    assert row.identical is True
    assert row.npu == row.gpu
    assert row.npu == measured(golden, npu, block=64)


@settings(max_examples=40, deadline=None)
@given(pairs(special=False))
def test_finite_three_way_is_two_pairs(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    golden, npu = pair
    gpu = golden.to(npu.dtype)
    (row,) = measure_three_way("gelu", npu, gpu, golden)
    if row.left_out or row.device_nonfinite:
        return
    assert row.npu == measured(golden, npu)
    assert row.gpu == measured(golden, gpu)


def test_flush_of_signs_counts_against_the_cast_bench() -> None:
    bench = torch.tensor([1.0 + 2**-40, 1.0], dtype=torch.float64)
    device = torch.tensor([1.0, 1.0])
    got = measured(bench, device)
    assert (got.different, got.above, got.below) == (1, 0, 0)


def test_random_seeded_against_the_definitions_in_blocks() -> None:
    generator = torch.Generator().manual_seed(5)
    for bench_name, device_name in COMBINATIONS:
        bench = torch.randn(70_001, generator=generator, dtype=torch.float64)
        bench *= 10.0 ** torch.randint(-12, 3, bench.shape, generator=generator)
        noise = torch.randn(bench.shape, generator=generator, dtype=torch.float64)
        bench, device = bench.to(DTYPES[bench_name]), bench * (1 + 1e-4 * noise)
        device = device.to(DTYPES[device_name])
        got = measured(bench, device)
        for name, want in oracle.columns(bench, device).items():
            assert same(getattr(got, name), want), (bench_name, device_name, name)
        for name in ("abs", "rel"):
            histogram = getattr(got, f"histogram_{name}")
            assert sum(histogram) == got.count
            assert min(histogram) >= 0
        assert np.sum(got.axis_bad) == got.bad


def test_last_bits_do_not_depend_on_threads() -> None:
    generator = torch.Generator().manual_seed(9)
    golden = torch.randn(3, 50_000, generator=generator, dtype=torch.float64)
    gpu = golden.float()
    npu = gpu * (1 + 1e-6 * torch.randn(gpu.shape, generator=generator))
    before = torch.get_num_threads()
    records = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            (row,) = measure_three_way("gelu", npu, gpu, golden)
            records.append(row.to_record())
    finally:
        torch.set_num_threads(before)
    assert records[0] == records[1] == records[2]


def test_memory_is_bounded_by_the_block() -> None:
    # 2^24 elements: one dense fp64 temporary would take 128 MiB.
    bench = torch.ones(1).expand(2**12, 2**12)
    device = torch.full((1,), 1.0 + 2**-20).expand(2**12, 2**12)
    measured(bench[:64], device[:64])
    start = peak_memory(reset=True)
    got = measured(bench, device)
    assert (got.count, got.different) == (2**24, 2**24)
    assert peak_memory(reset=False) - start < 48 * 2**20


def peak_memory(*, reset: bool) -> int:
    """Largest resident size of this process so far, in bytes, after setting it back."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
