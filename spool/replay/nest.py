"""Walks over nested argument and output values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a nesting with `change` applied to every leaf; a leaf met twice is changed once.

    Lists, tuples, named tuples, dicts and slices are nestings, everything else is a leaf.
    """
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list):
        return [_map(item, change, seen) for item in value]
    if isinstance(value, tuple):
        items = [_map(item, change, seen) for item in value]
        if type(value) is tuple:
            return tuple(items)
        # A named tuple takes its fields one by one, torch.return_types as one sequence.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map(item, change, seen) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_map(item, change, seen) for item in (value.start, value.stop, value.step)))
    if not isinstance(value, torch.Tensor):
        return change(value)
    if id(value) not in seen:
        seen[id(value)] = change(value)
    return seen[id(value)]


def map_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> Arguments:
    """`map_leaves` over positional and keyword arguments together."""
    changed, changed_kwargs = map_leaves((tuple(args), dict(kwargs)), change)
    return changed, changed_kwargs


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, in order: ``args.0``, ``args.1.weight``."""
    if isinstance(value, torch.Size):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from walk(item, f"{path}.{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}")
    elif isinstance(value, slice):
        for name in ("start", "stop", "step"):
            yield from walk(getattr(value, name), f"{path}.{name}")
    else:
        yield path, value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nesting."""
    for _, leaf in walk(value, ""):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def at_path(args: Sequence[Any], kwargs: Mapping[str, Any], path: str) -> Any:
    """The argument at a path such as ``args.0`` or ``kwargs.out.1``.

    Raises
    ------
    LookupError
        If there is no such argument.
    """
    root, *parts = path.split(".")
    value: Any = {"args": tuple(args), "kwargs": dict(kwargs)}[root]
    for part in parts:
        if isinstance(value, dict):
            value = value[part if part in value or not part.isdigit() else int(part)]
        elif isinstance(value, (list, tuple)) and part.isdigit():
            value = value[int(part)]
        elif isinstance(value, tuple) and part in getattr(value, "_fields", ()):
            value = getattr(value, part)
        else:
            raise LookupError(path)
    return value
