"""Reading the text of a shard that anybody may have written.

Nothing is trusted: every member, type, length, number and name is checked, and a
tensor must lie inside its region. The form is described in `spool._json`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Container
from dataclasses import fields
from typing import Any

from spool._json import IDENTITY
from spool.call import (
    MAX_DEPTH,
    MAX_DIMS,
    MAX_NODES,
    MAX_TEXT,
    Call,
    CallContext,
    NamedTuple,
    Size,
    Slice,
    TensorRef,
    TorchValue,
    Tree,
)
from spool.dtypes import CONSTANTS, DEVICE, ITEMSIZE, STORAGE_CODES
from spool.errors import BadShard
from spool.names import split_name

MAX_COUNTER = 10**12
MAX_ELEMENTS = 1 << 40
# What a packed tensor may take when it is laid out again.
MAX_EXTENT_BYTES = 1 << 37

_BIG_INT = re.compile(r"-?0x[0-9a-f]{1,65537}")
_FLOAT_BITS = re.compile(r"[0-9a-f]{16}")
OVERLOAD = re.compile(r"[A-Za-z0-9_]{0,100}")
DIRECTIONS = ("forward", "backward")
DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class CallReader:
    """Checks a shard's JSON and makes the call of it, without its regions.

    Parameters
    ----------
    text : bytes
        As stored.
    max_regions : int
        The most regions that are accepted.

    Raises
    ------
    BadShard
        On anything that `dump_call` would not have written.
    """

    def __init__(self, text: bytes, max_regions: int) -> None:
        self.nodes = 0
        self.refs: list[TensorRef] = []
        record = _object(_parse(text), _MEMBERS, "call")
        self.regions = self._regions(record["regions"], max_regions)
        self.record = record

    def call(self) -> Call:
        """Return the call, with an empty list of regions."""
        record = self.record
        identity = {name: record[name] for name in IDENTITY}
        check_identity(identity)
        call = Call(
            **identity,
            args=tuple([self._tree(item, 0) for item in self._list(record["args"])]),
            kwargs=self._kwargs(record["kwargs"]),
            outputs=self._tree(record["outputs"], 0),
            mutated=self._mutated(record["mutated"]),
            context=_context(record["context"]),
            regions=[],
            overload=_overload(record["overload"]),
        )
        self._check_refs()
        return call

    def _regions(self, items: Any, most: int) -> list[tuple[str, int, int]]:
        if type(items) is not list or len(items) > most:
            raise BadShard("the list of regions is not usable")
        regions = []
        for item in items:
            if type(item) is not list or len(item) != 3 or not _among(item[0], STORAGE_CODES):
                raise BadShard("a region is not described by type, size and checksum")
            size, crc = _integer(item[1], 0, 1 << 62), _integer(item[2], 0, (1 << 32) - 1)
            if size % STORAGE_CODES[item[0]].itemsize:
                raise BadShard("a region's size is not a whole number of elements")
            regions.append((item[0], size, crc))
        return regions

    def _list(self, items: Any, length: int | None = None) -> list[Any]:
        if type(items) is not list or (length is not None and len(items) != length):
            raise BadShard("a list in the call is not one, or of the wrong length")
        self.nodes += len(items)
        if self.nodes > 4 * MAX_NODES:
            raise BadShard("the call holds too many values")
        return items

    def _tree(self, item: Any, depth: int) -> Tree:
        kind = type(item)
        if item is None or kind is bool or kind is int:
            return item
        if kind is str:
            return _text(item)
        if kind is float:
            if not math.isfinite(item):
                raise BadShard("a number is out of range")
            return item
        if depth > MAX_DEPTH + 1:
            raise BadShard("the call is nested too deep")
        if kind is list:
            return [self._tree(value, depth + 1) for value in self._list(item)]
        if kind is dict and len(item) == 1:
            (tag, value) = next(iter(item.items()))
            reader = _TAGS.get(tag)
            if reader is not None:
                return reader(self, value, depth + 1)
        raise BadShard("the call holds a value with an unknown tag")

    def _int(self, value: Any, depth: int) -> int:
        if type(value) is not str or not _BIG_INT.fullmatch(value):
            raise BadShard("a large integer is not hexadecimal")
        return int(value, 16)

    def _float(self, value: Any, depth: int) -> float:
        if type(value) is not str or not _FLOAT_BITS.fullmatch(value):
            raise BadShard("a float is not 16 hexadecimal digits")
        number: float = struct.unpack(">d", bytes.fromhex(value))[0]
        return number

    def _complex(self, value: Any, depth: int) -> complex:
        parts = [self._tree(part, depth) for part in self._list(value, 2)]
        if not all(type(part) is float for part in parts):
            raise BadShard("a complex number is not two floats")
        return complex(*parts)

    def _ellipsis(self, value: Any, depth: int) -> Any:
        if value != 1 or type(value) is not int:
            raise BadShard("an ellipsis is malformed")
        return Ellipsis

    def _tuple(self, value: Any, depth: int) -> tuple[Tree, ...]:
        return tuple([self._tree(item, depth) for item in self._list(value)])

    def _dict(self, value: Any, depth: int) -> dict[str | int, Tree]:
        result: dict[str | int, Tree] = {}
        for pair in self._list(value):
            key, item = self._list(pair, 2)
            if type(key) not in (str, int) or key in result:
                raise BadShard("a dict has a key that is not a string or integer, or twice")
            result[_text(key) if type(key) is str else key] = self._tree(item, depth)
        return result

    def _slice(self, value: Any, depth: int) -> Slice:
        return Slice(*(self._tree(part, depth) for part in self._list(value, 3)))

    def _named(self, value: Any, depth: int) -> NamedTuple:
        label, names, items = self._list(value, 3)
        names, items = self._list(names), self._list(items)
        if len(names) != len(items) or len(set(map(str, names))) != len(names):
            raise BadShard("a named tuple's fields and values do not match")
        if not all(_text(name).isidentifier() for name in names):
            raise BadShard("a named tuple's field is not a name")
        return NamedTuple(_text(label), tuple(names), tuple([self._tree(x, depth) for x in items]))

    def _size(self, value: Any, depth: int) -> Size:
        return Size(tuple([_integer(item, -(1 << 62), 1 << 62) for item in self._list(value)]))

    def _torch(self, value: Any, depth: int) -> TorchValue:
        kind, name = self._list(value, 2)
        if type(kind) is not str or type(name) is not str:
            raise BadShard("a torch constant is malformed")
        known = DEVICE.fullmatch(name) if kind == "device" else name in CONSTANTS.get(kind, ())
        if not known:
            raise BadShard("a torch constant is of an unknown kind or name")
        return TorchValue(kind, name)

    def _tensor(self, value: Any, depth: int) -> TensorRef:
        allowed = {*_TENSOR_MEMBERS, "grad", "packed"}
        if type(value) is not dict or not _TENSOR_MEMBERS <= value.keys() <= allowed:
            raise BadShard("a tensor has missing or unknown members")
        dtype, device = value["dtype"], value["device"]
        if type(dtype) is not str or dtype.removeprefix("torch.") not in ITEMSIZE:
            raise BadShard("a tensor's dtype is unknown")
        if not dtype.startswith("torch.") or type(device) is not str:
            raise BadShard("a tensor's dtype or device is malformed")
        if not DEVICE.fullmatch(device):
            raise BadShard("a tensor's device is not a device name")
        if any(value.get(name, True) is not True for name in ("grad", "packed")):
            raise BadShard("a tensor's flag is not true")
        ref = TensorRef(
            region=_integer(value["region"], 0, len(self.regions) - 1),
            dtype=dtype.removeprefix("torch."),
            shape=_dims(value["shape"]),
            stride=_dims(value["stride"]),
            offset=_integer(value["offset"], 0, MAX_ELEMENTS),
            device=device,
            requires_grad="grad" in value,
            packed="packed" in value,
        )
        self._check_bounds(ref)
        self.refs.append(ref)
        return ref

    def _check_bounds(self, ref: TensorRef) -> None:
        if len(ref.shape) != len(ref.stride):
            raise BadShard("a tensor has not as many strides as axes")
        if math.prod(ref.shape) > MAX_ELEMENTS or ref.extent > MAX_ELEMENTS:
            raise BadShard("a tensor is too large")
        size = self.regions[ref.region][1]
        if ref.packed and ref.extent * ITEMSIZE[ref.dtype] > MAX_EXTENT_BYTES:
            raise BadShard("a packed tensor is spread too far")
        if ref.packed and (ref.offset or ref.stored * ITEMSIZE[ref.dtype] != size):
            raise BadShard("a packed tensor does not fill its region")
        if (ref.offset + ref.stored) * ITEMSIZE[ref.dtype] > size and ref.stored:
            raise BadShard("a tensor reaches outside its region")

    def _check_refs(self) -> None:
        packed: dict[int, tuple[Any, ...]] = {}
        for ref in self.refs:
            if ref.packed:
                packed.setdefault(ref.region, (ref.dtype, ref.shape, ref.stride))
        for ref in self.refs:
            expected = packed.get(ref.region)
            if expected and (not ref.packed or (ref.dtype, ref.shape, ref.stride) != expected):
                raise BadShard("two different tensors look into one packed region")

    def _kwargs(self, value: Any) -> dict[str, Tree]:
        if type(value) is not dict:
            raise BadShard("the keyword arguments are not an object")
        self._list(list(value))
        if not all(_text(name).isidentifier() for name in value):
            raise BadShard("a keyword argument's name is not a name")
        return {name: self._tree(item, 0) for name, item in value.items()}

    def _mutated(self, value: Any) -> dict[str, TensorRef]:
        if type(value) is not dict or not all(
            _text(path).startswith(("args.", "kwargs.")) for path in value
        ):
            raise BadShard("the mutated arguments are not named by path")
        self._list(list(value))
        return {path: self._tensor(ref, 0) for path, ref in value.items()}


_TAGS: dict[str, Callable[[CallReader, Any, int], Tree]] = {
    "int": CallReader._int,
    "float": CallReader._float,
    "complex": CallReader._complex,
    "ellipsis": CallReader._ellipsis,
    "tuple": CallReader._tuple,
    "dict": CallReader._dict,
    "slice": CallReader._slice,
    "named": CallReader._named,
    "size": CallReader._size,
    "torch": CallReader._torch,
    "tensor": CallReader._tensor,
}
_TREES = {"args", "kwargs", "outputs", "mutated"}
_MEMBERS = frozenset(IDENTITY) | _TREES | {"overload", "context", "regions"}
_TENSOR_MEMBERS = {"region", "dtype", "shape", "stride", "offset", "device"}


def check_identity(record: dict[str, Any]) -> None:
    """Check the values that become paths and table cells.

    Raises
    ------
    BadShard
        If one of them is of the wrong type, range or alphabet.
    """
    for name in ("index", "rank", "step", "order"):
        _integer(record[name], 0, MAX_COUNTER - 1)
    if type(record["api"]) is not str:
        raise BadShard("the call's name is not text")
    try:
        split_name(f"{record['api']}.{record['index']}")
    except ValueError as error:
        raise BadShard(str(error)) from error
    if not _among(record["direction"], DIRECTIONS):
        raise BadShard("the call's direction is neither forward nor backward")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise BadShard("the call's text is not JSON of the expected form") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("an object has a member twice")
    return record


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _object(value: Any, members: frozenset[str], what: str) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != members:
        raise BadShard(f"the {what} has missing or unknown members")
    return value


def _among(value: Any, known: Container[str]) -> bool:
    # Asking a table about a list would raise TypeError.
    return type(value) is str and value in known


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadShard("a number in the call is out of range")
    return value


def _overload(value: Any) -> str:
    if type(value) is not str or not OVERLOAD.fullmatch(value):
        raise BadShard("the operator's overload is not a name")
    return value


def _dims(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_DIMS:
        raise BadShard("a shape or stride is not a short list")
    return tuple([_integer(item, 0, (1 << 62)) for item in value])


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise BadShard("a text in the call is too long or not one")
    return value


def _context(value: Any) -> CallContext:
    record = _object(value, frozenset(item.name for item in fields(CallContext)), "context")
    autocast, stack = record["autocast"], record["stack"]
    if type(autocast) is not dict or type(stack) is not list or len(stack) > 1000:
        raise BadShard("the context's autocast or stack is malformed")
    for device, dtype in autocast.items():
        if not DEVICE.fullmatch(device) or not _among(dtype, ITEMSIZE):
            raise BadShard("the context's autocast names no device type or dtype")
    if not _among(record["default_dtype"], DEFAULT_DTYPES):
        raise BadShard("the context's default_dtype is no default dtype")
    for item in fields(CallContext):
        expected = {"bool": bool, "str": str}.get(str(item.type))
        if expected is not None and type(record[item.name]) is not expected:
            raise BadShard(f"the context's {item.name} is of the wrong type")
        if expected is str:
            _text(record[item.name])
    return CallContext(**{**record, "stack": tuple([_text(line) for line in stack])})
