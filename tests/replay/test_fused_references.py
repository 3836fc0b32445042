"""References of fused operators: against the stand-in, torch's own operators and autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import torch_npu

import spool
from spool.errors import BadShard
from spool.replay.fused import REFERENCES
from spool.replay.fused.arguments import check_signature
from spool.replay.fused.reference import Unsupported
from spool.replay.nest import map_arguments, tensors
from spool.replay.selfcases import DTYPES, Case, cases
from spool.replay.selftest import selftest

CASES = [case for dtype in DTYPES for case in cases(dtype)]
D = torch.float64
few = settings(max_examples=25, deadline=None, derandomize=True)


def of(name: str) -> Callable[..., Any]:
    return spool.reference(name)


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=D, requires_grad=grad)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def label(case: Case) -> str:
    return f"{case.operator}-{case.what}-{next(tensors(case.args)).dtype}"


def operator(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.npu, name)  # type: ignore[no-any-return]


def test_every_operator_has_a_reference_and_a_case() -> None:
    assert len(REFERENCES) == 25
    assert {case.operator for case in CASES} == set(REFERENCES)


def test_references_agree_with_other_kernels_in_every_dtype() -> None:
    rows = list(selftest("cpu", operator))
    assert len(rows) == len(CASES) > 150
    assert [row for row in rows if row.verdict != "pass"] == []


def test_a_wrong_operator_is_told_from_others() -> None:
    with torch_npu.fault("npu_mish", lambda y: y * 1.01):
        rows = list(selftest("cpu", operator))
    assert {row.operator for row in rows if row.is_bad} == {"npu_mish"}
    assert [row.verdict for row in rows if row.operator == "npu_mish"] == ["error"] * 3


@pytest.mark.parametrize("schema", torch_npu.SCHEMAS, ids=lambda s: s.partition("(")[0])
def test_signatures_and_defaults_are_those_of_the_operators(schema: str) -> None:
    name = schema.partition("(")[0]
    base, _, overload = name.partition(".")
    declared = getattr(getattr(torch.ops.npu, base), overload or "default")._schema
    own = inspect.signature(of(base)).parameters
    positional = [a.name for a in declared.arguments if not a.kwarg_only]
    assert [p.name for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for argument in declared.arguments:
        assert argument.name in own
        if argument.has_default_value():
            default = own[argument.name].default
            assert default == argument.default_value or (default, argument.default_value) == (
                None,
                None,
            )


@pytest.mark.parametrize("case", CASES, ids=label)
def test_shapes_and_dtypes_are_known_without_computing(case: Case) -> None:
    def meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = map_arguments(case.args, case.kwargs, lambda x: _copied(x))
    real = list(tensors(of(case.operator)(*args, **kwargs)))
    args, kwargs = map_arguments(case.args, case.kwargs, meta)
    known = list(tensors(of(case.operator)(*args, **kwargs)))
    assert [(t.shape, t.dtype) for t in known] == [(t.shape, t.dtype) for t in real]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize("case", CASES[: len(CASES) // 3], ids=label)
def test_only_what_an_operator_writes_is_written(case: Case) -> None:
    args, kwargs = map_arguments(case.args, case.kwargs, _copied)
    of(case.operator)(*args, **kwargs)
    before, after = (list(tensors(x)) for x in ((case.args, case.kwargs), (args, kwargs)))
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert changed == {"npu_apply_adam": 3, "npu_apply_adam_w": 3}.get(case.operator, 0) + (
        case.what == "amsgrad"
    )


def test_norms_are_torchs() -> None:
    x, gamma, beta = randn(3, 5, 8), randn(8), randn(8)
    same(of("npu_rms_norm")(x, gamma, 1e-3)[0], F.rms_norm(x, (8,), gamma, 1e-3))
    same(of("npu_rms_norm")(x, gamma)[0], F.rms_norm(x, (8,), gamma, 1e-6))
    same(
        of("npu_layer_norm_eval")(x, [8], gamma, beta, 1e-2),
        F.layer_norm(x, [8], gamma, beta, 1e-2),
    )
    same(of("npu_layer_norm_eval")(x, [5, 8]), F.layer_norm(x, [5, 8]))
    for shape in ((4, 6), (4, 6, 3), (2, 6, 3, 2, 2, 1, 2, 2)):
        x, gamma, beta = randn(*shape), randn(6), randn(6)
        y, mean, rstd = of("npu_group_norm_silu")(x, gamma, beta, 3, 1e-4)
        same(y, F.silu(F.group_norm(x, 3, gamma, beta, 1e-4)))
        groups = x.reshape(shape[0], 3, -1)
        same(mean, groups.mean(-1))
        same(rstd, (groups.var(-1, correction=0) + 1e-4) ** -0.5)


def test_activations_are_torchs() -> None:
    x = torch.linspace(-60, 60, 999, dtype=D)
    same(of("npu_mish")(x), x * torch.tanh(torch.logaddexp(x, torch.zeros((), dtype=D))))
    published = x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))
    same(of("npu_fast_gelu")(x), published)
    same(of("fast_gelu")(x), published)
    pair = randn(4, 10)
    same(of("npu_swiglu")(pair), F.silu(pair[:, :5]) * pair[:, 5:])
    same(of("npu_linear")(pair, randn(3, 10) * 0 + 1, randn(3) * 0), pair.sum(1, True).expand(4, 3))


def test_rotation_is_that_of_complex_numbers() -> None:
    x, angle = randn(2, 3, 4, 8), randn(3, 1, 4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(angle * 0 + 1, angle)
    cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    same(of("npu_rotary_mul")(x, cos, sin, "interleave"), torch.view_as_real(turned).flatten(-2))
    halves = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(angle * 0 + 1, angle)
    cos, sin = (f(angle).repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    same(of("npu_rotary_mul")(x, cos, sin), torch.cat((halves.real, halves.imag), -1))
    matrix = torch.zeros(8, 8, dtype=D)
    matrix[4:, :4], matrix[:4, 4:] = -torch.eye(4, dtype=D), torch.eye(4, dtype=D)
    same(of("npu_rotary_mul")(x, cos, sin, rotate=matrix), of("npu_rotary_mul")(x, cos, sin))


def test_choices_are_torchs() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]], dtype=D)
    y, expert, row = of("npu_moe_gating_top_k_softmax")(x, torch.tensor([False, True]), 2)
    same(y, x.softmax(-1).sort(-1, descending=True)[0][:, :2])
    assert expert.tolist() == [[1, 2], [4, 4]]
    assert row.tolist() == [[0, 2], [1, 3]]
    assert expert.dtype is row.dtype is torch.int32
    y, expert, row = of("npu_moe_gating_top_k_softmax")(x.expand(3, 2, 4), k=3)
    assert row.flatten(0, 1).tolist() == [[r, r + 6, r + 12] for r in range(6)]
    out = torch.empty_like(x)
    assert of("npu_sort_v2")(x, 0, True, out=out) is out
    assert torch.equal(out, x.sort(0, True)[0])
    scores, mask = randn(2, 3, 5, 5), torch.rand(2, 1, 5, 5) > 0.5
    hidden = torch.where(mask, -1e4, scores * 2)
    same(of("npu_scaled_masked_softmax")(scores, mask, 2), hidden.softmax(-1))
    causal = torch.ones(5, 5).triu(1).bool()
    same(
        of("npu_scaled_masked_softmax")(scores, mask, fixed_triu_mask=True),
        torch.where(causal, -1e4, scores).softmax(-1),
    )


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_w_is_torchs(amsgrad: bool, maximize: bool) -> None:
    param = randn(5, 3, grad=True)
    other = param.detach().clone()
    m, v, most = (torch.zeros_like(other) for _ in range(3))
    optimizer = torch.optim.AdamW(
        [param], lr=0.1, weight_decay=0.3, amsgrad=amsgrad, maximize=maximize
    )
    for step in range(4):
        param.grad = randn(5, 3)
        optimizer.step()
        found = of("npu_apply_adam_w")(
            *(0.9**step, 0.999**step, 0.1, 0.3, 0.9, 0.999, 1e-8, param.grad),
            *(most if amsgrad else None, amsgrad, maximize),
            out=(other, m, v),
        )
        assert found[0] is other
    same(other, param.detach())


def test_adam_is_torchs() -> None:
    # torch adds epsilon after the correction, this operator before: without it they agree.
    param = randn(5, 3, grad=True)
    other, m, v = param.detach().clone(), torch.zeros(5, 3, dtype=D), torch.zeros(5, 3, dtype=D)
    optimizer = torch.optim.Adam([param], lr=0.1, eps=0.0)
    for step in range(1, 5):
        param.grad = randn(5, 3)
        optimizer.step()
        powers = torch.tensor(0.9**step, dtype=D), torch.tensor([0.999**step], dtype=D)
        of("npu_apply_adam")(*powers, 0.1, 0.9, 0.999, 0.0, param.grad, var=other, m=m, v=v)
    same(other, param.detach())


def test_a_half_parameter_is_rounded_once() -> None:
    var, m, v = (torch.ones(100, dtype=torch.bfloat16) for _ in range(3))
    of("npu_apply_adam_w")(0.9, 0.99, 1e-3, 0, 0.9, 0.99, 1e-8, torch.ones(100), out=(var, m, v))
    assert var.dtype is torch.bfloat16
    assert m.unique().tolist() == [1.0]


BACKWARD: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], list[Any]]]] = {
    "fast_gelu": (
        lambda x: of("npu_fast_gelu")(x),
        lambda g, x: (of("npu_fast_gelu_backward")(g, x),),
        lambda: [randn(6) * 3],
    ),
    "mish": (
        lambda x: of("npu_mish")(x),
        lambda g, x: (of("npu_mish_backward")(g, x),),
        lambda: [randn(6) * 3],
    ),
    "swiglu": (
        lambda x: of("npu_swiglu")(x, 1),
        lambda g, x: (of("npu_swiglu_backward")(g, x, 1),),
        lambda: [randn(2, 6, 3)],
    ),
    "rms_norm": (
        lambda x, w: of("npu_rms_norm")(x, w)[0],
        lambda g, x, w: of("npu_rms_norm_backward")(g, x, w, of("npu_rms_norm")(x, w)[1]),
        lambda: [randn(3, 2, 5), randn(2, 5)],
    ),
    "linear": (
        lambda x, w: of("npu_linear")(x, w),
        lambda g, x, w: of("npu_linear_backward")(g, x, w),
        lambda: [randn(2, 3, 4), randn(5, 4)],
    ),
    "rotary half": (
        lambda x, a, b: of("npu_rotary_mul")(x, a, b),
        lambda g, x, a, b: of("npu_rotary_mul_backward")(g, x, a, b),
        lambda: [randn(2, 3, 2, 4), randn(1, 3, 1, 4), randn(3, 1, 4)],
    ),
    "rotary interleave": (
        lambda x, a, b: of("npu_rotary_mul")(x, a, b, "interleave"),
        lambda g, x, a, b: of("npu_rotary_mul_backward")(g, x, a, b, "interleave"),
        lambda: [randn(2, 3, 2, 4), randn(1, 3, 1, 4), randn(3, 1, 4)],
    ),
    "masked softmax": (
        lambda x: of("npu_scaled_masked_softmax")(x, torch.eye(4).bool(), 0.7),
        lambda g, x: (
            of("npu_scaled_masked_softmax_backward")(
                g,
                of("npu_scaled_masked_softmax")(x, torch.eye(4).bool(), 0.7),
                *(torch.eye(4).bool(), 0.7, False),
            ),
        ),
        lambda: [randn(1, 2, 4, 4)],
    ),
    "transpose first": (
        lambda x: of("npu_confusion_transpose")(x, [2, 0, 1], [8, 3], True),
        lambda g, x: (of("npu_confusion_transpose_backward")(g, [2, 0, 1], [2, 3, 4], True),),
        lambda: [randn(2, 3, 4)],
    ),
    "transpose last": (
        lambda x: of("npu_confusion_transpose")(x, [1, -1, 0], [2, 3, 4], False),
        lambda g, x: (of("npu_confusion_transpose_backward")(g, [1, -1, 0], [6, 4], False),),
        lambda: [randn(6, 4)],
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_forms_are_the_gradients(name: str) -> None:
    forward, backward, inputs = BACKWARD[name]

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*given)
            return forward(*given)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    given = [item.requires_grad_() for item in inputs()]
    assert torch.autograd.gradcheck(Pair.apply, given)
    # Autograd of the forward reference says the same.
    grad = torch.randn_like(forward(*given))
    plain = torch.autograd.grad(forward(*given), given, grad)
    for one, other in zip(backward(grad, *given), plain, strict=True):
        same(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_values_give_no_surprise(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor(
        [info.max, -info.max, torch.inf, -torch.inf, info.tiny, -0.0, 0.0], dtype=dtype
    )
    for name in ("npu_fast_gelu", "npu_mish"):
        y = of(name)(x)
        assert y[0] == info.max
        assert y[2] == torch.inf
        assert y[1] == 0
        assert y[5] == y[6] == 0
        assert of(name)(torch.full((2,), torch.nan, dtype=dtype)).isnan().all()
    # Sums of squares that fp16 cannot hold.
    y, rstd = of("npu_rms_norm")(
        torch.full((2, 4096), 60000.0).to(dtype), torch.ones(4096).to(dtype)
    )
    assert torch.allclose(y.float(), torch.ones(2, 4096), rtol=1e-2)
    assert rstd.dtype is torch.float32
    assert rstd.shape == (2, 1)
    hidden = of("npu_scaled_masked_softmax")(x[None, None, None], torch.ones(1, 1, 1, 7).bool())
    assert torch.allclose(hidden.float(), torch.full((1, 1, 1, 7), 1 / 7), rtol=1e-2)
    for name, args in (("npu_mish", ()), ("npu_swiglu", ()), ("npu_sort_v2", ())):
        assert of(name)(torch.empty(0, 4, dtype=dtype), *args).shape[0] == 0


@few
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, D]),
    name=st.sampled_from(["npu_fast_gelu", "npu_mish", "npu_swiglu", "npu_sort_v2"]),
    turned=st.booleans(),
)
def test_any_shape_stride_and_dtype(
    shape: list[int], dtype: torch.dtype, name: str, turned: bool
) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(*shape, 4).to(dtype)
    x = x.transpose(0, -2) if turned and len(shape) > 1 else x
    one, other = of(name)(x), operator(name)(x)
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    torch.testing.assert_close(one, other, rtol=info_of(dtype), atol=info_of(dtype))


def info_of(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("name", "args", "error", "words"),
    [
        (
            "npu_rotary_mul",
            (randn(2, 4), randn(4), randn(4), "quarter"),
            Unsupported,
            "rotary_mode",
        ),
        ("npu_rotary_mul", (randn(2, 3), randn(3), randn(3)), ValueError, "no two halves"),
        ("npu_swiglu", (randn(2, 3),), ValueError, "no two halves"),
        ("npu_rms_norm", (randn(2, 3), randn(2)), ValueError, "does not end in"),
        ("npu_layer_norm_eval", (randn(2, 3), [2]), ValueError, "does not end in"),
        ("npu_group_norm_silu", (randn(2, 3), None, None, 2), ValueError, "not 2 equal groups"),
        ("npu_group_norm_silu", (randn(3), None, None, 1), ValueError, "takes 2 to 8"),
        ("npu_moe_gating_top_k_softmax", (randn(2, 3), None, 4), ValueError, "k=4 of 3 experts"),
        ("npu_moe_gating_top_k_softmax", (randn(3),), ValueError, "takes 2 or 3"),
        ("npu_apply_adam_w", (1, 1, 1, 1, 1, 1, 1, randn(2)), ValueError, "out must be"),
    ],
)
def test_what_does_not_fit_is_one_line(
    name: str, args: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        of(name)(*args)
    assert "\n" not in str(caught.value)


HOSTILE: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a tensor for a list": (
        "npu_confusion_transpose_backward",
        (torch.ones(6), torch.ones(1).expand(10**9), [6], True),
        {},
    ),
    "texts in a list": ("npu_confusion_transpose", (torch.ones(6), ["a"], [6], True), {}),
    "a long list": ("npu_layer_norm_eval", (torch.ones(6), [1] * 10**6), {}),
    "a text for a number": ("npu_moe_gating_top_k_softmax", (torch.ones(2, 3),), {"k": "1"}),
    "a number for a tensor": ("npu_mish", (3,), {}),
    "no tensors": ("npu_apply_adam", (*[0.9] * 6, torch.ones(2), False, False), {"out": (1, 2, 3)}),
    "too many": ("npu_mish", (torch.ones(2), 3), {}),
    "too few": ("npu_linear", (torch.ones(2),), {}),
    "another name": ("npu_mish", (), {"input": torch.ones(2)}),
    "lengths": (
        "npu_fusion_attention",
        (*[torch.ones(4, 2, 3)] * 3, 2, "TND"),
        {"actual_seq_qlen": torch.ones(1).expand(10**9), "actual_seq_kvlen": [4]},
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_arguments_that_no_operator_takes_are_refused(case: str) -> None:
    name, args, kwargs = HOSTILE[case]
    with pytest.raises(BadShard, match=name) as caught:
        check_signature(name, of(name), args, kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_what_operators_take_is_not_refused(case: Case) -> None:
    check_signature(case.operator, of(case.operator), case.args, case.kwargs)


def test_an_unknown_operator_has_no_reference() -> None:
    with pytest.raises(LookupError, match="no reference for npu_nothing"):
        spool.reference("npu_nothing")
