"""Which forward call the autograd engine is at: a mark on the nodes of the graph.

A call leaves its place in the metadata of the nodes that its results hang on; the
operators that the engine runs for a node find it there. A mark lives as long as its
node, whatever thread or step runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_KEY = "spool"
_MOST_NODES = 64
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Place:
    """Where a call was made: module path, user's stack, and the forward call it belongs to."""

    module: str
    stack: tuple[str, ...]
    forward: str = ""


def edges(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The graph nodes that tensors hang on, held so that they can be told apart.

    Views are left out: looking at theirs may make a new node, and so change the order
    in which gradients are added up.
    """
    return [t.grad_fn for t in tensors if t.requires_grad and not t.is_leaf and not t._is_view()]


def mark(nodes: Iterable[Any], before: Iterable[Any], place: Place) -> None:
    """Leave `place` on the nodes that a call made.

    Parameters
    ----------
    nodes : iterable of Node
        `edges` of the call's results.
    before : iterable of Node
        `edges` of its arguments, before it ran: there it ends.
    place : Place
    """
    known = set(before)
    queue = list(nodes)
    for node in queue:
        if len(known) > _MOST_NODES:
            return
        if node in known or _KEY in node.metadata:
            continue
        known.add(node)
        node.metadata[_KEY] = place
        queue.extend(
            parent
            for parent, _ in node.next_functions
            if parent is not None and parent.name() != _LEAF
        )


def origin_of_node() -> Place | None:
    """The place that the engine's current node was marked with, if any."""
    node: Any = torch._C._current_autograd_node()
    place: Place | None = None if node is None else node.metadata.get(_KEY)
    return place
