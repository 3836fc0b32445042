"""Which backward operator each operator of the stand-in has, as torch_npu declares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Formula = tuple[Callable[..., Any], Callable[..., None]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.inputs, ctx.output = inputs, output


def _of_npu(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.npu, name)  # type: ignore[no-any-return]


def _fast_gelu(ctx: Any, grad: torch.Tensor) -> Any:
    return _of_npu("npu_fast_gelu_backward")(grad, *ctx.inputs)


def _confusion_transpose(ctx: Any, grad: torch.Tensor) -> Any:
    source, perm, _, first = ctx.inputs
    back = _of_npu("npu_confusion_transpose_backward")
    return back(grad, perm, list(source.shape), first), None, None, None


def _linear(ctx: Any, grad: torch.Tensor) -> Any:
    source, weight, bias = ctx.inputs
    dx, dw = _of_npu("npu_linear_backward")(grad, source, weight)
    db = None if bias is None else grad.reshape(-1, grad.shape[-1]).sum(0)
    return dx, dw, db


def _attention(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
    query, key, value, heads, layout, pse, padding, mask, scale, keep, pre, post = ctx.inputs[:12]
    precise, prefix, q_lengths, kv_lengths, sparse, parallel, sync, soft, sink = ctx.inputs[12:21]
    attention, maximum, total, inner, seed, offset, count = ctx.output
    found = _of_npu("npu_fusion_attention_grad")(
        query,
        key,
        value,
        grad,
        heads,
        layout,
        pse=pse,
        padding_mask=padding,
        atten_mask=mask,
        softmax_max=maximum,
        softmax_sum=total,
        softmax_in=inner,
        attention_in=attention,
        scale_value=scale,
        keep_prob=keep,
        pre_tockens=pre,
        next_tockens=post,
        inner_precise=precise,
        seed=seed,
        offset=offset,
        numels=count,
        prefix=prefix,
        actual_seq_qlen=q_lengths,
        actual_seq_kvlen=kv_lengths,
        sparse_mode=sparse,
        gen_mask_parallel=parallel,
        sync=sync,
        softmax_layout=soft,
        sink=sink,
    )
    grads: list[Any] = [None] * len(ctx.inputs)
    grads[:3] = found[:3]
    grads[5] = None if pse is None else found[3]
    grads[-1] = None if sink is None else found[4]
    return tuple(grads)


def _rms_norm(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
    x, gamma, _epsilon = ctx.inputs
    dx, dgamma = _of_npu("npu_rms_norm_backward")(dy, x, gamma, ctx.output[1])
    return dx, dgamma.to(gamma.dtype), None


def _rotary_mul(ctx: Any, grad: torch.Tensor) -> Any:
    x, r1, r2, mode, _ = ctx.inputs
    return (*_of_npu("npu_rotary_mul_backward")(grad, x, r1, r2, mode), None, None)


def _scaled_masked_softmax(ctx: Any, grad: torch.Tensor) -> Any:
    _, mask, scale, triangle = ctx.inputs
    back = _of_npu("npu_scaled_masked_softmax_backward")
    return back(grad, ctx.output, mask, scale, triangle), None, None, None


def _swiglu(ctx: Any, grad: torch.Tensor) -> Any:
    return _of_npu("npu_swiglu_backward")(grad, *ctx.inputs), None


def _mish(ctx: Any, grad: torch.Tensor) -> Any:
    return _of_npu("npu_mish_backward")(grad, *ctx.inputs)


FORMULAS: dict[str, Formula] = {
    "fast_gelu": (_fast_gelu, _keep),
    "npu_fast_gelu": (_fast_gelu, _keep),
    "npu_confusion_transpose": (_confusion_transpose, _keep),
    "npu_linear": (_linear, _keep),
    "npu_fusion_attention": (_attention, _keep),
    "npu_rms_norm": (_rms_norm, _keep),
    "npu_rotary_mul": (_rotary_mul, _keep),
    "npu_scaled_masked_softmax": (_scaled_masked_softmax, _keep),
    "npu_swiglu": (_swiglu, _keep),
    "npu_mish": (_mish, _keep),
}
