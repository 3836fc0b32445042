"""List-of-tensors calls of optimizers, taken apart into one call per list element.

``torch._foreach_add_([a, b], [c, d], alpha=2)`` is two calls, on ``[a], [c]`` and
on ``[b], [d]``: arguments that are lists of the same length are split, lists of
scalars too; single tensors and numbers (a shared learning rate) go to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spool.tensors import below_autograd

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# The overloads that take one tensor of scalars in place of a list of them.
_TENSOR_OF_SCALARS = ("addcdiv", "addcmul")
_SCALARS = ("scalars", 3)


def count_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many elements a call has: the length of its first list of tensors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return len(value)
    return 0


def split_arguments(
    api: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> list[Arguments]:
    """Arguments of each element's call.

    Parameters
    ----------
    api : str
        Prefixed API name.
    args, kwargs
        Of the whole call.
    count : int
        From `count_elements`.
    """
    scalars = any(word in api for word in _TENSOR_OF_SCALARS)

    def pick(key: object, value: Any, number: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            # A tuple stays one: in-place operators return the list they were given.
            return (value[number],) if isinstance(value, tuple) else [value[number]]
        if scalars and key in _SCALARS and _is_vector(value, count):
            return value[number : number + 1]
        return value

    with below_autograd():
        return [
            (
                tuple(pick(position, value, number) for position, value in enumerate(args)),
                {name: pick(name, value, number) for name, value in kwargs.items()},
            )
            for number in range(count)
        ]


def split_result(result: Any, count: int) -> list[Any]:
    """The part of a whole call's result that belongs to each element."""
    if isinstance(result, (list, tuple)) and len(result) == count:
        return [type(result)([item]) for item in result]
    return [result] * count


def _is_vector(value: object, count: int) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == (count,)
