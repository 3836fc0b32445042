"""``npu_rms_norm``: a norm by the root of the mean square."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import widen


def npu_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x · rstd · gamma`` with ``rstd = 1 / sqrt(mean(x²) + epsilon)`` (Zhang, Sennrich, 2019).

    Parameters
    ----------
    self : Tensor, shape (..., *gamma.shape)
        Floating.
    gamma : Tensor
        Weights; its axes are those that are normalised.
    epsilon : float

    Returns
    -------
    y : Tensor
        Of the shape and dtype of `self`; computed in fp32 or better, rounded once.
    rstd : Tensor, shape (..., 1, ...)
        fp32, or fp64 for that; the normalised axes have size 1.

    Raises
    ------
    ValueError
        If the last axes of `self` are not those of `gamma`.
    """
    axes = _axes(self, gamma)
    x = widen(self)
    rstd = torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    return (x * rstd * widen(gamma)).to(self.dtype), rstd


def npu_rms_norm_backward(
    dy: torch.Tensor, self: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `npu_rms_norm` by its input and its weights.

    With ``n = x · rstd`` and ``w = dy · gamma``: ``dx = rstd · (w - n · mean(w · n))`` and
    ``dgamma = sum(dy · n)`` over all other axes.

    Parameters
    ----------
    dy, self : Tensor
        Of one shape.
    gamma : Tensor
    rstd : Tensor
        As `npu_rms_norm` gave it.

    Returns
    -------
    dx : Tensor
        In the dtype of `self`.
    dgamma : Tensor
        Of the shape of `gamma`, fp32, or fp64 for that.

    Raises
    ------
    ValueError
        If the last axes of `self` are not those of `gamma`.
    """
    axes = _axes(self, gamma)
    x, grad, scale = widen(self), widen(dy), widen(rstd)
    normal = x * scale
    weighted = grad * widen(gamma)
    dx = scale * (weighted - normal * (weighted * normal).mean(axes, keepdim=True))
    others = tuple(range(self.dim() - gamma.dim()))
    products = grad * normal
    dgamma = products.sum(others) if others else products
    return dx.to(self.dtype), dgamma


def _axes(tensor: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    first = tensor.dim() - gamma.dim()
    if gamma.dim() == 0 or first < 0 or tensor.shape[first:] != gamma.shape:
        raise ValueError(
            f"npu_rms_norm: shape {list(tensor.shape)} does not end in {list(gamma.shape)}"
        )
    return tuple(range(first, tensor.dim()))
