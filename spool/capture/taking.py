"""A call's values, before and after it runs, on their way into the sink."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spool._json import dump_body
from spool.call import TensorRef, Tree
from spool.capture.arena import Arena, Block
from spool.capture.ledger import Ledger, amount
from spool.capture.mutation import Watch, watch
from spool.capture.naming import Identity
from spool.capture.sink import NoRoom, Record, Sink
from spool.capture.snapshot import PinnedPool, Transfers
from spool.capture.values import Tensors
from spool.capture.writers import Shard, Span
from spool.tensors import Plan

logger = logging.getLogger("spool")

TOO_LARGE_CALL = "larger than max_call_bytes"


@dataclass(slots=True)
class Half:
    """A call whose arguments are taken and whose result is to come.

    Parameters
    ----------
    identity : Identity
    index, order : int
        As in `spool.call.Call`.
    ledger : Ledger
        Of its step.
    watch : Watch
    transfers : Transfers
    blocks : list of Block
        What it holds of the arena.
    nbytes : int
        Tensor data so far.
    args, kwargs
        Trees.
    spans : list of Span
        Where the regions are.
    is_over : bool
        It is the sink's now, or given up.
    """

    identity: Identity
    index: int
    order: int
    ledger: Ledger
    watch: Watch
    transfers: Transfers
    blocks: list[Block] = field(default_factory=list)
    nbytes: int = 0
    args: list[Tree] = field(default_factory=list)
    kwargs: dict[str, Tree] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    is_over: bool = False


class Taker:
    """Takes the values of calls of one rank.

    Parameters
    ----------
    sink : Sink
    rank : int
    arena : Arena
    pool : PinnedPool
    max_call_bytes : int
        Calls that hold more are not captured.
    """

    def __init__(
        self, sink: Sink, rank: int, arena: Arena, pool: PinnedPool, max_call_bytes: int
    ) -> None:
        self._sink = sink
        self._rank = rank
        self._arena = arena
        self._pool = pool
        self._most = max_call_bytes
        self._named_large: set[str] = set()

    def take(
        self,
        identity: Identity,
        index: int,
        order: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Tensors,
        ledger: Ledger,
        held: int,
    ) -> Half:
        """Take a call's arguments, before it runs.

        Parameters
        ----------
        identity, index, order, ledger
            As in `Half`.
        args, kwargs
            Live.
        found : list of (path, Tensor)
            The tensors among them.
        held : int
            What calls that belong to this one hold already.

        Raises
        ------
        NoRoom
            There is no room for them. Not counted: the call may turn out to be none.
        Unsupported
            If a value cannot be stored.
        """
        watched = watch(identity, args, kwargs, found)
        half = Half(identity, index, order, ledger, watched, Transfers(self._arena, self._pool))
        trees = self._freeze(half, [*args, *kwargs.values()] if kwargs else args, held)
        half.args = trees[: len(args)]
        if kwargs:
            half.kwargs = dict(zip(kwargs, trees[len(args) :], strict=True))
        return half

    def complete(self, half: Half, result: Any, direction: str, context: Mapping[str, Any]) -> None:
        """Take the result and the written arguments, and hand the call over.

        Raises
        ------
        NoRoom
            There is no room for them.
        Unsupported
            If a value cannot be stored.
        """
        written = half.watch.written(result)
        trees = self._freeze(half, [result, *written.values()] if written else [result], 0)
        mutated: dict[str, TensorRef] = dict(zip(written, trees[1:], strict=True))
        overload = half.identity.overload
        api, index, step, order = half.identity.api, half.index, half.ledger.step, half.order
        identity = {"api": api, "index": index, "rank": self._rank, "step": step}
        identity |= {"order": order, "direction": direction}
        body = dump_body(
            identity,
            overload=overload._overloadname if overload is not None else "",
            args=half.args,
            kwargs=half.kwargs,
            outputs=trees[0],
            mutated=mutated,
            context=context,
        )
        shard = Shard((api, index, self._rank, step, order, direction), body, half.spans)
        transfers = half.transfers if half.transfers.pending else None
        half.is_over = True
        self._sink.submit(Record(shard, half.blocks, half.nbytes, transfers), half.ledger)

    def drop(self, half: Half) -> None:
        """Give up a call; what is handed over already is the sink's."""
        if half.is_over:
            return
        half.is_over = True
        half.transfers.drop()
        self._sink.free(half.blocks)

    def _freeze(self, half: Half, values: Any, held: int) -> list[Tree]:
        """Copy values into the arena; whatever fails, the call is given up."""
        try:
            plan = Plan(values, len(half.spans))
            total = half.nbytes + plan.nbytes
            if total > self._most:
                self._too_large(half, total)
                raise NoRoom(TOO_LARGE_CALL)
            held += half.nbytes
            half.blocks.append(self._sink.reserve(plan.nbytes, half.ledger, held))
            half.nbytes = total
            half.spans += half.transfers.copy(plan, half.blocks[-1])
        except BaseException:
            self.drop(half)
            raise
        return plan.trees

    def _too_large(self, half: Half, size: int) -> None:
        api = half.identity.api
        if api not in self._named_large:
            self._named_large.add(api)
            logger.warning(
                "%s.%d holds %s and is not captured; max_call_bytes is %s",
                api,
                half.index,
                amount(size),
                amount(self._most),
            )
