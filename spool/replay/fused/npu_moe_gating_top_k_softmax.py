"""``npu_moe_gating_top_k_softmax``: which experts a token goes to."""

from __future__ import annotations

import torch

from spool.replay.fused.reference import widen


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of a softmax over experts, and where they are.

    Parameters
    ----------
    x : Tensor, shape (rows, experts) or (batch, rows, experts)
        Floating.
    finished : Tensor of bool, shape x.shape[:-1], optional
        True for rows that take no part: their experts are all `experts`, which none is.
    k : int
        1 to experts.

    Returns
    -------
    y : Tensor, shape (..., k)
        Descending, of equal ones that of the lower expert first; softmax in fp32 or better,
        rounded once to the dtype of `x`.
    expert_idx : Tensor of int32, shape (..., k)
    row_idx : Tensor of int32, shape (..., k)
        Row r, place p has ``p · rows + r``, rows counted over the batch.

    Raises
    ------
    ValueError
        If `x` has another number of axes, or `k` is not within 1 and the number of experts.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"npu_moe_gating_top_k_softmax: {x.dim()} axes; it takes 2 or 3")
    experts = x.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"npu_moe_gating_top_k_softmax: k={k} of {experts} experts")
    chances = torch.softmax(widen(x), -1)
    values, places = torch.sort(chances, dim=-1, descending=True, stable=True)
    expert = places[..., :k].to(torch.int32)
    if finished is not None:
        expert = expert.masked_fill(finished.to(torch.bool)[..., None], experts)
    rows = expert[..., 0].numel()
    order = torch.arange(rows * k, dtype=torch.int32, device=x.device).reshape(k, rows).t()
    return values[..., :k].to(x.dtype), expert, order.reshape(expert.shape)
