"""The training process's end of the writer process.

One thread sends tasks and takes in what became of them, every few milliseconds; whoever
captures only appends to a list. If the writer process dies, threads here do what it left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spool.capture.arena import Arena
from spool.capture.spawn import pipe, start
from spool.capture.wire import END, Frames, frame, plain_counts, task_message
from spool.capture.writers import Done, Pull, Shard, Task, Writers, published
from spool.errors import ignoring_refusals
from spool.store import StepCounts, Store

logger = logging.getLogger("spool")

_READ = 1 << 16
_GATHER_SECONDS = 0.005
_IDLE_SECONDS = 0.25
_END_SECONDS = 5.0


class RemoteWriters:
    """`Writers` in a process of their own.

    Parameters
    ----------
    store : Store
    rank : int
    kept : mapping of int to StepCounts
        Steps of an earlier capture that stay.
    arena : Arena
    count : int
        Writer threads there.
    max_wait : float
        Seconds for which a full disk is waited for.
    patience : float
        Seconds without progress after which the process gives up, once it is alone.
    pull, done, lock
        As in `Writers`.

    Raises
    ------
    OSError
        If no process can be started.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        kept: Mapping[int, StepCounts],
        arena: Arena,
        *,
        count: int,
        max_wait: float,
        patience: float,
        pull: Pull,
        done: Callable[[Done], None],
        lock: threading.RLock,
    ) -> None:
        self._store, self._rank = store, rank
        self._arena = arena
        self._count, self._max_wait = count, max_wait
        self._pull = pull
        self._done = done
        self._lock = lock
        self._open: dict[int, Task] = {}
        self._is_idle = False
        self._stopping = False
        self._disk_full = False
        self._local: Writers | None = None
        with contextlib.ExitStack() as undo:
            # Not a `threading.Event`: an exception of a signal handler could leave one locked.
            self._woken, self._wake = pipe()
            undo.callback(self._woken.close)
            undo.callback(self._wake.close)
            os.set_blocking(self._woken.number, False)
            os.set_blocking(self._wake.number, False)
            self._process, self._tasks, self._reports = start(arena.file)
            undo.callback(self.forget)
            self._backlog = bytearray(frame(self._setup(kept, patience)))
            self._thread = threading.Thread(target=self._run, name="spool-courier", daemon=True)
            self._thread.start()
            undo.pop_all()

    def _setup(self, kept: Mapping[int, StepCounts], patience: float) -> dict[str, Any]:
        """The first message."""
        return {
            "root": str(self._store.root),
            "rank": self._rank,
            "kept": [(number, plain_counts(counts)) for number, counts in kept.items()],
            "writers": self._count,
            "max_wait": self._max_wait,
            "patience": patience,
            "file": self._arena.file,
            "size": self._arena.size,
        }

    @property
    def process(self) -> int:
        """Number of the writer process; 0 if threads have taken over."""
        return 0 if self._local is not None else self._process.pid

    @property
    def disk_full(self) -> bool:
        """Whether a writer waits for a full disk."""
        return self._disk_full if self._local is None else self._local.disk_full

    @property
    def is_busy(self) -> bool:
        """Whether a thread here still reads the arena."""
        return self._local is not None and self._local.is_busy

    def wake(self) -> None:
        """There is something to pull."""
        if self._local is not None:
            self._local.wake()
        elif self._is_idle and not self._stopping:
            self._is_idle = False
            self._ring()

    def _ring(self) -> None:
        with ignoring_refusals():
            os.write(self._wake.number, b"!")

    def stop(self) -> None:
        """End the process; what is not done yet is not done any more."""
        self._stopping = True
        if self._local is not None:
            self._local.stop()
        self._ring()
        self._thread.join(_END_SECONDS + 1)
        self._wake.close()
        self._woken.close()

    def forget(self) -> None:
        """Let go of the pipes; in a forked child, whose other ends are not its own."""
        self._tasks.close()
        self._reports.close()

    def _run(self) -> None:
        frames = Frames()
        try:
            while not self._stopping:
                self._send()
                self._take_in(self._receive(frames))
            self._end(frames)
        except Exception as error:  # of the process or of ours: the tasks are done all the same
            if not self._stopping:
                self._take_over(error)
        finally:
            self.forget()

    def _take_in(self, messages: list[Any]) -> None:
        for is_full, dones in messages:
            self._disk_full = is_full
            for number, stored, error in dones:
                if self._open.pop(number, None) is not None:
                    self._done(Done(number, stored, error))

    def _send(self) -> None:
        with self._lock:
            tasks = self._pull()
        self._open.update(tasks)
        for number, task in tasks:
            self._backlog += frame(task_message(number, task))
        if self._backlog:
            with contextlib.suppress(BlockingIOError):
                del self._backlog[: os.write(self._tasks.number, self._backlog)]

    def _receive(self, frames: Frames) -> list[Any]:
        """Wait a little and return what has come."""
        reports = self._reports.number
        if self._open or self._backlog:
            ready = _readable([reports], _GATHER_SECONDS)
        else:
            ready = self._sleep(reports)
        if reports not in ready:
            return []
        data = os.read(self._reports.number, _READ)
        if not data:
            raise EOFError
        return frames.feed(data)

    def _sleep(self, reports: int) -> list[int]:
        """Wait until there is something to do or to read; what can be read."""
        if not self._is_idle:  # once more round, to see what came before it was
            self._is_idle = True
            return []
        woken = self._woken.number
        ready = _readable([reports, woken], _IDLE_SECONDS)
        self._is_idle = False
        if woken in ready:
            os.read(self._woken.number, _READ)
        return ready

    def _end(self, frames: Frames) -> None:
        if self._open:
            self._give_up(frames)
        else:
            os.set_blocking(self._tasks.number, True)
            os.write(self._tasks.number, bytes(self._backlog) + frame(END))
        if not self._is_gone():
            self._kill()

    def _is_gone(self) -> bool:
        """Wait a while for the process to end; whether it has."""
        end = time.monotonic() + _END_SECONDS
        while (is_alive := self._process.is_alive()) and time.monotonic() < end:
            time.sleep(_GATHER_SECONDS)
        with contextlib.suppress(ChildProcessError):
            # A process 1, as of a container, is given the children of all that end.
            os.waitpid(self._process.pid, os.WNOHANG)
        return not is_alive

    def _kill(self) -> None:
        """End the process; it ends by itself too, when it sees the pipes closed."""
        self._process.kill()
        self._is_gone()

    def _give_up(self, frames: Frames) -> None:
        """End a process that is stuck: what is not written now must not appear later."""
        self._kill()
        reports = self._reports.number
        while _readable([reports], 0) and (data := os.read(reports, _READ)):
            self._take_in(frames.feed(data))
        for number, task in list(self._open.items()):
            if isinstance(task, Shard) and (stored := published(self._store, task)) is not None:
                self._done(Done(number, stored))
        self._store.remove_partials(self._rank)

    def _take_over(self, error: Exception) -> None:
        """Do here what the process has left."""
        self.forget()
        self._kill()
        what = f"is given up ({type(error).__name__}: {error})"
        if isinstance(error, (EOFError, BrokenPipeError)):
            what = "ended"
        logger.warning(
            "the writer process %s: threads of the training process write from here on", what
        )
        with contextlib.suppress(OSError):
            self._store.remove_partials(self._rank)
        self._local = Writers(
            self._store,
            self._arena.view(0, self._arena.size),
            count=self._count - 1,
            patience=self._max_wait,
            pull=self._pull_all,
            done=self._done,
            lock=self._lock,
        )
        if self._stopping:
            self._local.stop()
        # This thread is one of them: where no other can be started it is the only one.
        self._local.work()

    def _pull_all(self) -> list[tuple[int, Task]]:
        """What the process left, then what comes."""
        left, self._open = self._open, {}
        again = [
            (number, replace(task, is_again=True) if isinstance(task, Shard) else task)
            for number, task in left.items()
        ]
        return again + self._pull()


def _readable(files: list[int], seconds: float) -> list[int]:
    """Those of some descriptors that can be read, or have ended, once one can or time is up."""
    poll = select.poll()  # select() takes no descriptor from 1024 on
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(1000 * seconds)]
