"""One call from its arguments to a record in the sink.

Whatever goes wrong in here costs that call and nothing else: it is counted, the
first one is logged with its traceback, and training goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from spool.call import Call, CallContext, Region, TensorRef, Tree
from spool.capture.context import Places, Settings
from spool.capture.exits import raised_by_handler
from spool.capture.filters import Filters
from spool.capture.ledger import Ledger, amount
from spool.capture.leftalone import FUNCTORCH, in_transform, tracing, why_left_alone
from spool.capture.listcalls import Arguments, count_elements, split_arguments, split_result
from spool.capture.mutation import Watch, watch
from spool.capture.naming import Counters, Identity, Kind, Names
from spool.capture.origins import Place, edges, mark, next_node
from spool.capture.sink import Record, Sink
from spool.capture.snapshot import PinnedPool, Transfers
from spool.capture.values import (
    Tensors,
    call_tensors,
    is_distributed,
    local_shard,
    map_tensors,
    stored_bytes,
    tensors,
)
from spool.tensors import Unsupported

logger = logging.getLogger("spool")

TOO_LARGE_CALL = "larger than max_call_bytes"
HOOK_FAILED = "hook failed"


@dataclass
class _Half:
    """A call whose arguments are taken and whose result is to come."""

    identity: Identity
    index: int
    order: int
    ledger: Ledger
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    regions: list[Region]
    transfers: Transfers
    room: int
    watch: Watch
    is_submitted: bool = False


@dataclass
class _Pending:
    """What is kept of one use of an API while it runs: a half per captured element."""

    halves: list[tuple[int, _Half]]
    elements: int
    is_list: bool
    own_input: object
    context: CallContext
    direction: str = "forward"
    origin: Place | None = None
    first_node: int = 0


class Recorder:
    """Captures the calls of one rank, while `active`.

    Parameters
    ----------
    sink : Sink
    rank : int
    filters : Filters
    max_call_bytes : int
    pool : PinnedPool
    backward : bool
        Whether operators of the autograd engine are captured.
    """

    def __init__(
        self,
        sink: Sink,
        rank: int,
        filters: Filters,
        max_call_bytes: int,
        pool: PinnedPool,
        backward: bool,
    ) -> None:
        self.active = False
        self._backward = backward
        self._sink = sink
        self._rank = rank
        self._filters = filters
        self._max_call_bytes = max_call_bytes
        self._pool = pool
        self._names = Names()
        self._places = Places()
        self._settings = Settings()
        self._lock = threading.RLock()
        self._named_large: set[str] = set()
        self._failures = 0
        self.ledger = sink.ledger(0)
        self._counters = Counters()

    def new_step(self, step: int) -> None:
        """Count from zero again, into the ledger of `step`."""
        with self._lock:
            self.ledger = self._sink.ledger(step)
            self._counters = Counters()
            self._filters.new_step()

    def unmet(self) -> list[str]:
        """What the user asked for and no call was: a line each."""
        return self._filters.unmet()

    def wants_engine(self) -> bool:
        """Whether operators of the autograd engine, started now, are captured."""
        if not self.active:
            return False
        reason = tracing() or (FUNCTORCH if in_transform() else None)
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
                reason = why_left_alone(identity, found, self._places, in_engine=in_engine)
                if reason is not None:
                    self._sink.skip(self.ledger, reason)
                    return None
                return self._take(identity, args, kwargs, found, in_engine)
        except Unsupported as error:
            self._sink.skip(self.ledger, error.reason)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._failed("before", func)
        return None

    def _take(
        self,
        identity: Identity,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Tensors,
        in_engine: bool,
    ) -> _Pending | None:
        if any(is_distributed(tensor) for _, tensor in found):
            args, kwargs = map_tensors(args, local_shard), map_tensors(kwargs, local_shard)
        api, is_list = identity.api, identity.kind is Kind.LIST
        elements = count_elements(args, kwargs) if is_list else 1
        with self._lock:
            order, first = self._counters.count(api, elements)
            wanted = [n for n in range(elements) if self._filters.wants(api, first + n)]
            ledger = self.ledger
        if not wanted and not self._marks():
            return None
        parts = split_arguments(api, args, kwargs, elements) if is_list else [(args, kwargs)]
        device = str(found[0][1].device) if found else "cpu"
        place = self._places.in_engine() if in_engine else self._places.here()
        context = self._settings.context(place, device)
        pending = _Pending([], elements, is_list, _own_input(identity, args), context)
        pending.direction = "backward" if in_engine else "forward"
        if self._marks():
            pending.origin = place if in_engine else replace(place, forward=f"{api}.{first}")
            pending.first_node = next_node()
        try:
            for number in wanted:
                held = sum(half.room for _, half in pending.halves)
                half = self._half(identity, first + number, order, parts[number], ledger, held)
                if half is not None:
                    pending.halves.append((number, half))
        except BaseException:
            self._abandon(pending)
            raise
        return pending if pending.halves or pending.origin is not None else None

    def _marks(self) -> bool:
        """Whether a call leaves its place on the graph, for the engine to find."""
        return self._backward and torch.is_grad_enabled()

    def _too_large(self, name: str, size: int, ledger: Ledger) -> None:
        self._sink.skip(ledger, TOO_LARGE_CALL, dropped=True)
        api = name.rpartition(".")[0]
        if api not in self._named_large:
            self._named_large.add(api)
            logger.warning(
                "%s holds %s and is not captured; max_call_bytes is %s",
                name,
                amount(size),
                amount(self._max_call_bytes),
            )

    def _half(
        self,
        identity: Identity,
        index: int,
        order: int,
        arguments: Arguments,
        ledger: Ledger,
        held: int,
    ) -> _Half | None:
        """Take the arguments of one element's call; None if it may not be captured."""
        args, kwargs = arguments
        found = call_tensors(args, kwargs)
        room = stored_bytes([tensor for _, tensor in found])
        if room > self._max_call_bytes:
            self._too_large(f"{identity.api}.{index}", room, ledger)
            return None
        if self._refused(self._sink.reserve(room, ledger, held), ledger):
            return None
        transfers = Transfers(self._pool)
        try:
            trees, regions = transfers.freeze([*args, *kwargs.values()])
        except BaseException:
            self._sink.adjust(room, 0)
            transfers.release()
            raise
        exact = sum(region.nbytes for region in regions)
        self._sink.adjust(room, exact)
        return _Half(
            identity=identity,
            index=index,
            order=order,
            ledger=ledger,
            args=tuple(trees[: len(args)]),
            kwargs=dict(zip(kwargs, trees[len(args) :], strict=True)),
            regions=regions,
            transfers=transfers,
            room=exact,
            watch=watch(identity, args, kwargs, found),
        )

    def _refused(self, reason: str | None, ledger: Ledger) -> bool:
        if reason is not None:
            self._sink.skip(ledger, reason, dropped=True)
        return reason is not None

    # After the call.

    def _after(self, pending: _Pending, result: Any) -> None:
        try:
            with torch._C.DisableTorchFunction():
                if result is NotImplemented or _nothing_done(pending.own_input, result):
                    self._abandon(pending)
                    return
                if pending.origin is not None:
                    mark(edges(result), pending.first_node, pending.origin)
                if any(is_distributed(tensor) for _, tensor in tensors(result, "")):
                    result = map_tensors(result, local_shard)
                parts = split_result(result, pending.elements) if pending.is_list else [result]
                while pending.halves:
                    number, half = pending.halves[0]
                    self._complete(half, parts[number], pending)
                    pending.halves.pop(0)
        except Unsupported as error:
            self._sink.skip(self.ledger, error.reason, calls=len(pending.halves))
            self._abandon(pending)
        except Exception as error:
            api = pending.halves[0][1].identity.api if pending.halves else ""
            self._abandon(pending)
            if raised_by_handler(error):
                raise
            self._failed("after", api)
        except BaseException:  # an interrupt of the program's own
            self._abandon(pending)
            raise

    def _complete(self, half: _Half, result: Any, pending: _Pending) -> None:
        """Take the result and the written arguments, and hand the call over."""
        written = half.watch.written(result)
        found = [tensor for _, tensor in tensors(result, "")]
        size = stored_bytes([*found, *written.values()])
        if half.room + size > self._max_call_bytes:
            self._too_large(f"{half.identity.api}.{half.index}", half.room + size, half.ledger)
            self._drop(half)
            return
        if self._refused(self._sink.reserve(size, half.ledger, half.room), half.ledger):
            self._drop(half)
            return
        half.room += size
        trees, regions = half.transfers.freeze([result, *written.values()], len(half.regions))
        regions = [*half.regions, *regions]
        exact = sum(region.nbytes for region in regions)
        self._sink.adjust(half.room, exact)
        half.room = exact
        mutated: dict[str, TensorRef] = dict(zip(written, trees[1:], strict=True))
        overload = half.identity.overload
        call = Call(
            api=half.identity.api,
            index=half.index,
            rank=self._rank,
            step=half.ledger.step,
            order=half.order,
            direction=pending.direction,
            args=half.args,
            kwargs=half.kwargs,
            outputs=trees[0],
            mutated=mutated,
            context=pending.context,
            regions=regions,
            overload=overload._overloadname if overload is not None else "",
        )
        half.is_submitted = True
        self._sink.submit(Record(call, half.transfers, half.room), half.ledger)

    def _abandon(self, pending: _Pending) -> None:
        for _, half in pending.halves:
            self._drop(half)
        pending.halves.clear()

    def _drop(self, half: _Half) -> None:
        """Give up a call; what is handed over already is the sink's."""
        if half.is_submitted:
            return
        room, half.room = half.room, 0
        self._sink.adjust(room, 0)
        half.transfers.release()

    def _failed(self, when: str, what: object) -> None:
        """Count a fault of ours; must itself never fail."""
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
