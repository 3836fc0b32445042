"""Goldens of operators whose own kernels do not take the raised precision."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of the groups of two matrices, as ``torch.nn.functional.grouped_mm`` gives them.

    Parameters
    ----------
    self, mat2 : Tensor
        Two stacks ``(G, M, K)``, ``(G, K, N)``; or one or both a matrix, ``(M, K)`` and
        ``(K, N)``, of which `offs` divides the rows, the columns, or what is summed over.
    offs : Tensor of int32, shape (G,)
        Where each group ends.
    bias : None
        Not supported.
    out_dtype : torch.dtype, optional
    """
    if bias is not None:
        raise NotImplementedError("grouped_mm with a bias")
    if offs is None:
        result = self @ mat2
    else:
        ends = [0, *offs.tolist()]
        spans = [slice(*pair) for pair in pairwise(ends)]
        if self.dim() == 2 and mat2.dim() == 2:
            result = torch.stack([self[:, span] @ mat2[span] for span in spans])
        elif self.dim() == 2:
            result = self.new_zeros(self.shape[0], mat2.shape[-1])
            for group, span in enumerate(spans):
                result[span] = self[span] @ mat2[group]
        else:
            result = self.new_zeros(self.shape[1], mat2.shape[-1])
            for group, span in enumerate(spans):
                result[:, span] = self[group] @ mat2[:, span]
    return result if out_dtype is None else result.to(out_dtype)


REFERENCES: dict[str, Callable[..., Any]] = {"_grouped_mm": grouped_mm}
"""By base name."""
