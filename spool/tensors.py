"""Live values to trees and back: the only module of the format that knows torch.

`freeze` turns arguments and outputs of a call into trees over host byte regions;
`thaw` makes live tensors of them again, bit for bit, with the same strides and
the same aliasing. Training must not notice a freeze: nothing is recorded for
autograd, no function or dispatch mode sees the copies, no version counter moves.

What one region is: tensors over one storage whose byte ranges overlap share one,
so that a call which writes through one argument and reads through another is
replayed as it happened. Ranges that do not overlap are apart, and only bytes
inside a range are ever copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spool._regions import PLAIN_TENSORS, Bytes, Copy, Found, describe, pieces_of
from spool._thaw import thaw, thaw_all
from spool._torch import DTYPES, Unsupported, dtype_name, field_names, type_label
from spool.call import (
    MAX_DEPTH,
    MAX_INT_BITS,
    MAX_NODES,
    MAX_TEXT,
    NamedTuple,
    Region,
    Size,
    Slice,
    TorchValue,
    Tree,
)
from spool.dtypes import CONSTANTS, STORAGE

__all__ = [
    "DTYPES",
    "Plan",
    "Unsupported",
    "below_autograd",
    "copy_bytes",
    "copy_memory",
    "copy_to_host",
    "dtype_name",
    "flat_bytes",
    "freeze",
    "thaw",
    "thaw_all",
]

_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, type(Ellipsis)))


# Two of them, because giving up the GIL costs more than a small copy does.
_HOLDING_GIL: Any = ctypes.PyDLL(None).memmove
_RELEASING_GIL: Any = ctypes.CDLL(None).memmove
for _memmove in (_HOLDING_GIL, _RELEASING_GIL):
    _memmove.restype = ctypes.c_void_p
    _memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SMALL_COPY = 1 << 16


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes of host memory from one address to another."""
    (_HOLDING_GIL if nbytes <= _SMALL_COPY else _RELEASING_GIL)(target, source, nbytes)


def copy_bytes(target: int, source: torch.Tensor, nbytes: int) -> None:
    """Copy the first `nbytes` of a CPU tensor's memory to an address.

    Unlike a copy by torch it is nobody's operator, and unlike ``tensor.numpy()`` it does not
    mark a storage of the program as not resizable.
    """
    address = source.data_ptr()
    if address:
        copy_memory(target, address, nbytes)
    elif nbytes:  # one of torch's zero tensors, which have no memory
        ctypes.memset(target, 0, nbytes)


def below_autograd() -> Any:
    """Context in which nothing is recorded for autograd.

    Unlike ``torch.no_grad`` it is not written in Python, so that an exception of a signal
    handler cannot end it half-way and leave gradients off.
    """
    return torch._C._AutoDispatchBelowAutograd()


def copy_to_host(source: torch.Tensor, nbytes: int) -> npt.NDArray[np.uint8]:
    """Copy the first `nbytes` of a tensor's memory into a fresh array; see `Copy`."""
    array = np.empty(nbytes, np.uint8)
    if not source.is_cpu:
        torch.from_numpy(array).copy_(flat_bytes(source, nbytes))
    else:
        copy_bytes(array.__array_interface__["data"][0], source, nbytes)
    return array


def flat_bytes(source: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first `nbytes` of a tensor's memory as a flat uint8 tensor."""
    elements = nbytes // source.element_size()
    return source.as_strided((elements,), (1,), source.storage_offset()).view(torch.uint8)


class Plan:
    """Values that are described and not yet copied.

    Parameters
    ----------
    values : sequence of object
        Planned together: aliasing among all of them survives.
    first_region : int
        Number of the first new region, if the call already has some.

    Attributes
    ----------
    trees : list of tree
        One per value.
    nbytes : int
        What the regions will hold, exactly.

    Raises
    ------
    Unsupported
        A type, layout or nesting that is not stored.
    """

    __slots__ = ("_pieces", "nbytes", "trees")

    def __init__(self, values: Sequence[object], first_region: int = 0) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            collector = _Collector()
            trees = [collector.collect(value, 0) for value in values]
            self._pieces = pieces_of(collector.found, first_region) if collector.found else []
        self.trees = [_place(tree) for tree in trees] if self._pieces else trees
        self.nbytes = sum([piece.nbytes for piece in self._pieces])

    def copy(self, copy: Copy[Bytes]) -> list[tuple[str, Bytes]]:
        """Copy what the trees look into.

        Parameters
        ----------
        copy : callable
            Called once per region with a tensor and how many bytes of its memory, from
            its first element on, to copy; what it returns is the region. The copy may be
            made later, but the tensor may be gone then: on its stream.

        Returns
        -------
        list of (str, object)
            Per region the dtype by which it is stored, and what `copy` returned.
        """
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), below_autograd():
            return [(piece.dtype, piece.copy(copy)) for piece in self._pieces]


def freeze(values: Sequence[object], first_region: int = 0) -> tuple[list[Tree], list[Region]]:
    """Convert live values to trees that share one list of regions; see `Plan`.

    Returns
    -------
    trees : list of tree
        One per value.
    regions : list of numpy.ndarray
        1-D, of the storage type of the tensors that look into it; uint8 where
        tensors of several dtypes do.
    """
    plan = Plan(values, first_region)
    regions = [data.view(STORAGE[dtype]) for dtype, data in plan.copy(copy_to_host)]
    return plan.trees, regions


class _Collector:
    """First pass: checks every value and lists the tensors, copying nothing."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.nodes = 0

    def collect(self, value: Any, depth: int) -> Tree:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value if kind is not str and kind is not int else _bounded(value)
        if kind in PLAIN_TENSORS:
            return self._tensor(value)
        self.nodes += 1
        if depth >= MAX_DEPTH:
            raise Unsupported("nesting too deep")
        if kind is tuple:
            return tuple(self._items(value, depth))
        if kind is list:
            return self._items(value, depth)
        if kind is dict and not value:
            return {}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._rare(value, depth)

    def _items(self, values: Any, depth: int) -> list[Tree]:
        self.nodes += len(values)
        if self.nodes > MAX_NODES:
            raise Unsupported("too many values")
        return [self.collect(item, depth + 1) for item in values]

    def _rare(self, value: Any, depth: int) -> Tree:
        if type(value) is torch.Size:
            return Size(tuple(int(size) for size in value))
        if isinstance(value, tuple):
            fields = field_names(type(value))
            if fields is None:
                return tuple(self._items(value, depth))
            items = self._items(tuple(value), depth)
            return NamedTuple(type_label(type(value)), fields, tuple(items))
        if isinstance(value, list):
            return self._items(value, depth)
        if isinstance(value, dict):
            if any(type(key) is not str and not _is_small_int(key) for key in value):
                raise Unsupported("dict with keys other than text and integers")
            return dict(zip(value, self._items(list(value.values()), depth), strict=True))
        if isinstance(value, slice):
            return Slice(*self._items((value.start, value.stop, value.step), depth))
        return _constant(value)

    def _tensor(self, tensor: torch.Tensor) -> Found:
        found = describe(tensor)
        self.found.append(found)
        return found


def _is_small_int(key: object) -> bool:
    return type(key) is int and key.bit_length() < 64


def _bounded(value: Any) -> Tree:
    if type(value) is str:
        if len(value) > MAX_TEXT:
            raise Unsupported("text too long")
    elif value.bit_length() > MAX_INT_BITS:
        raise Unsupported("integer too long")
    return value


def _constant(value: object) -> Tree:
    """Leaves other than tensors and plain values of exactly the plain types."""
    if isinstance(value, torch.device):
        return TorchValue("device", str(value))
    for kind, known in CONSTANTS.items():
        if isinstance(value, getattr(torch, kind)):
            name = str(value).removeprefix("torch.")
            if name not in known:
                raise Unsupported(f"{kind} {name}")
            return TorchValue(kind, name)
    if isinstance(value, np.generic):
        plain = value.item()
        if type(plain) in _PLAIN_TYPES:
            return plain
    # Subclasses, such as an IntEnum, count for what they are underneath.
    elif isinstance(value, int):
        return _bounded(int.__int__(value))
    elif isinstance(value, float):
        return float.__float__(value)
    elif isinstance(value, str):
        return _bounded(str.__str__(value))
    raise Unsupported(type_label(type(value)))


def _place(tree: Tree) -> Tree:
    """Second pass: put the refs where the first pass left the tensors found."""
    kind = type(tree)
    if kind is Found:
        return tree.ref
    if kind is tuple:
        return tuple([_place(item) for item in tree])
    if kind is list:
        return [_place(item) for item in tree]
    if kind is dict:
        return {key: _place(item) for key, item in tree.items()}
    if kind is NamedTuple:
        return NamedTuple(tree.type, tree.fields, tuple([_place(item) for item in tree.values]))
    if kind is Slice:
        return Slice(_place(tree.start), _place(tree.stop), _place(tree.step))
    return tree
