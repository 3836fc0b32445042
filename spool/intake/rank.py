"""Following one rank: what is new, what is over, and what is missing at the end."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spool.errors import StoreError
from spool.intake.ledger import Clock, RankLedger
from spool.intake.remind import Reminder
from spool.intake.targets import rank_tables
from spool.intake.watch import Hints
from spool.markers import MarkerError, to_json
from spool.processes import is_running
from spool.settings import Settings
from spool.workdir import RankEnd, ShardRef

if TYPE_CHECKING:
    from spool.store import Heartbeat, RankCounts, StepCounts, Store

# A rank without a sign of life is spoken of after so many seconds; one whose process is
# known to be gone when the next heartbeat is overdue.
SILENT, OVERDUE = 60.0, 10.0


@dataclass(frozen=True)
class Found:
    """What one look at a rank brought: new batches and segments, and its end if it is over."""

    batches: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    end: RankEnd | None = None


class RankFollower:
    """Follows one rank of a spool until it is over.

    Parameters
    ----------
    store : Store
        The spool.
    rank : int
        Whose shards.
    settings : Settings
        Of this run.
    remind : Reminder
        For lines about what is waited for.
    clock : callable
        Monotonic seconds. Silence is measured by when *we* saw the last change:
        the training host's clock may be anything.
    """

    def __init__(
        self, store: Store, rank: int, settings: Settings, remind: Reminder, clock: Clock
    ) -> None:
        self.rank = rank
        self.is_ended = False
        self.ledger = RankLedger(
            settings.work, rank, store.root, store.run.run_id, settings.batch, clock
        )
        self._store = store
        self._settings = settings
        self._remind = remind
        self._clock = clock
        self._beat: Heartbeat | None = None
        self._alive = clock()
        self._over_since: float | None = None
        self._is_listed_since_over = False
        self._closed_steps: dict[int, StepCounts] = {}
        self._note = ""
        self._unretired: list[int] = []

    def restore(self) -> Found:
        """Take up what earlier runs wrote down.

        Raises
        ------
        SpoolError
            If it is unusable, of another run, or of steps that were captured anew since.
        """
        found = Found(*self.ledger.restore())
        self._unretired = list(found.segments)
        self._check_takes()
        return found

    def look(self, hints: Hints, is_listing: bool) -> Found:
        """Take in what is new.

        Parameters
        ----------
        hints : Hints
            Files that events named.
        is_listing : bool
            Whether to list the directories of all unfinished steps.
        """
        now = self._clock()
        # Read before the listing: what a closed rank counts is there by then.
        closed = self._store.rank_closed(self.rank)
        beat = self._read_heartbeat()
        if beat != self._beat:
            self._beat, self._alive = beat, now
        self._check_takes()
        self._note_over(closed, now)
        if self._over_since is not None and not self._is_listed_since_over:
            is_listing = self._is_listed_since_over = True
        steps = set(self.ledger.steps) | set(closed.steps if closed else ())
        steps.update(step for rank, step in hints if rank == self.rank)
        if is_listing:
            steps.update(self._store.steps(self.rank))
        found = Found()
        for step in sorted(steps):
            if not self.ledger.step(step).is_done:
                names = hints.get((self.rank, step), set())
                self._look_at_step(step, closed, None if is_listing else names, found)
        is_done = all(ledger.is_done for ledger in self.ledger.steps.values())
        if self._over_since is None or not is_done:
            return found
        return Found(found.batches, found.segments, self._end(closed))

    def _read_heartbeat(self) -> Heartbeat | None:
        """The last sign of life; one that a crash left torn is as good as none."""
        try:
            return self._store.read_heartbeat(self.rank)
        except MarkerError:
            return self._beat

    def await_first(self, there: Iterable[int]) -> Found:
        """Wait for a rank that is not in the spool, or give it up after `idle_timeout`."""
        self._store.rank_closed(self.rank)  # refuses what is there and is no directory
        silent, timeout = self._clock() - self._alive, self._settings.idle_timeout
        ranks = ", ".join(map(str, sorted(there))) or "none"
        if self._settings.watch and not (timeout and silent >= timeout):
            self._remind(
                f"appear {self.rank}",
                f"waiting for rank {self.rank} in {self._store.root} (ranks there: {ranks})",
            )
            return Found()
        self._note = f"rank {self.rank} never appeared in {self._store.root} (ranks there: {ranks})"
        return Found(end=self._end(None))

    def _look_at_step(
        self, step: int, closed: RankCounts | None, names: set[str] | None, found: Found
    ) -> None:
        ledger = self.ledger.step(step)
        counts = closed.steps.get(step) if closed else None
        if counts is None and names != set():
            counts = self._store.step_closed(self.rank, step)
        if counts is not None and step not in self._closed_steps:
            self._closed_steps[step] = counts
            names = None
        if names != set() and self.ledger.add(step, self._new_shards(step, names)):
            self._alive = self._clock()
            # Who deletes a step counts that first, so what was listed is of the take known
            # before if that is the take still.
            if step in self._check_takes():
                return
        is_whole = counts is not None and ledger.found >= counts.shards
        is_done = is_whole or self._is_given_up(step, closed, counts)
        is_urgent = is_done or self._is_starved()
        found.batches.extend(self.ledger.cut(step, everything=is_urgent))
        segments = self.ledger.close_segments(step, everything=is_urgent)
        self._unretired += segments
        found.segments.extend(segments)
        if is_done:
            self.ledger.finish(step)

    def _is_starved(self) -> bool:
        """Whether the writer waits for room that nothing on its way will free.

        It gets room only when what it wrote is retired. A batch of whatever has come since
        the last one freed some would be small, and every batch costs the start of its jobs.
        """
        if self._beat is None or not self._beat.blocked:
            return False
        retired = self._settings.work.retired
        self._unretired = [n for n in self._unretired if not retired(self.rank, n).exists()]
        return not self._unretired

    def _new_shards(self, step: int, names: set[str] | None) -> Iterator[ShardRef]:
        """Shards that a listing finds, or those of the names that are there."""
        known = self.ledger.known(step)
        if names is None:
            entries = self._store.shards(self.rank, step, known)
        else:
            entries = self._store.look_up(self.rank, step, names - known)
        for entry in entries:
            yield ShardRef(entry.path.name, entry.nbytes)

    def _check_takes(self) -> list[int]:
        """Steps that are captured anew and begin from nothing here too."""
        steps = self.ledger.check_takes(self._store.takes(self.rank))
        for step in steps:
            self._closed_steps.pop(step, None)
        return steps

    def _note_over(self, closed: RankCounts | None, now: float) -> None:
        """Note when the rank is first known to be over, and why if it never closed."""
        if closed is None and not self._note:
            # It was closed, and training goes on with it.
            self._over_since, self._is_listed_since_over = None, False
        if self._over_since is not None:
            return
        timeout, silent = self._settings.idle_timeout, now - self._alive
        if closed is not None:
            self._over_since = now
        elif not self._settings.watch:
            self._over_since = now
            self._note = f"rank {self.rank} was not closed when it was read (watch=false)"
        elif timeout and silent >= timeout:
            self._over_since = now
            self._note = (
                f"rank {self.rank} was not closed and silent for {timeout:g} s (idle_timeout); "
                "taken as ended"
            )
        elif silent >= OVERDUE and (pid := self._gone()):
            self._remind(
                f"silent {self.rank}",
                f"rank {self.rank}: process {pid} of this host, which captured it, is gone; "
                f"`spool close {self._store.root} --rank {self.rank}` ends it",
            )
        elif silent >= SILENT:
            self._remind(
                f"silent {self.rank}",
                f"rank {self.rank} silent for {silent:.0f} s; "
                f"`spool close {self._store.root} --rank {self.rank}` ends it",
            )

    def _gone(self) -> int:
        """The rank's training process, if it ran on this host and has ended; else 0."""
        beat = self._beat
        if beat is None or beat.host != socket.gethostname():
            return 0
        return 0 if is_running(beat.pid) or (beat.writer and is_running(beat.writer)) else beat.pid

    def _is_given_up(self, step: int, closed: RankCounts | None, counts: StepCounts | None) -> bool:
        """Whether an incomplete step of a rank that is over is taken as it is."""
        if self._over_since is None:
            return False
        if counts is None and (closed is None or not self.ledger.step(step).found):
            return True
        if self._retired_by(step):
            return True
        if self._clock() - self._over_since >= self._settings.missing_seconds:
            return True
        wanted = counts.shards if counts else 0
        self._remind(
            f"missing {self.rank}",
            f"rank {self.rank} step {step} is closed with {wanted} calls, "
            f"{self.ledger.step(step).found} seen; waiting for the rest",
        )
        return False

    def _retired_by(self, step: int) -> str:
        """Whose check took shards of a step away, if it was another work directory's."""
        by = ""
        with contextlib.suppress(StoreError):  # it only tells, and what is unreadable tells nothing
            by = self._store.retired_by(self.rank, step)
        return "" if by == self._settings.work.name else by

    def _end(self, closed: RankCounts | None) -> RankEnd:
        """Write down that the rank is over."""
        found = {step: item.named for step, item in self.ledger.steps.items() if item.named}
        counted = dict(closed.steps if closed else self._closed_steps)
        missing = {
            step: counts.shards - found.get(step, 0)
            for step, counts in counted.items()
            if counts.shards > found.get(step, 0)
        }
        end = RankEnd(
            rank=self.rank,
            run_id=self._store.run.run_id,
            timestamp=self._store.run.timestamp,
            segments=tuple(self.ledger.segments),
            batches=len(self.ledger.sizes),
            found=found,
            expected=json.loads(to_json(closed)) if closed else None,
            missing=missing,
            note=self._note,
            retired_by=next(filter(None, map(self._retired_by, sorted(missing))), ""),
        )
        tables = rank_tables(self._settings.results_dir, end).all
        path = self._settings.work.end(self.rank)
        if missing and not path.exists() and any(table.exists() for table in tables):
            other = end.retired_by or "another work_dir, which checked them,"
            raise StoreError(
                f"{tables[0].parent}: holds tables of rank {self.rank} of this run, and "
                f"{sum(missing.values())} of its shards are not in the spool: {other} has their "
                "rows; use that one, or name another results_dir"
            )
        # Late shards change it, and then the tables must be older.
        end.save(path, tables)
        self.is_ended = True
        return end
