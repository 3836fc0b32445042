"""Which files Snakemake is asked for, and which inputs a rank's tables have."""

from __future__ import annotations

from pathlib import Path

from spool.settings import Settings
from spool.tables import RankTables
from spool.workdir import RankEnd, Segment, WorkDir


def batch_target(work: WorkDir, rank: int, batch: int) -> Path:
    """What makes a batch be replayed."""
    return work.replay(rank, batch)


def segment_targets(work: WorkDir, rank: int, segment: int) -> tuple[Path, ...]:
    """What makes a segment be judged and retired.

    Its tables are asked for by themselves too: a deleted one is then made again, though
    what was made from it is still there.
    """
    return (
        work.two_way(rank, segment),
        work.three_way(rank, segment),
        work.retired(rank, segment),
    )


def end_targets(settings: Settings, end: RankEnd) -> tuple[Path, ...]:
    """A rank's tables."""
    return rank_tables(settings.results_dir, end).all


def verdict_target(work: WorkDir) -> Path:
    """What sets the exit status; asked for last."""
    return work.root / "verdict.txt"


def rank_tables(results_dir: Path, end: RankEnd) -> RankTables:
    """The tables of a rank that is over."""
    return RankTables(results_dir, end.timestamp, end.rank)


def segment_batches(work: WorkDir, rank: int, segment: int) -> list[Path]:
    """Measured rows of a segment's batches, as rule replay outputs them."""
    record = Segment.load(work.segment(rank, segment))
    return [work.replay(rank, batch) for batch in record.batches]


def run_tables(settings: Settings) -> list[Path]:
    """The tables of every rank of the run; their ends must have been written."""
    ends = [RankEnd.load(settings.work.end(rank)) for rank in settings.rank_list]
    return [path for end in ends for path in end_targets(settings, end)]


def existing_targets(settings: Settings) -> list[Path]:
    """What can be asked for without looking at the spool: all that is written down."""
    work = settings.work
    targets: list[Path] = []
    ended = []
    for rank in settings.rank_list:
        targets += [batch_target(work, rank, number) for number in work.batches(rank)]
        for number in work.segments(rank):
            # Snakemake asks for its batches later, and has no line for a damaged one.
            Segment.load(work.segment(rank, number))
            targets += segment_targets(work, rank, number)
        if work.end(rank).exists():
            ended.append(RankEnd.load(work.end(rank)))
    targets += [path for end in ended for path in end_targets(settings, end)]
    if len(ended) == len(settings.rank_list):
        targets.append(verdict_target(work))
    return targets
