"""Pairing outputs place by place: structure first, values later."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spool.standards.thresholds import FLOAT8

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", *FLOAT8})
_COMPLEXES = frozenset({"complex32", "complex64", "complex128"})
_BOOLS = frozenset({"bool", "uint8"})
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})


@dataclass(frozen=True)
class Leaf:
    """One place of the outputs.

    Parameters
    ----------
    path : str
        Such as ``[0]['w']``, empty at the top.
    device, bench, golden : object
        The values there; the golden is None on the two-way route.
    problem : str or None
        How device and bench differ in structure; the values are then whole subtrees.
    golden_problem : str or None
        How golden and bench differ in structure.
    """

    path: str
    device: Any
    bench: Any
    golden: Any = None
    problem: str | None = None
    golden_problem: str | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_class(name: str) -> str:
    """The class within which two dtypes can be compared."""
    for label, members in (
        ("float", _FLOATS),
        ("complex", _COMPLEXES),
        ("bool", _BOOLS),
        ("integer", _INTEGERS),
    ):
        if name in members:
            return label
    return name


def walk_pair(device: Any, bench: Any) -> Iterator[Leaf]:
    """Leaves of device and bench together, in the bench's order."""
    yield from _walk("", device, bench, None, three_way=False)


def walk_triple(device: Any, bench: Any, golden: Any) -> Iterator[Leaf]:
    """Leaves of device, bench and golden together, in the bench's order."""
    yield from _walk("", device, bench, golden, three_way=True)


def equal_plain(left: Any, right: Any) -> bool:
    """Whether two plain values are equal; a NaN equals a NaN."""
    if isinstance(left, (float, complex)) and isinstance(right, (float, complex)):
        if cmath.isnan(left) or cmath.isnan(right):
            # Part by part: complex(nan, 1) is not complex(nan, 2).
            pairs = zip(_parts(left), _parts(right), strict=True)
            return all(x == y or (x != x and y != y) for x, y in pairs)
        return left == right
    return bool(left == right)


def shown(value: Any) -> str:
    """A value as a message shows it: one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parts(value: complex) -> tuple[float, float]:
    return (value.real, value.imag)


def _walk(path: str, device: Any, bench: Any, golden: Any, *, three_way: bool) -> Iterator[Leaf]:
    problem = _mismatch(device, bench, "device", "bench")
    if problem is None and three_way:
        golden_problem = _mismatch(golden, bench, "golden", "bench")
    else:
        golden_problem = None
    if problem is not None or golden_problem is not None:
        yield Leaf(path, device, bench, golden, problem, golden_problem)
    elif isinstance(bench, Mapping):
        for key, value in bench.items():
            inner = golden[key] if three_way else None
            yield from _walk(f"{path}[{key!r}]", device[key], value, inner, three_way=three_way)
    elif isinstance(bench, (list, tuple)):
        for i, value in enumerate(bench):
            inner = golden[i] if three_way else None
            yield from _walk(f"{path}[{i}]", device[i], value, inner, three_way=three_way)
    else:
        yield Leaf(path, device, bench, golden)


def _kind(value: Any) -> type:
    # A shard gives named results back as plain named tuples, and parameters as
    # tensors: what they hold decides, not their class.
    for family in (torch.Tensor, tuple, list, dict):
        if isinstance(value, family):
            return family
    return type(value)


def _mismatch(left: Any, right: Any, left_name: str, right_name: str) -> str | None:
    kinds = _kind(left), _kind(right)

    def differ(what: str, left_is: object, right_is: object) -> str:
        return f"{what} differ: {left_name} {left_is}, {right_name} {right_is}"

    if kinds[0] is not kinds[1]:
        return differ("kinds", *(kind.__name__ for kind in kinds))
    if isinstance(right, (list, tuple)) and len(left) != len(right):
        return differ("lengths", len(left), len(right))
    if isinstance(right, Mapping) and left.keys() != right.keys():
        return differ("keys", shown(list(left)), shown(list(right)))
    if isinstance(right, torch.Tensor):
        if left.shape != right.shape:
            return differ("shapes", tuple(left.shape), tuple(right.shape))
        names = dtype_name(left.dtype), dtype_name(right.dtype)
        if dtype_class(names[0]) != dtype_class(names[1]):
            return differ("dtypes", *names)
    return None
