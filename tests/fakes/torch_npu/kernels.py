"""Kernels of the stand-in: torch's own composite functions, with a result in the input's dtype.

Each widens to fp32 (fp64 stays), computes, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a differentiable function, in the dtypes of its inputs."""
    with torch.enable_grad():
        wide = [_wide(tensor).detach().requires_grad_() for tensor in inputs]
        found = torch.autograd.grad(function(*wide), wide, _wide(grad))
    return [g.to(tensor.dtype) for g, tensor in zip(found, inputs, strict=True)]


def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(self: Tensor) -> Tensor:
    return _gelu(_wide(self)).to(self.dtype)


npu_fast_gelu = fast_gelu


def npu_fast_gelu_backward(grad: Tensor, self: Tensor) -> Tensor:
    return _gradients(_gelu, grad, self)[0]


def npu_apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
    *,
    var: Tensor,
    m: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    x, mean, square, g = (_wide(item) for item in (var, m, v, grad))
    step = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    mean = mean + (g - mean) * (1 - beta1)
    square = square + (g * g - square) * (1 - beta2)
    direction = mean * beta1 + g * (1 - beta1) if use_nesterov else mean
    var.copy_(x - step * direction / (square.sqrt() + epsilon))
    m.copy_(mean)
    v.copy_(square)
    return var, m, v


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    var: Tensor,
    m: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    x, mean, square = (_wide(item).clone() for item in (var, m, v))
    grad = _wide(grad.neg() if maximize else grad)
    x.mul_(1 - lr * weight_decay)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = square
    if amsgrad:
        assert max_grad_norm is not None
        second = torch.maximum(_wide(max_grad_norm), square)
        max_grad_norm.copy_(second)
    denominator = (second / (1 - beta2_power * beta2)).sqrt().add_(epsilon)
    x.addcdiv_(mean, denominator, value=-lr / (1 - beta1_power * beta1))
    for target, result in ((var, x), (m, mean), (v, square)):
        target.copy_(result)
    return var, m, v


def npu_confusion_transpose(
    self: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> Tensor:
    if transpose_first:
        return self.permute(list(perm)).reshape(list(shape)).clone()
    return self.reshape(list(shape)).permute(list(perm)).contiguous()


def npu_confusion_transpose_backward(
    grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> Tensor:
    with torch.enable_grad():
        source = grad.new_zeros(list(shape)).requires_grad_()
        inner = list(shape) if transpose_first else [0] * len(perm)
        if not transpose_first:
            for place, axis in enumerate(perm):
                inner[axis] = grad.shape[place]
        target = list(grad.shape) if transpose_first else inner
        moved = npu_confusion_transpose(source, perm, target, transpose_first)
        return torch.autograd.grad(moved, source, grad)[0]


def npu_layer_norm_eval(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    affine = (None if item is None else _wide(item) for item in (weight, bias))
    return F.layer_norm(_wide(input), list(normalized_shape), *affine, eps).to(input.dtype)


def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = None if bias is None else _wide(bias)
    return F.linear(_wide(input), _wide(weight), wide).to(input.dtype)


def npu_linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    g, x, w = _wide(grad), _wide(input), _wide(weight)
    columns = torch.einsum("rn,rk->nk", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]))
    return (g @ w).to(input.dtype), columns.to(weight.dtype)


def _rms(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, gamma.shape, gamma, epsilon)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    axes = tuple(range(self.dim() - gamma.dim(), self.dim()))
    wide = _wide(self)
    rstd = torch.linalg.vector_norm(wide, dim=axes, keepdim=True)
    rstd = (rstd * rstd / gamma.numel() + epsilon).rsqrt()
    return _rms(wide, _wide(gamma), epsilon).to(self.dtype), rstd


def npu_rms_norm_backward(
    dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    x, weighted = _wide(self) * rstd, _wide(dy) * _wide(gamma)
    axes = tuple(range(self.dim() - gamma.dim(), self.dim()))
    dx = (weighted - x * (weighted * x).mean(axes, keepdim=True)) * rstd
    dgamma = (_wide(dy) * x).reshape(-1, *gamma.shape).sum(0)
    return dx.to(self.dtype), dgamma.to(_wide(gamma).dtype)


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)


def npu_rotary_mul(
    self: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    x = _wide(self)
    turned = _rotated(x, rotary_mode) if rotate is None else x @ _wide(rotate)
    return (x * _wide(r1) + turned * _wide(r2)).to(self.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, ...]:
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + _rotated(x, rotary_mode) * sin

    return tuple(_gradients(forward, grad, self, r1, r2))


def _masked_softmax(x: Tensor, mask: Tensor, scale: float, triangle: bool) -> Tensor:
    if triangle:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu_(1)
    return (x * scale).masked_fill(mask.bool(), -10000.0).softmax(-1)


def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> Tensor:
    return _masked_softmax(_wide(x), mask, scale, fixed_triu_mask).to(x.dtype)


def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    grad = torch._softmax_backward_data(_wide(y_grad), _wide(y), -1, _wide(y).dtype) * scale
    if fixed_triu_mask:
        mask = torch.ones(y.shape[-2:], dtype=torch.bool).triu_(1)
    return grad.masked_fill(mask.bool(), 0.0).to(y.dtype)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    first, second = _wide(self).chunk(2, dim)
    return (F.silu(first) * second).to(self.dtype)


def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim)
        return F.silu(first) * second

    return _gradients(forward, grad_output, self)[0]


def npu_group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 0.00001
) -> tuple[Tensor, Tensor, Tensor]:
    x = _wide(input)
    affine = [None if item is None else _wide(item) for item in (weight, bias)]
    variance, mean = torch.var_mean(x.reshape(x.shape[0], group, -1), -1, correction=0)
    y = F.silu(F.group_norm(x, group, *affine, eps))
    return y.to(input.dtype), mean.to(input.dtype), (variance + eps).rsqrt().to(input.dtype)


def npu_mish(self: Tensor) -> Tensor:
    return F.mish(_wide(self)).to(self.dtype)


def npu_mish_backward(grad: Tensor, input: Tensor) -> Tensor:
    return _gradients(F.mish, grad, input)[0]


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    chances = _wide(x).softmax(-1)
    order = chances.argsort(dim=-1, descending=True, stable=True)[..., :k]
    y, expert = chances.gather(-1, order).to(x.dtype), order.int()
    if finished is not None:
        expert[finished] = x.shape[-1]
    rows = y.numel() // k
    places = [[column * rows + row for column in range(k)] for row in range(rows)]
    return y, expert, torch.tensor(places, dtype=torch.int32).reshape(y.shape)


def npu_sort_v2(
    self: Tensor, dim: int = -1, descending: bool = False, *, out: Tensor | None = None
) -> Tensor:
    values = self.sort(dim, descending)[0]
    return values if out is None else out.copy_(values)


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    from . import attention

    return attention.forward(*args, **kwargs)


def npu_fusion_attention_grad(*args: Any, **kwargs: Any) -> Any:
    from . import attention

    return attention.backward(*args, **kwargs)
