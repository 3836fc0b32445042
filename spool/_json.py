"""The text of a shard: a call as JSON with tags. (`spool._json_read` reads it.)

Plain JSON values stand for themselves: null, booleans, strings, integers below
2**63, finite floats (shortest digits that give the same bits), arrays for lists.
Everything else is an object with a single member, whose name is the tag::

    {"int": "-0x1..."}            an integer of 64 bits or more
    {"float": "7ff8000000000000"} the bits of an inf or NaN
    {"complex": [re, im]}
    {"ellipsis": 1}
    {"tuple": [...]}
    {"dict": [[key, value], ...]}
    {"slice": [start, stop, step]}
    {"named": [type, [field, ...], [value, ...]]}
    {"size": [dim, ...]}
    {"torch": [kind, name]}
    {"tensor": {"region": 0, "dtype": "torch.bfloat16", "shape": [...],
                "stride": [...], "offset": 0, "device": "npu:0",
                "grad": true, "packed": true}}      the last two only if true
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from spool.call import Call, CallContext, NamedTuple, Size, Slice, TensorRef, TorchValue, Tree

IDENTITY = ("api", "index", "rank", "step", "order", "direction")
_CONTEXT = tuple(item.name for item in fields(CallContext))
_context_values = operator.attrgetter(*_CONTEXT)
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)


def identity_of(call: Call) -> dict[str, Any]:
    """Return what tells `call` from every other: the values of `IDENTITY`."""
    return {name: getattr(call, name) for name in IDENTITY}


def dump_call(call: Call, regions: list[list[Any]]) -> bytes:
    """Return the JSON text of `call`; `regions` is written as it is.

    Raises
    ------
    TypeError
        If a tree holds something that is not part of one.
    """
    return add_regions(body_of(call), regions)


def body_of(call: Call) -> bytes:
    """Return the text of `call` without its regions."""
    return dump_body(
        identity_of(call),
        overload=call.overload,
        args=call.args,
        kwargs=call.kwargs,
        outputs=call.outputs,
        mutated=call.mutated,
        context=dict(zip(_CONTEXT, _context_values(call.context), strict=True)),
    )


def dump_body(
    identity: Mapping[str, Any],
    *,
    overload: str,
    args: Iterable[Tree],
    kwargs: Mapping[str, Tree],
    outputs: Tree,
    mutated: Mapping[str, TensorRef],
    context: Mapping[str, Any],
) -> bytes:
    """Return the JSON text of a call without its regions, whose bytes may not be there yet.

    Parameters
    ----------
    identity : mapping
        The values of `IDENTITY`, in that order.
    overload, args, kwargs, outputs, mutated
        As in `Call`.
    context : mapping
        The members of `CallContext`, in their order.

    Raises
    ------
    TypeError
        If a tree holds something that is not part of one.
    """
    record = {
        **identity,
        "overload": overload,
        "args": [_dump(item) for item in args],
        "kwargs": {key: _dump(item) for key, item in kwargs.items()} if kwargs else {},
        "outputs": _dump(outputs),
        "mutated": {path: _tensor_fields(ref) for path, ref in mutated.items()} if mutated else {},
        "context": context,
    }
    return _ENCODER.encode(record).encode("ascii")


def add_regions(body: bytes, regions: list[list[Any]]) -> bytes:
    """Return the whole text of a call: `dump_body` with the description of its regions."""
    return b'%b,"regions":%b}' % (body[:-1], _ENCODER.encode(regions).encode("ascii"))


def _dump(tree: Tree) -> Any:
    kind = type(tree)
    if tree is None or kind is bool or kind is str:
        return tree
    if kind is TensorRef:
        return {"tensor": _tensor_fields(tree)}
    if kind is int:
        return tree if -(1 << 63) <= tree < (1 << 63) else {"int": hex(tree)}
    if kind is float:
        return tree if math.isfinite(tree) else {"float": struct.pack(">d", tree).hex()}
    if kind is tuple:
        return {"tuple": [_dump(item) for item in tree]}
    if kind is list:
        return [_dump(item) for item in tree]
    if kind is dict:
        return {"dict": [[key, _dump(item)] for key, item in tree.items()]}
    if kind is Slice:
        return {"slice": [_dump(tree.start), _dump(tree.stop), _dump(tree.step)]}
    if kind is NamedTuple:
        return {"named": [tree.type, list(tree.fields), [_dump(item) for item in tree.values]]}
    if kind is Size:
        return {"size": list(tree.dims)}
    if kind is TorchValue:
        return {"torch": [tree.kind, tree.name]}
    if kind is complex:
        return {"complex": [_dump(tree.real), _dump(tree.imag)]}
    if tree is Ellipsis:
        return {"ellipsis": 1}
    raise TypeError(f"not part of a tree: {kind.__name__}")


def _tensor_fields(ref: TensorRef) -> dict[str, Any]:
    record: dict[str, Any] = {
        "region": ref.region,
        "dtype": f"torch.{ref.dtype}",
        "shape": ref.shape,
        "stride": ref.stride,
        "offset": ref.offset,
        "device": ref.device,
    }
    if ref.requires_grad:
        record["grad"] = True
    if ref.packed:
        record["packed"] = True
    return record
