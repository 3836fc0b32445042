"""Attention of the stand-in: one head of one sequence at a time, its whole mask by definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float32).min


def sees(
    i: int, j: int, sizes: tuple[int, int], mode: int, tokens: tuple[int, int], prefix: int
) -> bool:
    """Whether query i sees key j, as far as the mode says."""
    corner = i + sizes[1] - sizes[0]
    if mode == 0:
        return i - tokens[0] <= j <= i + tokens[1]
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= corner
    if mode == 4:
        return corner - tokens[0] <= j <= corner + tokens[1]
    if mode == 6:
        return j <= corner or j < prefix
    return True


def to_heads(x: Tensor, layout: str, number: int) -> Tensor:
    """As (B, N, S, D), copied."""
    if layout == "BSH":
        b, s, h = x.shape
        return x.reshape(b, s, number, h // number).transpose(1, 2)
    if layout == "SBH":
        return to_heads(x.transpose(0, 1), "BSH", number)
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "TND":
        return x.transpose(0, 1).unsqueeze(0)
    return x


def from_heads(x: Tensor, layout: str) -> Tensor:
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return from_heads(x, "BSH").transpose(0, 1)
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.squeeze(0).transpose(0, 1) if layout == "TND" else x


def count_of_keys(key: Tensor, query: Tensor, layout: str, number: int) -> int:
    if layout in ("BSH", "SBH"):
        return key.shape[-1] * number // query.shape[-1]
    return key.shape[2] if layout == "BSND" else key.shape[1]


@dataclass
class Head:
    """One head of one sequence: where it lies, and what is hidden and added there."""

    batch: int
    number: int
    of_keys: int
    queries: slice
    keys: slice
    hidden: Tensor
    pse: tuple[int, int] | None


def all_heads(
    q: Tensor, k: Tensor, layout: str, pse: Tensor | None, mask: Tensor | None,
    tokens: tuple[int, int], prefix: Sequence[int] | None, q_ends: Sequence[int] | None,
    k_ends: Sequence[int] | None, mode: int,
) -> Iterator[Head]:  # fmt: skip
    spans = [(0, q.shape[2], 0, k.shape[2])]
    if layout == "TND":
        starts = [0, *q_ends][:-1], [0, *k_ends][:-1]
        spans = [s for s in zip(starts[0], q_ends, starts[1], k_ends, strict=True) if s[1] > s[0]]
    number, few = q.shape[1], k.shape[1]
    for b, (place, (q0, q1, k0, k1)) in product(range(q.shape[0]), enumerate(spans)):
        sizes = (q1 - q0, k1 - k0)
        own = {7: 4 if place == len(spans) - 1 else 3, 8: 2 if place else 4}.get(mode, mode)
        before = 0 if prefix is None else prefix[b if layout != "TND" else place]
        seen = [
            [sees(i, j, sizes, own, tokens, before) for j in range(sizes[1])]
            for i in range(sizes[0])
        ]
        for n in range(number):
            hidden = torch.zeros(sizes, dtype=torch.bool)
            if mask is not None:
                hidden = ~torch.tensor(seen).reshape(sizes)
                if own in (0, 1, 5):
                    given = mask.bool().reshape((1,) * (4 - mask.dim()) + mask.shape)
                    given = given[b % given.shape[0], n % given.shape[1]]
                    hidden = hidden | given[: sizes[0], : sizes[1]]
            shift = None if pse is None else (b % pse.shape[0], n % pse.shape[1])
            yield Head(b, n, n * few // number, slice(q0, q1), slice(k0, k1), hidden, shift)


def logits_of(head: Head, q: Tensor, k: Tensor, pse: Tensor | None, scale: float) -> Tensor:
    logits = q[head.batch, head.number, head.queries] @ k[head.batch, head.of_keys, head.keys].T
    if pse is not None:
        logits = logits + pse[head.pse]
    return torch.where(head.hidden, LOWEST, scale * logits)


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def statistic(x: Tensor, layout: str) -> Tensor:
    x = x[0].T if layout == "TND" else x
    return x.unsqueeze(-1).expand(*x.shape, 8).contiguous()


def row(x: Tensor, layout: str) -> Tensor:
    return x[..., 0].T.unsqueeze(0) if layout == "TND" else x[..., 0]


def forward(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
    pse: Tensor | None = None, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    prefix: Sequence[int] | None = None, actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    few = count_of_keys(key, query, input_layout, head_num)
    q = wide(to_heads(query, input_layout, head_num))
    k, v = (wide(to_heads(x, input_layout, few)) for x in (key, value))
    pse, sink = wide(pse), wide(sink)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    peak, total = torch.full(q.shape[:3], LOWEST).to(q), torch.full(q.shape[:3], torch.inf).to(q)
    for head in all_heads(
        *(q, k, input_layout, pse, atten_mask, (pre_tockens, next_tockens), prefix),
        *(actual_seq_qlen, actual_seq_kvlen, sparse_mode),
    ):
        logits = logits_of(head, q, k, pse, scale)
        if sink is not None:
            logits = torch.cat([logits, sink[head.number].expand(len(logits), 1)], 1)
        here = head.batch, head.number, head.queries
        peak[here] = logits.max(1)[0]
        parts = (logits - peak[here][:, None]).exp()
        parts[:, : head.hidden.shape[1]].masked_fill_(head.hidden, 0)
        total[here] = torch.where(parts.sum(1) == 0, torch.inf, parts.sum(1))
        chances = parts[:, : head.hidden.shape[1]] / total[here][:, None]
        out[here] = chances @ v[head.batch, head.of_keys, head.keys]
    result = from_heads(out, input_layout).to(query.dtype).contiguous()
    statistics = statistic(peak, input_layout), statistic(total, input_layout)
    return (result, *statistics, query.new_empty(0), 77, 0, query.numel())


def backward(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str,
    *, pse: Tensor | None = None, atten_mask: Tensor | None = None, scale_value: float = 1.0,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None,
    attention_in: Tensor | None = None, pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0, sink: Tensor | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    few = count_of_keys(key, query, input_layout, head_num)
    q, up, result = (wide(to_heads(x, input_layout, head_num)) for x in (query, dy, attention_in))
    k, v = (wide(to_heads(x, input_layout, few)) for x in (key, value))
    peak, total = row(softmax_max, input_layout), row(softmax_sum, input_layout)
    shift, extra = wide(pse), wide(sink)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dpse = None if shift is None else torch.zeros_like(shift)
    dsink = None if extra is None else torch.zeros_like(extra)
    for head in all_heads(
        *(q, k, input_layout, shift, atten_mask, (pre_tockens, next_tockens), prefix),
        *(actual_seq_qlen, actual_seq_kvlen, sparse_mode),
    ):
        here = head.batch, head.number, head.queries
        there = head.batch, head.of_keys, head.keys
        logits = logits_of(head, q, k, shift, scale_value)
        chances = (logits - peak[here][:, None]).exp().masked_fill(head.hidden, 0)
        chances = chances / total[here][:, None]
        delta = torch.einsum("sd,sd->s", up[here], result[here])
        slopes = scale_value * chances * (up[here] @ v[there].T - delta[:, None])
        dq[here] += slopes @ k[there]
        dk[there] += slopes.T @ q[here]
        dv[there] += chances.T @ up[here]
        if dpse is not None:
            dpse[head.pse] += slopes.sum(0, keepdim=True) if dpse.shape[2] == 1 else slopes
        if dsink is not None:
            share = (extra[head.number] - peak[here]).exp() / total[here]
            dsink[head.number] -= (share * delta).sum()
    dq, dk, dv = (
        from_heads(d, input_layout).to(x.dtype).contiguous()
        for d, x in ((dq, query), (dk, key), (dv, value))
    )
    empty = query.new_empty(0)
    return (
        *(dq, dk, dv),
        empty if pse is None else dpse.to(pse.dtype),
        query.new_empty(0) if sink is None else dsink.to(sink.dtype),
    )
