"""``npu_sort_v2``: sorted values without their places."""

from __future__ import annotations

import torch


def npu_sort_v2(
    self: torch.Tensor,
    dim: int = -1,
    descending: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of a tensor, sorted along an axis.

    Parameters
    ----------
    self : Tensor
    dim : int
    descending : bool
    out : Tensor, optional
        Is given the result, and returned.

    Returns
    -------
    Tensor
        Of the shape and dtype of `self`.
    """
    values = torch.sort(self, dim=dim, descending=descending).values
    return values if out is None else out.copy_(values)
