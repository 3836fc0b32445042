"""Whether a call gives a reference what its signature asks for, found out before it runs.

The operators' schemas see to that in training, so a shard that has something else was
not captured. References rely on it: they would walk a tensor that stands for a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spool.errors import BadShard

# The varlen layout takes 2,048 lengths.
_MOST_NUMBERS = 1 << 16


def check_signature(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments of other kinds than the reference's annotations say.

    Parameters
    ----------
    name : str
        Of the operator.
    function : callable
        One of Spool's own references.
    args, kwargs
        Live.

    Raises
    ------
    BadShard
    """
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise BadShard(f"{name}: {error}") from None
    for argument, value in given.items():
        kinds = str(signature.parameters[argument].annotation).split(" | ")
        if not any(_CHECKS[kind](value) for kind in kinds):
            raise BadShard(f"{name}: {argument} is not of the kind that the operator takes")


def _is_number(value: Any) -> bool:
    # A tensor of one element goes for a number.
    return isinstance(value, (bool, int, float)) or (_is_tensor(value) and value.numel() == 1)


def _are_numbers(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= _MOST_NUMBERS
        and all(type(item) is int for item in value)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "torch.Tensor": _is_tensor,
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int),
    "float": _is_number,
    "Scalar": _is_number,
    "Sequence[int]": _are_numbers,
    "State": lambda value: (
        isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_tensor, value))
    ),
}
"""By the annotations that references have."""
