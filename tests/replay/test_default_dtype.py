"""torch's default dtype at the call, and memory given as ``out``, in bench and golden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shard_writing import record
from test_execute import replayed, worst

from spool.call import CallContext
from spool.records import Outcome
from spool.replay.golden import like_out, raise_precision, raised_default

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
IDS = torch.arange(1000)


@pytest.fixture
def default() -> Iterator[Callable[[torch.dtype], CallContext]]:
    """Sets the default dtype, and gives the context that capture would write."""

    def choose(dtype: torch.dtype) -> CallContext:
        torch.set_default_dtype(dtype)
        return CallContext(default_dtype=str(dtype).removeprefix("torch."))

    yield choose
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "raised"), [(BF16, FP32), (FP16, FP32), (FP32, FP64), (FP64, FP64)]
)
def test_a_result_of_the_default_dtype(
    default: Any, dtype: torch.dtype, raised: torch.dtype
) -> None:
    context = default(dtype)
    quotient = record("Tensor.__truediv__", torch.Tensor.__truediv__, IDS, 3, context=context)
    root = record("Torch.sqrt", torch.sqrt, IDS, context=context)
    torch.set_default_dtype(torch.float32)
    (output,) = replayed(quotient).outputs
    assert output.device_dtype == output.bench_dtype == str(dtype)
    assert output.two_way is not None
    assert output.two_way.max_abs == 0
    (output,) = replayed(root).outputs
    assert output.device_dtype == output.bench_dtype == str(dtype)
    assert output.golden_dtype == str(raised)
    assert output.identical
    assert torch.get_default_dtype() is torch.float32


def test_a_floating_argument_decides_instead_of_the_default(default: Any) -> None:
    context = default(BF16)
    call = record(
        "Functional.gelu", torch.nn.functional.gelu, torch.rand(9, dtype=FP32), context=context
    )
    torch.set_default_dtype(torch.float32)
    (output,) = replayed(call).outputs
    assert (output.bench_dtype, output.golden_dtype) == ("torch.float32", "torch.float64")


@pytest.mark.parametrize(
    ("args", "kwargs", "raised"),
    [
        ((IDS, 3), {}, FP64),
        ((IDS > 3, [IDS]), {}, FP64),
        ((IDS,), {"out": torch.ones(3)}, FP64),
        ((IDS, torch.ones(3, dtype=BF16)), {}, FP32),
        ((), {"weight": torch.ones(3)}, FP32),
        ((torch.ones(3, dtype=torch.complex64), 3), {}, FP32),
        ((torch.ones(3).to(torch.float8_e5m2),), {}, FP32),
    ],
)
def test_the_default_is_raised_only_where_it_decides(
    args: tuple[Any, ...], kwargs: dict[str, Any], raised: torch.dtype
) -> None:
    assert raised_default("Torch.div", args, kwargs, FP32) is raised
    assert raised_default("Tensor.type_as", args, kwargs, FP32) is FP32
    assert raised_default("Torch.histc", args, kwargs, FP32) is FP32


X = torch.rand(4, 4) + 4 * torch.eye(4)
Z = torch.complex(X, X.t())


@pytest.mark.parametrize(
    ("api", "function", "args", "out"),
    [
        ("Torch.complex", torch.complex, (X, X), torch.empty(0, dtype=torch.complex64)),
        ("Torch.polar", torch.polar, (X, X), torch.empty(0, dtype=torch.complex64)),
        ("Torch.fft.ifft", torch.fft.ifft, (X,), torch.empty(0, dtype=torch.complex64)),
        ("Torch.fft.rfft", torch.fft.rfft, (X,), torch.empty(0, dtype=torch.complex64)),
        ("Torch.linalg.vector_norm", torch.linalg.vector_norm, (Z,), torch.empty(0)),
        ("Torch.linalg.eigh", torch.linalg.eigh, (X + X.t(),), (torch.empty(0), torch.empty(0))),
        ("Torch.linalg.slogdet", torch.linalg.slogdet, (X,), (torch.empty(0), torch.empty(0))),
        ("Torch.linalg.svd", torch.linalg.svd, (X,), tuple(torch.empty(0) for _ in range(3))),
        ("Torch.linalg.slogdet", torch.linalg.slogdet, (Z,), (Z.clone(), torch.empty(0))),
        ("Torch.cumsum", torch.cumsum, (X.bfloat16(), 0), torch.empty(0)),
        ("Torch.eq", torch.eq, (X, X.t()), torch.empty(0)),
        ("Torch.exp", torch.exp, (IDS[:4],), torch.empty(0)),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_memory_for_the_result_does_not_bind_the_golden(
    api: str, function: Any, args: tuple[Any, ...], out: Any
) -> None:
    result = replayed(record(api, function, *args, out=out))
    assert result.outcome is Outcome.MEASURED, result.reason
    assert all(str(output.kind) == "tensor" for output in result.outputs), result.outputs
    # Signs of vectors are free: fp32 and fp64 may choose differently.
    assert worst(result) < (4 if "svd" in api or "eigh" in api else 0.06)


def test_a_call_that_returns_nothing_where_it_is_given_memory() -> None:
    out = [torch.empty(2), torch.empty(2)]
    written = ["kwargs.out.0", "kwargs.out.1"]
    try:
        call = record(
            "Torch.unbind_copy", torch.unbind_copy, torch.rand(2, 2), out=out, writes=written
        )
    except RuntimeError:
        pytest.skip("this torch has no such form")
    result = replayed(call)
    assert len(result.outputs) == 2
    assert worst(result) == 0


def test_out_takes_no_part_in_the_raise() -> None:
    half, single = torch.ones(2, dtype=BF16), torch.ones(2)
    (x,), kwargs = raise_precision("Torch.exp", (half,), {"out": single})
    assert x.dtype is FP32
    assert kwargs["out"] is single
    (x,), _ = raise_precision("Torch.exp", (single,), {"out": half})
    assert x.dtype is FP64


def test_a_golden_is_of_the_kind_of_the_memory() -> None:
    flags, numbers = torch.tensor([True]), torch.tensor([2])
    assert like_out(flags, torch.ones(1)).dtype is FP64
    assert like_out(numbers, torch.ones(1, dtype=BF16)).dtype is FP32
    assert like_out(numbers, numbers) is numbers
    assert like_out(torch.ones(1, dtype=FP64), torch.ones(1)).dtype is FP64
    parts = like_out((flags, numbers), [torch.ones(1), numbers])
    assert [part.dtype for part in parts] == [FP64, torch.int64]
    assert like_out((flags,), [flags, flags]) == (flags,)
    assert like_out(3, flags) == 3
