"""Rule replay: one batch from its manifest to its measured rows. Imports no torch.

The rows of a batch are written once, to the work directory's ``measured``; the rule's
output is a link to them. Running the rule again on a measured batch only publishes
the rows again: the shards may be gone by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spool.parquet import read_measured, read_meta, write_measured
from spool.records import CallHeader, MeasuredRow, Outcome
from spool.replay.journal import Progress, recover
from spool.replay.result import CallResult, header_of_file
from spool.replay.supervise import Job, run_workers
from spool.settings import ReplaySettings
from spool.standards.rows import SCHEMA_VERSION
from spool.store import atomic_write, fsync_dir
from spool.workdir import Manifest, WorkDir

_JOURNAL_VERSION = 1


def replay_batch(manifest: Path, work_dir: Path, output: Path, settings: ReplaySettings) -> None:
    """Replay and measure the calls of a batch, and publish the rows as `output`.

    May be killed at any point and run again, also at the same time by two jobs: the
    rows come out the same.

    Parameters
    ----------
    manifest : Path
        The batch's manifest.
    work_dir : Path
        Root of the work directory.
    output : Path
        The rule's output; becomes a link to (or a copy of) the measured rows.
    settings : ReplaySettings

    Raises
    ------
    SpoolError
        If the batch cannot be replayed on this host at all. What goes wrong in one
        call is that call's row.
    """
    record = Manifest.load(manifest)
    work = WorkDir(work_dir)
    measured = work.measured(record.rank, record.batch)
    journal = measured.with_name(f".{measured.stem}.journal")
    measured.parent.mkdir(parents=True, exist_ok=True)
    with _locked(journal, f"rank {record.rank} batch {record.batch}") as unfinished:
        if measured.exists():
            _say_kept(measured, record, settings)
            if unfinished:
                _quarantine(record, work, read_measured(measured))
        else:
            rows = _measure(Job(manifest, journal, settings), record)
            _write_once(measured, rows, _facts(settings))
            _quarantine(record, work, rows)
        journal.unlink(missing_ok=True)
    _publish(measured, output)


def _measure(job: Job, record: Manifest) -> list[MeasuredRow]:
    identity = _identity(record, job.settings)

    def reload() -> Progress:
        return recover(job.journal, identity)

    progress = run_workers(job, len(record.shards), reload(), reload)
    results = [
        _result(record, number, progress, job.settings) for number in range(len(record.shards))
    ]
    results.sort(key=lambda result: result.header.key)
    return [row for result in results for row in result.rows()]


def _result(
    record: Manifest, number: int, progress: Progress, settings: ReplaySettings
) -> CallResult:
    if number in progress.done:
        return CallResult.from_json(progress.done[number])
    header = header_of_file(record, record.shards[number])
    if number in progress.headers:
        header = CallHeader(**progress.headers[number])
    return CallResult(header, Outcome.REPLAY_FAILED, progress.lost[number])


def _identity(record: Manifest, settings: ReplaySettings) -> dict[str, Any]:
    """What the journal's results hang on; results of another job are worth nothing."""
    content = json.dumps(record.to_json(), sort_keys=True).encode()
    return {
        "journal": _JOURNAL_VERSION,
        "manifest": hashlib.sha256(content).hexdigest(),
        "settings": settings.to_json() | {"gpu": None},
        **_versions(),
    }


def _facts(settings: ReplaySettings) -> dict[str, str]:
    """What is stored with the rows, for those who read them later."""
    measuring = {key: str(value) for key, value in settings.measuring().items()}
    return measuring | _versions()


def _versions() -> dict[str, str]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "unknown"  # a build that was not installed as a package
    return {"torch": torch, "schema": str(SCHEMA_VERSION)}


def _write_once(measured: Path, rows: list[MeasuredRow], facts: dict[str, str]) -> None:
    """Write the rows, durably, unless somebody has meanwhile."""
    partial = measured.with_name(f".{measured.name}.{uuid.uuid4().hex}.partial")
    try:
        write_measured(partial, rows, facts)
        with contextlib.suppress(FileExistsError):
            os.link(partial, measured)
    finally:
        partial.unlink(missing_ok=True)
    fsync_dir(measured.parent)


def _publish(measured: Path, output: Path) -> None:
    """Make `output` show the measured rows, newer than whatever they were made from."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
    try:
        os.link(measured, partial)
        os.utime(partial)
        # A rename onto another name of the same file does nothing at all.
        output.unlink(missing_ok=True)
        os.replace(partial, output)
    except OSError:
        atomic_write(output, measured.read_bytes())
    finally:
        partial.unlink(missing_ok=True)


def _quarantine(record: Manifest, work: WorkDir, rows: list[MeasuredRow]) -> None:
    """Set unusable shards aside, each with its reason; what is moved already stays."""
    bad = {row.header.shard: row.reason for row in rows if row.outcome is Outcome.QUARANTINED}
    target = work.quarantine(record.rank, record.step)
    if bad:
        target.mkdir(parents=True, exist_ok=True)
    for file, reason in bad.items():
        note = {"shard": file, "spool": record.spool, "batch": record.batch, "reason": reason}
        atomic_write(target / f"{file}.json", json.dumps(note, ensure_ascii=False).encode() + b"\n")
        _move(record.step_dir / file, target / file)


def _move(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        return
    except OSError:  # another file system, or a spool that is mounted read-only
        partial = target.with_name(f".{target.name}.partial")
        with source.open("rb") as reader, partial.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(partial, target)
        with contextlib.suppress(OSError):
            source.unlink()
    fsync_dir(target.parent)


@contextlib.contextmanager
def _locked(journal: Path, what: str) -> Iterator[bool]:
    """Hold the batch: a job whose Snakemake was killed may still be at it.

    The lock is on the journal, which exists from the first job's begin to its end.
    Whoever waited for it may find it removed, and then the measured rows are there.

    Yields
    ------
    bool
        Whether the journal has content, so that some job was cut short.
    """
    with journal.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: waiting for another job that replays it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield os.fstat(file.fileno()).st_size > 0


def _say_kept(measured: Path, record: Manifest, settings: ReplaySettings) -> None:
    stored = read_meta(measured)
    wanted = {key: str(value) for key, value in settings.measuring().items()}
    kept = [f"{key}={stored[key]}" for key in wanted if stored.get(key, wanted[key]) != wanted[key]]
    if kept:
        print(
            f"rank {record.rank}: batch {record.batch} was measured under {', '.join(kept)}; "
            "it keeps that",
            file=sys.stderr,
        )
