"""What the autograd engine computes: a key of torch's dispatcher shows every operator.

Inside the engine everything is an ATen operator: gradient formulas, tensor hooks and
the ``backward`` of a custom ``autograd.Function``. A call that starts the engine includes
a dispatch key in its thread's state, which torch hands on to the engine's device threads
and to the engines that run inside (reentrant checkpoints). Under that key every operator
that computes has a kernel of ours (`spool.capture.operators`), which comes first and calls
the operator itself. While no engine runs the key is in no thread's state, and torch does
not know the kernels are there.

A ``TorchDispatchMode`` would see the same operators, but torch's gradient formulas take
other paths while any such mode is active, and their results differ in the last bits.

The forward that a checkpoint runs again inside the engine computes what was captured
in the forward pass, so it passes uncaptured.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import graph

from spool.capture import operators
from spool.capture.exits import raised_by_handler
from spool.capture.recorder import Recorder

# The functions that run the engine, by where they are written: under their names may stand
# what is not torch's. And the position of ``create_graph`` among their arguments.
_ENTRIES = {
    ("backward", "torch._tensor"): 3,
    ("backward", "torch.autograd"): 3,
    ("grad", "torch.autograd"): 4,
}
_ENTRY_NAMES = ("backward", "grad")
_OUTSIDE = -1
_TRACED = "<eval_with_key>"
_CHECKPOINT = torch.utils.checkpoint.__file__
_RUN_BACKWARD = graph._engine_run_backward.__code__
_CALL_IMPL = torch.nn.Module._call_impl.__code__


def starts_engine(func: Callable[..., Any]) -> bool:
    """Whether a function runs the autograd engine: ``backward`` and ``grad`` do."""
    return getattr(func, "__name__", "") in _ENTRY_NAMES and _entry(func) in _ENTRIES


def _entry(func: Any) -> tuple[str, str]:
    return func.__name__, str(getattr(func, "__globals__", {}).get("__name__"))


class Engine:
    """Hands every operator that the autograd engine runs to a recorder.

    Parameters
    ----------
    recorder : Recorder
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs = 0
        self._lock = threading.Lock()
        self._can = operators.register(_on_operator)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that starts the engine.

        The function's result is returned as it is, and its exceptions propagate.
        """
        global _current
        if not self._can or not self._recorder.wants_engine():
            return func(*args, **kwargs)
        position = _ENTRIES[_entry(func)]
        given = kwargs.get("create_graph", args[position] if position < len(args) else False)
        makes_graph = isinstance(given, int) and given != 0  # what else it is, torch refuses
        with self._lock:
            self._graphs += makes_graph
        _current = self
        try:
            with operators.included():
                return func(*args, **kwargs)
        finally:
            with self._lock:
                self._graphs -= makes_graph

    def forget(self) -> None:
        """See no more operators."""
        global _current
        if _current is self:
            _current = None

    def on_operator(
        self,
        operator: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an operator that came by in the engine."""
        if not self._recorder.active or not self._is_gradient(operator):
            return run(*args, **kwargs)
        return self._recorder.run(operator, args, kwargs, in_engine=run)

    def _is_gradient(self, operator: Any) -> bool:
        """Whether an operator belongs to the backward pass."""
        try:
            return torch._C._current_graph_task_id() != _OUTSIDE and not self._is_recomputed()
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._recorder.failed("before", operator)
            return False

    def _is_recomputed(self) -> bool:
        """Whether the operator belongs to a forward that is run again.

        The engine runs gradients without recording a graph, unless it was asked to, and
        forwards with it. A forward may have parts without, so that the stack is looked at:
        whether the innermost of checkpoint, module and engine is the engine.
        """
        if torch.is_grad_enabled() and not self._graphs:
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _RUN_BACKWARD:
            if frame.f_code is _CALL_IMPL or frame.f_code.co_filename == _CHECKPOINT:
                return True
            if frame.f_code.co_filename.startswith(_TRACED):
                return False  # a graph that torch made, which the recorder counts as one
            frame = frame.f_back
        return False


_current: Engine | None = None


def _on_operator(
    operator: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if _current is None:
        return run(*args, **kwargs)
    return _current.on_operator(operator, run, args, kwargs)
