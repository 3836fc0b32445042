"""The function mode that sees forward calls, and its life on torch's mode stack.

Operators that the autograd engine runs do not pass the function protocol: the calls
that start the engine do, and `spool.capture.engine` goes on from there. Any function
mode switches off one fast path of torch, the fused kernel of
``nn.TransformerEncoderLayer`` in evaluation; its parts are captured then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch.overrides import TorchFunctionMode

from spool.capture.engine import Engine, starts_engine
from spool.capture.exits import raised_by_handler
from spool.capture.patched import Originals
from spool.capture.recorder import Recorder

_push: Any = torch.overrides._push_mode
_pop: Any = torch.overrides._pop_mode


class Interceptor(TorchFunctionMode):
    """Hands every call of the thread to a recorder.

    It stands above the modes that were there before; while it handles a call
    torch takes it off the stack, so that calls inside the call are not seen and
    the modes below see the call as always.

    Parameters
    ----------
    recorder : Recorder
    engine : Engine or None
        Takes the calls that start the autograd engine.
    """

    def __init__(self, recorder: Recorder, engine: Engine | None) -> None:
        super().__init__()
        self._recorder = recorder
        self._originals = Originals()
        self._engine = engine
        self._local = threading.local()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # First, and in this form: dynamo sees a plain call and no graph break.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        try:
            func, kwargs = self._originals.of(func, args, kwargs, sys._getframe(1))
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._recorder.failed("before", func)
        if not self._recorder.active:
            return func(*args, **kwargs)
        if self._engine is not None and starts_engine(func):
            # Meanwhile torch has taken this mode off the stack, and hooks of the user run.
            before, self._local.is_away = self.is_away, True
            try:
                return self._engine.run(func, args, kwargs)
            finally:
                self._local.is_away = before
        return self._recorder.run(func, args, kwargs)

    @property
    def is_away(self) -> bool:
        """Whether torch will put this mode back on the calling thread's stack."""
        return bool(getattr(self._local, "is_away", False))

    def place(self) -> None:
        """Put this mode on the calling thread's stack, above the modes of its first time.

        Where it is put again, modes that were entered since stay above it: whoever leaves
        one takes the top off, and that must be theirs. Takes off modes of earlier captures
        that another thread ended, which could not reach this stack.
        """
        for mode in _stack():
            if isinstance(mode, Interceptor) and mode is not self:
                mode.remove()
        if self.present():
            return
        below = [*self._local.__dict__.setdefault("below", _stack()), _default_device()]
        above = []
        while (stack := _stack()) and not any(stack[-1] is mode for mode in below):
            above.append(_pop())
        _push(self)
        for mode in reversed(above):
            _push(mode)

    def present(self) -> bool:
        """Whether this mode is on the calling thread's stack, or will be again."""
        return self.is_away or any(mode is self for mode in _stack())

    def remove(self) -> bool:
        """Take this mode, and no other, off the calling thread's stack.

        Modes that were entered above it stay, in their order.

        Returns
        -------
        bool
            False if it was not there: somebody popped it. One that is away comes back,
            and stays there inactive.
        """
        if self.is_away:
            return True
        if not self.present():
            return False
        above = []
        while (mode := _pop()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push(mode)
        return not self.present()


def open_modes() -> list[str]:
    """Type names of the modes on the calling thread's stack, bottom first."""
    return [type(mode).__name__ for mode in _stack()]


def _default_device() -> object:
    """The mode of ``torch.set_default_device``, which torch keeps below all others."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def _stack() -> list[Any]:
    return [
        torch._C._get_function_stack_at(level)
        for level in range(torch._C._len_torch_function_stack())
    ]
