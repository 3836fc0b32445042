"""Ends of a process: normal exit, exception, SIGTERM."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Exits:
    """Calls `close` when the process ends.

    Parameters
    ----------
    close : callable
        Takes the reason; may run inside a signal handler. Returns False if it was
        called in the middle of itself, and will go on after the handler.
    """

    def __init__(self, close: Callable[[str], bool]) -> None:
        self._close = close
        self._pid = os.getpid()
        self._installed = False
        self._late = 0
        self._previous: Any = None
        self._error_before: object = None

    def install(self) -> None:
        """Register for exit and, from the main thread, for SIGTERM."""
        self._error_before = _last_error()
        atexit.register(self._at_exit)
        if _is_main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            # Ignored, or handled outside Python: not ours to change.
            if previous not in (signal.SIG_IGN, None):
                self._previous = previous
                signal.signal(signal.SIGTERM, self._on_sigterm)
                self._installed = True

    def uninstall(self) -> None:
        """Put everything back; a SIGTERM that came while closing is delivered now."""
        atexit.unregister(self._at_exit)
        # From another thread the handler cannot be taken back; it only passes on then.
        self._close = _closed
        if not self._installed or not _is_main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous)
        if self._late:
            os.kill(os.getpid(), self._late)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self._close(self._exit_reason())

    def _exit_reason(self) -> str:
        # The interpreter keeps the exception that ended the program.
        error = _last_error()
        if error is not None and error is not self._error_before:
            return f"exception: {type(error).__name__}"
        return "exit"

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous
        if os.getpid() == self._pid and not self._close("SIGTERM"):
            self._late = number
            return
        if callable(previous):
            previous(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _closed(reason: str) -> bool:
    """In place of `close` once everything is closed, so that nothing of it is kept alive."""
    return True


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it: then it is the program's, wherever it struck.

    Timeouts and preemption are often told to a training loop in this way.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """The code that a signal handler runs: of a function, method, partial or callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _last_error() -> object:
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
