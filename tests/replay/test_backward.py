"""Operators of the autograd engine: known ones replay, and hostile arguments do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spool.apinames import Refused, function_of, name_of
from spool.atennames import CHECKING, TRUSTING, overloads
from spool.errors import BadShard
from spool.replay.backward import CHECKS, check_operator
from spool.replay.kernels import check_values

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Engine(TorchDispatchMode):
    """Keeps the arguments of one operator that the engine runs."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.case: Case | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == f"aten::{self.operator}":
            self.case = (func, tuple(args), dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def weight_norm() -> torch.Tensor:
    return torch._weight_norm(x(3, 4), x(3, 1), 0)


def norm_layer() -> torch.Tensor:
    return F.batch_norm(x(4, 3, 2), torch.zeros(3), torch.ones(3), x(3), x(3), training=True)


# What makes the engine run each of the operators.
FORWARD: dict[str, Callable[[], torch.Tensor]] = {
    "_adaptive_avg_pool2d_backward": lambda: F.adaptive_avg_pool2d(x(1, 2, 6, 6), 2),
    "_adaptive_avg_pool3d_backward": lambda: F.adaptive_avg_pool3d(x(1, 2, 4, 4, 4), 2),
    "_cdist_backward": lambda: torch.cdist(x(1, 3, 4), x(1, 5, 4)),
    "_fft_c2c": lambda: torch.fft.fft(torch.fft.rfft(x(8))).abs(),
    "_fft_r2c": lambda: torch.fft.rfft(x(4, 6), dim=0).abs(),
    "avg_pool2d_backward": lambda: F.avg_pool2d(x(2, 2, 6, 6), 2),
    "avg_pool3d_backward": lambda: F.avg_pool3d(x(2, 2, 4, 4, 4), 2),
    "_fft_c2r": lambda: torch.fft.irfft(torch.fft.rfft(x(8))),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda: F.scaled_dot_product_attention(
        x(1, 4, 6, 8), x(1, 4, 6, 8), x(1, 4, 6, 8)
    ),
    "_unsafe_index": lambda: torch.ops.aten._unsafe_index(x(4, 3), [torch.tensor([0, 3])]),
    "_unsafe_index_put": lambda: torch.ops.aten._unsafe_index_put(
        x(4, 3), [torch.tensor([0, 3])], x(2, 3)
    ),
    "_weight_norm_interface": weight_norm,
    "_weight_norm_interface_backward": weight_norm,
    "adaptive_max_pool2d_backward": lambda: F.adaptive_max_pool2d(x(1, 2, 6, 6), 2),
    "adaptive_max_pool3d_backward": lambda: F.adaptive_max_pool3d(x(1, 2, 4, 4, 4), 2),
    "convolution_backward": lambda: F.conv2d(x(1, 2, 6, 6), x(3, 2, 3, 3), x(3)),
    "embedding_dense_backward": lambda: F.embedding(torch.tensor([[1, 4]]), x(5, 3)),
    "fractional_max_pool2d_backward": lambda: F.fractional_max_pool2d(x(1, 2, 6, 6), 2, 3),
    "fractional_max_pool3d_backward": lambda: F.fractional_max_pool3d(x(1, 2, 4, 4, 4), 2, 2),
    "index": lambda: x(4, 3)[torch.tensor([0, 3])],
    "grid_sampler_2d_backward": lambda: F.grid_sample(
        x(1, 2, 5, 5), x(1, 3, 3, 2), align_corners=False
    ),
    "grid_sampler_3d_backward": lambda: F.grid_sample(
        x(1, 2, 4, 4, 4), x(1, 3, 3, 3, 3), align_corners=False
    ),
    "max_pool2d_with_indices_backward": lambda: F.max_pool2d(x(1, 2, 6, 6), 2),
    "max_pool3d_with_indices_backward": lambda: F.max_pool3d(x(1, 2, 4, 4, 4), 2),
    "native_batch_norm_backward": norm_layer,
    "native_group_norm_backward": lambda: F.group_norm(x(2, 4, 3), 2, x(4), x(4)),
    "native_layer_norm_backward": lambda: F.layer_norm(x(2, 3, 4), (4,), x(4), x(4)),
    "nll_loss_backward": lambda: F.cross_entropy(x(3, 5), torch.tensor([0, -100, 4])),
    "nll_loss2d_backward": lambda: F.cross_entropy(x(1, 5, 2, 2), torch.zeros(1, 2, 2).long()),
    "reflection_pad1d_backward": lambda: F.pad(x(1, 2, 5), (1, 2), "reflect"),
    "reflection_pad2d_backward": lambda: F.pad(x(1, 2, 5, 5), (1, 2, 0, 1), "reflect"),
    "reflection_pad3d_backward": lambda: F.pad(x(1, 2, 4, 4, 4), (1, 2, 0, 1, 1, 1), "reflect"),
    "replication_pad1d_backward": lambda: F.pad(x(1, 2, 5), (1, 2), "replicate"),
    "replication_pad2d_backward": lambda: F.pad(x(1, 2, 5, 5), (1, 2, 0, 1), "replicate"),
    "replication_pad3d_backward": lambda: F.pad(x(1, 2, 4, 4, 4), (1, 2, 0, 1, 1, 1), "replicate"),
    "unfold_backward": lambda: x(3, 8).unfold(1, 3, 2),
}

# Forward operators, which a hook may call.
_OUTSIDE = {
    "_fft_r2c",
    "index",
    "_unsafe_index",
    "_unsafe_index_put",
    "_weight_norm_interface",
    "_fft_c2r",
}
# What the engine of this build does not run.
GIVEN: dict[str, tuple[Any, ...]] = {
    "_native_batch_norm_legit": (
        *(torch.randn(4, 3, 2), torch.ones(3), torch.ones(3), torch.zeros(3), torch.ones(3)),
        *(True, 0.1, 1e-5),
    ),
    "_index_put_impl_": (torch.ones(4, 3), [torch.tensor([0, 3])], torch.ones(2, 3), True, True),
    "_fused_rms_norm_backward": (
        *(torch.ones(2, 4), torch.ones(2, 4), [4], torch.ones(2, 1), torch.ones(4), [True, True]),
    ),
}
# Not on the CPU.
_ONLY_CHECKED = {"_fused_rms_norm_backward"}


def case_of(operator: str) -> Case:
    """A real call of an operator."""
    torch.manual_seed(0)
    if operator in GIVEN:
        return getattr(torch.ops.aten, operator).default, GIVEN[operator], {}
    engine = Engine(operator)
    if operator in _OUTSIDE:
        with engine:
            FORWARD[operator]()
    else:
        y = FORWARD[operator]()
        with engine:
            y.sum().backward()
    assert engine.case is not None, f"the engine did not run {operator}"
    return engine.case


def test_every_trusting_operator_has_a_check_and_a_case() -> None:
    assert set(CHECKS) == TRUSTING == set(FORWARD) | set(GIVEN)
    assert not TRUSTING & CHECKING


@pytest.mark.parametrize("operator", sorted(TRUSTING))
def test_what_the_engine_gives_passes(operator: str) -> None:
    func, args, kwargs = case_of(operator)
    assert name_of(func) == f"Aten.{operator}"
    assert function_of(f"Aten.{operator}", func._overloadname) is func
    check_operator(func, (args, kwargs))
    if operator not in _ONLY_CHECKED:
        func(*args, **kwargs)


def hostile(operator: str) -> Iterator[tuple[str, Case]]:
    """The same call with one argument of another size, or with indices beyond the end."""
    func, args, kwargs = case_of(operator)
    schema = func._schema.arguments
    for position, (argument, value) in enumerate(zip(schema, args, strict=False)):
        tensors = value if isinstance(value, (list, tuple)) else [value]
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            for what, bad in _spoiled(argument.name, tensor.detach()):
                new = [*tensors[:number], bad, *tensors[number + 1 :]]
                changed = new if isinstance(value, (list, tuple)) else bad
                yield (
                    f"{argument.name}: {what}",
                    (func, (*args[:position], changed, *args[position + 1 :]), kwargs),
                )


def _spoiled(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.dtype == torch.int64:
        yield "far index", tensor.clone().fill_(1 << 40)
        yield "negative index", tensor.clone().fill_(-(1 << 40))
        return
    for axis in range(tensor.dim()):
        if tensor.shape[axis] > 1:
            yield f"axis {axis} shorter", tensor.narrow(axis, 0, tensor.shape[axis] - 1).clone()
        yield f"axis {axis} longer", torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
    yield "flat", tensor.flatten()[:1].clone()


# Changes that leave a call sound: the operator takes the sizes as it finds them.
SOUND = {
    "_adaptive_avg_pool2d_backward": ("axis 2", "axis 3"),
    "_adaptive_avg_pool3d_backward": ("axis 2", "axis 3", "axis 4"),
    "_index_put_impl_": ("self: axis", "values"),
    "_unsafe_index": ("self: axis",),
    "index": ("self: axis",),
    "fractional_max_pool2d_backward": ("self: axis 2 longer", "self: axis 3 longer"),
    "fractional_max_pool3d_backward": ("self: axis 2", "self: axis 3", "self: axis 4"),
    "_unsafe_index_put": ("self: axis", "values"),
    "_fft_c2c": ("self: axis", "self: flat"),
    "_fft_r2c": ("self: axis", "self: flat"),
    "avg_pool2d_backward": ("self: axis 2 longer", "self: axis 3 longer"),
    "avg_pool3d_backward": (
        *("self: axis 2 longer", "self: axis 3 longer", "self: axis 4 longer"),
    ),
    "_native_batch_norm_legit": ("input: axis 0", "input: axis 2"),
    "_weight_norm_interface": ("v: axis 1",),
    "grid_sampler_2d_backward": ("input: axis 2", "input: axis 3"),
    "grid_sampler_3d_backward": ("input: axis 2", "input: axis 3", "input: axis 4"),
    "nll_loss_backward": ("grad_output: flat", "total_weight: flat", "self: axis 1"),
    "nll_loss2d_backward": ("grad_output: flat", "total_weight: flat", "self: axis 1"),
    "embedding_dense_backward": ("grad_output: axis 2",),
    "max_pool2d_with_indices_backward": ("self: axis 2 longer", "self: axis 3 longer"),
    "max_pool3d_with_indices_backward": ("self: axis 2", "self: axis 3", "self: axis 4"),
    "adaptive_max_pool2d_backward": ("self: axis 2 longer", "self: axis 3 longer"),
    "adaptive_max_pool3d_backward": ("self: axis 2", "self: axis 3", "self: axis 4"),
}


@pytest.mark.parametrize("operator", sorted(TRUSTING))
def test_hostile_arguments_are_refused(operator: str) -> None:
    refused = 0
    for what, (func, args, kwargs) in hostile(operator):
        try:
            check_operator(func, (args, kwargs))
        except BadShard:
            refused += 1
            continue
        assert any(word in what for word in SOUND.get(operator, ())), f"{operator} {what} passed"
    # Of these only the axes are trusted.
    assert refused > 0 or operator in ("_fft_c2c", "_fft_r2c")


@pytest.mark.parametrize(
    ("operator", "name", "value"),
    [
        ("native_layer_norm_backward", "normalized_shape", [400]),
        ("native_layer_norm_backward", "normalized_shape", []),
        ("native_group_norm_backward", "group", 0),
        ("native_group_norm_backward", "N", 2_000),
        ("convolution_backward", "bias_sizes", [3_000]),
        ("convolution_backward", "stride", [2, 2]),
        ("embedding_dense_backward", "num_weights", 2),
        ("unfold_backward", "input_sizes", [3, 4]),
        ("unfold_backward", "step", 1),
        ("reflection_pad1d_backward", "padding", [400, 2]),
        ("_fft_c2r", "last_dim_size", 80),
        ("_weight_norm_interface_backward", "dim", 7),
        ("native_batch_norm_backward", "save_mean", None),
        ("convolution_backward", "stride", "abc"),
    ],
)
def test_hostile_sizes_are_refused(operator: str, name: str, value: Any) -> None:
    func, args, kwargs = case_of(operator)
    position = [argument.name for argument in func._schema.arguments].index(name)
    args = (*args[:position], value, *args[position + 1 :])
    with pytest.raises(BadShard, match="do not fit together"):
        check_operator(func, (args, kwargs))


ONE = torch.ones(1)
FIVE = torch.ones(1, 1, 5, 5)
COMPLEX = torch.ones(4, 4, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (
            "native_layer_norm_backward",
            (
                *(ONE.expand(9, 2), ONE.expand(9, 2), [2], ONE.expand(9, 1), ONE.expand(9, 1)),
                *(None, None, [True, False, False]),
            ),
        ),
        (
            "native_group_norm_backward",
            (
                *(ONE.expand(1, 4, 9), ONE.expand(1, 4, 9), torch.ones(1, 2), torch.ones(1, 2)),
                *(None, 1, 4, 9, 2, [True, False, False]),
            ),
        ),
        ("_weight_norm_interface", (ONE.expand(9, 2), ONE.expand(9, 1), 0)),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            (*[torch.ones(64, 1, 16, 1)] * 5, torch.ones(1, 1, 64 * 16), 0.0, False),
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            (*[ONE.expand(1, 1, 2, 99)] * 5, torch.ones(1, 1, 2), 0.0, False),
        ),
        (
            "avg_pool2d_backward",
            (
                *(torch.ones(64, 1, 8, 8), torch.ones(1, 1, 16, 16)),
                *([2, 2], [2, 2], [0, 0], False, True, None),
            ),
        ),
        (
            "avg_pool3d_backward",
            (
                *(torch.ones(1, 1, 2, 8, 8), torch.ones(64, 1, 4, 16, 16)),
                *([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
            ),
        ),
        ("reflection_pad2d_backward", (ONE.expand(1, 1, 5, 17), FIVE, [12, 0, 0, 0])),
        ("reflection_pad2d_backward", (FIVE, FIVE, [1 << 24, -(1 << 24), 0, 0])),
        ("replication_pad2d_backward", (FIVE, FIVE, [9, -9, 0, 0])),
        ("_fft_c2c", (COMPLEX, [5], 0, True)),
        ("_fft_c2c", (COMPLEX, [0, 1 << 30], 0, True)),
        ("_fft_c2c", (COMPLEX, [], 0, True)),
        ("_fft_r2c", (COMPLEX.real, [1 << 20], 0, True)),
        ("_fft_c2r", (COMPLEX, [5, 1], 0, 6)),
        (
            "grid_sampler_2d_backward",
            (
                torch.ones(1, 1, 4, 4),
                torch.ones(1, 1, 4, 4),
                torch.full((1, 4, 4, 2), 3e38),
                *(0, 2, False, [True, True]),
            ),
        ),
        ("_adaptive_avg_pool2d_backward", (torch.ones(1, 1, 4, 4), torch.ones(1, 1, 0, 0))),
    ],
)
def test_what_ended_a_process_is_refused(operator: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(BadShard, match="do not fit together"):
        check_operator(getattr(torch.ops.aten, operator).default, (args, {}))


def test_a_grid_of_huge_numbers_is_refused_in_forward_too() -> None:
    arguments = (torch.ones(1, 1, 4, 4), torch.full((1, 4, 4, 2), 3e38)), {}
    with pytest.raises(BadShard, match="do not fit together"):
        check_values("Functional.grid_sample", arguments)
    nan = (torch.ones(1, 1, 4, 4), torch.full((1, 4, 4, 2), torch.nan)), {}
    check_values("Functional.grid_sample", nan)


@pytest.mark.parametrize(
    ("api", "overload"),
    [
        ("Aten.from_file", "default"),
        ("Aten.set_", "source_Tensor"),
        ("Aten.resize_", "default"),
        ("Aten._foobar", "default"),
        ("Aten._test_check_tensor", "default"),
        ("Aten.record_stream", "default"),
        ("Aten.item", "default"),
        ("Aten.save", "default"),
        ("Aten.mm", "no_such"),
        ("Aten.mm", ""),
        ("Aten.mm", "overloads"),
        ("Aten.mm.default", ""),
        ("Aten.__class__", "default"),
        ("Aten._ctc_loss_backward", "default"),
        ("Aten.mkldnn_rnn_layer_backward", "default"),
        ("Torch.mm", "default"),
        ("Functional.linear", "default"),
    ],
)
def test_nothing_else_is_reached(api: str, overload: str) -> None:
    with pytest.raises(Refused):
        function_of(api, overload)


def test_public_functions_written_in_python_lend_no_name() -> None:
    assert overloads("mm", {"mm"})
    from spool.apinames import _public

    assert "norm" not in _public() or "norm" in CHECKING
    assert {"mm", "linalg_svd", "fft_rfft", "special_erf"} <= _public()
    assert not {"from_file", "set_", "resize_", "item", "record_stream"} & _public()


@pytest.mark.parametrize(
    ("one", "two"), [((5, 3, 4), (6, 4)), ((1, 3, 4), (5, 6, 4)), ((2, 1, 3, 4), (5, 6, 4))]
)
def test_distances_of_batches_that_broadcast(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    y = torch.cdist(x(*one), x(*two), p=1.0)
    with Engine("_cdist_backward") as engine:
        y.sum().backward()
    assert engine.case is not None
    func, args, kwargs = engine.case
    check_operator(func, (args, kwargs))
