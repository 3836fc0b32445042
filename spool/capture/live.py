"""A capture that runs: its parts, its steps, and every way it can end."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable

import torch

from spool.capture.arena import Arena
from spool.capture.context import npu_version
from spool.capture.destination import Destination, Shared, Shipped
from spool.capture.engine import Engine
from spool.capture.exits import Exits, raised_by_handler
from spool.capture.filters import Filters
from spool.capture.interceptor import Interceptor, open_modes
from spool.capture.keeper import Keeper
from spool.capture.ledger import amount
from spool.capture.recorder import HOOK_FAILED, Recorder
from spool.capture.remote import RemoteWriters
from spool.capture.sink import Backend, Sink
from spool.capture.snapshot import PinnedPool
from spool.capture.taking import Taker
from spool.capture.watermark import Watermark
from spool.capture.writers import Done, Pull, Writers
from spool.config import CaptureConfig
from spool.errors import StoreError, ignoring_refusals
from spool.files import occupy_standard
from spool.store import Heartbeat, RankCounts, StepCounts

logger = logging.getLogger("spool")

OTHER_THREAD = "step began in another thread"
MODE_LOST = "capture hook removed by others"
_LEAST_PATIENCE = 30.0


class NoThreadError(StoreError):
    """The system starts no thread."""

    def __init__(self) -> None:
        super().__init__(
            "no thread can be started to write what is captured: raise the limit of processes "
            "and threads (ulimit -u)"
        )


class Live:
    """What a session that captures is made of.

    Parameters
    ----------
    config : CaptureConfig
    rank : int
    on_end : callable
        Called when everything is written and the rank is closed.
    """

    def __init__(self, config: CaptureConfig, rank: int, on_end: Callable[[], None]) -> None:
        self._config = config
        self._rank = rank
        self._on_end = on_end
        self._patience = max(config.max_wait, _LEAST_PATIENCE)
        self._thread = threading.get_ident()
        self._step = config.first_step
        self._started = False
        self._pushed = False
        self._said_below = False
        self.ended = False
        self._closer: int | None = None
        self._closed = threading.Event()
        self._end_lock = threading.RLock()
        occupy_standard()
        with contextlib.ExitStack() as undo:
            self._arena = Arena(config.queue_bytes)
            undo.callback(self._arena.retire)
            undo.callback(self._arena.close_file)
            self._destination = self._choose_destination()
            undo.callback(self._destination.abandon)
            self._store = self._destination.store
            self._kept = self._destination.kept
            watermark = Watermark(
                self._destination.limit, config.on_full == "drop", lambda: self._store.usage()
            )
            self._sink = Sink(
                rank,
                self._arena,
                queue_bytes=config.queue_bytes,
                max_wait=config.max_wait,
                watermark=watermark,
                start=self._start_writers,
            )
            undo.callback(self._sink.stop)
            self._arena.close_file()
            pool = PinnedPool(config.queue_bytes // 4)
            taker = Taker(self._sink, rank, self._arena, pool, config.max_call_bytes)
            self.recorder = Recorder(
                self._sink, Filters(config), taker, config.backward, self._step
            )
            self._engine = Engine(self.recorder) if config.backward else None
            self.mode = Interceptor(self.recorder, self._engine)
            self._exits = Exits(self.end)
            undo.callback(self._exits.uninstall)
            self._exits.install()
            self._keeper = Keeper(self._beat, lambda: self._sink.blocked, watermark)
            undo.pop_all()
        if self._kept:
            logger.info(
                "rank %d: %d steps from %d to %d are closed already and stay; this run begins with "
                "step %d (first_step)%s",
                rank,
                len(self._kept),
                min(self._kept),
                max(self._kept),
                self._step,
                ": the closed ones are not captured again" * (self._step in self._kept),
            )

    @property
    def where(self) -> str:
        """What is captured goes there."""
        return self._destination.where

    def _choose_destination(self) -> Destination:
        root = self._config.spool_dir
        if root is None:
            return Shipped(self._rank, self._config, _versions())
        return Shared(root, self._rank, self._config, _versions(), self._patience)

    def _start_writers(
        self, pull: Pull, done: Callable[[Done], None], lock: threading.RLock
    ) -> Backend:
        config, arena = self._config, self._arena
        if config.writer == "process":
            try:
                if arena.file < 0:
                    raise OSError("the system gives no memory that two processes share")
                return RemoteWriters(
                    self._store,
                    self._rank,
                    self._kept,
                    arena,
                    count=config.writers,
                    max_wait=config.max_wait,
                    patience=self._patience,
                    pull=pull,
                    done=done,
                    lock=lock,
                )
            except Exception as error:
                if raised_by_handler(error):
                    raise
                logger.warning("no writer process can be started, threads write: %s", error)
        writers = Writers(
            self._store,
            arena.view(0, arena.size),
            count=config.writers,
            patience=config.max_wait,
            pull=pull,
            done=done,
            lock=lock,
        )
        if not writers.threads:
            raise NoThreadError
        return writers

    # Between start and end.

    def start(self) -> None:
        if self.ended:
            return
        if not self._pushed:
            below = open_modes()
            if below and not self._said_below:
                logger.info(
                    "function modes that are open now (%s) must stay open until disable(): "
                    "closing one earlier would remove capture's hook in its place",
                    ", ".join(below),
                )
            self._said_below = True
            self._thread = threading.get_ident()
        self._started = True
        if self._verify():
            self._update()

    def stop(self) -> None:
        self._started = False
        self._update()

    def step(self) -> None:
        if self.ended:
            return
        self._verify()
        self._end_step(whole=True)
        last = self._config.last_step
        if last is not None and self._step >= last:
            self._end_in_background()
            return
        self._step += 1
        self.recorder.new_step(self._step)
        self._update()

    def guarded(self, action: Callable[[], None]) -> None:
        """Do what the program asked for; a fault of ours ends capture, never training."""
        try:
            action()
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._give_up()

    def _give_up(self) -> None:
        self._started = False
        self.recorder.active = False
        self._sink.skip(self.recorder.ledger, HOOK_FAILED, dropped=True)
        logger.exception("capture failed and ends here, training goes on")

    def _update(self) -> None:
        """Put the hook where a step is captured, and take it off where none is."""
        active = self._started and not self.ended and self._wants_step()
        # In another thread than ours the mode stays as it is: stacks are per thread.
        if threading.get_ident() == self._thread:
            if active and not self._pushed:
                self.mode.place()
            elif self._pushed and not active:
                self.mode.remove()
            self._pushed = active
        elif active and not self._pushed:
            self._sink.skip(self.recorder.ledger, OTHER_THREAD, dropped=True)
            logger.error(
                "step %d began in another thread than the one that enabled capture, which cannot "
                "be captured therefore: call spool.step() where spool.enable() was called",
                self._step,
            )
        self.recorder.active = active

    def _wants_step(self) -> bool:
        return self._config.wants_step(self._step) and self._step not in self._kept

    def _end_step(self, *, whole: bool, last: bool = False) -> None:
        """Seal the current step if it is one that is captured, and say what it holds."""
        self.recorder.active = False
        ledger = self.recorder.ledger
        if not self._wants_step() or (last and self._sink.untouched(ledger)):
            return
        self._sink.seal(ledger, whole=whole)
        logger.info("rank %d %s", self._rank, self._sink.line(ledger))

    def _verify(self) -> bool:
        """Whether our mode is where it was put; says so once if it is not."""
        if not self._pushed or threading.get_ident() != self._thread or self.mode.present():
            return True
        self._sink.skip(self.recorder.ledger, MODE_LOST, dropped=True)
        logger.error(
            "capture's hook is gone from torch's mode stack: a function mode that was open before "
            "start was closed; nothing more is captured in this run, training goes on"
        )
        self._pushed = False
        self._started = False
        self._update()
        return False

    def _beat(self) -> None:
        ledgers = self._sink.ledgers()
        beat = Heartbeat(
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            step=self._step,
            captured=sum(ledger.shards for ledger in ledgers),
            bytes=sum(ledger.bytes for ledger in ledgers),
            blocked=self._sink.blocked,
            writer=self._sink.backend.process,
        )
        self._store.heartbeat(self._rank, beat)
        self._destination.tell()

    # Ends.

    def end(self, reason: str) -> bool:
        """End from the program: returns when everything is written.

        Returns
        -------
        bool
            False if called in the middle of itself, by a signal handler.
        """
        if self._begin_end():
            # A step that an exception or a signal cut short is no whole step.
            self.guarded(lambda: self._end_step(whole=reason == "disabled", last=True))
            self._close(reason)
        elif self._closer == threading.get_ident() and not self._closed.is_set():
            return False
        self.guarded(self._leave)
        self._closed.wait()
        self._exits.uninstall()
        return True

    def _end_in_background(self) -> None:
        """The last configured step is over: training goes on while the rest is written."""
        if self._begin_end():
            logger.info("rank %d: the last configured step is captured, capture ends", self._rank)
            self._close_in_background("steps done")

    def _begin_end(self) -> bool:
        """Take the hook off; False if the capture is ending already."""
        with self._end_lock:
            if self.ended:
                return False
            self.ended = True
            self._closer = threading.get_ident()
        self.recorder.active = False
        self.guarded(self._take_off)
        return True

    def _take_off(self) -> None:
        # In another thread than ours the mode stays, inactive: stacks are per thread.
        if self._pushed and threading.get_ident() == self._thread:
            if not self.mode.remove():
                logger.error("capture's hook was already gone from torch's mode stack")
            self._pushed = False

    def _leave(self) -> None:
        """Take the hook off this thread's stack too, if another thread ended the capture."""
        if self.mode.present():
            self.mode.remove()

    def _close(self, reason: str) -> None:
        try:
            self._finish(reason)
        except BaseException as error:
            if isinstance(error, Exception) and not raised_by_handler(error):
                logger.error("rank %d could not be closed: %s", self._rank, error)
            else:
                # The program's own, which goes to it; what it interrupted goes on meanwhile.
                self._close_in_background(reason)
                raise
        if self._engine is not None:
            self._engine.forget()
        if not self._sink.backend.is_busy:
            self._arena.retire()
        self._closed.set()
        self._on_end()

    def _close_in_background(self, reason: str) -> None:
        self._closer = None

        def close() -> None:
            self._close(reason)
            self._exits.uninstall()

        threading.Thread(target=close, name="spool-closer", daemon=True).start()

    def _finish(self, reason: str) -> None:
        """Write what was accepted, end all that runs, close the rank; may be begun again."""
        if not self._sink.drain(self._patience):
            logger.error(
                "the spool took nothing for %.0f s: what is left is dropped and counted",
                self._patience,
            )
        self._sink.stop()
        self._keeper.stop()
        counts = self._counts(reason)
        with ignoring_refusals():
            self._beat()
        self._store.close_rank(self._rank, counts)
        self._say_unmet()
        steps = counts.steps.values()
        logger.info(
            "rank %d closed (%s): %d calls, %s of shards, dropped %d",
            self._rank,
            reason,
            sum(step.shards for step in steps),
            amount(sum(step.bytes for step in steps)),
            sum(step.dropped for step in steps),
        )
        self._destination.wait(self._config.max_wait)

    def _say_unmet(self) -> None:
        """What was asked for and never came, so that nobody takes its absence for a pass."""
        lines = self.recorder.unmet()
        late = sorted(step for step in self._config.step if step > self._step)
        if late:
            steps = ", ".join(map(str, late[:5])) + (", ..." if len(late) > 5 else "")
            lines.append(
                f"step: {steps} never came, the last one was {self._step}; spool.step() ends a step"
            )
        for line in lines:
            logger.warning("rank %d: %s", self._rank, line)

    def _counts(self, reason: str) -> RankCounts:
        steps: dict[int, StepCounts] = dict(self._kept)
        for ledger in self._sink.ledgers():
            if ledger.sealed:
                steps[ledger.step] = ledger.counts()
        return RankCounts(steps, reason)

    def orphan(self) -> None:
        """In a forked child: no thread of ours lives here, so touch nothing but the hook."""
        self.recorder.orphan()
        self._sink.orphan()
        self.ended = True
        self._closed.set()
        if self.mode.present():
            self.mode.remove()
        self._exits.uninstall()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if npu_version():
        versions["torch_npu"] = npu_version()
    return versions
