"""``npu_fusion_attention``: scaled, masked attention, computed tile by tile.

A tile is some rows of queries against all keys, so that no matrix of queries by keys is
ever held as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from spool.replay.fused.attention_problem import (
    Mask,
    check_arguments,
    heads,
    in_layout,
    key_heads,
    parts,
)
from spool.replay.fused.attention_tiles import HIDDEN, by_head, check_shapes, pse_of, scores, tiles
from spool.replay.fused.reference import Unsupported, wide_dtype, widen

_REPEATS = 8  # the last axis of the statistics, all the same

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> Result:
    """``softmax(mask(scale · (pse + q kᵀ))) v`` (Vaswani et al., 2017; Dao et al., 2022).

    Products and softmax are in fp32 or better; the result is rounded once.

    Parameters
    ----------
    query : Tensor
        In `input_layout`: BSH, SBH, BSND, BNSD, or TND (sequences of any lengths, one
        after the other).
    key, value : Tensor
        Their heads may be fewer; each serves as many heads of queries.
    head_num : int
        Heads of the queries.
    input_layout : str
    pse : Tensor, shape (B or 1, N, Sq or 1, Skv), optional
    padding_mask : None
    atten_mask : Tensor of bool or uint8, optional
        True hides; shape (B, N, Sq, Skv), (B, 1, Sq, Skv), (1, 1, Sq, Skv) or (Sq, Skv).
        In modes 2 to 4 and 6 to 8 a compressed triangle, of which only its presence counts.
    scale : float
    keep_prob : float
        1; other calls draw random numbers and are not replayed.
    pre_tockens, next_tockens, prefix, sparse_mode
        See `spool.replay.fused.attention_problem.parts`.
    inner_precise, gen_mask_parallel, sync
        Change no number here.
    actual_seq_qlen, actual_seq_kvlen : sequence of int, optional
        Cumulative lengths, for TND.
    softmax_layout : str
        "" or "TND".
    sink : Tensor, shape (N,), optional
        One more logit of every row, whose share goes nowhere.

    Returns
    -------
    attention : Tensor
        In the layout and dtype of `query`.
    softmax_max, softmax_sum : Tensor, shape (B, N, Sq, 8) or (T, N, 8)
        Of each row's logits, and of their exponentials less the maximum; fp32, or fp64 for
        that. A row whose keys are all hidden has the least fp32 number, and infinity.
    softmax_in : Tensor
        Empty.
    seed, offset, numels : int
        0: nothing is drawn.

    Raises
    ------
    Unsupported
        For what is not named above.
    ValueError
        If the arguments do not fit together.
    """
    check_arguments(input_layout, sparse_mode, keep_prob, padding_mask)
    if softmax_layout not in ("", "TND"):
        raise Unsupported(f"softmax_layout={softmax_layout!r:.40}")
    q = heads(query, input_layout, head_num)
    few = key_heads(query, key, input_layout, head_num)
    k, v = (heads(tensor, input_layout, few) for tensor in (key, value))
    check_shapes(q, k, v)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    wide = wide_dtype(q.dtype)
    maximum = q.new_full(q.shape[:3], HIDDEN, dtype=wide)
    total = q.new_full(q.shape[:3], math.inf, dtype=wide)
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
        here = q[:, :, part.queries], k[:, :, part.keys], v[:, :, part.keys]
        shift = pse_of(pse, q, here, input_layout)
        places = out[:, :, part.queries], maximum[:, :, part.queries], total[:, :, part.queries]
        _attend(here, part.hides, shift, sink, scale, places)
        if by_kernel(q.dtype, q.device) and (shift, sink) == (None, None):
            _attend_by_kernel(here, part.hides, scale, places[0])
    statistics = (_statistic(item, input_layout) for item in (maximum, total))
    empty = query.new_empty(0)
    return (in_layout(out, input_layout), *statistics, empty, 0, 0, 0)  # type: ignore[return-value]


def _attend(
    here: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    hides: Mask,
    pse: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Compute a part's result and statistics, and put them into their places."""
    q, k, v = here
    if k.shape[2] == 0:
        return
    out, maximum, total = places
    values = widen(v)
    for first, last in tiles(q, k):
        logits, hidden = scores(q, k, hides, pse, scale, (first, last))
        peak = logits.amax(-1)
        if sink is not None:
            extra = widen(sink).reshape(1, -1, 1)
            peak = torch.maximum(peak, extra)
        weights = torch.exp(logits - peak[..., None])
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0.0)
        amount = weights.sum(-1)
        if sink is not None:
            amount = amount + torch.exp(extra - peak)
        # A row of which all is hidden: 0 / inf is 0.
        amount = amount.masked_fill(amount == 0, math.inf)
        found = by_head(weights, values) / amount[..., None]
        out[:, :, first:last] = found.to(out.dtype)
        maximum[:, :, first:last] = peak
        total[:, :, first:last] = amount


def by_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has a fused attention of its own here, which then is the bench."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _attend_by_kernel(
    here: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    hides: Mask,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Replace a part's result by that of torch's fused attention, where it can express it."""
    q, k, v = here
    if not (hides.is_open or hides.is_causal) or 0 in (q.shape[2], k.shape[2]):
        return
    causal = hides.is_causal and not hides.is_open
    grouped = q.shape[1] != k.shape[1]
    out.copy_(
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    )


def _statistic(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """A statistic of shape (B, N, Sq) as the operator returns it."""
    if layout == "TND":
        rows = rows[0].t()
    return rows[..., None].repeat(*(1,) * rows.dim(), _REPEATS)
