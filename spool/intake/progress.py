"""One line per batch: how far a rank is, how fast, and how many calls fail so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from spool.errors import SpoolError
from spool.intake.ledger import Clock
from spool.intake.remind import Say
from spool.workdir import WorkDir, read_json

# So many outstanding files are looked at each time, the oldest first.
WINDOW = 64


@dataclass
class _Rank:
    seen: int = 0
    done: int = 0
    failing: int = 0


@dataclass(frozen=True)
class _Waiting:
    path: Path
    rank: int
    step: int = 0
    number: int = 0
    calls: int = 0


class Progress:
    """Watches the outputs of queued batches and segments appear.

    What was there when it was queued counts as done, without a line.

    Parameters
    ----------
    work : WorkDir
        Where outputs appear.
    clock : callable
        Monotonic seconds.
    say : callable
        Takes the lines.
    """

    def __init__(self, work: WorkDir, clock: Clock, say: Say) -> None:
        self._work = work
        self._clock = clock
        self._say = say
        self._began = clock()
        self._fresh = 0
        self._ranks: dict[int, _Rank] = {}
        self._batches: deque[_Waiting] = deque()
        self._segments: deque[_Waiting] = deque()

    def add_batch(self, rank: int, step: int, number: int, calls: int) -> None:
        """Note a batch that was queued."""
        counts = self._ranks.setdefault(rank, _Rank())
        counts.seen += calls
        path = self._work.replay(rank, number)
        if path.exists():
            counts.done += calls
        else:
            self._batches.append(_Waiting(path, rank, step, number, calls))

    def add_segment(self, rank: int, number: int) -> None:
        """Note a segment that was queued."""
        self._segments.append(_Waiting(self._work.retired(rank, number), rank))

    def look(self) -> bool:
        """Say what was finished since the last look.

        Returns
        -------
        bool
            Whether some queued batch is still to come.
        """
        for segment in _finished(self._segments):
            self._ranks.setdefault(segment.rank, _Rank()).failing += failing_calls(segment.path)
        for batch in _finished(self._batches):
            counts = self._ranks[batch.rank]
            counts.done += batch.calls
            self._fresh += batch.calls
            rate = self._fresh / max(self._clock() - self._began, 1e-9)
            self._say(
                f"rank {batch.rank} step {batch.step} batch {batch.number}: "
                f"{counts.done} of {counts.seen} calls replayed, {rate:.0f} calls/s, "
                f"{counts.failing} failing so far"
            )
        return bool(self._batches)


def _finished(waiting: deque[_Waiting]) -> list[_Waiting]:
    """Take out what is finished among the oldest."""
    window = [waiting.popleft() for _ in range(min(WINDOW, len(waiting)))]
    there = [item for item in window if item.path.exists()]
    waiting.extendleft(reversed([item for item in window if item not in there]))
    return there


def failing_calls(path: Path) -> int:
    """How many calls of a segment fail, by the record of its retired shards; 0 if none yet."""
    if not path.exists():
        return 0
    try:
        count = read_json(path, "record of retired shards").get("failing", 0)
    except SpoolError:
        # It is being made anew.
        return 0
    return count if isinstance(count, int) else 0
