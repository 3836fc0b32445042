"""Dropping what was checked of a step that has been captured anew since.

Training that went on with ``resume=True``, or a rank that was cleared, leaves shards of
the same names that are other calls. What is known of the old ones must go before the
new ones are looked at.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from spool.intake.remind import Say
from spool.ledger import Ledger, ledger_path
from spool.store import Store
from spool.workdir import Manifest, Segment, WorkDir


def forget_earlier_takes(work: WorkDir, rank: int, store: Store, say: Say) -> None:
    """Delete manifests, rows and verdicts of steps whose shards are of a later take now.

    The manifests go last: after a kill in between, the next run finds them and goes on.
    No job may be running.

    Raises
    ------
    WorkDirError
        If a manifest or a segment is not usable.
    """
    takes = store.takes(rank)
    batches = {
        number: manifest.step
        for number in work.batches(rank)
        for manifest in [Manifest.load(work.batch(rank, number))]
        if manifest.run_id == store.run.run_id and manifest.take < takes.get(manifest.step, 0)
    }
    steps = sorted(set(batches.values()))
    if not steps:
        return
    work.end(rank).unlink(missing_ok=True)
    segments = {
        number
        for number in work.segments(rank)
        if Segment.load(work.segment(rank, number)).step in steps
    }
    _forget_kept_shards(work, rank, steps, segments)
    for number in segments:
        for path in (work.two_way, work.three_way, work.retired):
            _remove(path(rank, number))
        work.segment(rank, number).unlink()
    for number in batches:
        _remove(work.replay(rank, number))
        _remove(work.measured(rank, number))
    for number in batches:
        work.batch(rank, number).unlink()
    for step in steps:
        say(f"rank {rank} step {step} was captured anew: what was checked of it before is dropped")


def _forget_kept_shards(work: WorkDir, rank: int, steps: list[int], segments: set[int]) -> None:
    path = ledger_path(work, rank)
    ledger = Ledger.load(path)
    for step in steps:
        for directory in (
            ledger.path(work, rank, step, "shard").parent,
            work.quarantine(rank, step),
        ):
            shutil.rmtree(directory, ignore_errors=True)
    if path.exists():
        replace(
            ledger,
            segments=tuple(number for number in ledger.segments if number not in segments),
            candidates=tuple(c for c in ledger.candidates if c.key.step not in steps),
            evict=tuple(item for item in ledger.evict if item[0] not in steps),
        ).save(path)


def _remove(path: Path) -> None:
    """Delete a file, and what its job left beside it under the same name."""
    for found in path.parent.glob(f"{path.stem}.*"):
        found.unlink(missing_ok=True)
