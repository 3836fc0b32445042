"""The dispatch mode that sees what the autograd engine computes.

Inside the engine everything is an ATen operator: gradient formulas, tensor hooks and
the ``backward`` of a custom ``autograd.Function``. The mode stands on torch's dispatch
stack while a call that starts the engine runs; torch hands it on to the engine's device
threads and to the engines that run inside (reentrant checkpoints).

The forward that a checkpoint runs again inside the engine computes what was captured
in the forward pass, so it passes uncaptured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import graph
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from spool.capture.recorder import Recorder

ENTRIES = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""The functions that run the engine. In all of them ``create_graph`` is the fifth."""

_CREATE_GRAPH = ("create_graph", 4)
_OUTSIDE = -1
_CHECKPOINT = torch.utils.checkpoint.__file__
_GRAPH = graph.__file__

_push: Any = _python_dispatch._push_mode
_pop: Any = _python_dispatch._pop_mode
_stack: Any = _python_dispatch._get_current_dispatch_mode_stack


def run_engine(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one of `ENTRIES` with its operators handed to the recorder.

    The function's result is returned as it is, and its exceptions propagate.
    """
    if not recorder.wants_engine():
        return func(*args, **kwargs)
    mode = EngineMode(recorder, _makes_graph(func, args, kwargs))
    _push(mode)
    try:
        return func(*args, **kwargs)
    finally:
        mode.remove()


def _makes_graph(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the engine records its own operators for a second derivative."""
    name, position = _CREATE_GRAPH
    if func is torch.Tensor.backward:
        position -= 1
    return bool(kwargs.get(name, args[position] if position < len(args) else False))


class EngineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator that the engine runs to a recorder.

    Parameters
    ----------
    recorder : Recorder
    makes_graph : bool
        The engine runs with ``create_graph=True``.
    """

    # Without it torch refuses flex attention and other higher-order operators.
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder, makes_graph: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._makes_graph = makes_graph

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile compiles inside the engine, it compiles as ever."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler into every program

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes back as operators on the local shards
        if torch._C._current_graph_task_id() == _OUTSIDE or not self._recorder.active:
            return func(*args, **named)
        if torch.is_grad_enabled() and (not self._makes_graph or _in_checkpoint()):
            return func(*args, **named)
        return self._recorder.run(func, tuple(args), named, in_engine=True)

    def remove(self) -> None:
        """Take this mode, and no other, off the calling thread's stack."""
        if not any(mode is self for mode in _stack()):
            return  # somebody popped it
        above = []
        while (mode := _pop()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push(mode)


def _in_checkpoint() -> bool:
    """Whether the innermost of checkpoint and engine on the stack is the checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CHECKPOINT:
            return True
        if name == _GRAPH and frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False
