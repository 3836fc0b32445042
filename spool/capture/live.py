"""A capture that runs: its parts, its steps, and every way it can end."""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable

import torch

from spool.capture.context import npu_version
from spool.capture.engine import Engine
from spool.capture.exits import Exits
from spool.capture.filters import Filters
from spool.capture.interceptor import Interceptor, open_modes
from spool.capture.keeper import HEARTBEAT_SECONDS, Keeper
from spool.capture.ledger import amount
from spool.capture.recorder import Recorder
from spool.capture.sink import Sink
from spool.capture.snapshot import PinnedPool
from spool.capture.watermark import Watermark
from spool.config import CaptureConfig
from spool.errors import StoreError
from spool.store import Heartbeat, RankCounts, StepCounts, Store

logger = logging.getLogger("spool")

MODE_LOST = "capture hook removed by others"
_LEAST_PATIENCE = 30.0


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
        self._store = Store.create(config.spool_dir, _versions())
        self._kept = _claim(self._store, rank, config.resume)
        watermark = Watermark(
            config.max_spool_bytes, config.on_full == "drop", lambda: self._store.usage()
        )
        self._sink = Sink(
            self._store,
            rank,
            queue_bytes=config.queue_bytes,
            writers=config.writers,
            max_wait=config.max_wait,
            watermark=watermark,
        )
        pool = PinnedPool(config.queue_bytes // 4)
        self.recorder = Recorder(
            self._sink, rank, Filters(config), config.max_call_bytes, pool, config.backward
        )
        self.mode = Interceptor(self.recorder, Engine(self.recorder) if config.backward else None)
        self._thread = threading.get_ident()
        self._step = 0
        self._started = False
        self._pushed = False
        self._said_below = False
        self.ended = False
        self._closer: int | None = None
        self._closed = threading.Event()
        self._end_lock = threading.RLock()
        self._keeper = Keeper(self._beat, watermark)
        self._exits = Exits(self.end)
        self._exits.install()

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

    def _update(self) -> None:
        """Put the hook where a step is captured, and take it off where none is."""
        active = self._started and not self.ended and self._wants_step()
        # In another thread than ours the mode stays as it is: stacks are per thread.
        if active != self._pushed and threading.get_ident() == self._thread:
            if active:
                self.mode.place()
            else:
                self.mode.remove()
            self._pushed = active
        self.recorder.active = active

    def _wants_step(self) -> bool:
        return self._config.wants_step(self._step) and self._step not in self._kept

    def _end_step(self, *, whole: bool, last: bool = False) -> None:
        """Seal the current step if it is one that is captured, and say what it holds."""
        self.recorder.active = False
        ledger = self.recorder.ledger
        if not self._wants_step() or (last and ledger.untouched):
            return
        self._sink.seal(ledger, whole=whole)
        logger.info("rank %d %s", self._rank, ledger.line())

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
        )
        self._store.heartbeat(self._rank, beat)

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
            self._end_step(whole=reason == "disabled", last=True)
            self._close(reason)
        elif self._closer == threading.get_ident() and not self._closed.is_set():
            return False
        if self.mode.present():  # another thread ended the capture
            self.mode.remove()
        self._closed.wait()
        self._exits.uninstall()
        return True

    def _end_in_background(self) -> None:
        """The last configured step is over: training goes on while the rest is written."""
        if self._begin_end():
            logger.info("rank %d: the last configured step is captured, capture ends", self._rank)
            closer = threading.Thread(
                target=self._close, args=("steps done",), name="spool-closer", daemon=True
            )
            self._closer = None
            closer.start()

    def _begin_end(self) -> bool:
        """Take the hook off; False if the capture is ending already."""
        with self._end_lock:
            if self.ended:
                return False
            self.ended = True
            self._closer = threading.get_ident()
        self.recorder.active = False
        # In another thread than ours the mode stays, inactive: stacks are per thread.
        if self._pushed and threading.get_ident() == self._thread:
            if not self.mode.remove():
                logger.error("capture's hook was already gone from torch's mode stack")
            self._pushed = False
        return True

    def _close(self, reason: str) -> None:
        try:
            patience = max(self._config.max_wait, _LEAST_PATIENCE)
            if not self._sink.drain(patience):
                logger.error(
                    "the spool took nothing for %.0f s: what is left is dropped and counted",
                    patience,
                )
            self._sink.stop()
            self._keeper.stop()
            counts = self._counts(reason)
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
        except Exception as error:
            logger.error("rank %d could not be closed: %s", self._rank, error)
        finally:
            self._closed.set()
            self._on_end()

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
        self.recorder.active = False
        self.ended = True
        self._closed.set()
        if self.mode.present():
            self.mode.remove()
        self._exits.uninstall()


def _claim(store: Store, rank: int, resume: bool) -> dict[int, StepCounts]:
    """Make sure that no capture of this rank is in the way; counts of steps that stay."""
    beat = store.read_heartbeat(rank)
    if not resume:
        if beat is not None or store.steps(rank) or store.rank_closed(rank) is not None:
            raise StoreError(
                f"{store.root} holds a capture of rank {rank} already: enable with resume=True to "
                f"go on with it, name another spool_dir, or run `spool clear {store.root}`"
            )
        return {}
    if beat is not None and _alive(beat):
        raise StoreError(
            f"{store.root}: rank {rank} is being captured by process {beat.pid}: "
            "end that one first, or set RANK if this process is another rank"
        )
    store.reopen_rank(rank)
    store.remove_partials(rank)
    for number in store.unclosed_steps(rank):
        store.drop_step(rank, number)
    kept = {number: store.step_closed(rank, number) for number in store.steps(rank)}
    return {number: counts for number, counts in kept.items() if counts is not None}


def _alive(beat: Heartbeat) -> bool:
    """Whether the process behind a heartbeat is surely another one and running."""
    recent = time.time() - beat.time < 3 * HEARTBEAT_SECONDS
    if not recent or beat.host != socket.gethostname() or beat.pid == os.getpid():
        return False
    try:
        os.kill(beat.pid, 0)
    except OSError:
        return False
    return True


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if npu_version():
        versions["torch_npu"] = npu_version()
    return versions
