"""The intake: follows a spool in a thread and queues what Snakemake shall make.

Everything it knows is in the work directory: after any kind of end, a new intake
reads the manifests back and goes on with what no manifest names.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spool.errors import StoreError
from spool.intake.forget import forget_earlier_takes
from spool.intake.ledger import Clock
from spool.intake.mend import mend
from spool.intake.progress import Progress
from spool.intake.rank import Found, RankFollower
from spool.intake.remind import Reminder, Say, say
from spool.intake.targets import batch_target, end_targets, segment_targets, verdict_target
from spool.intake.watch import Hints, Watch
from spool.markers import load_run
from spool.settings import Settings
from spool.workdir import Bound

if TYPE_CHECKING:
    from spool.store import Store

# Between two looks, so that a burst of events is one look.
SETTLE = 0.2
# Longest pause between two looks; a closing rank is seen within it, events or not.
LOOK = 1.0
# Listing may take this share of the time at most.
LISTING_SHARE = 0.1


class Intake(threading.Thread):
    """Turns shards into batches, segments and ends, and queues their targets.

    Parameters
    ----------
    settings : Settings
        Of this run.
    put : callable
        Called with each target's path, in the order in which they shall be made.
    finish : callable
        Called once, when no target will follow.
    clock : callable
        Monotonic seconds.
    say : callable
        Takes lines for people.
    """

    def __init__(
        self,
        settings: Settings,
        put: Callable[[Path], None],
        finish: Callable[[], None],
        clock: Clock = time.monotonic,
        say: Say = say,
    ) -> None:
        super().__init__(name="spool-intake", daemon=True)
        self.error: BaseException | None = None
        self._settings = settings
        self._work = settings.work
        self._root = settings.spool_dir.absolute()
        self._put = put
        self._finish = finish
        self._clock = clock
        self._say = say
        self._remind = Reminder(say, clock)
        self._progress = Progress(self._work, clock, say)
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._wake = threading.Event()
        self._ranks: list[RankFollower] = []
        self._next_listing = clock()
        self._is_stopping = False

    def prepare(self) -> None:
        """Queue what earlier runs left, before the first job is planned.

        Raises
        ------
        SpoolError
            If the work directory belongs to another run, or, with ``watch=false``,
            if there is no spool or a wanted rank is not in it.
        """
        self._find_store()
        if self._settings.watch:
            return
        if self._store is None:
            raise StoreError(
                f"{self._root}: no spool there; name the directory that the training host "
                "writes: --config spool_dir=DIR"
            )
        there = self._store.ranks()
        missing = [rank for rank in self._settings.rank_list if rank not in there]
        if missing:
            ranks = ", ".join(map(str, there)) or "none"
            raise StoreError(
                f"rank_list: rank {missing[0]} is not in {self._root} (ranks there: {ranks}); "
                "name ranks that were captured"
            )

    def run(self) -> None:
        """Follow the spool until every wanted rank is over."""
        try:
            while not self._is_stopping and not self.look():
                if self._wake.wait(min(LOOK, self._settings.rescan_seconds)):
                    time.sleep(min(SETTLE, self._settings.rescan_seconds))
                    self._wake.clear()
        except BaseException as error:
            # Snakemake's thread finds it at its next look into the queue, and ends the run.
            self.error = error
        finally:
            if self._watch is not None:
                self._watch.stop()
            self._finish()
        while not self._is_stopping and self.error is None and self._progress.look():
            time.sleep(LOOK)

    def stop(self) -> None:
        """Make `run` end soon."""
        self._is_stopping = True
        self._wake.set()

    def look(self) -> bool:
        """Take in what is new and queue what is ready.

        Returns
        -------
        bool
            True when every wanted rank is over and the last target is queued.
        """
        self._progress.look()
        try:
            return self._look()
        except (OSError, StoreError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            line = f"{cause.filename or self._root}: {cause.strerror}"
            if not self._settings.watch or cause.errno == errno.ENOSPC:
                raise StoreError(f"{line}; mend that and start again") from cause
            # A mount that went away may come back, and nothing is lost by waiting.
            self._remind("mount", f"{line}; trying again")
            return False

    def _look(self) -> bool:
        store = self._find_store()
        if store is None or not os.path.lexists(self._root / "run.json"):
            if self._root.exists():
                self._remind("spool", f"waiting for a spool in {self._root}")
            else:
                self._remind(
                    "spool",
                    f"waiting for a spool in {self._root}, which is not there yet "
                    "(--config spool_dir=DIR names another)",
                )
            return False
        began = self._clock()
        is_listing = began >= self._next_listing
        hints: Hints = {}
        if self._watch is not None:
            hints, is_due = self._watch.take()
            is_listing |= is_due
        elif self._settings.watch:
            self._watch = Watch(self._root, self._wake, self._settings.rescan_seconds)
        if is_listing:
            self._check_run(store)
        there = set(store.ranks())
        for rank in self._ranks:
            if not rank.is_ended:
                is_there = rank.rank in there
                self._queue(
                    rank, rank.look(hints, is_listing) if is_there else rank.await_first(there)
                )
        if is_listing:
            cost = self._clock() - began
            self._next_listing = began + max(self._settings.rescan_seconds, cost / LISTING_SHARE)
        if not all(rank.is_ended for rank in self._ranks):
            return False
        self._put(verdict_target(self._work))
        return True

    def _find_store(self) -> Store | None:
        """Open the spool once it is there, and queue what is known of it already."""
        from spool.store import Store

        # run.json appears last: before it there is nothing to read.
        if self._store is None and os.path.lexists(self._root / "run.json"):
            store = Store.open(self._root)
            self._check_run(store)
            ranks = [
                RankFollower(store, number, self._settings, self._remind, self._clock)
                for number in self._settings.rank_list
            ]
            for rank in self._settings.rank_list:
                forget_earlier_takes(self._work, rank, store, self._say)
                mend(self._work, rank)
            # A mount that fails in here is tried again: from the start, and for every rank.
            restored = [follower.restore() for follower in ranks]
            self._store, self._ranks = store, ranks
            if os.geteuid() == 0 and self._root.stat().st_mode & stat.S_IWOTH:
                self._say(
                    f"{self._root}: anybody may write there, and what they write is replayed as "
                    "root; run as another user, or take that right away: chmod o-w"
                )
            for follower, found in zip(ranks, restored, strict=True):
                self._queue(follower, found)
        return self._store

    def _check_run(self, store: Store) -> None:
        """Make sure that the work directory and the spool are of one run."""
        found = load_run(self._root / "run.json")
        if found is not None and found.run_id != store.run.run_id:
            raise StoreError(f"{self._root}: another run began there; start the workflow again")
        bound = Bound.load(self._work.run)
        if bound is not None and bound.run_id != store.run.run_id:
            same = bound.spool == str(self._root)
            when = " before it was cleared and captured anew" if same else ""
            raise StoreError(
                f"{self._work.root}: holds another run, that of {bound.spool}{when}; "
                "use another one: --config work_dir=DIR"
            )
        # The spool may have moved; jobs take its path from here.
        Bound(store.run.run_id, str(self._root)).save(self._work.run)

    def _queue(self, rank: RankFollower, found: Found) -> None:
        for batch in found.batches:
            step, calls = rank.ledger.sizes[batch]
            self._progress.add_batch(rank.rank, step, batch, calls)
            self._put(batch_target(self._work, rank.rank, batch))
        for segment in found.segments:
            self._progress.add_segment(rank.rank, segment)
            for target in segment_targets(self._work, rank.rank, segment):
                self._put(target)
        if found.end is None:
            return
        end = found.end
        lost = f", {sum(end.missing.values())} missing" if end.missing else ""
        if end.retired_by:
            lost += f": a check with work_dir {end.retired_by} took them"
        note = f" ({end.note})" if end.note else ""
        calls = sum(end.found.values())
        amount = (
            f"{calls} call{'s' * (calls != 1)} in {end.batches} batch{'es' * (end.batches != 1)}"
        )
        self._say(f"rank {end.rank} is over: {amount}{lost}{note}")
        for target in end_targets(self._settings, end):
            self._put(target)
