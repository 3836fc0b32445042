"""One call from its arguments to a record in the sink.

Whatever goes wrong in here costs that call and nothing else: it is counted, the
first one is logged with its traceback, and training goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spool.capture.castcache import CHANGED, CastCache
from spool.capture.context import Places, Settings
from spool.capture.exits import raised_by_handler
from spool.capture.filters import Filters
from spool.capture.ledger import Ledger
from spool.capture.leftalone import COMPILED, FUNCTORCH, foreign, in_transform, tracing
from spool.capture.listcalls import count_elements, split_arguments, split_result
from spool.capture.naming import Counters, Identity, Kind, Names
from spool.capture.origins import Place, edges, mark, next_node
from spool.capture.sink import NoRoom, Sink
from spool.capture.taking import Half, Taker
from spool.capture.values import (
    Tensors,
    call_tensors,
    is_distributed,
    local_shard,
    map_tensors,
    tensors,
)
from spool.tensors import Unsupported

logger = logging.getLogger("spool")

HOOK_FAILED = "hook failed"


@dataclass(slots=True)
class _Pending:
    """What is kept of one use of an API while it runs: a half per captured element."""

    halves: list[tuple[int, Half]]
    elements: int
    is_list: bool
    own_input: object
    context: Mapping[str, Any]
    ledger: Ledger
    refused: list[str] = field(default_factory=list)
    direction: str = "forward"
    origin: Place | None = None
    first_node: int = 0


class Recorder:
    """Captures the calls of one rank, while `active`.

    Parameters
    ----------
    sink : Sink
    filters : Filters
    taker : Taker
    backward : bool
        Whether operators of the autograd engine are captured.
    """

    def __init__(
        self, sink: Sink, filters: Filters, taker: Taker, backward: bool, step: int
    ) -> None:
        self.active = False
        self._backward = backward
        self._sink = sink
        self._filters = filters
        self._taker = taker
        self._names = Names()
        self._places = Places()
        self._settings = Settings()
        self._casts = CastCache()
        self._lock = threading.RLock()
        self._failures = 0
        self.ledger = sink.ledger(step)
        self._counters = Counters()

    def new_step(self, step: int) -> None:
        """Count from zero again, into the ledger of `step`."""
        with self._lock:
            self.ledger = self._sink.ledger(step)
            self._counters = Counters()
            self._filters.new_step()

    def orphan(self) -> None:
        """In a forked child: threads that are not here may have held the lock."""
        self.active = False
        self._lock = threading.RLock()

    def unmet(self) -> list[str]:
        """What the user asked for and no call was: a line each."""
        return self._filters.unmet()

    def wants_engine(self) -> bool:
        """Whether operators of the autograd engine, started now, are captured."""
        if not self.active:
            return False
        try:
            reason = tracing() or (FUNCTORCH if in_transform() else None)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.failed("before", "the autograd engine")
            return False
        if reason is not None:
            self._sink.skip(self.ledger, reason)
        return reason is None

    def run(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_engine: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a function that torch reported, captured if it is a call.

        The function's result is returned as it is, and its exceptions propagate.

        Parameters
        ----------
        func : callable
            From the function protocol; from the dispatcher if `in_engine`.
        args, kwargs
            Live.
        in_engine : callable, optional
            What runs it instead, if the autograd engine does.
        """
        call = in_engine or func
        pending = self._before(func, args, kwargs, in_engine is not None)
        if pending is None:
            return call(*args, **kwargs)
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self._abandon(pending)
            raise
        self._after(pending, result)
        return result

    # Before the call.

    def _before(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_engine: bool,
    ) -> _Pending | None:
        try:
            with torch._C.DisableTorchFunction():
                identity = self._names.identify(func)
                if identity.kind is Kind.SILENT:
                    return None
                found = call_tensors(args, kwargs)
                reason = identity.reason or tracing()
                place = None
                if reason is None:
                    place = self._places.of_call(in_engine=in_engine)
                    reason = COMPILED if place is None else foreign(identity, found)
                    if reason is None and not in_engine and self._casts.is_stale(identity, found):
                        reason = CHANGED
                if reason is not None or place is None:
                    self._sink.skip(self.ledger, reason or COMPILED)
                    return None
                return self._take(identity, args, kwargs, found, place, in_engine)
        except Unsupported as error:
            self._sink.skip(self.ledger, error.reason)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.failed("before", func)
        return None

    def _take(
        self,
        identity: Identity,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Tensors,
        place: Place,
        in_engine: bool,
    ) -> _Pending | None:
        if any(is_distributed(tensor) for _, tensor in found):
            args, kwargs = map_tensors(args, local_shard), map_tensors(kwargs, local_shard)
            found = call_tensors(args, kwargs)
        api, is_list = identity.api, identity.kind is Kind.LIST
        elements = count_elements(args, kwargs) if is_list else 1
        with self._lock:
            order, first = self._counters.count(api, elements)
            wanted = [n for n in range(elements) if self._filters.wants(api, first + n)]
            ledger = self.ledger
        marks = self._backward and torch.is_grad_enabled()
        if not wanted and not marks:
            return None
        device = str(found[0][1].device) if found else "cpu"
        context = self._settings.context(place, device)
        pending = _Pending([], elements, is_list, _own_input(identity, args), context, ledger)
        if in_engine:
            pending.direction = "backward"
        if marks:
            pending.origin = place
            if not in_engine:
                pending.origin = Place(place.module, place.stack, f"{api}.{first}")
            pending.first_node = next_node()
        parts = split_arguments(api, args, kwargs, elements) if is_list else [(args, kwargs)]
        try:
            held = 0
            for number in wanted:
                part = parts[number]
                tensors_of_part = call_tensors(*part) if is_list else found
                try:
                    half = self._taker.take(
                        identity, first + number, order, *part, tensors_of_part, ledger, held
                    )
                except NoRoom as error:
                    pending.refused.append(error.reason)
                    continue
                held += half.nbytes
                pending.halves.append((number, half))
        except BaseException:
            self._abandon(pending)
            raise
        return pending if pending.halves or pending.refused or marks else None

    # After the call.

    def _after(self, pending: _Pending, result: Any) -> None:
        try:
            with torch._C.DisableTorchFunction():
                if result is NotImplemented or _nothing_done(pending.own_input, result):
                    self._abandon(pending)
                    return
                for reason in pending.refused:
                    self._sink.skip(pending.ledger, reason, dropped=True)
                if pending.origin is not None:
                    mark(edges(result), pending.first_node, pending.origin)
                if any(is_distributed(tensor) for _, tensor in tensors(result, "")):
                    result = map_tensors(result, local_shard)
                parts = split_result(result, pending.elements) if pending.is_list else [result]
                while pending.halves:
                    number, half = pending.halves[0]
                    try:
                        self._taker.complete(
                            half, parts[number], pending.direction, pending.context
                        )
                    except NoRoom as error:
                        self._sink.skip(pending.ledger, error.reason, dropped=True)
                    pending.halves.pop(0)
        except Unsupported as error:
            self._sink.skip(self.ledger, error.reason, calls=len(pending.halves))
            self._abandon(pending)
        except Exception as error:
            api = pending.halves[0][1].identity.api if pending.halves else ""
            self._abandon(pending)
            if raised_by_handler(error):
                raise
            self.failed("after", api)
        except BaseException:  # an interrupt of the program's own
            self._abandon(pending)
            raise

    def _abandon(self, pending: _Pending) -> None:
        for _, half in pending.halves:
            self._taker.drop(half)
        pending.halves.clear()

    def failed(self, when: str, what: object) -> None:
        """Count a fault of ours, where it is handled; must itself never fail."""
        self._sink.skip(self.ledger, HOOK_FAILED, dropped=True)
        self._failures += 1
        if self._failures == 1:
            logger.exception(
                "capture failed %s a call of %s; the call is lost, training goes on "
                "(later failures are only counted)",
                when,
                what,
            )


def _own_input(identity: Identity, args: tuple[Any, ...]) -> object:
    """The input of a conversion, which returns it if there is nothing to convert."""
    return args[0] if identity.kind is Kind.CONVERSION and args else None


def _nothing_done(own_input: object, result: object) -> bool:
    """Whether a conversion computed nothing: same tensor, or a copy of its bits."""
    if own_input is None or not isinstance(own_input, torch.Tensor):
        return False
    if result is own_input or not isinstance(result, torch.Tensor):
        return True
    return result.dtype == own_input.dtype and result.stride() == own_input.stride()
