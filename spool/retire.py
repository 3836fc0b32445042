"""What becomes of a segment's shards once its verdicts are durable.

``retain: failed`` keeps the shards of calls with a warning or an error by either of
their verdicts, of calls that could not be replayed or judged, and of those for which there
is no reference yet; they move to the directory for failed shards, within the limits of
`spool.ledger`. ``all`` leaves every shard where it is, ``none`` deletes every one, also
what was kept before. A segment that was retired before stays as it is under ``all``, and
its record says so.

The rank's ledger is written before anything is moved or deleted, so that a kill at any
point is repaired by running again. Judging again under other keys never brings shards
back and never deletes one that is kept.
"""

from __future__ import annotations

import errno
import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from spool.errors import SpoolError
from spool.files import copy_open, fsync_dir, is_regular, make_dirs, open_regular, opener
from spool.ledger import Candidate, Ledger, choose, directory_of, ledger_path, load_ledger, relevant
from spool.markers import note_retired
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
    manifests = [_manifest(work, record, number) for number in record.batches]
    wanted, failing, quarantined = _judged(record, manifests, two_way, three_way)
    retain = settings.retain
    if retain == "all" and record.segment in Ledger.load(ledger_path(work, record.rank)).segments:
        retain = "earlier"
        print(
            f"rank {record.rank}: segment {record.segment} was retired before retain=all; "
            "its shards stay as they are",
            file=sys.stderr,
        )
    elif retain != "all":
        limit = settings.max_failed_bytes // max(1, ranks)
        with _locked(ledger_path(work, record.rank)) as path:
            ledger = load_ledger(work, record.rank)
            if record.segment not in ledger.segments:
                _require_spool(record, manifests)
            if retain == "none":
                wanted = []
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
            "retain": retain,
            "shards": sum(len(manifest.shards) for manifest in manifests),
            "failing": failing,
            "quarantined": len(quarantined),
        },
    )


def _manifest(work: WorkDir, record: Segment, number: int) -> Manifest:
    path = work.batch(record.rank, number)
    manifest = Manifest.find(path)
    if manifest.step != record.step:
        raise RetireError(
            f"{path}: of step {manifest.step}, but its segment {record.segment} is of step "
            f"{record.step}; nothing was deleted; remove the segment and rerun"
        )
    return manifest


def _judged(
    record: Segment, manifests: Sequence[Manifest], two_way: Path, three_way: Path
) -> tuple[list[CallVerdict], int, set[str]]:
    """Calls whose shards are kept, how many calls fail, and quarantined files."""
    files = {shard.file for manifest in manifests for shard in manifest.shards}
    calls = 0
    kept: list[CallVerdict] = []
    failing = 0
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
            elif verdict.is_worth_keeping:
                kept.append(verdict)
                failing += verdict.failed
    if calls != len(files):
        raise RetireError(
            f"{two_way}: segment {record.segment} of rank {record.rank} has {len(files)} shards "
            f"and {calls} verdicts; nothing was deleted; remove its tables and rerun"
        )
    return kept, failing, quarantined


def _require_spool(record: Segment, manifests: Sequence[Manifest]) -> None:
    for manifest in manifests:
        try:
            with manifest.opened():
                pass
        except (FileNotFoundError, NotADirectoryError):
            raise RetireError(
                f"{manifest.step_dir}: the shards of segment {record.segment} are not there; "
                "mount the spool and rerun"
            ) from None


def _settle(
    ledger: Ledger,
    manifests: Sequence[Manifest],
    wanted: Sequence[CallVerdict],
    settings: RetireSettings,
    limit: int,
    work: WorkDir,
) -> Ledger:
    """The ledger with the calls worth keeping taken in and everything decided."""
    there = _in_spool(manifests, {call.shard for call in wanted})
    known = {candidate.key for candidate in ledger.candidates}
    ledger = replace(ledger, directory=ledger.directory or directory_of(work, settings.failed_dir))

    def kept_path(call: CallVerdict) -> Path:
        return ledger.path(work, call.rank, call.step, call.shard)

    fresh = [
        Candidate(call.key, call.shard, call.nbytes)
        for call in wanted
        if call.key not in known
        # What a lost ledger had kept is there already.
        and (call.shard in there or is_regular(kept_path(call)))
    ]
    candidates = sorted([*ledger.candidates, *fresh])
    is_keeping = settings.retain == "failed"
    keep = choose(candidates, settings.keep_per_api, limit) if is_keeping else set()
    decided = [replace(c, kept=c.kept and c.key in keep) for c in candidates]
    before = {(c.key.step, c.file) for c in ledger.candidates if c.kept}
    after = {(c.key.step, c.file) for c in decided if c.kept}
    return replace(
        ledger,
        candidates=tuple(relevant(decided, settings.keep_per_api, limit)),
        evict=tuple(sorted({*ledger.evict, *(before - after)})),
    )


def _in_spool(manifests: Sequence[Manifest], files: set[str]) -> set[str]:
    """Those of some shards that lie in the spool, and are files."""
    return {
        shard.file
        for manifest, here in _opened(manifests)
        for shard in manifest.shards
        if shard.file in files and is_regular(here / shard.file)
    }


def _opened(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, Path]]:
    """Each manifest with its directory in the spool, open until the next; not those without."""
    for manifest in manifests:
        with ExitStack() as stack:
            try:
                here = stack.enter_context(manifest.opened())
            except FileNotFoundError:
                continue
            yield manifest, here


def _act(
    ledger: Ledger,
    record: Segment,
    manifests: Sequence[Manifest],
    quarantined: set[str],
    work: WorkDir,
) -> None:
    """Do what the ledger says; each step may have been done already."""
    by = work.name
    for step, file in ledger.evict:
        path = ledger.path(work, record.rank, step, file)
        _delete(path, path)
    kept = ledger.kept
    directory = ledger.path(work, record.rank, record.step, "_").parent
    for manifest, here in _opened(manifests):
        # By these names messages call what is reached by way of the open directory.
        shards = [manifest.step_dir / shard.file for shard in manifest.shards]
        for shard in shards:
            if (record.step, shard.name) in kept:
                _move(here / shard.name, directory / shard.name, shard)
        if directory.is_dir():
            fsync_dir(directory)
        for shard in shards:
            if shard.name not in quarantined:
                _delete(here / shard.name, shard)
        # Only a help to who comes with another work directory: no reason to fail.
        with suppress(OSError):
            note_retired(here, by)


def _delete(path: Path, name: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RetireError(
            f"{name}: cannot delete the shard: {error.strerror}; make it writable, or set "
            "retain=all, and rerun"
        ) from None


def _move(source: Path, target: Path, name: Path) -> None:
    """Move a file if it is there; what is no file is not followed, and stays.

    Across file systems it is copied, and the source stays: the caller deletes it when
    the copy is durable.
    """
    if not is_regular(source):
        return
    if is_regular(target) and target.stat().st_size == source.lstat().st_size:
        return
    try:
        make_dirs(target.parent)
        try:
            source.rename(target)
        except OSError as error:
            # A spool that may only be read can still be copied from.
            if error.errno not in (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            copy_open(open_regular(source), target)
        if not is_regular(target):
            # Something else took the shard's place just now.
            target.unlink()
    except OSError as error:
        raise RetireError(
            f"{name}: cannot keep the shard in {target.parent}: {error.strerror}; "
            "make room or set another error_data_path, and rerun"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Hold the lock of a ledger: one segment of a rank is retired at a time."""
    make_dirs(path.parent)
    with open(path.with_name(".ledger.lock"), "w", opener=opener) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield path
