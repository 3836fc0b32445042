"""What a rank's manifests name, what waits to be named, and when a batch is full.

Pure bookkeeping and the writing of manifests and segments; listing the spool
and deciding when a rank is over are `follow`'s. Memory grows with the shards of
unfinished steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spool.errors import StoreError
from spool.markers import captured_anew
from spool.settings import BatchLimits
from spool.workdir import MAX_BATCHES_PER_SEGMENT, Manifest, Segment, ShardRef, WorkDir

# A segment that fills slowly is closed at this many times a batch's seconds.
SEGMENT_AGE = 3.0

Clock = Callable[[], float]


@dataclass
class StepLedger:
    """Shards of one step: counted when named, remembered by file name until the step is done."""

    step: int
    # Which take of the step its shards are of, as `Store.takes` counts them.
    take: int = 0
    named: int = 0
    nbytes: int = 0
    is_done: bool = False
    batches: list[int] = field(default_factory=list)
    pending: dict[str, ShardRef] = field(default_factory=dict)
    pending_bytes: int = 0
    pending_since: float = 0.0
    unsegmented: list[int] = field(default_factory=list)
    unsegmented_since: float = 0.0
    # File names seen; None until something of the step is looked at, and when it is done.
    known: set[str] | None = None

    @property
    def found(self) -> int:
        """Shards seen, named or waiting."""
        return self.named + len(self.pending)


class RankLedger:
    """Batches and segments of one rank.

    Parameters
    ----------
    work : WorkDir
        Where manifests and segments are written.
    rank : int
        Whose.
    spool : Path
        Absolute path of the spool.
    run_id : str
        The run that manifests must belong to.
    limits : BatchLimits
        When a batch is cut.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self, work: WorkDir, rank: int, spool: Path, run_id: str, limits: BatchLimits, clock: Clock
    ) -> None:
        self.work = work
        self.rank = rank
        self.spool = spool
        self.run_id = run_id
        self.limits = limits
        self.steps: dict[int, StepLedger] = {}
        # Step and number of calls of each batch.
        self.sizes: dict[int, tuple[int, int]] = {}
        self.segments: list[int] = []
        self._takes: Mapping[int, int] = {}
        self._clock = clock
        self._next_batch = 0
        self._next_segment = 0

    def restore(self) -> tuple[list[int], list[int]]:
        """Take up the manifests and segments of an earlier run.

        Returns
        -------
        list of int, list of int
            Numbers of all batches and of all segments, ascending.

        Raises
        ------
        WorkDirError
            If one of them is not usable.
        StoreError
            If a manifest is of another run.
        """
        now = self._clock()
        for number in self.work.batches(self.rank):
            path = self.work.batch(self.rank, number)
            manifest = Manifest.load(path)
            if manifest.run_id != self.run_id:
                raise StoreError(
                    f"{path}: belongs to another run, that of {manifest.spool}; "
                    "use another one: --config work_dir=DIR"
                )
            step = self.step(manifest.step)
            step.take = manifest.take
            step.named += len(manifest.shards)
            step.nbytes += manifest.nbytes
            step.batches.append(number)
            self.sizes[number] = (manifest.step, len(manifest.shards))
        segmented: set[int] = set()
        for number in self.work.segments(self.rank):
            segmented.update(Segment.load(self.work.segment(self.rank, number)).batches)
            self.segments.append(number)
        for number, (at, _) in self.sizes.items():
            if number not in segmented:
                self.steps[at].unsegmented.append(number)
                self.steps[at].unsegmented_since = now
        self._next_batch = max(self.sizes, default=-1) + 1
        self._next_segment = max(self.segments, default=-1) + 1
        return list(self.sizes), list(self.segments)

    def check_takes(self, takes: Mapping[int, int]) -> list[int]:
        """Compare with what the spool has now; shards of an earlier take are forgotten.

        Parameters
        ----------
        takes : mapping of int to int
            By step, as `Store.takes` gives them.

        Returns
        -------
        list of int
            Steps of which something was forgotten.

        Raises
        ------
        StoreError
            If manifests name shards of an earlier take: the results of both would mix.
        """
        self._takes = takes
        stale = [step for step in self.steps.values() if step.take != takes.get(step.step, 0)]
        for step in stale:
            if step.batches:
                raise captured_anew(self.spool, self.rank, step.step)
            del self.steps[step.step]
        return [step.step for step in stale]

    def known(self, step: int) -> set[str]:
        """File names of a step that were seen; what manifests name is read back once."""
        ledger = self.step(step)
        if ledger.known is None:
            ledger.known = {
                shard.file
                for number in ledger.batches
                for shard in Manifest.load(self.work.batch(self.rank, number)).shards
            }
        return ledger.known

    def add(self, step: int, shards: Iterable[ShardRef]) -> int:
        """Note shards of a step, of which some may be known.

        Returns
        -------
        int
            How many were new.
        """
        ledger, known = self.step(step), self.known(step)
        before = len(ledger.pending)
        for shard in shards:
            if shard.file not in known:
                known.add(shard.file)
                if not ledger.pending:
                    ledger.pending_since = self._clock()
                ledger.pending[shard.file] = shard
                ledger.pending_bytes += shard.nbytes
        return len(ledger.pending) - before

    def cut(self, step: int, *, everything: bool = False) -> list[int]:
        """Write manifests of the batches that are full.

        Parameters
        ----------
        everything : bool
            Also what is not full: the step is over, or its writer waits for room.

        Returns
        -------
        list of int
            Numbers of the batches, whose manifests are on disk.
        """
        ledger = self.step(step)
        limits = self.limits
        everything |= self._clock() - ledger.pending_since >= limits.seconds
        if not ledger.pending or not (
            everything
            or len(ledger.pending) >= limits.calls
            or ledger.pending_bytes >= limits.nbytes
        ):
            return []
        waiting = deque(sorted(ledger.pending.values(), key=lambda item: (item.order, item.file)))
        numbers = []
        while waiting and (
            everything or len(waiting) >= limits.calls or ledger.pending_bytes >= limits.nbytes
        ):
            numbers.append(self._write_batch(ledger, waiting))
        ledger.pending_since = self._clock()
        return numbers

    def close_segments(self, step: int, *, everything: bool = False) -> list[int]:
        """Write segments of the batches that wait for one.

        Parameters
        ----------
        everything : bool
            Also a segment that is not full.

        Returns
        -------
        list of int
            Numbers of the segments, on disk.
        """
        ledger = self.step(step)
        late = self._clock() - ledger.unsegmented_since >= SEGMENT_AGE * self.limits.seconds
        numbers = []
        while ledger.unsegmented and (
            everything or late or len(ledger.unsegmented) >= MAX_BATCHES_PER_SEGMENT
        ):
            batches = tuple(sorted(ledger.unsegmented)[:MAX_BATCHES_PER_SEGMENT])
            number = self._next_segment
            path = self.work.segment(self.rank, number)
            Segment(self.rank, step, number, batches).save(path)
            self.segments.append(number)
            self._next_segment += 1
            numbers.append(number)
            ledger.unsegmented = [item for item in ledger.unsegmented if item not in batches]
            ledger.unsegmented_since = self._clock()
        return numbers

    def finish(self, step: int) -> None:
        """Forget the file names of a step that is complete."""
        ledger = self.step(step)
        ledger.is_done = True
        ledger.known = None

    def step(self, step: int) -> StepLedger:
        """The ledger of one step, begun if it is new."""
        return self.steps.setdefault(step, StepLedger(step, self._takes.get(step, 0)))

    def _write_batch(self, ledger: StepLedger, waiting: deque[ShardRef]) -> int:
        """Name the first of the waiting shards in a manifest, as many as fit one batch."""
        chosen = [waiting.popleft()]
        size = chosen[0].nbytes
        while (
            waiting
            and len(chosen) < self.limits.calls
            and size + waiting[0].nbytes <= self.limits.nbytes
        ):
            chosen.append(waiting.popleft())
            size += chosen[-1].nbytes
        manifest = Manifest(
            rank=self.rank,
            step=ledger.step,
            batch=self._next_batch,
            spool=str(self.spool),
            run_id=self.run_id,
            shards=tuple(chosen),
            take=ledger.take,
        )
        manifest.save(self.work.batch(self.rank, manifest.batch))
        self._next_batch += 1
        self.sizes[manifest.batch] = (ledger.step, len(chosen))
        for shard in chosen:
            del ledger.pending[shard.file]
        ledger.pending_bytes -= size
        ledger.named += len(chosen)
        ledger.nbytes += size
        ledger.batches.append(manifest.batch)
        if not ledger.unsegmented:
            ledger.unsegmented_since = self._clock()
        ledger.unsegmented.append(manifest.batch)
        return manifest.batch
