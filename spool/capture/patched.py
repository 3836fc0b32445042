"""Which function torch means, where a program has put its own in the place of torch's.

torch does not give a function mode the function that reports a call, but whatever stands
under the name of that function by then. If that is somebody's replacement, it is under way
already: a mode that calls it runs it twice. The function that reports is to be run:

* one in Python reports by ``torch.overrides.handle_torch_function``, and its frame tells
  which it is;
* one in C is looked up in the class or module of its name, and torch has it elsewhere too.

Some functions in Python also report less than they were given (``l1_loss`` leaves out its
weights); their frames have the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType, MethodWrapperType
from typing import Any, NamedTuple

import torch
import torch.overrides
from torch._ops import OpOverload, OpOverloadPacket

from spool.apinames import C_MODULES, MADE_IN_C, is_torchs_module, is_torchs_own, made_in_c

logger = logging.getLogger("spool")

Function = Callable[..., Any]

_HANDLE = torch.overrides.handle_torch_function.__code__
_ONLY_REPORTS = "_torch_function"  # at the end of the name of what does so for its caller
_METHODS = vars(torch._tensor)
_FROM_C = (*MADE_IN_C, MethodWrapperType, OpOverload, OpOverloadPacket)
_HOMES: tuple[Any, ...] = (torch.Tensor, *C_MODULES)


class _Reporter(NamedTuple):
    """What is known of a function in Python that reported a call.

    Parameters
    ----------
    reported : callable
        What torch handed over for it.
    function : callable
        What is to be run.
    forgotten : tuple of str
        Its parameters that it does not report.
    """

    reported: Function
    function: Function
    forgotten: tuple[str, ...]


class Originals:
    """Finds the function that reported a call."""

    def __init__(self) -> None:
        self._reporters: dict[CodeType, _Reporter] = {}
        self._functions: dict[CodeType, FunctionType] = {}
        self._told: set[str] = set()

    def of(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> tuple[Function, dict[str, Any]]:
        """The function to run for `func`, and its keyword arguments.

        Parameters
        ----------
        func : callable
            As torch handed it to the mode.
        args, kwargs
            Likewise.
        caller : frame
            Of what called the mode.
        """
        if caller.f_code is not _HANDLE or caller.f_back is None:
            if type(func) not in _FROM_C or isinstance(getattr(func, "__self__", None), property):
                func = self._below(func)
            return func, kwargs
        reporter = caller.f_back
        name = reporter.f_code.co_name
        if name.endswith(_ONLY_REPORTS) and reporter.f_back is not None:
            reporter = reporter.f_back
        known = self._reporters.get(reporter.f_code)
        if known is None or known.reported is not func:
            known = self._learn(func, args, kwargs, reporter, name)
        if known.forgotten:
            here = reporter.f_locals
            kwargs = {**kwargs, **{name: here[name] for name in known.forgotten if name in here}}
        return known.function, kwargs

    def _learn(
        self,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reporter: FrameType,
        name: str,
    ) -> _Reporter:
        code, function = reporter.f_code, func
        replaced = _replaced(func, reporter, name)
        if replaced is not None:
            function = self._functions.setdefault(code, _function(reporter, replaced))
        reports_itself = getattr(function, "__code__", None) is code
        forgotten = _forgotten(code, args, kwargs) if reports_itself else ()
        known = self._reporters[code] = _Reporter(func, function, forgotten)
        return known

    def _below(self, func: Function) -> Function:
        """The function in C that `func` has replaced; `func` if it has replaced none."""
        if is_torchs_own(func):
            return func
        method = func if not isinstance(func, MethodWrapperType) else func.__self__
        for home in _HOMES:
            for name, value in list(vars(home).items()):
                if value is not method:
                    continue
                original = made_in_c(home, name)
                if original is None:
                    self._tell(home, name)
                elif method is func:
                    return original  # type: ignore[no-any-return]
                else:  # of a property, its __get__ or __set__
                    return getattr(original, func.__name__)  # type: ignore[no-any-return]
        return func

    def _tell(self, home: Any, name: str) -> None:
        if home is torch.Tensor or name in self._told:  # torch's class never had it: not replaced
            return
        self._told.add(name)
        logger.warning(
            "%s.%s is not torch's, and torch's own is found nowhere: while spool is enabled,"
            " what stands there runs twice; replace torch's public function instead",
            home.__name__,
            name,
        )


def _replaced(func: Function, reporter: FrameType, name: str) -> str | None:
    """The name under which torch found `func` where what reports should be; None if it may be.

    Parameters
    ----------
    func : callable
    reporter : frame
        Of the function that reports.
    name : str
        Its name, or that of the one that does it for it.
    """
    if getattr(func, "__code__", None) is reporter.f_code:
        return None
    names = reporter.f_globals
    if names.get(name) is func or (names is _METHODS and vars(torch.Tensor).get(name) is func):
        return name
    if not is_torchs_module(names) or is_torchs_own(func):
        return None
    # The forms of a function that returns more or less report what stands for all of them.
    found = (known for known, value in list(names.items()) if value is func)
    return next((known for known in found if name.startswith("_" + known)), None)


def _function(frame: FrameType, name: str) -> FunctionType:
    """The function that runs in a frame, by the name it has for its users."""
    code, here = frame.f_code, frame.f_locals
    closure = tuple(CellType(here[name]) for name in code.co_freevars)
    return FunctionType(code, frame.f_globals, name, None, closure)


def _forgotten(code: CodeType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Parameters of a function that are not among the arguments it reported."""
    positional = code.co_varnames[len(args) : code.co_argcount]
    end = code.co_argcount + code.co_kwonlyargcount
    keywords = code.co_varnames[code.co_argcount : end]
    return tuple(name for name in (*positional, *keywords) if name not in kwargs)
