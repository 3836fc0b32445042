"""``npu_scaled_masked_softmax``: the softmax of attention scores."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import widen

_MASKED = -10000.0


def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """``softmax(masked(x · scale))`` over the last axis, in fp32 or better, rounded once.

    What is masked is -10000 after scaling, so that a row masked as a whole is uniform.

    Parameters
    ----------
    x : Tensor, shape (B, N, S, T)
    mask : Tensor of bool, shape (B or 1, N or 1, S, T)
        True where masked.
    scale : float
    fixed_triu_mask : bool
        Instead of `mask`, everything above the diagonal is masked.

    Returns
    -------
    Tensor
        Of the shape and dtype of `x`.
    """
    scores = (widen(x) * scale).masked_fill(_hidden(x, mask, fixed_triu_mask), _MASKED)
    return torch.softmax(scores, -1).to(x.dtype)


def npu_scaled_masked_softmax_backward(
    y_grad: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    fixed_triu_mask: bool,
) -> torch.Tensor:
    """``scale · y · (dy - Σ y dy)``, and 0 where masked.

    Parameters
    ----------
    y_grad, y : Tensor, shape (B, N, S, T)
        `y` is the result of forward.
    mask, scale, fixed_triu_mask
        As in forward.

    Returns
    -------
    Tensor
        Of the shape and dtype of `y`.
    """
    grad, chances = widen(y_grad), widen(y)
    found = (grad - (grad * chances).sum(-1, keepdim=True)) * chances * scale
    return found.masked_fill(_hidden(y, mask, fixed_triu_mask), 0.0).to(y.dtype)


def _hidden(x: torch.Tensor, mask: torch.Tensor, triangle: bool) -> torch.Tensor:
    if triangle:
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        return columns > rows[:, None]
    return mask.to(torch.bool)
