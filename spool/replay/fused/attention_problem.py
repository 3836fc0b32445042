"""A call of fused attention as it is computed: sequences, heads, and what hides what.

Whatever the layout, a part of the work is one batch of sequences of equal length: all of
it, or in the varlen layout ``TND`` one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spool.replay.fused.reference import Unsupported

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
MODES = range(9)
_CAUSAL_LEFT, _CAUSAL_RIGHT, _BAND, _PREFIX, _RIGHT_BAND, _LEFT_BAND = 2, 3, 4, 6, 7, 8


@dataclass(frozen=True)
class Part:
    """Sequences of one length, and the mask between their queries and keys.

    Parameters
    ----------
    queries, keys : slice
        Of the axis T; the whole in other layouts.
    hides : Mask
    """

    queries: slice
    keys: slice
    hides: Mask


@dataclass(frozen=True)
class Mask:
    """Which keys are hidden from which queries, built for some rows at a time.

    Parameters
    ----------
    sizes : tuple of int
        Queries and keys.
    given : Tensor of bool, shape (B or 1, N or 1, Sq, Skv), optional
        True hides.
    before, after : int, optional
        Query i sees keys from ``i - before`` to ``i + after``; None is no limit.
    prefix : Tensor of int64, shape (B, 1, 1, 1), optional
        So many first keys are seen whatever the limits say.
    """

    sizes: tuple[int, int]
    given: torch.Tensor | None = None
    before: int | None = None
    after: int | None = None
    prefix: torch.Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys up to i, and nothing else is said."""
        return self.given is None and self.prefix is None and self._limits() == (None, 0)

    @property
    def is_open(self) -> bool:
        """Whether nothing is hidden."""
        return self.given is None and self._limits() == (None, None)

    def rows(self, first: int, last: int, device: torch.device) -> torch.Tensor | None:
        """What is hidden from the queries `first` to `last`; None if nothing is.

        Returns
        -------
        Tensor of bool or None, shape broadcast to (B, N, last - first, Skv)
        """
        before, after = self._limits()
        hidden = None
        if before is not None or after is not None:
            row = torch.arange(first, last, device=device)[:, None]
            column = torch.arange(self.sizes[1], device=device)
            if after is not None:
                hidden = column > row + after
            if before is not None:
                early = column < row - before
                hidden = early if hidden is None else hidden | early
            if self.prefix is not None and hidden is not None:
                hidden = hidden & (column >= self.prefix)
        if self.given is not None:
            given = self.given[..., first:last, :]
            hidden = given if hidden is None else hidden | given
        return hidden

    def _limits(self) -> tuple[int | None, int | None]:
        """The limits that hide anything at all."""
        queries, keys = self.sizes
        before = None if self.before is None or self.before >= queries - 1 else self.before
        after = None if self.after is None or self.after >= keys - 1 else self.after
        return before, after


def check_arguments(layout: str, mode: int, keep_prob: float, padding_mask: Any) -> None:
    """Refuse what no reference computes.

    Raises
    ------
    Unsupported
    """
    if layout not in LAYOUTS:
        raise Unsupported(f"input_layout={layout!r:.40}")
    if mode not in MODES:
        raise Unsupported(f"sparse_mode={mode!r:.40}")
    if keep_prob != 1:
        raise Unsupported(f"keep_prob={keep_prob!r:.40}")
    if padding_mask is not None:
        raise Unsupported("padding_mask")


def heads(tensor: torch.Tensor, layout: str, number: int) -> torch.Tensor:
    """A view of shape (B, N, S, D); B is 1 and S is T in the layout ``TND``.

    Parameters
    ----------
    tensor : Tensor
    layout : str
    number : int
        Of heads.

    Raises
    ------
    ValueError
        If the tensor is not of the layout.
    """
    axes = 4 if layout in ("BSND", "BNSD") else 3
    if tensor.dim() != axes or number < 1:
        raise ValueError(f"npu_fusion_attention: {list(tensor.shape)} is not {layout}")
    if layout in ("BSH", "SBH"):
        if tensor.shape[-1] % number:
            raise ValueError(
                f"npu_fusion_attention: {tensor.shape[-1]} columns are not {number} heads"
            )
        tensor = tensor.reshape(*tensor.shape[:-1], number, tensor.shape[-1] // number)
    order = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
    if layout == "TND":
        return tensor.transpose(0, 1)[None]
    return tensor.permute(order[layout])


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of shape (B, N, S, D) in a layout, contiguous."""
    if layout == "TND":
        return tensor[0].transpose(0, 1).contiguous()
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    result = tensor.permute(0, 2, 1, 3).contiguous()
    return result.flatten(2) if layout == "BSH" else result


def key_heads(query: torch.Tensor, key: torch.Tensor, layout: str, number: int) -> int:
    """How many heads the keys have, of `number` of the queries.

    Raises
    ------
    ValueError
        If it does not divide that.
    """
    if layout in ("BSND", "BNSD", "TND"):
        found = key.shape[1] if layout in ("BNSD", "TND") else key.shape[2]
    else:
        width = query.shape[-1] // max(number, 1)
        found = key.shape[-1] // max(width, 1)
    if found < 1 or number % found:
        raise ValueError(f"npu_fusion_attention: {number} heads of queries, {found} of keys")
    return found


def parts(
    sizes: tuple[int, int, int],
    layout: str,
    *,
    atten_mask: torch.Tensor | None,
    sparse_mode: int,
    pre_tockens: int,
    next_tockens: int,
    prefix: Sequence[int] | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    device: torch.device,
) -> Iterator[Part]:
    """The parts of a call.

    What hides what is said by `sparse_mode`; without `atten_mask` nothing is hidden:

    =====  ================================================================
    mode   query i sees key j
    =====  ================================================================
    0      unless the mask hides it, and i - pre <= j <= i + next
    1, 5   unless the mask hides it
    2      j <= i
    3      j <= i + Skv - Sq
    4      i + Skv - Sq - pre <= j <= i + Skv - Sq + next
    6      as 3, and j < prefix of the batch
    7, 8   as 3, 2, but the last, first sequence that is not empty as 4
    =====  ================================================================

    Parameters
    ----------
    sizes : tuple of int
        Batch, queries, keys.
    layout : str
    atten_mask, sparse_mode, pre_tockens, next_tockens, prefix
    actual_seq_qlen, actual_seq_kvlen
        As the operator has them.
    device : torch.device

    Raises
    ------
    ValueError
        If they do not fit together.
    """
    batch, queries, keys = sizes
    tokens = pre_tockens, next_tockens
    if layout != "TND":
        mode = {_RIGHT_BAND: _BAND, _LEFT_BAND: _BAND}.get(sparse_mode, sparse_mode)
        mask = _mask((queries, keys), mode, atten_mask, tokens, prefix, batch, device)
        yield Part(slice(0, queries), slice(0, keys), mask)
        return
    spans = list(
        zip(_spans(actual_seq_qlen, queries), _spans(actual_seq_kvlen, keys), strict=False)
    )
    full = [place for place, (q, k) in enumerate(spans) if q.stop > q.start and k.stop > k.start]
    for place, (q, k) in enumerate(spans):
        mode = sparse_mode
        if sparse_mode == _RIGHT_BAND:
            mode = _BAND if full and place == full[-1] else _CAUSAL_RIGHT
        elif sparse_mode == _LEFT_BAND:
            mode = _BAND if full and place == full[0] else _CAUSAL_LEFT
        lengths = q.stop - q.start, k.stop - k.start
        own = None if prefix is None or place >= len(prefix) else [prefix[place]]
        yield Part(q, k, _mask(lengths, mode, atten_mask, tokens, own, 1, device))


def _mask(
    sizes: tuple[int, int],
    mode: int,
    given: torch.Tensor | None,
    tokens: tuple[int, int],
    prefix: Sequence[int] | None,
    batch: int,
    device: torch.device,
) -> Mask:
    if given is None:
        return Mask(sizes)
    shift = sizes[1] - sizes[0]
    if mode in (0, 1, 5):
        whole = _four_axes(given, sizes)
        before, after = tokens if mode == 0 else (None, None)
        return Mask(sizes, whole, before, after)
    if mode == _CAUSAL_LEFT:
        return Mask(sizes, after=0)
    if mode == _CAUSAL_RIGHT:
        return Mask(sizes, after=shift)
    if mode == _BAND:
        return Mask(sizes, before=tokens[0] - shift, after=tokens[1] + shift)
    if prefix is None or len(prefix) != batch:
        raise ValueError(f"npu_fusion_attention: sparse_mode={mode} needs one prefix per sequence")
    lengths = torch.tensor(list(prefix), device=device).reshape(-1, 1, 1, 1)
    return Mask(sizes, after=shift, prefix=lengths)


def _four_axes(mask: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """A mask that the caller made, as (B or 1, N or 1, Sq, Skv)."""
    mask = mask.to(torch.bool)
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.dim() != 4 or mask.shape[2] < sizes[0] or mask.shape[3] < sizes[1]:
        raise ValueError(
            f"npu_fusion_attention: a mask of shape {list(mask.shape)} for {sizes[0]} queries "
            f"and {sizes[1]} keys"
        )
    # Of several sequences, the longest decides the size.
    return mask[:, :, : sizes[0], : sizes[1]]


def _spans(ends: Sequence[int] | None, total: int) -> Iterator[slice]:
    """Where sequences begin and end, from their cumulative lengths; 0 at the end is no more."""
    if ends is None:
        raise ValueError("npu_fusion_attention: TND needs actual_seq_qlen and actual_seq_kvlen")
    start = 0
    for end in ends:
        if end == 0 and start > 0:
            return
        if not start <= end <= total:
            raise ValueError(f"npu_fusion_attention: a sequence from {start} to {end} of {total}")
        yield slice(start, end)
        start = end


def results_of_forward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Which results of forward are compared: not what is empty or belongs to a generator.

    How the statistics of the varlen layout are ordered hangs on versions, if nothing is said.
    """
    layout = kwargs.get("input_layout", args[4] if len(args) > 4 else "")
    order = kwargs.get("softmax_layout", args[19] if len(args) > 19 else "")
    return (0,) if layout == "TND" and order != "TND" else (0, 1, 2)


def results_of_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Which results of backward are compared.

    The gradients of `pse` and `sink` where there is one: the operator leaves the others
    undefined, and older versions have none of a sink.
    """
    there = {3: kwargs.get("pse"), 4: kwargs.get("sink")}
    return (0, 1, 2, *(place for place, value in there.items() if value is not None))
