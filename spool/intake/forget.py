"""Dropping what was checked of a step that has been captured anew since.

Training that went on with ``resume=True``, or a rank that was cleared, leaves shards of
the same names that are other calls. What is known of the old ones must go before the
new ones are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from spool.files import fsync_dir
from spool.intake.remind import Say
from spool.ledger import Ledger, ledger_path
from spool.store import Store
from spool.workdir import Manifest, Segment, WorkDir


def forget_earlier_takes(work: WorkDir, rank: int, store: Store, say: Say) -> None:
    """Delete manifests, rows and verdicts of steps whose shards are of another take now.

    The manifests go last: after a kill in between, the next run finds them and goes on.
    No job may be running.

    Raises
    ------
    WorkDirError
        If a manifest or a segment is not usable.
    """
    takes = store.takes(rank)
    stale: dict[int, Manifest] = {}
    for number in work.batches(rank):
        manifest = Manifest.load(work.batch(rank, number))
        is_ours = manifest.run_id == store.run.run_id
        if is_ours and manifest.take != takes.get(manifest.step, 0):
            stale[number] = manifest
    steps = sorted({manifest.step for manifest in stale.values()})
    if not steps:
        return
    work.end(rank).unlink(missing_ok=True)
    segments = {
        number
        for number in work.segments(rank)
        if Segment.load(work.segment(rank, number)).step in steps
    }
    _forget_kept_shards(work, rank, stale.values(), segments)
    for number in segments:
        for path in (work.two_way, work.three_way, work.retired):
            _remove(path(rank, number))
        work.segment(rank, number).unlink()
    for number in stale:
        _remove(work.replay(rank, number))
        _remove(work.measured(rank, number))
    for example in (work.measured(rank, 0), work.replay(rank, 0), work.segment(rank, 0)):
        # A number may be used again: what had it must be gone for good before.
        if example.parent.is_dir():
            fsync_dir(example.parent)
    for number in stale:
        work.batch(rank, number).unlink()
    for step in steps:
        say(f"rank {rank} step {step} was captured anew: what was checked of it before is dropped")


def _forget_kept_shards(
    work: WorkDir, rank: int, manifests: Iterable[Manifest], segments: set[int]
) -> None:
    """Delete the shards that manifests name, wherever they were kept, and nothing else there."""
    path = ledger_path(work, rank)
    ledger = Ledger.load(path)
    steps = set()
    for manifest in manifests:
        steps.add(manifest.step)
        for shard in manifest.shards:
            kept = ledger.path(work, rank, manifest.step, shard.file)
            for file in (kept, work.failed(rank, manifest.step) / shard.file):
                file.unlink(missing_ok=True)
            quarantined = work.quarantine(rank, manifest.step) / shard.file
            for file in (quarantined, quarantined.with_name(f"{shard.file}.json")):
                file.unlink(missing_ok=True)
    if path.exists():
        replace(
            ledger,
            segments=tuple(number for number in ledger.segments if number not in segments),
            candidates=tuple(c for c in ledger.candidates if c.key.step not in steps),
            evict=tuple(item for item in ledger.evict if item[0] not in steps),
        ).save(path)


def _remove(path: Path) -> None:
    """Delete a file, and what else has its number."""
    for found in path.parent.glob(f"{path.stem}.*"):
        found.unlink(missing_ok=True)
