"""The sink: calls on their way to the writers, bounded by bytes, and steps closed behind them.

The trainer takes room in the arena *before* it copies anything, so that memory is bounded
also while a call is being snapshot. Where there is none it waits, at most `max_wait`; then
the call is dropped and counted, and as long as nothing moves later calls do not wait
again. When the last call of a finished step is published, the step's marker follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from spool.capture.arena import Arena, Block
from spool.capture.ledger import Ledger
from spool.capture.snapshot import Landings, Transfers
from spool.capture.watermark import Watermark
from spool.capture.writers import Closing, Done, Pull, Shard, Task

logger = logging.getLogger("spool")

NO_ROOM = "queue full"
SPOOL_FULL = "spool full"
TOO_LARGE = "larger than queue_bytes"
WRITE_FAILED = "write failed"
_PATIENT_SECONDS = 5.0


class Backend(Protocol):
    """What writes: `Writers` here, or `RemoteWriters` in a process of their own."""

    def wake(self) -> None:
        """There is something to pull."""

    def stop(self) -> None:
        """Do nothing more."""

    def forget(self) -> None:
        """In a forked child: let go of what is not its own."""

    @property
    def disk_full(self) -> bool:
        """Whether a writer waits for a full disk."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread here still reads the arena, stuck in a write since before `stop`."""

    @property
    def process(self) -> int:
        """Number of the process that writes, if it is another; else 0."""


class NoRoom(Exception):
    """There is no room for a call, which is dropped and counted.

    Parameters
    ----------
    reason : str
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Record:
    """A captured call on its way to the store.

    Parameters
    ----------
    shard : Shard
    blocks : list of Block
        What it holds of the arena.
    nbytes : int
        Tensor data.
    transfers : Transfers or None
        What has not arrived yet.
    """

    shard: Shard
    blocks: list[Block]
    nbytes: int
    transfers: Transfers | None = None


class Sink:
    """Accepts records of one rank and has them published.

    Parameters
    ----------
    rank : int
    arena : Arena
        Memory that records wait in.
    queue_bytes : int
        Most bytes of it that are held at a time.
    max_wait : float
        Most seconds that `reserve` blocks.
    watermark : Watermark
        Tells whether the spool has room.
    start : callable
        Makes what writes, given the function to pull tasks, with their numbers, the function
        to tell what became of one, and the lock under which to pull.
    """

    def __init__(
        self,
        rank: int,
        arena: Arena,
        *,
        queue_bytes: int,
        max_wait: float,
        watermark: Watermark,
        start: Callable[[Pull, Callable[[Done], None], Any], Backend],
    ) -> None:
        self._rank = rank
        self._arena = arena
        self._limit = queue_bytes
        self._max_wait = max_wait
        self._watermark = watermark
        # Re-entrant: a signal handler that closes the session may interrupt the trainer here.
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)  # for who waits for room or for the end
        # What the trainer hands over it hands over by one append, so that an exception of a
        # signal handler finds it done or not begun; a record of None seals its step.
        self._inbox: deque[tuple[Record | None, Ledger]] = deque()
        self._pending: dict[int, tuple[Record | None, Ledger]] = {}
        self._ready: list[tuple[int, Task]] = []
        self._number = 0
        self._held = 0
        self._stalled = False
        self._stopping = False
        self._progress = 0
        self._ledgers: dict[int, Ledger] = {}
        self._write_failures = 0
        self._waiting = False
        self._landings = Landings(self._landed)
        watermark.on_change(self._wake)
        self.backend = start(self._pull, self._done, self._lock)

    # The trainer's side.

    def ledger(self, step: int) -> Ledger:
        """The step's ledger, begun if it is new."""
        with self._lock:
            return self._ledgers.setdefault(step, Ledger(step))

    def ledgers(self) -> list[Ledger]:
        """All ledgers, by step; takes no lock."""
        return [ledger for _, ledger in sorted(self._ledgers.items())]

    def skip(self, ledger: Ledger, reason: str, *, dropped: bool = False, calls: int = 1) -> None:
        """Count calls that are not captured."""
        with self._lock:
            ledger.skipped[reason] += calls
            if dropped:
                ledger.dropped += calls

    def reserve(self, nbytes: int, ledger: Ledger, held: int = 0) -> Block:
        """Take room for `nbytes`, waiting for it if there is none.

        Parameters
        ----------
        nbytes : int
        ledger : Ledger
            Of the step; its waiting time is counted.
        held : int
            What the same call holds already.

        Raises
        ------
        NoRoom
        """
        if nbytes + held > self._limit or self._watermark.never(nbytes + held):
            raise NoRoom(TOO_LARGE)
        with self._lock:
            obstacle = self._obstacle(nbytes)
            if obstacle is not None:
                obstacle = self._wait_for_room(nbytes, ledger, obstacle)
            block = self._arena.take(nbytes) if obstacle is None else None
            if block is None:
                raise NoRoom(obstacle or NO_ROOM)
            self._held += block.nbytes
            if self._stalled:
                self._stalled = not self._relaxed()
            return block

    def free(self, blocks: list[Block]) -> None:
        """Give room back."""
        with self._lock:
            for block in blocks:
                self._arena.give(block)
                self._held -= block.nbytes
            self._state.notify_all()

    def _relaxed(self) -> bool:
        """Whether there is room enough that waiting for some is worth while again.

        At the very edge small calls still fit: they must not make every large one
        between them wait the longest time again.
        """
        return self._held <= self._limit * 3 // 4 and self._watermark.relaxed(self._held)

    def _obstacle(self, nbytes: int) -> str | None:
        if not self._watermark.has_room(nbytes + self._held):
            return SPOOL_FULL
        # With nothing in the writers' hands no room will ever be made: the call goes on.
        if self._held + nbytes > self._limit and (self._inbox or self._pending):
            return NO_ROOM
        return None

    def _wait_for_room(self, nbytes: int, ledger: Ledger, obstacle: str) -> str | None:
        begin = time.monotonic()
        found: str | None = obstacle
        self._waiting = True
        while found is not None and not self._stopping:
            left = begin + self._max_wait - ledger.in_vain - time.monotonic()
            if self._stalled or left <= 0 or (found == SPOOL_FULL and self._watermark.drop):
                break
            self._state.wait(min(left, _PATIENT_SECONDS))
            found = self._obstacle(nbytes)
            if found and not ledger.said_waiting and time.monotonic() - begin >= _PATIENT_SECONDS:
                ledger.said_waiting = True
                logger.warning(
                    "%s: training waits for room, at most %.0f s; see whether the workflow runs",
                    found,
                    self._max_wait,
                )
        self._waiting = False
        waited = time.monotonic() - begin
        ledger.blocked += waited
        if found is not None:
            ledger.in_vain += waited
        if found is not None and not self._stalled:
            self._stalled = True
            logger.warning(
                "%s: calls are dropped and counted until there is room (waited %.1f s)",
                found,
                waited,
            )
        return found

    def submit(self, record: Record, ledger: Ledger) -> None:
        """Hand a record to the writers; its room is freed when it is published."""
        if self._stopping:
            self.free(record.blocks)
            return
        self._inbox.append((record, ledger))
        self.backend.wake()

    def seal(self, ledger: Ledger, *, whole: bool = True) -> None:
        """No further call of the step will come; its marker follows the last one."""
        ledger.whole = whole
        self._inbox.append((None, ledger))
        self.backend.wake()

    def untouched(self, ledger: Ledger) -> bool:
        """Whether nothing of a step was counted at all."""
        return ledger.untouched and not any(other is ledger for _, other in self._inbox.copy())

    def line(self, ledger: Ledger) -> str:
        """What a step holds by now, for people."""
        waiting = [record for record, other in self._inbox.copy() if other is ledger and record]
        return ledger.line(len(waiting), sum(record.nbytes for record in waiting))

    def drain(self, patience: float) -> bool:
        """Wait until everything accepted is published and sealed steps are closed.

        Parameters
        ----------
        patience : float
            Seconds without any progress after which to give up, so that a dead
            mount cannot keep the program from ending.

        Returns
        -------
        bool
            Whether everything is done.
        """
        with self._lock:
            seen, since = self._progress, time.monotonic()
            while self._inbox or self._pending:
                if self._progress != seen:
                    seen, since = self._progress, time.monotonic()
                left = since + patience - time.monotonic()
                if left <= 0:
                    return False
                self._state.wait(min(left, 1.0))
            return True

    def orphan(self) -> None:
        """In a forked child, which may be in the middle of a call: write to nothing shared."""
        # Threads that are not here may have held the lock.
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        self._stopping = True
        self._arena.retire()
        self.backend.forget()

    def stop(self) -> None:
        """End the writers; what is still pending then is counted as dropped."""
        with self._lock:
            self._pull()
            self._stopping = True
        self.backend.stop()
        self._landings.stop()
        with self._lock:
            # One at a time: an exception of a signal handler may strike, and it is begun again.
            while self._pending:
                record, ledger = self._pending.popitem()[1]
                if record is not None:
                    ledger.pending -= 1
                    ledger.dropped += 1
                    ledger.skipped[WRITE_FAILED] += 1
            self._state.notify_all()

    @property
    def blocked(self) -> bool:
        """Whether the trainer waits for room, or a writer for a full disk."""
        return self._waiting or self.backend.disk_full

    def _wake(self) -> None:
        with self._lock:
            self._state.notify_all()

    # The writers' side.

    def _pull(self) -> list[tuple[int, Task]]:
        """Take in what was handed over; the tasks that can be done now."""
        while self._inbox:
            record, ledger = self._inbox.popleft()
            if record is None:
                ledger.sealed = True
                self._close_if_done(ledger)
                continue
            ledger.accepted += 1
            ledger.accepted_bytes += record.nbytes
            ledger.pending += 1
            number = self._add(record, ledger)
            if record.transfers is None:
                self._ready.append((number, record.shard))
            else:
                self._landings.add(record.transfers, (number, record.shard))
        ready, self._ready = self._ready, []
        return ready

    def _add(self, record: Record | None, ledger: Ledger) -> int:
        number = self._number
        self._number += 1
        self._pending[number] = record, ledger
        return number

    def _close_if_done(self, ledger: Ledger) -> None:
        if ledger.sealed and not ledger.pending and not ledger.closing and not self._stopping:
            ledger.closing = True
            counts = ledger.counts() if ledger.whole else None
            number = self._add(None, ledger)
            self._ready.append((number, Closing(self._rank, ledger.step, counts)))
            self.backend.wake()

    def _landed(self, what: tuple[int, Task], error: str) -> None:
        if error:
            self._done(Done(what[0], error=error))
            return
        with self._lock:
            self._ready.append(what)
        self.backend.wake()

    def _done(self, done: Done) -> None:
        with self._lock:
            if done.number not in self._pending:
                return
            record, ledger = self._pending.pop(done.number)
            self._progress += 1
            if record is None:
                ledger.closed = True
                if done.error:
                    logger.error("step %d could not be closed: %s", ledger.step, done.error)
            else:
                ledger.pending -= 1
                if done.error:
                    self._failed(record.shard, done.error)
                    ledger.dropped += 1
                    ledger.skipped[WRITE_FAILED] += 1
                else:
                    ledger.shards += 1
                    ledger.bytes += done.stored
                    self._watermark.wrote(done.stored)
                self.free(record.blocks)
            self._close_if_done(ledger)
            self._state.notify_all()

    def _failed(self, shard: Shard, error: str) -> None:
        self._write_failures += 1
        if self._write_failures == 1:
            logger.error(
                "%s.%d could not be written and is dropped (later failures are only counted): %s",
                *shard.identity[:2],
                error,
            )
