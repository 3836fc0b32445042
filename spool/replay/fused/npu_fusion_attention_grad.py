"""``npu_fusion_attention_grad``: the backward of `npu_fusion_attention`, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spool.replay.fused.attention_problem import (
    check_arguments,
    heads,
    in_layout,
    key_heads,
    parts,
)
from spool.replay.fused.attention_tiles import by_head, check_shapes, pse_of, scores, tiles
from spool.replay.fused.npu_fusion_attention import npu_fusion_attention
from spool.replay.fused.reference import wide_dtype, widen

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> Gradients:
    """Gradients of attention by its inputs (Dao et al., 2022, appendix B).

    With ``P = exp(S - max) / sum`` of the logits ``S = scale · (pse + q kᵀ)``,
    ``δ = Σ dy · attention`` of each row and ``dS = P · (dy vᵀ - δ)``: ``dv = Pᵀ dy``,
    ``dq = scale · dS k``, ``dk = scale · dSᵀ q``, ``dpse = scale · dS``, and of the sink
    ``-Σ exp(sink - max) / sum · δ``.

    Parameters
    ----------
    query, key, value, head_num, input_layout
    pse, padding_mask, atten_mask, keep_prob, pre_tockens, next_tockens, inner_precise, prefix
    actual_seq_qlen, actual_seq_kvlen, sparse_mode, gen_mask_parallel, sync, softmax_layout, sink
        As for `npu_fusion_attention`.
    dy : Tensor
        In the layout of the result.
    softmax_max, softmax_sum : Tensor, optional
        What forward returned. Computed anew if they are not given, and in the layout TND,
        where their order hangs on versions.
    softmax_in, seed, offset, numels
        Not used.
    attention_in : Tensor, optional
        The result of forward; computed anew if it is not given.
    scale_value : float

    Returns
    -------
    dq, dk, dv : Tensor
        Like `query`, `key`, `value`, summed in fp32 or better, rounded once.
    dpse, dsink : Tensor
        Like `pse` and `sink`; empty without them.

    Raises
    ------
    Unsupported, ValueError
        As `npu_fusion_attention`.
    """
    check_arguments(input_layout, sparse_mode, keep_prob, padding_mask)
    q, grad = (heads(tensor, input_layout, head_num) for tensor in (query, dy))
    few = key_heads(query, key, input_layout, head_num)
    k, v = (heads(tensor, input_layout, few) for tensor in (key, value))
    check_shapes(q, k, v)
    if grad.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(f"npu_fusion_attention: dy of shape {list(dy.shape)} is not the result's")
    known = None if input_layout == "TND" else (softmax_max, softmax_sum)
    if known is None or None in known or attention_in is None:
        again = npu_fusion_attention(
            *(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask),
            *(scale_value, keep_prob, pre_tockens, next_tockens, inner_precise, prefix),
            *(actual_seq_qlen, actual_seq_kvlen, sparse_mode),
            sink=sink,
        )
        attention_in = again[0] if attention_in is None else attention_in
        known = (again[1], again[2]) if known is None or None in known else known
    peak, amount = (_rows(item, input_layout) for item in known)
    delta = (widen(grad) * widen(heads(attention_in, input_layout, head_num))).sum(-1)
    wide = wide_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(item, dtype=wide) for item in (q, k, v))
    dpse = None if pse is None else torch.zeros_like(pse, dtype=wide)
    for part in parts(
        (q.shape[0], q.shape[2], k.shape[2]),
        input_layout,
        atten_mask=atten_mask,
        sparse_mode=sparse_mode,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        device=q.device,
    ):
        rows, columns = part.queries, part.keys
        here = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        shift = pse_of(pse, q, here, input_layout)
        if 0 in (here[0].shape[2], here[1].shape[2]):
            continue
        keys, values = widen(here[1]), widen(here[2])
        for first, last in tiles(*here[:2]):
            tile = slice(rows.start + first, rows.start + last)
            logits, hidden = scores(*here[:2], part.hides, shift, scale_value, (first, last))
            weights = torch.exp(logits - peak[:, :, tile, None]) / amount[:, :, tile, None]
            if hidden is not None:
                weights = weights.masked_fill(hidden, 0.0)
            upper = widen(grad[:, :, tile])
            slopes = weights * (by_head(upper, values.mT) - delta[:, :, tile, None])
            slopes = slopes * scale_value
            dq[:, :, tile] = by_head(slopes, keys)
            dk[:, :, columns] += _over_heads(slopes, widen(q[:, :, tile]), few)
            dv[:, :, columns] += _over_heads(weights, upper, few)
            if dpse is not None:
                _add(dpse, slopes, first, last)
    return (
        in_layout(dq.to(query.dtype), input_layout),
        in_layout(dk.to(key.dtype), input_layout),
        in_layout(dv.to(value.dtype), input_layout),
        query.new_empty(0) if pse is None or dpse is None else dpse.to(pse.dtype),
        query.new_empty(0) if sink is None else _by_sink(sink, peak, amount, delta),
    )


def _rows(statistic: torch.Tensor | None, layout: str) -> torch.Tensor:
    """A statistic of shape (B, N, Sq, 8) or (T, N, 8) as (B, N, Sq)."""
    assert statistic is not None
    rows = widen(statistic[..., 0])
    return rows.t()[None] if layout == "TND" else rows


def _over_heads(left: torch.Tensor, right: torch.Tensor, few: int) -> torch.Tensor:
    """``leftᵀ right`` of each head, summed over the heads that one head of keys serves."""
    batch, width = left.shape[0], left.shape[3]
    left = left.reshape(batch, few, -1, width)
    return torch.matmul(left.mT, right.reshape(batch, few, -1, right.shape[3]))


def _add(dpse: torch.Tensor, slopes: torch.Tensor, first: int, last: int) -> None:
    """Add the slopes of some rows, summed over the axes along which the shift was broadcast."""
    target = dpse if dpse.shape[2] == 1 else dpse[:, :, first:last]
    target += slopes.sum_to_size(target.shape)


def _by_sink(
    sink: torch.Tensor, peak: torch.Tensor, amount: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    share = torch.exp(widen(sink).reshape(1, -1, 1) - peak) / amount
    # A row without keys was not computed, its sum is infinite.
    share = share.masked_fill(amount == math.inf, 0.0)
    return -(share * delta).sum((0, 2)).to(sink.dtype)
