"""One call on the bench device: context, aliases, strides, devices, what is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_writing import record

from spool.apinames import function_of
from spool.call import Call, CallContext, TorchValue
from spool.errors import BadShard
from spool.records import CallHeader, Outcome
from spool.replay.calls import describe, replay_call
from spool.replay.execute import Bench, autocast_dtype, run, thaw_arguments
from spool.replay.facts import describe_inputs
from spool.replay.nest import at_path, map_leaves
from spool.replay.references import REFERENCES
from spool.replay.result import CallResult, header_of_call
from spool.standards import route_of
from spool.standards.rows import Route

CPU = torch.device("cpu")
BENCH = Bench(CPU, CPU)
LIMIT = 10**9


def replayed(call: Call, limit: int = LIMIT) -> CallResult:
    blank = CallHeader(
        call.rank, call.step, call.order, call.index, call.name, call.api, "forward",
        "", "", "", "", "file", 1, "", "", "", False,
    )  # fmt: skip
    return replay_call(call, header_of_call(blank, call, {}, "cpu"), BENCH, limit)


def value_of(call: Call) -> Any:
    arguments = thaw_arguments(call, CPU)
    dtype = autocast_dtype(call.context)
    return run(
        call,
        function_of(call.api),
        arguments,
        device=CPU,
        autocast=dtype,
        default=torch.float32,
    )


def worst(result: CallResult) -> float:
    assert result.outcome is Outcome.MEASURED, result.reason
    assert all(output.message is None for output in result.outputs)
    pairs = [output.two_way or output.npu for output in result.outputs]
    return max((pair.max_abs or 0.0 for pair in pairs if pair is not None), default=0.0)


def test_an_in_place_call_starts_from_the_argument_before_it() -> None:
    call = record("Tensor.add_", torch.Tensor.add_, torch.tensor([3.0]), 1)
    assert torch.equal(thaw_arguments(call, CPU)[0][0], torch.tensor([3.0]))
    assert torch.equal(value_of(call), torch.tensor([4.0]))
    assert torch.equal(value_of(call), torch.tensor([4.0]))  # and again
    assert worst(replayed(call)) == 0


def test_a_transposed_argument_keeps_its_stride() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    call = record("Torch.matmul", torch.matmul, x, torch.ones(2, 2))
    assert thaw_arguments(call, CPU)[0][0].stride() == (1, 3)
    assert worst(replayed(call)) == 0


def test_what_a_call_writes_is_compared() -> None:
    mask = torch.tensor([True, False, True])
    indices: tuple[Any, ...] = (
        slice(0, 1), ..., None, mask, torch.tensor([0, 2]), (slice(None), 1),
    )  # fmt: skip
    for index in indices:
        target = torch.arange(9.0).view(3, 3)
        write = record(
            "Tensor.__setitem__",
            torch.Tensor.__setitem__,
            target,
            index,
            7.0,
            writes=["args.0"],
        )
        assert torch.equal(value_of(write), target)
        assert worst(replayed(write)) == 0
        read = record("Tensor.__getitem__", torch.Tensor.__getitem__, target, index)
        assert worst(replayed(read)) == 0


def test_a_wrong_write_is_seen() -> None:
    call = record(
        "Tensor.__setitem__",
        torch.Tensor.__setitem__,
        torch.zeros(3),
        0,
        7.0,
        writes=["args.0"],
    )
    (path, ref), *_ = call.mutated.items()
    regions = [region.copy() for region in call.regions]
    regions[ref.region][0] = 8.0
    result = replayed(replace(call, regions=regions))
    assert path == "args.0"
    assert worst(result) == 1.0


def test_written_arguments_follow_the_result() -> None:
    out = torch.empty(3), torch.empty(3, dtype=torch.int64)
    call = record("Torch.sort", torch.sort, torch.tensor([3.0, 1.0, 2.0]), out=out)
    assert [len(result) for result in [replayed(call).outputs]] == [2]
    mean, var = torch.zeros(2), torch.ones(2)
    call = record(
        "Functional.batch_norm",
        F.batch_norm,
        torch.randn(4, 2),
        mean,
        var,
        None,
        None,
        True,
        0.1,
        writes=["args.1", "args.2"],
    )
    result = replayed(call)
    assert len(result.outputs) == 3
    assert worst(result) < 1e-5


def test_optimizer_lists() -> None:
    call = record(
        "Torch._foreach_mul_",
        torch._foreach_mul_,
        [torch.ones(3)],
        2.0,
        writes=["args.0.0"],
    )
    assert worst(replayed(call)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_optimizer(dtype: torch.dtype) -> None:
    params, grads, means, squares = (torch.rand(3).to(dtype) for _ in range(4))
    call = record(
        "Torch._fused_adamw_",
        torch._fused_adamw_,
        [params],
        [grads],
        [means],
        [squares],
        [],
        [torch.tensor(3.0)],
        amsgrad=False,
        lr=0.1,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.01,
        eps=1e-8,
        maximize=False,
        writes=["args.0.0", "args.2.0", "args.3.0"],
    )
    result = replayed(call)
    assert len(result.outputs) == 3
    assert worst(result) < 0.05


def test_aliased_arguments_stay_aliased() -> None:
    memory = torch.arange(6.0)
    call = record("Tensor.copy_", torch.Tensor.copy_, memory[:4], memory[:4].flip(0))
    assert worst(replayed(call)) == 0
    call = record("Tensor.add_", torch.Tensor.add_, memory[1:], memory[:1])
    assert worst(replayed(call)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_restored(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        call = record(
            "Functional.linear",
            F.linear,
            torch.randn(4, 8),
            torch.randn(3, 8),
            context=CallContext(autocast={"cpu": str(dtype).removeprefix("torch.")}),
        )
    result = replayed(call)
    (output,) = result.outputs
    assert output.device_dtype == output.bench_dtype == str(dtype)
    assert worst(result) < 0.1
    assert output.npu is not None
    assert output.npu.bench_dtype == "float64"  # the golden runs without autocast


def test_autocast_of_another_device_type_is_not() -> None:
    context = CallContext(autocast={"cuda": "bfloat16"}, device="cpu")
    assert autocast_dtype(context) is None
    npu = CallContext(autocast={"npu": "bfloat16"}, device="npu:3")
    assert autocast_dtype(npu) is torch.bfloat16


def test_the_state_of_the_process_is_put_back() -> None:
    call = record("Functional.relu", F.relu, torch.ones(2))
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    tf32 = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(TypeError):
        run(
            call,
            torch.relu,
            ((), {}),
            device=CPU,
            autocast=torch.bfloat16,
            default=torch.float16,
            allow_tf32=True,
        )
    assert torch.get_default_dtype() is torch.float32
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


def test_devices_are_rewritten() -> None:
    npu = TorchValue("device", "npu:0")
    x = torch.ones(2)
    for changed in (
        {"args": ("npu:1", torch.float64)},
        {"args": (npu,)},
        {"kwargs": {"device": "npu:0"}},
        {"kwargs": {"device": npu}},
        {"kwargs": {"device": 3}},
    ):
        call = record("Tensor.to", torch.Tensor.to, x, torch.float64)
        call = replace(
            call,
            args=(call.args[0], *changed.get("args", ())),
            kwargs=dict(changed.get("kwargs", {})),
        )
        assert value_of(call).device == CPU
    call = record("Tensor.type", torch.Tensor.type, x, "torch.DoubleTensor")
    call = replace(call, args=(call.args[0], "torch.npu.DoubleTensor"))
    assert value_of(call).dtype == torch.float64
    call = record("Torch.full_like", torch.full_like, x, 2.0)
    assert value_of(replace(call, kwargs={"device": "npu:0"})).device == CPU


def test_dtype_and_memory_format_arguments() -> None:
    x = torch.randn(2, 3, 4, 5)
    call = record("Torch.sum", torch.sum, x.bfloat16(), dim=-1, dtype=torch.float32)
    assert value_of(call).dtype == torch.float32
    assert worst(replayed(call)) < 1e-5
    call = record("Tensor.to", torch.Tensor.to, x, memory_format=torch.channels_last)
    assert value_of(call).is_contiguous(memory_format=torch.channels_last)
    assert worst(replayed(call)) == 0


@pytest.mark.parametrize(
    ("api", "function", "count"),
    [
        ("Torch.linalg.svd", torch.linalg.svd, 3),
        ("Torch.linalg.inv", torch.linalg.inv, 1),
        ("Torch.linalg.slogdet", torch.linalg.slogdet, 2),
        ("Torch.aminmax", torch.aminmax, 2),
        ("Torch.unbind", torch.unbind, 4),
    ],
)
def test_outputs_in_any_nesting(api: str, function: Any, count: int) -> None:
    result = replayed(record(api, function, torch.rand(4, 4) + torch.eye(4)))
    assert len(result.outputs) == count
    # Signs of singular vectors are free: fp32 and fp64 may choose differently.
    assert worst(result) < (2 if "svd" in api else 1e-4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
def test_narrow_indices_are_widened(dtype: torch.dtype) -> None:
    target = torch.tensor([0, 2])
    call = record("Functional.cross_entropy", F.cross_entropy, torch.randn(2, 3), target)
    narrow = record("Functional.relu", F.relu, target.to(dtype))
    ref = replace(narrow.args[0], region=len(call.regions))
    call = replace(call, args=(call.args[0], ref), regions=[*call.regions, narrow.regions[0]])
    assert worst(replayed(call)) < 1e-5


def test_dropout_draws_the_same_zeros_in_every_replay() -> None:
    """Its share of zeros goes into the tables, which a rerun must give again."""
    torch.manual_seed(0)  # else the two would have as many zeros now and then
    call = record("Functional.dropout", F.dropout, torch.ones(40, 40), 0.5)
    first = replayed(call)
    torch.rand(7)
    assert replayed(call).to_json() == first.to_json()
    (output,) = first.outputs
    assert output.zeros_bench != output.zeros_device
    other = replayed(replace(call, order=1))
    assert other.outputs[0].zeros_bench != output.zeros_bench


def test_random_calls_are_skipped_and_dropout_is_not() -> None:
    x = torch.rand(50, 50)
    skipped = replayed(record("Torch.bernoulli", torch.bernoulli, x))
    assert (skipped.outcome, skipped.reason) == (Outcome.SKIPPED, "draws random numbers")
    assert skipped.header.random
    blank = replayed(record("Torch.empty_like", torch.empty_like, x))
    assert (blank.outcome, blank.header.random) == (Outcome.SKIPPED, False)
    assert blank.reason == "returns memory that was never written"
    dropout = replayed(record("Functional.dropout", F.dropout, x, 0.5))
    (output,) = dropout.outputs
    assert dropout.header.random
    assert output.zeros_bench is not None
    assert output.zeros_device is not None
    assert 0.3 < output.zeros_device / output.count < 0.7
    off = replayed(record("Functional.dropout", F.dropout, x, 0.5, training=False))
    assert not off.header.random
    assert off.outputs[0].zeros_bench is None


def test_a_missing_reference_is_a_skip() -> None:
    result = replayed(record("NPU.npu_my_op", F.relu, torch.ones(2)))
    assert (result.outcome, result.reason) == (Outcome.SKIPPED, "no reference for npu_my_op")


@pytest.mark.parametrize("api", ["Torch.load", "Tensor.set_", "Aten.from_file", "Torch.os.mkdir"])
def test_a_refused_name_is_a_bad_shard(api: str) -> None:
    with pytest.raises(BadShard, match="refused"):
        replayed(record(api, F.relu, torch.ones(2)))


def test_an_exception_is_the_calls_row() -> None:
    call = record("Torch.matmul", torch.matmul, torch.ones(2, 3), torch.ones(3))
    broken = replace(call, args=(call.args[0], call.args[0]))
    result = replayed(broken)
    assert result.outcome is Outcome.REPLAY_FAILED
    assert result.reason.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "\n" not in result.reason


def test_a_failing_golden_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFERENCES, "sinh", lambda x: 1 / 0)
    result = replayed(record("Torch.sinh", torch.sinh, torch.ones(3)))
    assert result.outcome is Outcome.REPLAY_FAILED
    assert result.reason.startswith("RuntimeError: at raised precision: ZeroDivisionError")


def test_a_call_that_orders_terabytes_fails_alone() -> None:
    call = record("Tensor.repeat", torch.Tensor.repeat, torch.ones(2), 2)
    result = replayed(replace(call, args=(call.args[0], 10**12)))
    assert result.outcome is Outcome.REPLAY_FAILED
    assert result.reason == "TooLarge: its result would take 8 TB, the limit is 1 GB"


def test_the_route_decides_about_the_golden() -> None:
    x = torch.rand(3)
    two_way = replayed(record("Tensor.mul", torch.Tensor.mul, x, x))
    assert route_of("Tensor.mul") is Route.TWO_WAY
    assert two_way.header.golden == ""
    assert two_way.outputs[0].two_way is not None
    three_way = replayed(record("Functional.gelu", F.gelu, x))
    assert three_way.header.golden == "cpu"
    assert three_way.outputs[0].npu is not None
    assert three_way.outputs[0].gpu is not None


def test_results_survive_the_journal() -> None:
    call = record("Functional.gelu", F.gelu, torch.tensor([0.5, float("inf"), float("nan")]))
    result = replayed(call)
    again = CallResult.from_json(json.loads(json.dumps(result.to_json())))
    assert repr(again) == repr(result)


def test_errors_are_described_in_one_short_line() -> None:
    assert describe(ValueError("a\n  b\tc")) == "ValueError: a b c"
    assert len(describe(RuntimeError("x" * 5000))) == 300
    assert describe(torch.OutOfMemoryError("tried 0x7f")).startswith("OutOfMemoryError: out of")


def test_facts_about_inputs() -> None:
    x = torch.tensor([[1.0, -4.0], [float("nan"), float("-inf")]])
    wide = x.bfloat16()[0].expand(3, 2)
    facts = json.loads(describe_inputs(((x, [wide], 5), {"out": torch.tensor([-7, 0])})))
    keys = ("path", "dtype", "shape", "count", "nan", "inf", "zeros", "max_abs", "mean_abs")
    assert [tuple(fact[key] for key in keys) for fact in facts] == [
        ("args[0]", "float32", [2, 2], 4, 1, 1, 0, 4.0, 2.5),
        ("args[1][0]", "bfloat16", [3, 2], 6, 0, 0, 0, 4.0, 2.5),
        ("kwargs['out']", "int64", [2], 2, 0, 0, 1, 7.0, 3.5),
    ]


def test_facts_cost_nothing_for_an_expanded_argument() -> None:
    nans = torch.full((1,), float("nan")).expand(10**12)
    (facts,) = json.loads(describe_inputs(((nans, slice(nans)), {})))
    assert (facts["nan"], facts["count"], facts["shape"]) == (10**12, 10**12, [10**12])


def test_the_reduction_length_is_measured_with_the_outputs() -> None:
    result = replayed(record("Functional.linear", F.linear, torch.ones(2, 5), torch.ones(3, 5)))
    assert result.outputs[0].reduction == 5


def test_paths_and_nests() -> None:
    x = torch.ones(1)
    args = ([x, (1, {"w": x})],)
    assert at_path(args, {}, "args.0.1.1.w") is x
    assert at_path((), {"out": (1, x)}, "kwargs.out.1") is x
    for wrong in ("args.7", "args.0.w", "kwargs.out", "other.0", "args.0.0.5"):
        with pytest.raises(LookupError):
            at_path(args, {}, wrong)
    copied = map_leaves(args, lambda leaf: leaf.clone() if leaf is x else leaf)
    assert copied[0][0] is copied[0][1][1]["w"]
    assert copied[0][0] is not x
    pair = torch.aminmax(x)
    assert type(map_leaves(pair, lambda leaf: leaf)) is type(pair)
