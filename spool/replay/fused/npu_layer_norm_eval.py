"""``npu_layer_norm_eval``: layer norm without what a backward would need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spool.replay.fused.reference import widen


def npu_layer_norm_eval(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-05,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) · weight + bias`` (Ba, Kiros, Hinton, 2016), rounded once.

    Mean and (biased) variance are taken over the last axes, in fp32 or better.

    Parameters
    ----------
    input : Tensor, shape (..., *normalized_shape)
    normalized_shape : sequence of int
    weight, bias : Tensor of shape normalized_shape, optional
    eps : float

    Returns
    -------
    Tensor
        Of the shape and dtype of `input`.

    Raises
    ------
    ValueError
        If the last axes of `input` are not `normalized_shape`.
    """
    shape = tuple(normalized_shape)
    first = input.dim() - len(shape)
    if not shape or first < 0 or tuple(input.shape[first:]) != shape:
        raise ValueError(
            f"npu_layer_norm_eval: shape {list(input.shape)} does not end in {list(shape)}"
        )
    axes = tuple(range(first, input.dim()))
    x = widen(input)
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    return y.to(input.dtype)
