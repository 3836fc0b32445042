"""From tensors to regions of bytes: which bytes are kept, and their copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from spool._torch import DTYPE_NAMES, Unsupported, carrier, dtype_name, type_label
from spool.call import MAX_DIMS, TensorRef, packing
from spool.dtypes import ITEMSIZE

# A strided extent is stored without its gaps when it is larger than a page and
# the elements fill no more than half of it.
_PACK_FROM = 4096

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

Bytes = TypeVar("Bytes")
Copy = Callable[[torch.Tensor, int], Bytes]
"""Copies the bytes of a tensor's memory, as many as told, from its first element on."""


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
    device: str
    ref: TensorRef | None = None


@dataclass(slots=True)
class Piece:
    """What becomes one region: tensors that share bytes.

    Parameters
    ----------
    group : list of Found
        Either all are empty or none is.
    dtype : str
        Whose storage type the region has.
    start, nbytes : int
        In the storage of the group; `nbytes` as stored.
    packed : bool
        Only the elements are stored, densely.
    """

    group: list[Found]
    dtype: str
    start: int
    nbytes: int
    packed: bool

    def copy(self, copy: Copy[Bytes]) -> Bytes:
        """Copy the bytes to keep."""
        first = self.group[0]
        if self.packed:
            return copy(_packed(first), self.nbytes)
        if len(self.group) == 1 and not (first.storage[1] or first.storage[2]):
            return copy(first.tensor, self.nbytes)
        narrow = min(self.group, key=lambda item: item.itemsize)
        return copy(_flat(narrow, self.start, self.start + self.nbytes), self.nbytes)


def describe(tensor: torch.Tensor) -> Found:
    """Check a tensor and say which bytes of which storage it uses; copies nothing."""
    kind = type(tensor)
    if kind not in PLAIN_TENSORS:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Unsupported(type_label(kind))
        if torch.nn.parameter.is_lazy(tensor):
            raise Unsupported("uninitialized parameter")
    name = DTYPE_NAMES.get(tensor.dtype)
    if tensor.layout is not torch.strided or name is None or tensor.is_nested or tensor.is_meta:
        raise Unsupported(_obstacle(tensor))
    itemsize = ITEMSIZE[name]
    try:
        shape, stride = tuple(tensor.shape), tensor.stride()
        start = int(tensor.storage_offset()) * itemsize
        storage = tensor.untyped_storage()
        stop = start + _extent(shape, stride) * itemsize
        # FSDP takes the memory of its parameters away while they are not used.
        if start < stop and (storage.nbytes() < stop or _is_missing(tensor)):
            raise Unsupported("tensor without storage")
    except (RuntimeError, NotImplementedError) as error:
        raise Unsupported("tensor without storage") from error
    if len(shape) > MAX_DIMS:
        raise Unsupported(f"tensor of more than {MAX_DIMS} axes")
    if _is_wrapped is not None and _is_wrapped(tensor):
        raise Unsupported("functorch tensor")
    device = tensor.device
    label = _labels.get(device)
    if label is None:
        label = _labels[device] = str(device)
    key = (storage._cdata, tensor.is_conj(), tensor.is_neg())
    return Found(tensor, name, itemsize, shape, stride, key, start, stop, label)


_is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
_labels: dict[torch.device, str] = {}


def _is_missing(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory, and is not one of torch's zero tensors."""
    return not tensor.data_ptr() and not tensor._is_zerotensor()


def _obstacle(tensor: torch.Tensor) -> str:
    """Why a tensor has no strided memory of plain elements."""
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return "quantized tensor"
    return "meta tensor" if tensor.is_meta else dtype_name(tensor.dtype)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    # As `spool.call.extent`, unrolled: this runs for every tensor of every call.
    last = 1
    for size, step in zip(shape, stride):  # noqa: B905
        if size == 0:
            return 0
        last += (size - 1) * step
    return last


def pieces_of(found: list[Found], first_region: int) -> list[Piece]:
    """Divide what the tensors need into regions and give each tensor its ref."""
    groups = [found] if len(found) == 1 else _groups(found)
    pieces = []
    for number, group in enumerate(groups, first_region):
        piece = _piece(group)
        pieces.append(piece)
        for item in group:
            item.ref = TensorRef(
                number,
                item.dtype,
                item.shape,
                item.stride,
                (item.start - piece.start) // item.itemsize if piece.nbytes else 0,
                item.device,
                item.tensor.requires_grad,
                piece.packed,
            )
    return pieces


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


def _piece(group: list[Found]) -> Piece:
    first = group[0]
    if first.start == first.stop:
        return Piece(group, first.dtype, first.start, 0, packed=False)
    start, stop, dtype = first.start, first.stop, first.dtype
    if len(group) > 1:
        if any(item.dtype != first.dtype for item in group):
            dtype = "uint8"
        # Every member's offset must be a whole number of its elements; element sizes
        # are powers of two, and each member starts at a multiple of its own.
        wide = max(item.itemsize for item in group)
        start = min(item.start for item in group) // wide * wide
        stop = max(item.stop for item in group)
    if stop - start > _PACK_FROM and _is_packable(group):
        block, _ = packing(first.shape, first.stride)
        size = math.prod(block) * first.itemsize
        return Piece(group, first.dtype, first.start, size, packed=True)
    return Piece(group, dtype, start, stop - start, packed=False)


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
    if len(first.shape) == 0 or first.tensor.is_contiguous():
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
    return raw.as_strided(shape, stride, raw.storage_offset()).contiguous()
