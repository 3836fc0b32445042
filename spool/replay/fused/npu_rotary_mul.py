"""``npu_rotary_mul``: rotary position embedding."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import Unsupported, widen

MODES = ("half", "interleave")


def npu_rotary_mul(
    self: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x · r1 + turned(x) · r2`` (Su et al., 2021), computed in fp32 or better, rounded once.

    ``turned`` is, for ``half``, ``[-x₂, x₁]`` of the halves of the last axis; for
    ``interleave``, ``[-x₁, x₀, -x₃, x₂, ...]``; with `rotate`, ``x @ rotate``.

    Parameters
    ----------
    self : Tensor, shape (..., D)
        D is even.
    r1, r2 : Tensor
        Cosines and sines; broadcast to `self`.
    rotary_mode : str
        ``half`` or ``interleave``.
    rotate : Tensor of shape (D, D), optional

    Returns
    -------
    Tensor
        Of the shape and dtype of `self`.

    Raises
    ------
    Unsupported
        For another mode.
    ValueError
        If D is odd.
    """
    x = widen(self)
    turned = _turned(x, rotary_mode) if rotate is None else torch.matmul(x, widen(rotate))
    return (x * widen(r1) + turned * widen(r2)).to(self.dtype)


def npu_rotary_mul_backward(
    grad: torch.Tensor,
    self: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `npu_rotary_mul` without `rotate`.

    ``dx = grad · r1 - turned(grad · r2)``, because turning twice changes the sign;
    ``dr1 = Σ grad · x``, ``dr2 = Σ grad · turned(x)`` over the axes along which they were
    broadcast.

    Parameters
    ----------
    grad, self : Tensor, shape (..., D)
    r1, r2 : Tensor
    rotary_mode : str

    Returns
    -------
    dx, dr1, dr2 : Tensor
        Of the shapes and dtypes of `self`, `r1` and `r2`.

    Raises
    ------
    Unsupported, ValueError
        As `npu_rotary_mul`.
    """
    g, x = widen(grad), widen(self)
    dx = g * widen(r1) - _turned(g * widen(r2), rotary_mode)
    dr1 = (g * x).sum_to_size(r1.shape)
    dr2 = (g * _turned(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(self.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)


def _turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode not in MODES:
        raise Unsupported(f"rotary_mode={mode!r:.40}")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"npu_rotary_mul: the last axis of {list(x.shape)} has no two halves")
    if mode == "half":
        first, second = x.tensor_split(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
