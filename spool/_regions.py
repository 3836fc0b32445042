"""From tensors to regions of bytes: which bytes are kept, and their copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spool._torch import Unsupported, carrier, dtype_name, type_label
from spool.call import MAX_DIMS, Region, TensorRef, extent, packing
from spool.dtypes import ITEMSIZE, STORAGE

# A strided extent is stored without its gaps when it is larger than a page and
# the elements fill no more than half of it.
_PACK_FROM = 4096

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

Copy = Callable[[torch.Tensor], "npt.NDArray[Any]"]


@dataclass(slots=True)
class Found:
    """A tensor met in a value, which stands in the tree until its region is known.

    `start` and `stop` are bytes in its storage; `storage` names that, and with it
    the pending conjugation and negation, which are resolved for a region as a whole.
    """

    tensor: torch.Tensor
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: tuple[int, bool, bool]
    start: int
    stop: int
    ref: TensorRef | None = None


def describe(tensor: torch.Tensor) -> Found:
    """Check a tensor and say which bytes of which storage it uses; copies nothing."""
    kind = type(tensor)
    if kind not in PLAIN_TENSORS:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Unsupported(type_label(kind))
        if torch.nn.parameter.is_lazy(tensor):
            raise Unsupported("uninitialized parameter")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{str(tensor.layout).removeprefix('torch.')} tensor")
    if tensor.is_nested:
        raise Unsupported("nested tensor")
    if tensor.is_quantized:
        raise Unsupported("quantized tensor")
    if tensor.is_meta:
        raise Unsupported("meta tensor")
    if tensor.dim() > MAX_DIMS:
        raise Unsupported(f"tensor of more than {MAX_DIMS} axes")
    name = dtype_name(tensor.dtype)
    itemsize = ITEMSIZE[name]
    try:
        shape, stride = tuple(tensor.shape), tensor.stride()
        start = int(tensor.storage_offset()) * itemsize
        storage = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError) as error:
        raise Unsupported("tensor without storage") from error
    if _is_wrapped is not None and _is_wrapped(tensor):
        raise Unsupported("functorch tensor")
    key = (storage, tensor.is_conj(), tensor.is_neg())
    stop = start + extent(shape, stride) * itemsize
    return Found(tensor, name, itemsize, shape, stride, key, start, stop)


_is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)


def copy_regions(found: list[Found], copy: Copy, first_region: int) -> list[Region]:
    """Copy what the tensors need and give each its ref."""
    regions: list[Region] = []
    for group in _groups(found):
        region, packed, start = _copy_group(group, copy)
        number = first_region + len(regions)
        regions.append(region)
        for item in group:
            item.ref = TensorRef(
                number,
                item.dtype,
                item.shape,
                item.stride,
                (item.start - start) // item.itemsize if region.size else 0,
                str(item.tensor.device),
                item.tensor.requires_grad,
                packed,
            )
    return regions


def _groups(found: list[Found]) -> list[list[Found]]:
    """Tensors that share a region, in order of first appearance of their storage."""
    by_storage: dict[tuple[int, bool, bool], list[Found]] = {}
    for item in found:
        by_storage.setdefault(item.storage, []).append(item)
    groups: list[list[Found]] = []
    for items in by_storage.values():
        if len(items) == 1:
            groups.append(items)
        else:
            groups.extend(_overlapping(items))
    return groups


def _overlapping(items: list[Found]) -> list[list[Found]]:
    groups: list[list[Found]] = []
    # Empty tensors of one storage belong together: `out=` may resize them.
    empty = [item for item in items if item.start == item.stop]
    if empty:
        groups.append(empty)
    stop = -1
    full = [item for item in items if item.start < item.stop]
    for item in sorted(full, key=lambda item: item.start):
        if item.start < stop:
            groups[-1].append(item)
        else:
            groups.append([item])
        stop = max(stop, item.stop)
    return [part for group in groups for part in _interleaved(group)]


def _interleaved(group: list[Found]) -> list[list[Found]]:
    """Split a group whose ranges overlap but whose elements provably do not.

    Two columns of a matrix are apart, though each spans nearly all of it. Only what
    is mostly gaps is split: the rest is cheaper to copy as one range.
    """
    rows = {_row(item) for item in group}
    pitches = {pitch for pitch, _, _ in rows}
    if len(group) < 2 or len(rows) < 2 or len(pitches) > 1 or 0 in pitches:
        return [group]
    span = max(item.stop for item in group) - min(item.start for item in group)
    pitch = pitches.pop()
    places = sorted((place, width) for _, place, width in rows)
    if span <= _PACK_FROM or 2 * sum(width for _, width in places) > pitch:
        return [group]
    ends = [place + width for place, width in places]
    starts = [place for place, _ in places[1:]] + [pitch]
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        return [group]
    parts: dict[tuple[int, int, int], list[Found]] = {}
    for item in group:
        parts.setdefault(_row(item), []).append(item)
    return list(parts.values())


def _row(item: Found) -> tuple[int, int, int]:
    """Largest stride, place within it and reach of the other axes, in bytes."""
    axes = [(step, size) for step, size in zip(item.stride, item.shape, strict=True) if size > 1]
    pitch = max((step for step, _ in axes), default=0)
    width = 1 + sum((size - 1) * step for step, size in axes if step < pitch)
    return (
        pitch * item.itemsize,
        item.start % (pitch * item.itemsize) if pitch else 0,
        width * item.itemsize,
    )


def _copy_group(group: list[Found], copy: Copy) -> tuple[Region, bool, int]:
    """Copy one group's bytes; returns them, whether packed, and their first byte.

    Either all of the group is empty or none is.
    """
    first = narrow = group[0]
    start, stop, storage = first.start, first.stop, STORAGE[first.dtype]
    if len(group) > 1:
        if any(item.dtype != first.dtype for item in group):
            storage = STORAGE["uint8"]
        narrow = min(group, key=lambda item: item.itemsize)
        # Every member's offset must be a whole number of its elements; element sizes
        # are powers of two, and each member starts at a multiple of its own.
        wide = max(item.itemsize for item in group)
        start = min(item.start for item in group) // wide * wide
        stop = max(item.stop for item in group)
    if first.start == first.stop:
        return np.empty(0, storage), False, start
    if stop - start > _PACK_FROM and _is_packable(group):
        return copy(_packed(first)).view(storage), True, first.start
    flat = _flat(narrow, start, stop)
    return copy(flat.view(torch.uint8)).view(storage), False, start


def _flat(item: Found, start: int, stop: int) -> torch.Tensor:
    """All elements of the storage between two bytes, of the dtype of `item`."""
    source = item.tensor
    _, conjugated, negated = item.storage
    if conjugated:
        source = torch._conj(source)
    if negated:
        source = torch._neg_view(source)
    size = item.itemsize
    flat = source.as_strided(((stop - start) // size,), (1,), start // size)
    if conjugated:
        flat = torch.conj_physical(flat)
    if negated:
        flat = torch.neg(flat)
    return flat


def _is_packable(group: list[Found]) -> bool:
    """Whether all of the group is one tensor that is mostly gaps."""
    first = group[0]
    if any(first.storage[1:]) or any(
        (item.dtype, item.start, item.shape, item.stride)
        != (first.dtype, first.start, first.shape, first.stride)
        for item in group[1:]
    ):
        return False
    block, _ = packing(first.shape, first.stride)
    size = math.prod(block) * first.itemsize
    return 2 * size <= first.stop - first.start and not _overlaps_itself(block, first.stride)


def _overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two indices may mean one element; may say yes needlessly."""
    reach = 0
    for step, size in sorted((t, s) for s, t in zip(shape, stride, strict=True) if s > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _packed(item: Found) -> torch.Tensor:
    block, _ = packing(item.shape, item.stride)
    raw, shape, stride = carrier(item.tensor, block, item.stride)
    dense = raw.as_strided(shape, stride, raw.storage_offset()).contiguous()
    return dense.view(-1).view(torch.uint8)
