"""``npu_linear``: ``x Wᵀ + b``."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import widen


def npu_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x Wᵀ + b``, summed in fp32 or better and rounded once.

    Parameters
    ----------
    input : Tensor, shape (..., K)
    weight : Tensor, shape (N, K)
    bias : Tensor of shape (N,), optional

    Returns
    -------
    Tensor, shape (..., N)
        In the dtype of `input`.
    """
    product = torch.matmul(widen(input), widen(weight).t())
    if bias is not None:
        product = product + widen(bias)
    return product.to(input.dtype)


def npu_linear_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(grad W, gradᵀ x)``, all leading axes taken as one.

    Parameters
    ----------
    grad : Tensor, shape (..., N)
    input : Tensor, shape (..., K)
    weight : Tensor, shape (N, K)

    Returns
    -------
    grad_input : Tensor, shape (..., K)
        In the dtype of `input`.
    grad_weight : Tensor, shape (N, K)
        In the dtype of `weight`.
    """
    wide, source = widen(grad), widen(input)
    by_input = torch.matmul(wide, widen(weight))
    rows = wide.flatten(0, -2) if wide.dim() > 1 else wide[None]
    columns = source.flatten(0, -2) if source.dim() > 1 else source[None]
    return by_input.to(input.dtype), (rows.t() @ columns).to(weight.dtype)
