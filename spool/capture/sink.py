"""The sink: a queue bounded by bytes, writer threads, and steps closed behind them.

The trainer reserves room *before* it copies anything, so that memory is bounded
also while a call is being snapshot. Where there is none it waits, at most
`max_wait`; then the call is dropped and counted, and as long as nothing moves
later calls do not wait again. Writers encode and publish; the one that publishes
the last call of a finished step writes the step's marker.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from spool.call import Call
from spool.capture.ledger import Ledger
from spool.capture.snapshot import Transfers
from spool.capture.watermark import Watermark
from spool.store import Store

logger = logging.getLogger("spool")

NO_ROOM = "queue full"
SPOOL_FULL = "spool full"
TOO_LARGE = "larger than queue_bytes"
WRITE_FAILED = "write failed"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 0.5


@dataclass
class Record:
    """A captured call on its way to the store.

    Parameters
    ----------
    call : Call
        Its regions may still be filling until `transfers` has waited.
    transfers : Transfers
    room : int
        Bytes that it holds of the queue.
    """

    call: Call
    transfers: Transfers
    room: int


class Sink:
    """Accepts records of one rank and publishes them into a store.

    Parameters
    ----------
    store : Store
    rank : int
    queue_bytes : int
        Most bytes of tensor data that are held at a time.
    writers : int
        Writer threads.
    max_wait : float
        Most seconds that `reserve` blocks, and that a writer waits for a full disk.
    watermark : Watermark
        Tells whether the spool has room.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        queue_bytes: int,
        writers: int,
        max_wait: float,
        watermark: Watermark,
    ) -> None:
        self._store = store
        self._rank = rank
        self._limit = queue_bytes
        self._max_wait = max_wait
        self._watermark = watermark
        # Re-entrant: a signal handler that closes the session may interrupt the trainer here.
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)  # for who waits for room or for the end
        self._work = threading.Condition(self._lock)  # for writers that wait for a record
        self._queue: deque[tuple[Record | None, Ledger]] = deque()
        self._held = 0
        self._writing = 0
        self._stalled = False
        self._stopping = False
        self._progress = 0
        self._ledgers: dict[int, Ledger] = {}
        self._write_failures = 0
        self._waiting = False
        self._disk_full = 0
        self._alive = writers
        watermark.on_change(self._wake)
        for number in range(writers):
            threading.Thread(target=self._run, name=f"spool-writer-{number}", daemon=True).start()

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

    def reserve(self, nbytes: int, ledger: Ledger, held: int = 0) -> str | None:
        """Take room for `nbytes`, waiting for it if there is none.

        Parameters
        ----------
        nbytes : int
        ledger : Ledger
            Of the step; its waiting time is counted.
        held : int
            What the same call holds already.

        Returns
        -------
        str or None
            Why there is no room; None if it is taken.
        """
        if nbytes + held > self._limit or self._watermark.never(nbytes + held):
            return TOO_LARGE
        with self._lock:
            obstacle = self._obstacle(nbytes)
            if obstacle is not None:
                obstacle = self._wait_for_room(nbytes, ledger, obstacle)
            if obstacle is None:
                self._held += nbytes
                self._stalled = self._stalled and not self._relaxed()
            return obstacle

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
        if self._held + nbytes > self._limit and (self._queue or self._writing):
            return NO_ROOM
        return None

    def _wait_for_room(self, nbytes: int, ledger: Ledger, obstacle: str) -> str | None:
        begin = time.monotonic()
        found: str | None = obstacle
        self._waiting = True
        while found is not None and not self._stopping:
            left = begin + self._max_wait - time.monotonic()
            if self._stalled or left <= 0 or (found == SPOOL_FULL and self._watermark.drop):
                break
            self._state.wait(left)
            found = self._obstacle(nbytes)
        self._waiting = False
        ledger.blocked += time.monotonic() - begin
        if found is not None and not self._stalled:
            self._stalled = True
            logger.warning(
                "%s: calls are dropped and counted until there is room (waited %.1f s)",
                found,
                time.monotonic() - begin,
            )
        return found

    def adjust(self, before: int, after: int) -> None:
        """Correct what a call holds, once its size is known."""
        with self._lock:
            self._held += after - before
            if after < before:
                self._state.notify_all()

    def submit(self, record: Record, ledger: Ledger) -> None:
        """Hand a record to the writers; its room is freed when it is published."""
        with self._lock:
            if self._stopping:
                self._held -= record.room
                return
            self._queue.append((record, ledger))
            ledger.accepted += 1
            ledger.accepted_bytes += record.call.nbytes
            ledger.pending += 1
            self._work.notify()

    def seal(self, ledger: Ledger, *, whole: bool = True) -> None:
        """No further call of the step will come; its marker follows the last one."""
        with self._lock:
            ledger.sealed, ledger.whole = True, whole
            self._queue.append((None, ledger))  # a writer closes it, not the trainer
            self._work.notify()

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
            while self._queue or self._writing or any(self._unclosed()):
                if self._progress != seen:
                    seen, since = self._progress, time.monotonic()
                left = since + patience - time.monotonic()
                if left <= 0:
                    return False
                self._state.wait(min(left, 1.0))
            return True

    def _unclosed(self) -> list[Ledger]:
        return [ledger for ledger in self._ledgers.values() if ledger.sealed and not ledger.closed]

    def stop(self, timeout: float = 5.0) -> None:
        """End the writers; what is still queued is counted as dropped."""
        with self._lock:
            self._stopping = True
            while self._queue:
                record, ledger = self._queue.popleft()
                if record is None:
                    continue
                self._held -= record.room
                ledger.pending -= 1
                ledger.dropped += 1
                ledger.skipped[WRITE_FAILED] += 1
            self._work.notify_all()
            # Not joined: whoever stops may be a signal handler above a frame that holds
            # the lock, and only waiting on the condition lets the writers have it.
            self._state.wait_for(lambda: self._alive == 0, timeout)

    @property
    def blocked(self) -> bool:
        """Whether the trainer waits for room, or a writer for a full disk."""
        return self._waiting or self._disk_full > 0

    def _wake(self) -> None:
        with self._lock:
            self._state.notify_all()

    # The writers' side.

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._stopping:
                    self._work.wait()
                if not self._queue:
                    self._alive -= 1
                    self._state.notify_all()
                    return
                record, ledger = self._queue.popleft()
                self._writing += 1
            stored: int | None = None
            try:
                if record is not None:
                    stored = self._publish(record)
            except Exception as error:
                self._report(record.call.name if record else "", error)
            finally:
                self._finish(record, ledger, stored)

    def _publish(self, record: Record) -> int:
        record.transfers.wait()
        deadline = time.monotonic() + (0.0 if self._watermark.drop else self._max_wait)
        while True:
            try:
                return self._store.publish(record.call).nbytes
            except OSError as error:
                # A full disk may be emptied by the checking host.
                if error.errno not in _FULL_DISK or time.monotonic() >= deadline:
                    raise
            with self._lock:
                self._disk_full += 1
            time.sleep(_RETRY_SECONDS)
            with self._lock:
                self._disk_full -= 1

    def _finish(self, record: Record | None, ledger: Ledger, stored: int | None) -> None:
        if record is not None:
            record.transfers.release()
        with self._lock:
            self._writing -= 1
            self._progress += 1
            if record is not None:
                self._held -= record.room
                ledger.pending -= 1
                if stored is None:
                    ledger.dropped += 1
                    ledger.skipped[WRITE_FAILED] += 1
                else:
                    ledger.shards += 1
                    ledger.bytes += stored
                    self._watermark.wrote(stored)
            self._state.notify_all()
        self._close_if_done(ledger)

    def _report(self, name: str, error: Exception) -> None:
        with self._lock:
            self._write_failures += 1
            first = self._write_failures == 1
        if first:
            logger.error(
                "%s could not be written and is dropped (later failures are only counted): %s",
                name,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def _close_if_done(self, ledger: Ledger) -> None:
        with self._lock:
            if not ledger.sealed or ledger.pending or ledger.closing:
                return
            ledger.closing = True
        try:
            self._store.sync()
            if ledger.whole:
                self._store.close_step(self._rank, ledger.step, ledger.counts())
        except Exception as error:
            logger.error("step %d could not be closed: %s", ledger.step, error)
        finally:
            with self._lock:
                ledger.closed = True
                self._progress += 1
                self._state.notify_all()
