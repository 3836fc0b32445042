"""Which forward call the autograd engine is at: a mark on the nodes of the graph.

A call leaves its place in the metadata of the nodes that its results hang on; the
operators that the engine runs for a node find it there. A mark lives as long as its
node, whatever thread or step runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from spool.capture.values import tensors

_KEY = "spool"
_MOST_NODES = 64
# Of gradients' ends, which no call makes.
_LAST = 2**64 - 1

_autograd: Any = torch.autograd
next_node: Callable[[], int] = _autograd._get_sequence_nr
"""Number of the next graph node that this thread makes."""


@dataclass(frozen=True)
class Place:
    """Where a call was made: module path, user's stack, and the forward call it belongs to."""

    module: str
    stack: tuple[str, ...]
    forward: str = ""


def edges(result: object) -> list[Any]:
    """The graph nodes that a call's result hangs on.

    Views that were changed in place are left out: looking at theirs would make a new node,
    and so might change the order in which gradients are added up.
    """
    return [
        tensor.grad_fn
        for _, tensor in tensors(result, "")
        if tensor.requires_grad and not (tensor._is_view() and tensor._version)
    ]


def mark(nodes: Iterable[Any], first: int, place: Place) -> None:
    """Leave `place` on the nodes that a call made.

    Parameters
    ----------
    nodes : iterable of Node
        `edges` of the call's result.
    first : int
        `next_node` before the call ran.
    place : Place
    """
    queue = list(nodes)
    for node in queue:
        if node is None or not first <= node._sequence_nr() < _LAST or _KEY in node.metadata:
            continue
        node.metadata[_KEY] = place
        if len(queue) < _MOST_NODES:
            queue.extend(parent for parent, _ in node.next_functions)


def origin_of_node() -> Place | None:
    """The place that the engine's current node was marked with, if any."""
    node: Any = torch._C._current_autograd_node()
    place: Place | None = None if node is None else node.metadata.get(_KEY)
    return place
