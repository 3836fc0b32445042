"""Which functions are calls, their names, and the counters of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from spool.apinames import name_of
from spool.capture.denylist import COLLECTIVES, CONVERSIONS, DENIED, is_silent
from spool.names import base_name

# Enough for every function of torch; a program that keeps making new ones must not grow it.
_MAX_KNOWN = 20_000


class Kind(Enum):
    """What the interceptor does with a function."""

    CALL = "captured"
    CONVERSION = "captured if it converts"
    LIST = "captured per list element"
    SILENT = "not a call"
    UNKNOWN = "not one that replay knows"
    DISTRIBUTED = "distributed"
    CUSTOM = "custom operator"


@dataclass(frozen=True)
class Identity:
    """A function's API name and kind; the name is empty unless it is captured.

    Parameters
    ----------
    kind : Kind
    api : str
    overload : OpOverload or None
        Of an operator that torch's dispatcher reported.
    """

    kind: Kind
    api: str = ""
    overload: OpOverload | None = None

    @property
    def reason(self) -> str | None:
        """Why calls of this function are left alone and counted; None if they are not."""
        if self.kind is Kind.UNKNOWN:
            return f"operator without replay: {self.api}"
        return self.kind.value if self.kind in (Kind.DISTRIBUTED, Kind.CUSTOM) else None


def _identify(func: Any) -> Identity:
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _identify_operator(func)
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        return Identity(Kind.DISTRIBUTED)
    api = name_of(func)
    if api is not None:
        return _by_name(api)
    if isinstance(func, BuiltinFunctionType) and func.__name__.startswith("_"):
        return _identify_private(func.__name__)
    return Identity(Kind.SILENT)


def _identify_private(name: str) -> Identity:
    """A private function of torch: counted if it is an operator that computes."""
    overloads = getattr(torch.ops.aten, name, None)
    if overloads is None or is_silent(getattr(overloads, overloads.overloads()[0])):
        return Identity(Kind.SILENT)
    return Identity(Kind.UNKNOWN, f"aten.{name}")


def _identify_operator(func: OpOverload | OpOverloadPacket) -> Identity:
    namespace = _namespace(func)
    if namespace in COLLECTIVES:
        return Identity(Kind.DISTRIBUTED)
    if namespace in ("prim", "prims", "profiler"):
        return Identity(Kind.SILENT)
    overload = func if isinstance(func, OpOverload) else None
    if namespace == "aten" and overload is not None:
        if is_silent(overload):
            return Identity(Kind.SILENT)
        if name_of(overload) is None:
            return Identity(Kind.UNKNOWN, str(overload).removesuffix(".default"))
    elif namespace != "npu":  # which overload of ATen, would have to be told from the arguments
        return Identity(Kind.CUSTOM)
    return replace(_by_name(str(name_of(func))), overload=overload)


def _by_name(api: str) -> Identity:
    base = base_name(api)
    if base in DENIED:
        return Identity(Kind.SILENT)
    if base in CONVERSIONS:
        return Identity(Kind.CONVERSION, api)
    if base.startswith(("_foreach_", "_fused_")):
        return Identity(Kind.LIST, api)
    return Identity(Kind.CALL, api)


def _namespace(func: OpOverload | OpOverloadPacket) -> str:
    packet = func.overloadpacket if isinstance(func, OpOverload) else func
    return str(packet._qualified_op_name).partition("::")[0]


class Names:
    """Identities of functions, remembered."""

    def __init__(self) -> None:
        self._known: dict[Any, Identity] = {}

    def identify(self, func: Any) -> Identity:
        """Name and kind of a function that the function protocol reported."""
        try:
            identity = self._known.get(func)
        except TypeError:  # unhashable: not a function of torch
            return Identity(Kind.SILENT)
        if identity is None:
            identity = _identify(func)
            if len(self._known) < _MAX_KNOWN:
                self._known[func] = identity
        return identity


class Counters:
    """Uses of each API in one step, and the order of calls.

    Every use is counted, wanted by the filters or not, so that a call has the
    same name and order under any filter.
    """

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._order = 0

    def count(self, api: str, elements: int = 1) -> tuple[int, int]:
        """Count one call of `elements` elements.

        Returns
        -------
        order, index : int
            Of the call in the step, and of its first element among uses of `api`.
        """
        order, index = self._order, self._uses[api]
        self._order += 1
        self._uses[api] += elements
        return order, index
