"""Threads that write shards and mark steps as complete; they know no torch.

They run in the writer process, or in the training process where there can be none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spool.shard import Draft
from spool.store import StepCounts, Store

logger = logging.getLogger("spool")

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 0.5
_IDLE_SECONDS = 0.25

Span = tuple[str, int, int]
"""Type code, first byte in the arena, and bytes of a region."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A call to be written.

    Parameters
    ----------
    identity : tuple
        api, index, rank, step, order, direction.
    body : bytes
        From `spool._json.dump_body`.
    spans : list of Span
    is_again : bool
        A writer that is gone may have written it already.
    """

    identity: tuple[str, int, int, int, int, str]
    body: bytes
    spans: list[Span]
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Closing:
    """A step to be marked as complete; ``None`` counts only make its shards durable."""

    rank: int
    step: int
    counts: StepCounts | None


Task = Shard | Closing
Pull = Callable[[], list[tuple[int, Task]]]


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a task.

    Parameters
    ----------
    number : int
        As given to `Writers.put`.
    stored : int
        Bytes of the shard.
    error : str
        Why it failed, else "".
    """

    number: int
    stored: int = 0
    error: str = ""


class Writers:
    """Writes what it is given, in about that order.

    Attributes
    ----------
    threads : int
        How many there are; fewer than asked for if the system starts no more.

    Parameters
    ----------
    store : Store
    view : memoryview
        The arena.
    count : int
        Threads.
    patience : float
        Seconds for which a full disk is waited for.
    pull : callable
        Returns tasks that have come, with their numbers.
    done : callable
        Called with `Done` after each task, in the thread that did it.
    lock : RLock
        Under which `pull` is called.
    """

    def __init__(
        self,
        store: Store,
        view: memoryview,
        *,
        count: int,
        patience: float,
        pull: Pull,
        done: Callable[[Done], None],
        lock: threading.RLock,
    ) -> None:
        self._store = store
        self._view = view
        self._patience = patience
        self._pull = pull
        self._done = done
        self._queue: deque[tuple[int, Task]] = deque()
        # Entered as itself: a condition's own way in is written in Python, and an exception
        # of a signal handler could leave it locked.
        self._lock = lock
        self._work = threading.Condition(lock)
        self._stopping = False
        self._disk_full = 0
        self._busy = 0
        self.threads = 0
        with contextlib.suppress(RuntimeError):  # the system starts no more
            for number in range(count):
                name = f"spool-writer-{number}"
                threading.Thread(target=self.work, name=name, daemon=True).start()
                self.threads += 1

    def wake(self) -> None:
        """There is something to pull."""
        with self._lock:
            self._work.notify()

    process = 0
    """Number of the process that writes, if it is another."""

    def forget(self) -> None:
        """In a forked child: there are no threads of ours, and nothing to let go of."""

    def stop(self) -> None:
        """End the threads; what is queued is not done."""
        with self._lock:
            self._stopping = True
            self._queue.clear()
            self._work.notify_all()

    @property
    def disk_full(self) -> bool:
        """Whether a writer waits for a full disk."""
        return self._disk_full > 0

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at a task."""
        return self._busy > 0

    def work(self) -> None:
        """Do tasks until `stop`; what every thread does."""
        while True:
            with self._lock:
                self._queue.extend(self._pull())
                while not self._queue and not self._stopping:
                    # Not for ever: an exception of a signal handler may have lost a wake.
                    self._work.wait(_IDLE_SECONDS)
                    self._queue.extend(self._pull())
                if self._stopping:
                    return
                number, task = self._queue.popleft()
                self._busy += 1
                if self._queue:
                    self._work.notify()
            try:
                stored = self._publish(task) if isinstance(task, Shard) else self._close(task)
                done = Done(number, stored)
            except OSError as error:
                done = Done(number, error=str(error))
            except Exception as error:
                done = Done(number, error=f"{error}\n{traceback.format_exc()}")
            try:
                self._done(done)
            except Exception:
                logger.exception("what became of a call could not be noted; writing goes on")
            with self._lock:
                self._busy -= 1

    def _publish(self, shard: Shard) -> int:
        if shard.is_again and (stored := published(self._store, shard)) is not None:
            return stored
        regions = [
            (code, self._view[offset : offset + nbytes]) for code, offset, nbytes in shard.spans
        ]
        draft = Draft(*shard.identity, shard.body, regions)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._store.publish(draft).nbytes
            except OSError as error:
                # A full disk may be emptied by the checking host.
                if error.errno not in _FULL_DISK or time.monotonic() >= deadline:
                    raise
            with self._lock:
                self._disk_full += 1
            time.sleep(_RETRY_SECONDS)
            with self._lock:
                self._disk_full -= 1

    def _close(self, closing: Closing) -> int:
        self._store.sync()
        if closing.counts is not None:
            self._store.close_step(closing.rank, closing.step, closing.counts)
        return 0


def published(store: Store, shard: Shard) -> int | None:
    """Bytes of a shard that lies in the store already; None if it does not."""
    api, index, rank, step, order, _ = shard.identity
    try:
        return store.shard_path(rank, step, order, f"{api}.{index}").stat().st_size
    except FileNotFoundError:
        return None
