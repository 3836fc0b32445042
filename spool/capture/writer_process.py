"""The writer process: publishes what a training process leaves in the arena.

It imports no torch, does the encoding and the waiting for disks away from the training
process, and outlives it: what a killed one had handed over is published, and its rank is
closed with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spool.capture.arena import NAME as ARENA_NAME
from spool.capture.wire import END, Frames, counts_of, done_message, frame, task_of
from spool.capture.writers import Closing, Done, Shard, Task, Writers
from spool.close import KILLED
from spool.errors import StoreError
from spool.processes import Process
from spool.store import RankCounts, StepCounts, Store

_READ = 1 << 20
_GATHER_SECONDS = 0.005
_BEAT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_END_SECONDS = 2.0


class _Reports:
    """Tells the training process what became of tasks, some at a time."""

    def __init__(self, file: int, disk_full: Callable[[], bool]) -> None:
        self._file = file
        self._disk_full = disk_full
        self._said_full = False
        self._dones: deque[Done] = deque()
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="spool-reports", daemon=True).start()

    def add(self, done: Done) -> None:
        self._dones.append(done)
        self._wake.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads them any more
            while True:
                self._wake.wait(_LOOK_SECONDS)
                self._wake.clear()
                time.sleep(_GATHER_SECONDS)
                dones = [self._dones.popleft() for _ in range(len(self._dones))]
                is_full = self._disk_full()
                if dones or is_full != self._said_full:
                    self._said_full = is_full
                    self._write(frame((is_full, [done_message(done) for done in dones])))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


class _Work:
    """The tasks of one training process and what became of them.

    Parameters
    ----------
    setup : dict
        The first message.
    reports : int
        Descriptor that they are told to.
    """

    def __init__(self, setup: dict[str, Any], reports: int) -> None:
        self._began = time.time()
        self._store = Store.open(setup["root"])
        self._rank = setup["rank"]
        self._kept: dict[int, Any] = {n: counts_of(counts) for n, counts in setup["kept"]}
        self._patience = setup["patience"]
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._new: list[tuple[int, Task]] = []
        self._tasks: dict[int, Task] = {}
        self._open: dict[int, StepCounts] = {}
        memory = mmap.mmap(setup["file"], setup["size"], access=mmap.ACCESS_READ)
        self._writers = Writers(
            self._store,
            memoryview(memory),
            count=setup["writers"],
            patience=setup["max_wait"],
            pull=self._pull,
            done=self._done,
            lock=self._lock,
        )
        self._reports = _Reports(reports, lambda: self._writers.disk_full)

    def put(self, number: int, task: Task) -> None:
        with self._lock:
            self._tasks[number] = task
            self._new.append((number, task))
        self._writers.wake()

    def _pull(self) -> list[tuple[int, Task]]:
        new, self._new = self._new, []
        return new

    def _done(self, done: Done) -> None:
        with self._changed:
            self._count(self._tasks.pop(done.number), done)
            self._changed.notify_all()
        self._reports.add(done)

    def _count(self, task: Task, done: Done) -> None:
        if isinstance(task, Shard):
            step = task.identity[3]
            known = self._open.get(step, StepCounts(0, 0))
            if done.error:
                known = dataclasses.replace(known, dropped=known.dropped + 1)
            else:
                known = dataclasses.replace(
                    known, shards=known.shards + 1, bytes=known.bytes + done.stored
                )
            self._open[step] = known
        elif isinstance(task, Closing) and task.counts is not None and not done.error:
            self._kept[task.step] = task.counts
            self._open.pop(task.step, None)

    def close_orphaned(self) -> None:
        """Finish what was handed over and close the rank, in place of the one that is gone."""
        since = next_beat = time.monotonic()
        with self._changed:
            left = len(self._tasks)
            while self._tasks and time.monotonic() - since < self._patience:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + _BEAT_SECONDS
                    self._beat()
                self._changed.wait(_LOOK_SECONDS)
                if len(self._tasks) != left:
                    left, since = len(self._tasks), time.monotonic()
            for number, task in list(self._tasks.items()):
                self._count(task, Done(number, error="given up"))
            steps = {**self._kept, **self._open}
        if self._is_ours():
            self._close(RankCounts(steps, KILLED))

    def _is_ours(self) -> bool:
        """Whether nobody else has closed the rank meanwhile, or captures it."""
        if self._store.rank_closed(self._rank) is not None:
            return False
        beat = self._store.read_heartbeat(self._rank)
        return beat is None or beat.writer == os.getpid() or beat.time < self._began

    def _close(self, counts: RankCounts) -> None:
        end = time.monotonic() + self._patience
        while True:
            try:
                self._store.close_rank(self._rank, counts)
                return
            except OSError:  # a full disk, perhaps, that the checking host empties
                if time.monotonic() >= end:
                    raise
            self._beat()
            time.sleep(_LOOK_SECONDS)

    def _beat(self) -> None:
        """Tell who resumes that somebody still writes."""
        with contextlib.suppress(OSError, StoreError):
            beat = self._store.read_heartbeat(self._rank)
            if beat is not None and beat.writer == os.getpid():
                beat = dataclasses.replace(beat, time=time.time(), writer=os.getpid())
                self._store.heartbeat(self._rank, beat)


def main() -> None:
    """Serve one training process until it ends.

    Arguments: its process number and start, and the descriptors that tasks come by and that
    what became of them goes out by.
    """
    try:
        pid, started, tasks, reports = map(int, sys.argv[1:])
        _serve(Process(pid, started), tasks, reports)
    finally:
        os._exit(0)  # threads may hang on a dead mount: nothing waits for them


def _serve(trainer: Process, tasks: int, reports: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    frames = Frames()
    work: _Work | None = None
    for data in _incoming(tasks, trainer):
        for message in frames.feed(data):
            if message == END:
                return
            if work is None:
                work = _Work(message, reports)
            else:
                work.put(*task_of(message))
    if work is not None and _has_left(trainer):
        work.close_orphaned()


def _has_left(trainer: Process) -> bool:
    """Whether the training process has ended, or become another program.

    Otherwise it has lost its end of the pipe, and writes by itself. A process that ends closes
    its files first.
    """
    end = time.monotonic() + _END_SECONDS
    while _captures(trainer) and time.monotonic() < end:
        time.sleep(0.01)
    return not _captures(trainer)


def _captures(trainer: Process) -> bool:
    """Whether the training process lives and still holds the arena, as far as can be seen."""
    try:
        maps = Path(f"/proc/{trainer.pid}/maps").read_text(errors="replace")
    except OSError:
        return trainer.is_alive()
    return trainer.is_alive() and ARENA_NAME in maps


def _incoming(file: int, trainer: Process) -> Any:
    """Bytes as they come, until nobody is left who could send any."""
    os.set_blocking(file, False)
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while True:
        # A forked child of the trainer may hold its end of the pipe open.
        is_orphaned = not trainer.is_alive()
        if not is_orphaned:
            poll.poll(1000 * _LOOK_SECONDS)
        try:
            data = os.read(file, _READ)
        except BlockingIOError:
            if is_orphaned:
                return
            continue
        if not data:
            return
        yield data
