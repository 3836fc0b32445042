"""``npu_swiglu``: one half of a tensor, gated by the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spool.replay.fused.reference import widen


def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(a) · b`` of the halves of a tensor (Shazeer, 2020), rounded once.

    Parameters
    ----------
    self : Tensor
        Floating, of even size along `dim`; its first half is a, its second b.
    dim : int

    Returns
    -------
    Tensor
        Half as long along `dim`, in the same dtype.

    Raises
    ------
    ValueError
        If the size along `dim` is odd.
    """
    first, second = (widen(half) for half in _halves(self, dim))
    return (F.silu(first) * second).to(self.dtype)


def npu_swiglu_backward(
    grad_output: torch.Tensor, self: torch.Tensor, dim: int = -1
) -> torch.Tensor:
    """``[grad · b · (σ + a σ (1 - σ)), grad · silu(a)]`` with ``σ = σ(a)``.

    Parameters
    ----------
    grad_output : Tensor
        Of the result's shape.
    self : Tensor
        As for `npu_swiglu`.
    dim : int

    Returns
    -------
    Tensor
        Of the shape and dtype of `self`.

    Raises
    ------
    ValueError
        If the size along `dim` is odd.
    """
    first, second = (widen(half) for half in _halves(self, dim))
    grad, gate = widen(grad_output), torch.sigmoid(first)
    slope = gate + first * gate * torch.sigmoid(-first)
    return torch.cat((grad * second * slope, grad * first * gate), dim).to(self.dtype)


def _halves(tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    if tensor.size(dim) % 2:
        raise ValueError(f"npu_swiglu: axis {dim} of size {tensor.size(dim)} has no two halves")
    return tensor.tensor_split(2, dim)
