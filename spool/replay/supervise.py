"""The supervising side of a replay job: keeps a worker going until every call has its row.

The worker may die or hang in any call. The call it was in becomes ``replay_failed``
with the reason, and a fresh worker goes on after it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.errors import SpoolError
from spool.replay.journal import Journal, Progress
from spool.settings import ReplaySettings

_RESTART = 75  # `worker.RESTART`; importing it would import torch
_START_SECONDS = 600.0
_MAX_IDLE_DEATHS = 3
# Signals that come from outside (a person, the kernel short of memory) as often as
# from the call itself; such a call gets a second try.
_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class ReplayError(SpoolError):
    """A batch cannot be replayed on this host."""


@dataclass(frozen=True)
class Job:
    """What a worker is told.

    Parameters
    ----------
    manifest, journal : Path
    settings : ReplaySettings
    numbers : tuple of int
        Shards of the manifest, in ascending order.
    again : bool
        Whether they were measured before, and may lie where kept shards lie.
    """

    manifest: Path
    journal: Path
    settings: ReplaySettings
    numbers: tuple[int, ...]
    again: bool = False


def run_workers(job: Job, progress: Progress, reload: Callable[[], Progress]) -> Progress:
    """Start workers until every shard is settled.

    Parameters
    ----------
    job : Job
    progress : Progress
        What the journal already holds.
    reload : callable
        Reads the journal again.

    Raises
    ------
    ReplayError
        If workers cannot start, or die without being in a call.
    """
    second_try: set[int] = set()
    idle_deaths = 0
    while todo := [number for number in job.numbers if not progress.settled(number)]:
        end = _Worker(job, todo).follow()
        if end.fatal:
            raise ReplayError(end.fatal)
        if end.current is not None:
            if end.signal in _OUTSIDE and not end.hung and end.current not in second_try:
                second_try.add(end.current)
            else:
                reload()  # cuts off a record that the worker did not finish
                with Journal(job.journal) as journal:
                    journal.add({"lost": end.current, "reason": end.reason(job)}, 0.0)
        elif end.status not in (0, _RESTART) or not _has_settled(todo, reload()):
            idle_deaths += 1
            again = end.ready or end.signal in _OUTSIDE
            if end.hung or not again or idle_deaths >= _MAX_IDLE_DEATHS:
                raise ReplayError(end.idle_reason(job, idle_deaths))
        progress = reload()
        if _has_settled(todo, progress):
            idle_deaths = 0
    return progress


def _has_settled(todo: list[int], progress: Progress) -> bool:
    return any(progress.settled(number) for number in todo)


@dataclass
class _End:
    """How a worker ended: exit status, the call it was in, whether it ever was ready."""

    status: int = 0
    current: int | None = None
    ready: bool = False
    hung: bool = False
    fatal: str = ""

    @property
    def signal(self) -> int:
        return -self.status if self.status < 0 else 0

    def idle_reason(self, job: Job, deaths: int) -> str:
        """Why workers that are in no call are given up."""
        if self.hung:
            return (
                f"{job.manifest}: the replay process does not get ready within "
                f"{_patience(job.settings.call_timeout):g} s; see whether its device answers"
            )
        if self.signal:
            name = signal.Signals(self.signal).name
            times = "" if deaths == 1 else f", {deaths} times in a row"
            return (
                f"{job.manifest}: the replay process died of {name} before it replayed "
                f"anything{times}; see whether memory is short, and rerun"
            )
        return (
            f"{job.manifest}: the replay process ends before it replays anything "
            f"(status {self.status}); its own message is above"
        )

    def reason(self, job: Job) -> str:
        """Why the call has no measurement; the same text for the same cause."""
        if self.hung:
            return f"Timeout: took longer than {job.settings.call_timeout:g} s"
        if self.status >= 0:
            return f"Crash: the replay process exited with status {self.status}"
        name = signal.Signals(self.signal).name
        hint = " (out of memory?)" if self.signal == signal.SIGKILL else ""
        return f"Crash: the replay process died of {name}{hint}"


def _patience(call_timeout: float) -> float:
    """Seconds after which a worker that is in no call is given up."""
    return max(_START_SECONDS, call_timeout)


class _Worker:
    """A running worker process."""

    def __init__(self, job: Job, todo: list[int]) -> None:
        self.timeout = job.settings.call_timeout
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spool.replay.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C at a terminal reaches the supervisor alone, which ends the worker.
            start_new_session=True,
            env=environment(job.settings),
        )
        self.end = _End()
        self.buffer = b""
        order: dict[str, Any] = {
            "parent": os.getpid(),
            "manifest": str(job.manifest),
            "journal": str(job.journal),
            "settings": job.settings.to_json(),
            "todo": todo,
            "again": job.again,
        }
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already; `follow` finds out how

    def follow(self) -> _End:
        """Take the worker's events until it ends; end it if it hangs."""
        try:
            self._follow()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.end.status = self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
        return self.end

    def _follow(self) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + _patience(self.timeout)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.end.hung = True
                    return
                data = os.read(self.process.stdout.fileno(), 65536)
                if not data:
                    self.process.wait()
                    return
                self._take(data)
                deadline = time.monotonic() + self.timeout

    def _take(self, data: bytes) -> None:
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            event, _, rest = line.decode("utf-8", "replace").partition(" ")
            if event == "ready":
                self.end.ready = True
            elif event == "start":
                self.end.current = int(rest)
            elif event == "done":
                self.end.current = None
            elif event == "fatal":
                self.end.fatal = rest


def environment(settings: ReplaySettings) -> dict[str, str]:
    """The worker's environment: fixed threads, one GPU, reproducible kernels."""
    threads = str(settings.threads)
    values = dict(os.environ)
    values.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OPENBLAS_NUM_THREADS=threads,
        # cuBLAS is reproducible only with a workspace of fixed size.
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    if settings.gpu is not None:
        values["CUDA_VISIBLE_DEVICES"] = str(settings.gpu)
    return values
