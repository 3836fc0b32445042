"""Channel dropout is judged by channels (D17); what is not finite in fp64 and complex by D9."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spool import standards
from spool.standards import Status
from spool.standards.measure import measure_two_way
from spool.standards.select import channel_axes
from spool.standards.zeros import ZeroCounter


@pytest.mark.parametrize(
    ("name", "axes", "leading"),
    [
        ("dropout", 4, 4),
        ("native_dropout", 3, 3),
        ("dropout1d", 2, 1),
        ("dropout1d", 3, 2),
        ("dropout2d", 3, 2),
        ("dropout2d", 4, 2),
        ("dropout3d", 4, 1),
        ("dropout3d", 5, 2),
        ("feature_dropout", 4, 2),
        ("feature_dropout_", 2, 2),
        ("feature_dropout", 1, 1),
    ],
)
def test_axes_that_number_what_is_zeroed_together(name: str, axes: int, leading: int) -> None:
    assert channel_axes(name, axes) == leading


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dropout1d", (200, 64)),
        ("dropout1d", (8, 25, 64)),
        ("dropout2d", (8, 25, 16, 16)),
        ("dropout2d", (8, 25, 64)),
        ("dropout3d", (200, 4, 4, 4)),
        ("dropout3d", (8, 25, 4, 4, 4)),
        ("feature_dropout", (8, 25, 64)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
def test_channels_are_what_torch_zeroes(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.rand(shape) + 1
    function = getattr(F, name, None) or torch.feature_dropout
    y = function(x, 0.5, True)
    for block in (None, 1, 7, 1000):
        (output,) = measure_two_way(name, y, y, block=block)
        assert output.count == 200
        assert output.zeros_device == output.zeros_bench
        # 200 draws of 0.5; elements beside a zeroed channel are not zero.
        assert 60 < (output.zeros_device or 0) < 140
        assert (output.zeros_device or 0) / 200 == float((y == 0).double().mean())


def channels(zeroed: int, of: int = 200) -> torch.Tensor:
    values = torch.ones(of // 10, 10, 5, 5)
    values.view(of, 25)[:zeroed] = 0
    return values


@pytest.mark.parametrize(
    ("bench", "device", "of", "status"),
    [
        (20, 39, 200, Status.PASS),
        (20, 40, 200, Status.ERROR),
        (0, 90, 90, Status.PASS),  # 2250 elements, but 90 channels
        (0, 100, 100, Status.ERROR),
    ],
)
@pytest.mark.parametrize("name", ["dropout2d", "feature_dropout"])
def test_the_share_of_zero_channels(
    name: str, bench: int, device: int, of: int, status: Status
) -> None:
    pair = channels(bench, of), channels(device, of)
    judged = standards.check(name, *pair)
    assert judged.status is status
    assert ("channels are zero" in judged.message) == (status is Status.ERROR)
    assert standards.compare(name, pair[1], pair[0], pair[0]).status is status


def test_healthy_draws_pass() -> None:
    """Of 300 channels, shares of two right runs differ by 0.04 or so, hardly by 0.1."""
    torch.manual_seed(2)
    x = torch.rand(10, 30, 8)
    x[0] = 0  # zero channels of the input are so on both sides
    statuses = [
        standards.check("dropout1d", F.dropout1d(x, 0.3), F.dropout1d(x, 0.3)).status
        for _ in range(40)
    ]
    assert set(statuses) == {Status.PASS}


def test_an_element_dropout_still_counts_elements() -> None:
    bench, device = channels(20), channels(60)
    (output,) = measure_two_way("dropout", bench, device)
    assert (output.count, output.zeros_bench, output.zeros_device) == (5000, 500, 1500)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 64])
def test_groups_across_blocks_count_once(step: int) -> None:
    torch.manual_seed(step)
    values = (torch.rand(60) < 0.3).float()
    counter = ZeroCounter(20, 60)
    for start in range(0, 60, step):
        counter.add(start, values[start : start + step])
    assert counter.zeros() == int((values.view(20, 3) == 0).all(1).sum())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_an_output_without_standard_that_is_nan_alone_is_an_error(dtype: torch.dtype) -> None:
    good = torch.ones(3).to(dtype)
    judged = standards.compare("gelu", good * NAN, good, good)
    assert judged.status is Status.ERROR
    assert "are inf or NaN on the device, finite in the golden" in judged.message
    whole = "6 of 6 real and imaginary parts" if dtype.is_complex else "3 of 3 elements"
    assert whole in judged.message
    assert judged.worst is not None
    assert judged.worst.metric == "device_nonfinite"
    assert judged.worst.index == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("npu", "gpu", "golden"),
    [(1, 1, 1), (5, 1, 1), (NAN, NAN, NAN), (INF, INF, 1), (1, INF, 1), (NAN, 1, NAN)],
)
def test_the_rest_stays_without_verdict(
    dtype: torch.dtype, npu: float, gpu: float, golden: float
) -> None:
    sides = [torch.tensor([value, 1.0]).to(dtype) for value in (npu, gpu, golden)]
    judged = standards.compare("gelu", *sides)
    assert judged.status is Status.SKIP
    assert f"no standard for {dtype}" in judged.message
