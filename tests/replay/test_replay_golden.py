"""Which dtypes the golden has: one rule, decided by all tensors of the call together."""

from __future__ import annotations

import pytest
import torch

from spool.replay.golden import raise_precision

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def dtypes(api: str, *args: object, **kwargs: object) -> list[object]:
    new_args, new_kwargs = raise_precision(api, args, dict(kwargs))
    values = [*new_args, *new_kwargs.values()]
    return [v.dtype if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.parametrize(
    ("given", "raised"),
    [
        ([FP16], [FP32]),
        ([BF16], [FP32]),
        ([FP32], [FP64]),
        ([FP64], [FP64]),
        ([FP16, FP16], [FP32, FP32]),
        ([FP32, FP32], [FP64, FP64]),
        ([BF16, FP32], [FP32, FP32]),
        ([FP16, BF16], [FP32, FP32]),
        ([FP16, BF16, FP32], [FP32, FP32, FP32]),
        ([FP32, FP64], [FP64, FP64]),
        ([BF16, torch.int32, torch.bool], [FP32, torch.int32, torch.bool]),
        ([FP32, torch.complex64], [FP64, torch.complex64]),
        ([torch.float8_e4m3fn], [torch.float8_e4m3fn]),
        ([torch.float8_e4m3fn, BF16], [torch.float8_e4m3fn, FP32]),
        ([torch.int64], [torch.int64]),
        ([], []),
    ],
)
def test_tensors_are_raised_together(given: list[torch.dtype], raised: list[torch.dtype]) -> None:
    tensors = [torch.ones(3).to(dtype) for dtype in given]
    assert dtypes("Torch.stack", *tensors) == raised


def test_nested_and_keyword_tensors_count() -> None:
    half, single = torch.ones(2, dtype=FP16), torch.ones(2)
    (items,), kwargs = raise_precision("Torch.cat", ([half, (half,)],), {"x": single})
    assert items[0].dtype == FP32
    assert items[1][0].dtype == FP32
    assert kwargs["x"].dtype == FP32


@pytest.mark.parametrize(
    ("api", "given", "raised"),
    [
        ("Tensor.type_as", FP32, FP32),
        ("Tensor.type_as", FP16, FP16),
        ("Functional.conv1d", FP32, FP32),
        ("Functional.conv2d", FP32, FP32),
        ("Functional.conv2d", BF16, FP32),
        ("Functional.conv3d", FP32, FP64),
        ("Torch.histc", torch.int64, FP32),
        ("Torch.histc", FP16, FP32),
        ("Torch.histc", torch.int32, torch.int32),
    ],
)
def test_exceptions(api: str, given: torch.dtype, raised: torch.dtype) -> None:
    assert dtypes(api, torch.ones(3).to(given)) == [raised]


@pytest.mark.parametrize(
    ("tensor", "named", "raised"),
    [
        (BF16, BF16, FP32),
        (BF16, FP32, FP64),
        (FP32, BF16, FP64),
        (FP32, FP16, FP64),
        (FP32, FP32, FP64),
        (FP32, FP64, FP64),
        (torch.int64, FP32, FP64),
        (torch.int64, FP16, FP32),
        (FP32, torch.int32, torch.int32),
        (FP32, torch.bool, torch.bool),
    ],
)
def test_a_named_dtype_is_raised_at_least_as_far_as_the_tensors(
    tensor: torch.dtype, named: torch.dtype, raised: torch.dtype
) -> None:
    assert dtypes("Torch.sum", torch.ones(3).to(tensor), dtype=named)[-1] == raised


def test_a_view_of_bits_is_not_raised() -> None:
    assert dtypes("Tensor.view", torch.ones(2, dtype=BF16), torch.int16) == [BF16, torch.int16]
    assert dtypes("Tensor.view", torch.ones(2, dtype=BF16), 2, 1) == [FP32, 2, 1]


def test_a_named_dtype_of_a_mixed_call_is_fp32() -> None:
    args = torch.ones(2, dtype=BF16), torch.ones(2)
    assert dtypes("Torch.mul", *args, dtype=FP16) == [FP32, FP32, FP32]


def test_strides_and_values_stay() -> None:
    base = torch.arange(12.0).view(3, 4)
    for view in (base.t(), base[:, 1], base[0].expand(5, 4), base[1:, ::2]):
        ((raised,), _) = raise_precision("Torch.abs", (view,), {})
        assert raised.dtype == FP64
        assert raised.stride() == view.stride()
        assert torch.equal(raised, view.double())


def test_aliases_stay_aliases() -> None:
    memory = torch.arange(6, dtype=BF16)
    left, right = memory[:4], memory[2:]
    (a, b), kwargs = raise_precision("Torch.add", (left, right), {"other": left})
    a[2] = 100
    assert b[0] == 100
    assert kwargs["other"][2] == 100
    assert left[2] == 2  # the caller's own are untouched


def test_a_memory_of_two_dtypes_is_copied_tensor_by_tensor() -> None:
    memory = torch.zeros(4)
    bits = memory.view(torch.int32)
    ((raised, kept), _) = raise_precision("Torch.foo", (memory, bits), {})
    assert raised.dtype == FP64
    assert kept.dtype == torch.int32
    assert torch.equal(raised, memory.double())


def test_a_tensor_given_twice_is_still_one_tensor() -> None:
    x = torch.ones(2)
    ((a, b), _) = raise_precision("Torch.mul", (x, x), {})
    assert a is b


def test_fused_optimizers_take_the_scale_as_fp32() -> None:
    """With a GradScaler; the kernel reads both as fp32, whatever the parameters are."""
    params, scale = [torch.ones(2)], torch.ones(1)
    lists = [[torch.ones(2)] for _ in range(3)]
    args, kwargs = raise_precision(
        "Torch._fused_adamw_",
        (params, *lists, [], [torch.ones(())]),
        {"lr": 1e-3, "grad_scale": scale, "found_inf": torch.zeros(1)},
    )
    assert args[0][0].dtype == FP64
    assert kwargs["grad_scale"].dtype == kwargs["found_inf"].dtype == FP32
    rest = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    torch._fused_adamw_(*args, **kwargs, **rest, amsgrad=False, maximize=False)
    assert args[0][0][0] < 1
