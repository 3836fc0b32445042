"""Facts about a call's inputs, at a cost that does not hang on expanded axes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spool.replay.nest import Arguments, map_arguments
from spool.standards.inputs import input_facts

_COUNTS = ("count", "nan", "inf", "zeros")


def describe_inputs(arguments: Arguments) -> str:
    """Describe every tensor argument, as `spool.standards.inputs.input_facts` does.

    An expanded axis is looked at once and its elements are counted as often as they
    appear: a mask expanded over batch and heads is small in memory, and a hostile one
    may claim any size.

    Parameters
    ----------
    arguments : tuple of args and kwargs
        Live, before the call.

    Returns
    -------
    str
        JSON array of objects, in the order of the arguments.
    """
    facts = input_facts(*map_arguments(*arguments, _once))
    for fact, tensor in zip(facts, _tensors(arguments), strict=True):
        times = math.prod(tensor.shape[axis] for axis in _expanded(tensor))
        if times > 1:
            fact["shape"] = list(tensor.shape)
            fact.update({name: int(str(fact[name])) * times for name in _COUNTS})
    return json.dumps(facts, separators=(",", ":"))


def _expanded(tensor: torch.Tensor) -> list[int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [axis for axis, (size, step) in enumerate(sizes) if step == 0 and size > 1]


def _once(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        for axis in _expanded(leaf):
            leaf = leaf.narrow(axis, 0, 1)
    return leaf


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that `input_facts` describes: those in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
