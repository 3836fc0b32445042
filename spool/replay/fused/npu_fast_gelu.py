"""``npu_fast_gelu``, by its older name ``fast_gelu``: gelu by a sigmoid."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import widen

_STEEPNESS = 1.702


def npu_fast_gelu(self: torch.Tensor) -> torch.Tensor:
    """``x · σ(1.702 x)``, computed in fp32 or better and rounded once.

    The operator's published form ``x / (1 + exp(-1.702 |x|)) · exp(0.851 (x - |x|))`` is the
    same function, written so that nothing overflows; the sigmoid does not either.

    Parameters
    ----------
    self : Tensor
        Of any shape, floating.

    Returns
    -------
    Tensor
        Of the same shape and dtype.
    """
    x = widen(self)
    return (x * torch.sigmoid(_STEEPNESS * x)).to(self.dtype)


def npu_fast_gelu_backward(grad: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """``grad · (σ + 1.702 x σ (1 - σ))`` with ``σ = σ(1.702 x)``.

    Parameters
    ----------
    grad, self : Tensor
        Of one shape, floating.

    Returns
    -------
    Tensor
        In the dtype of `self`.
    """
    x = widen(self)
    gate = torch.sigmoid(_STEEPNESS * x)
    # 1 - σ would cancel where σ is close to 1.
    slope = gate + _STEEPNESS * x * gate * torch.sigmoid(-_STEEPNESS * x)
    return (widen(grad) * slope).to(self.dtype)
