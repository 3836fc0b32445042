"""Attention tile by tile: what forward and backward share.

A tile is some rows of queries against all keys. Tensors are of shape (B, N, S, D).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spool.replay.fused.attention_problem import Mask
from spool.replay.fused.reference import Unsupported, widen

# Elements of the scores of a tile, of which a few copies exist at a time.
TILE = 1 << 23
# What the operator's kernel puts where a key is hidden, and keeps as a row's maximum where
# all are; such a row's result is 0.
HIDDEN = -3.4028234663852886e38


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Make sure that queries, keys and values, of shape (B, N, S, D), belong together.

    Raises
    ------
    ValueError
    """
    fits = (
        q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[3] == k.shape[3]
    )
    if not fits:
        shapes = ", ".join(str(list(item.shape)) for item in (q, k, v))
        raise ValueError(f"npu_fusion_attention: (B, N, S, D) of {shapes} do not fit together")


def pse_of(
    pse: torch.Tensor | None,
    q: torch.Tensor,
    here: tuple[torch.Tensor, ...],
    layout: str,
) -> torch.Tensor | None:
    """The shift of the scores, if it is one that is known.

    Raises
    ------
    Unsupported
        For shifts that are compressed or that lie between many sequences.
    """
    if pse is None:
        return None
    rows, columns = here[0].shape[2], here[1].shape[2]
    known = (
        layout != "TND"
        and pse.dim() == 4
        and pse.shape[0] in (1, q.shape[0])
        and pse.shape[1] in (1, q.shape[1])
        and pse.shape[2] in (1, rows)
        and pse.shape[3] == columns
    )
    if not known:
        raise Unsupported(f"pse of shape {list(pse.shape)} in {layout}")
    return pse


def tiles(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Spans of rows whose scores take `TILE` elements."""
    batch, number, rows = q.shape[:3]
    step = max(1, TILE // max(1, batch * number * k.shape[2]))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    hides: Mask,
    pse: torch.Tensor | None,
    scale: float,
    rows: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of some rows of queries, and what of them is hidden.

    Returns
    -------
    logits : Tensor, shape (B, N, rows, Skv)
        In fp32 or better; `HIDDEN` where hidden.
    hidden : Tensor of bool or None
    """
    first, last = rows
    logits = by_head(widen(q[:, :, first:last]), widen(k).mT)
    if pse is not None:
        logits = logits + widen(pse if pse.shape[2] == 1 else pse[:, :, first:last])
    logits = logits * scale
    hidden = hides.rows(first, last, q.device)
    if hidden is not None:
        logits = logits.masked_fill(hidden, HIDDEN)
    return logits, hidden


def by_head(many: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    """Matrix products, each head of `few` with the heads of `many` that it serves.

    Parameters
    ----------
    many : Tensor, shape (B, N, S, K)
    few : Tensor, shape (B, M, K, L)
        M divides N.

    Returns
    -------
    Tensor, shape (B, N, S, L)
    """
    batch, number, rows, _ = many.shape
    together = many.reshape(batch, few.shape[1], -1, many.shape[3])
    return torch.matmul(together, few).reshape(batch, number, rows, few.shape[3])
