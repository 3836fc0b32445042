"""What becomes of a segment's shards once its verdicts are durable.

``retain: failed`` keeps the shards of calls with a warning or an error by either of
their verdicts, and of calls that could not be replayed or judged; they move to the
directory for failed shards, within the limits of `spool.ledger`. ``all`` leaves every
shard where it is, ``none`` deletes every one.

The rank's ledger is written before anything is moved or deleted, so that a kill at any
point is repaired by running again. Judging again under other keys never brings shards
back and never deletes one that is kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spool.errors import SpoolError
from spool.files import fsync_dir
from spool.ledger import Candidate, Ledger, choose, directory_of, ledger_path, load_ledger, relevant
from spool.records import CallVerdict, Outcome
from spool.settings import RetireSettings
from spool.tables import read_verdict_info, read_verdicts
from spool.workdir import Manifest, Segment, WorkDir, write_if_changed

VERSION = 1


class RetireError(SpoolError):
    """Shards cannot be retired without losing something."""


def retire_segment(
    segment: Path,
    two_way: Path,
    three_way: Path,
    out: Path,
    settings: RetireSettings,
    ranks: int = 1,
) -> None:
    """Move or delete a segment's shards, and write what was done.

    Parameters
    ----------
    segment : Path
        The segment's record, inside the work directory.
    two_way, three_way : Path
        Its verdict files, durable by now.
    out : Path
        Record to write: how many shards there were, how many of them failed.
    settings : RetireSettings
    ranks : int
        Ranks that share `max_failed_bytes`, in equal parts: what one rank keeps never
        depends on another's data.

    Raises
    ------
    RetireError
        If a shard of the segment has no verdict, or the spool is not there.
    StoreError
        If the spool holds other shards of the same names by now.
    """
    record = Segment.load(segment)
    work = WorkDir(segment.absolute().parents[2])
    manifests = [Manifest.find(work.batch(record.rank, number)) for number in record.batches]
    failing, quarantined = _judged(record, manifests, two_way, three_way)
    if settings.retain != "all":
        limit = settings.max_failed_bytes // max(1, ranks)
        with _locked(ledger_path(work, record.rank)) as path:
            ledger = load_ledger(work, record.rank)
            if record.segment not in ledger.segments:
                _require_spool(record, manifests)
            wanted = failing if settings.retain == "failed" else []
            ledger = _settle(ledger, manifests, wanted, settings, limit, work)
            for manifest in manifests:
                manifest.require_take()
            ledger.save(path)
            _act(ledger, record, manifests, quarantined, work)
            done = tuple(sorted({*ledger.segments, record.segment}))
            replace(ledger, segments=done, evict=()).save(path)
    write_if_changed(
        out,
        {
            "version": VERSION,
            "rank": record.rank,
            "step": record.step,
            "segment": record.segment,
            "retain": settings.retain,
            "shards": sum(len(manifest.shards) for manifest in manifests),
            "failing": len(failing),
            "quarantined": len(quarantined),
        },
    )


def _judged(
    record: Segment, manifests: Sequence[Manifest], two_way: Path, three_way: Path
) -> tuple[list[CallVerdict], set[str]]:
    """Failing calls and quarantined files of the segment."""
    files = {shard.file for manifest in manifests for shard in manifest.shards}
    calls = 0
    failing: list[CallVerdict] = []
    quarantined: set[str] = set()
    for path in (two_way, three_way):
        info = read_verdict_info(path)
        if (info.rank, info.segment) != (record.rank, record.segment):
            raise RetireError(
                f"{path}: verdicts of rank {info.rank} segment {info.segment}, not of rank "
                f"{record.rank} segment {record.segment}; remove it and rerun"
            )
        calls += info.calls + info.not_selected
        for verdict in read_verdicts(path, details=False):
            if verdict.shard not in files:
                raise RetireError(
                    f"{path}: {verdict.shard} is no shard of segment {record.segment}; "
                    "nothing was deleted; remove the table and rerun"
                )
            if verdict.outcome is Outcome.QUARANTINED:
                quarantined.add(verdict.shard)
            elif verdict.failed:
                failing.append(verdict)
    if calls != len(files):
        raise RetireError(
            f"{two_way}: segment {record.segment} of rank {record.rank} has {len(files)} shards "
            f"and {calls} verdicts; nothing was deleted; remove its tables and rerun"
        )
    return failing, quarantined


def _require_spool(record: Segment, manifests: Sequence[Manifest]) -> None:
    for manifest in manifests:
        if not manifest.step_dir.is_dir():
            raise RetireError(
                f"{manifest.step_dir}: the shards of segment {record.segment} are not there; "
                "mount the spool and rerun"
            )


def _settle(
    ledger: Ledger,
    manifests: Sequence[Manifest],
    failing: Sequence[CallVerdict],
    settings: RetireSettings,
    limit: int,
    work: WorkDir,
) -> Ledger:
    """The ledger with the segment's failing calls taken in and everything decided."""
    places = {shard.file: manifest.step_dir for manifest in manifests for shard in manifest.shards}
    known = {candidate.key for candidate in ledger.candidates}
    ledger = replace(ledger, directory=ledger.directory or directory_of(work, settings.failed_dir))

    def kept_path(call: CallVerdict) -> Path:
        return ledger.path(work, call.rank, call.step, call.shard)

    fresh = [
        Candidate(call.key, call.shard, call.nbytes)
        for call in failing
        if call.key not in known
        # What a lost ledger had kept is there already.
        and ((places[call.shard] / call.shard).exists() or kept_path(call).exists())
    ]
    candidates = sorted([*ledger.candidates, *fresh])
    keep = choose(candidates, settings.keep_per_api, limit)
    decided = [replace(c, kept=c.kept and c.key in keep) for c in candidates]
    before = {(c.key.step, c.file) for c in ledger.candidates if c.kept}
    after = {(c.key.step, c.file) for c in decided if c.kept}
    return replace(
        ledger,
        candidates=tuple(relevant(decided, settings.keep_per_api, limit)),
        evict=tuple(sorted({*ledger.evict, *(before - after)})),
    )


def _act(
    ledger: Ledger,
    record: Segment,
    manifests: Sequence[Manifest],
    quarantined: set[str],
    work: WorkDir,
) -> None:
    """Do what the ledger says; each step may have been done already."""
    for step, file in ledger.evict:
        _delete(ledger.path(work, record.rank, step, file))
    kept = ledger.kept
    directory = ledger.path(work, record.rank, record.step, "_").parent
    shards = [manifest.step_dir / shard.file for manifest in manifests for shard in manifest.shards]
    for shard in shards:
        if (record.step, shard.name) in kept:
            _move(shard, directory / shard.name)
    if directory.is_dir():
        fsync_dir(directory)
    for shard in shards:
        if shard.name not in quarantined:
            _delete(shard)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RetireError(
            f"{path}: cannot delete the shard: {error.strerror}; make it writable, or set "
            "retain=all, and rerun"
        ) from None


def _move(source: Path, target: Path) -> None:
    """Move a file if it is there.

    Across file systems it is copied, and the source stays: the caller deletes it when
    the copy is durable.
    """
    try:
        size = source.stat().st_size
    except FileNotFoundError:
        return
    if target.exists() and target.stat().st_size == size:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            source.rename(target)
        except OSError as error:
            # A spool that may only be read can still be copied from.
            if error.errno not in (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            _copy(source, target)
    except OSError as error:
        raise RetireError(
            f"{source}: cannot keep the shard in {target.parent}: {error.strerror}; "
            "make room or set another error_data_path, and rerun"
        ) from None


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        with source.open("rb") as reader, partial.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Hold the lock of a ledger: one segment of a rank is retired at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(".ledger.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield path
