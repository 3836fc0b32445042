"""Walking through live arguments: tensors with their paths, sizes, local shards.

Callers hold the function protocol off (`torch._C.DisableTorchFunction`), so that
looking at a tensor is not a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensors = list[tuple[str, torch.Tensor]]

_CONTAINERS = (list, tuple, dict, slice)


def tensors(value: Any, path: str) -> Tensors:
    """Tensors of a nested value with their dotted paths, in order.

    Parameters
    ----------
    value : object
        Any nesting of lists, tuples, dicts and slices; other containers have none.
    path : str
        Path of `value` itself, e.g. ``"args"``.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    found: Tensors = []
    if isinstance(value, _CONTAINERS):
        _collect(value, path, found)
    return found


def _collect(value: Any, path: str, found: Tensors) -> None:
    for key, item in _items(value):
        if isinstance(item, torch.Tensor):
            found.append((f"{path}.{key}", item))
        elif isinstance(item, _CONTAINERS):
            _collect(item, f"{path}.{key}", found)


def _items(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, slice):
        return (("start", value.start), ("stop", value.stop), ("step", value.step))
    return enumerate(value)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """Tensors among a call's arguments, with paths such as ``"kwargs.out.1"``."""
    found: Tensors = []
    _collect(args, "args", found)
    if kwargs:
        _collect(kwargs, "kwargs", found)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild lists, tuples and dicts of a value with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def is_distributed(value: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, without importing torch.distributed."""
    return type(value).__name__ == "DTensor" and hasattr(value, "_local_tensor")


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """The local shard of a ``DTensor``; other tensors as they are."""
    if is_distributed(value):
        shard: torch.Tensor = value._local_tensor  # type: ignore[attr-defined]
        return shard
    return value
