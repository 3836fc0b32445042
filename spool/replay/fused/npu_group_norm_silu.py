"""``npu_group_norm_silu``: group norm, then silu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spool.replay.fused.reference import widen


def npu_group_norm_silu(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    eps: float = 0.00001,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``silu(group_norm(x))`` and the statistics of the norm (Wu, He, 2018).

    Parameters
    ----------
    input : Tensor, shape (N, C, ...)
        Floating, of 2 to 8 axes.
    weight, bias : Tensor of shape (C,) or None
    group : int
        Number of groups; divides C.
    eps : float

    Returns
    -------
    y : Tensor
        Of the shape and dtype of `input`; computed in fp32 or better, rounded once.
    mean, rstd : Tensor, shape (N, group)
        In the dtype of `input`.

    Raises
    ------
    ValueError
        If `input` has another number of axes, or `group` does not divide its channels.
    """
    if not 2 <= input.dim() <= 8:
        raise ValueError(f"npu_group_norm_silu: {input.dim()} axes; it takes 2 to 8")
    samples, channels = input.shape[:2]
    if group < 1 or channels % group:
        raise ValueError(f"npu_group_norm_silu: {channels} channels are not {group} equal groups")
    x = widen(input).reshape(samples, group, input[0:1].numel() // group)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = (centred * rstd).reshape(input.shape)
    per_channel = (1, channels, *(1,) * (input.dim() - 2))
    if weight is not None:
        y = y * widen(weight).reshape(per_channel)
    if bias is not None:
        y = y + widen(bias).reshape(per_channel)
    statistics = (item.squeeze(-1).to(input.dtype) for item in (mean, rstd))
    return (F.silu(y).to(input.dtype), *statistics)  # type: ignore[return-value]
