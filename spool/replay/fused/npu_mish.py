"""``npu_mish``: ``x · tanh(softplus(x))``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spool.replay.fused.reference import widen


def npu_mish(self: torch.Tensor) -> torch.Tensor:
    """``x · tanh(ln(1 + eˣ))`` (Misra, 2019), computed in fp32 or better and rounded once.

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
    return (x * torch.tanh(_softplus(x))).to(self.dtype)


def npu_mish_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """``grad · (t + x (1 - t²) σ(x))`` with ``t = tanh(softplus(x))``.

    Parameters
    ----------
    grad, input : Tensor
        Of one shape, floating.

    Returns
    -------
    Tensor
        In the dtype of `input`.
    """
    x = widen(input)
    t = torch.tanh(_softplus(x))
    return (widen(grad) * (t + x * (1 - t * t) * torch.sigmoid(x))).to(input.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    # torch's softplus is the identity above its threshold, which fp64 would notice at 20.
    return F.softplus(x, threshold=50)
