"""Small calls of every fused operator that has a reference, with fixed random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spool.replay.registry import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BATCH, _HEADS, _ROWS, _WIDTH = 2, 4, 48, 16


@dataclass(frozen=True)
class Case:
    """One call.

    Parameters
    ----------
    operator : str
    what : str
        Says which form of it.
    args : tuple
    kwargs : dict
    """

    operator: str
    what: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Calls of every operator.

    Parameters
    ----------
    dtype : torch.dtype
        Of all floating tensors: fp32, fp16 or bf16.
    """
    draw = _Draw(dtype)
    yield from _elementwise(draw)
    yield from _norms(draw)
    yield from _choices(draw)
    yield from _optimizers(draw)
    yield from _attention(draw)


class _Draw:
    """Draws tensors of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._dtype = dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def mask(self, *shape: int) -> torch.Tensor:
        """True for about a third."""
        return torch.rand(shape, generator=self._generator) > 0.67


def _elementwise(draw: _Draw) -> Iterator[Case]:
    x, grad = draw(32, 96) * 3, draw(32, 96)
    for name in ("fast_gelu", "npu_fast_gelu", "npu_mish"):
        yield Case(name, "", (x,))
    for name in ("npu_fast_gelu_backward", "npu_mish_backward"):
        yield Case(name, "", (grad, x))
    for dim in (0, -1):
        yield Case("npu_swiglu", f"dim={dim}", (x,), {"dim": dim})
        part = grad.tensor_split(2, dim)[0]
        yield Case("npu_swiglu_backward", f"dim={dim}", (part, x), {"dim": dim})
    x, grad, angles = draw(2, 24, 4, 32), draw(2, 24, 4, 32), draw(1, 24, 1, 32)
    for mode in ("half", "interleave"):
        turn = (angles.cos(), angles.sin(), mode)
        yield Case("npu_rotary_mul", mode, (x, *turn))
        yield Case("npu_rotary_mul_backward", mode, (grad, x, *turn))
    perm, shape = [0, 2, 1, 3], [2, 4, 24 * 32]
    yield Case("npu_confusion_transpose", "first", (x, perm, shape, True))
    back = draw(*shape)
    yield Case("npu_confusion_transpose_backward", "first", (back, perm, list(x.shape), True))
    flat, parts = draw(2, 24, 128), [2, 24, 4, 32]
    yield Case("npu_confusion_transpose", "last", (flat, perm, parts, False))
    back = draw(2, 4, 24, 32)
    yield Case("npu_confusion_transpose_backward", "last", (back, perm, [2, 24, 128], False))


def _norms(draw: _Draw) -> Iterator[Case]:
    x, grad, gamma, beta = draw(4, 24, 64), draw(4, 24, 64), draw(64), draw(64)
    yield Case("npu_rms_norm", "", (x, gamma))
    rstd = reference("npu_rms_norm")(x, gamma)[1]
    yield Case("npu_rms_norm_backward", "", (grad, x, gamma, rstd))
    yield Case("npu_layer_norm_eval", "plain", (x, [64]))
    yield Case("npu_layer_norm_eval", "weight, bias, eps", (x, [64], gamma, beta, 1e-3))
    yield Case("npu_group_norm_silu", "", (draw(3, 8, 10, 10), draw(8), draw(8), 4))
    weight = draw(48, 64)
    yield Case("npu_linear", "plain", (x, weight))
    yield Case("npu_linear", "bias", (x, weight, draw(48)))
    yield Case("npu_linear_backward", "", (draw(96, 48), x.flatten(0, 1), weight))


def _choices(draw: _Draw) -> Iterator[Case]:
    scores, mask = draw(2, 4, 32, 32), draw.mask(2, 1, 32, 32)
    for triangle in (False, True):
        what = "triangle" if triangle else "mask"
        yield Case("npu_scaled_masked_softmax", what, (scores, mask, 0.5, triangle))
        y = reference("npu_scaled_masked_softmax")(scores, mask, 0.5, triangle)
        back = (draw(2, 4, 32, 32), y, mask, 0.5, triangle)
        yield Case("npu_scaled_masked_softmax_backward", what, back)
    x = draw(64, 16) * 2
    yield Case("npu_moe_gating_top_k_softmax", "k=1", (x,))
    finished = draw.mask(64)
    yield Case("npu_moe_gating_top_k_softmax", "k=2, finished", (x, finished), {"k": 2})
    yield Case("npu_sort_v2", "ascending", (x,))
    yield Case("npu_sort_v2", "descending, dim=0", (x, 0, True))


def _optimizers(draw: _Draw) -> Iterator[Case]:
    def state() -> dict[str, torch.Tensor]:
        m, v = draw(40, 30) * 0.1, draw(40, 30).square() * 0.01
        return {"var": draw(40, 30), "m": m, "v": v}

    for nesterov in (False, True):
        numbers = (0.9**3, 0.999**3, 1e-2, 0.9, 0.999, 1e-8, draw(40, 30), False, nesterov)
        yield Case("npu_apply_adam", f"nesterov={nesterov}", numbers, state())
    for what, amsgrad, maximize in (
        ("", False, False),
        ("amsgrad", True, False),
        ("up", False, True),
    ):
        most = draw(40, 30).square() * 0.01 if amsgrad else None
        rates = (0.9**2, 0.999**2, 1e-2, 0.01, 0.9, 0.999, 1e-8)
        rest = (draw(40, 30), most, amsgrad, maximize)
        yield Case("npu_apply_adam_w", what, (*rates, *rest), state())


def _attention(draw: _Draw) -> Iterator[Case]:
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    q = draw(_BATCH, _HEADS, _ROWS, _WIDTH)
    k, v = draw(_BATCH, _HEADS, _ROWS, _WIDTH), draw(_BATCH, _HEADS, _ROWS, _WIDTH)
    few, fewer = draw(_BATCH, 2, 64, _WIDTH), draw(_BATCH, 2, 64, _WIDTH)
    by_row = [item.transpose(1, 2) for item in (q, k, v)]
    flat = [item.transpose(1, 2).flatten(2) for item in (q, few, fewer)]
    turned = [item.transpose(0, 1) for item in flat]
    many = [draw(80, _HEADS, _WIDTH), draw(90, _HEADS, _WIDTH), draw(90, _HEADS, _WIDTH)]
    lengths = {"actual_seq_qlen": [20, 20, 80], "actual_seq_kvlen": [30, 30, 90]}
    shift = draw(1, _HEADS, _ROWS, _ROWS)
    causal = {"atten_mask": triangle}
    forms: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("open", (q, k, v), "BNSD", {}),
        ("mask", (q, k, v), "BNSD", {"atten_mask": draw.mask(_BATCH, 1, _ROWS, _ROWS)}),
        ("pse", (q, k, v), "BNSD", {"pse": shift}),
        ("causal", by_row, "BSND", {**causal, "sparse_mode": 2}),
        ("grouped, causal to the right", flat, "BSH", {**causal, "sparse_mode": 3}),
        (
            *("band", turned, "SBH"),
            {**causal, "sparse_mode": 4, "pre_tockens": 8, "next_tockens": 2},
        ),
        ("prefix", (q, k, v), "BNSD", {**causal, "sparse_mode": 6, "prefix": [5, 20]}),
        ("sequences", many, "TND", {**causal, **lengths, "sparse_mode": 3}),
    ]
    for what, inputs, layout, more in forms:
        scale = _WIDTH**-0.5
        call = (*inputs, _HEADS, layout)
        yield Case("npu_fusion_attention", what, call, {**more, "scale": scale})
        out, peak, total = reference("npu_fusion_attention")(*call, **more, scale=scale)[:3]
        known = {"softmax_max": peak, "softmax_sum": total, "attention_in": out}
        grad = draw(*out.shape)
        yield Case(
            "npu_fusion_attention_grad",
            what,
            (*inputs, grad, _HEADS, layout),
            {**more, **known, "scale_value": scale},
        )
