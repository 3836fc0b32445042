"""Rule replay: one batch from its manifest to its measured rows. Imports no torch.

The rows of a batch are written once, to the work directory's ``measured``; the rule's
output is a link to them. Running the rule again on a measured batch only publishes
the rows again: the shards may be gone by then. Calls of fused operators are an exception
when their references changed, see `spool.replay.again`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spool.errors import explain
from spool.files import (
    atomic_write,
    copy_open,
    fsync_dir,
    is_regular,
    make_dirs,
    open_regular,
    opener,
    read_regular,
)
from spool.gpus import visible_gpus
from spool.parquet import MAX_TABLE, read_measured, read_meta, write_measured
from spool.records import MeasuredRow, Outcome
from spool.replay.again import REFERENCES, changed, merged, numbers_again
from spool.replay.journal import Progress, recover
from spool.replay.result import CallResult, header_from_json, header_of_file, is_same_call
from spool.replay.supervise import Job, ReplayError, run_workers
from spool.settings import ReplaySettings
from spool.standards.rows import SCHEMA_VERSION
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
        If the batch cannot be replayed on this host at all, or its rows cannot be
        written. What goes wrong in one call is that call's row.
    """
    try:
        _replay_batch(manifest, work_dir, output, settings)
    except OSError as error:
        raise ReplayError(f"{manifest}: {explain(error)}; rerun when that is mended") from error


def _replay_batch(manifest: Path, work_dir: Path, output: Path, settings: ReplaySettings) -> None:
    record = Manifest.find(manifest)
    work = WorkDir(work_dir)
    measured = work.measured(record.rank, record.batch)
    journal = measured.with_name(f".{measured.stem}.journal")
    make_dirs(measured.parent)
    with _locked(journal, f"rank {record.rank} batch {record.batch}") as unfinished:
        if measured.exists():
            if unfinished:
                record.require_take()
                _quarantine(record, work, read_measured(measured))
            if changed(read_meta(measured), _measuring(settings)):
                _measure_again(Job(manifest, journal, settings, (), again=True), record, measured)
            _say_kept(measured, record, settings)
        else:
            if not unfinished:
                _require_shards(record, measured)
            everything = tuple(range(len(record.shards)))
            rows = _measure(Job(manifest, journal, settings, everything), record)
            # After the shards were read: what was read is of the take that is meant.
            record.require_take()
            _write_once(measured, rows, _facts(settings, rows))
            _quarantine(record, work, rows)
        journal.unlink(missing_ok=True)
    _publish(measured, output)


def _require_shards(record: Manifest, measured: Path) -> None:
    """Make sure that something of a batch is there: its tables must not be lost for nothing.

    A single shard that is gone is that shard's row; a spool that is gone is the worker's
    to tell.

    Raises
    ------
    ReplayError
        If no shard of it is.
    """
    directory = record.step_dir
    if directory.is_dir() and not any(
        os.path.lexists(directory / shard.file) for shard in record.shards
    ):
        raise ReplayError(
            f"{directory}: no shard of batch {record.batch} of rank {record.rank} is there any "
            f"more, and {measured} is missing; restore one of them and rerun"
        )


def _measure_again(job: Job, record: Manifest, measured: Path) -> None:
    """Measure those calls again that other references act on, where their shards are there."""
    old = read_measured(measured)
    numbers, gone = numbers_again(job.manifest, record, old)
    if numbers:
        rows = merged(old, _measure(replace(job, numbers=numbers), record))
        record.require_take()
    else:
        rows = old
    wanted = _measuring(job.settings)
    write_measured(measured, rows, read_meta(measured) | {key: wanted[key] for key in REFERENCES})
    if numbers or gone:
        print(
            f"rank {record.rank}: batch {record.batch}: other references (fused): "
            f"{len(numbers)} calls measured again, {gone} keep what they have, for their shards "
            "are gone",
            file=sys.stderr,
        )


def _measure(job: Job, record: Manifest) -> list[MeasuredRow]:
    identity = _identity(record, job)

    def reload() -> Progress:
        return recover(job.journal, identity)

    return _rows(record, run_workers(job, reload(), reload), job)


def _rows(record: Manifest, progress: Progress, job: Job) -> list[MeasuredRow]:
    """The rows of a job's shards, which are all settled."""
    try:
        results = [_result(record, number, progress) for number in job.numbers]
    except ValueError as error:
        raise ReplayError(
            f"{job.journal}: not a usable journal: {error}; remove it and rerun"
        ) from None
    results.sort(key=lambda result: result.header.key)
    return [row for result in results for row in result.rows()]


def _result(record: Manifest, number: int, progress: Progress) -> CallResult:
    blank = header_of_file(record, record.shards[number])
    if number in progress.done:
        result = CallResult.from_json(progress.done[number])
    else:
        header = progress.headers.get(number)
        result = CallResult(
            blank if header is None else header_from_json(header),
            Outcome.REPLAY_FAILED,
            progress.lost[number],
        )
    if not is_same_call(result.header, blank):
        raise ValueError(f"its record {number} is of another shard")
    return result


def _identity(record: Manifest, job: Job) -> dict[str, Any]:
    """What the journal's results hang on; results of another job are worth nothing."""
    content = json.dumps(record.to_json(), sort_keys=True).encode()
    return {
        "journal": _JOURNAL_VERSION,
        "manifest": hashlib.sha256(content).hexdigest(),
        "settings": job.settings.to_json() | {"gpu": None},
        "numbers": list(job.numbers),
        **_versions(),
    }


def _facts(settings: ReplaySettings, rows: list[MeasuredRow]) -> dict[str, str]:
    """What is stored with the rows, for those who read them later."""
    # The worker knows which device it was, and says so in every row of a shard it read.
    devices = (row.header.bench_device for row in rows)
    return _measuring(settings, next(filter(None, devices), None)) | _versions()


def _measuring(settings: ReplaySettings, device: str | None = None) -> dict[str, str]:
    """The measuring keys as text, with the device that `auto` stands for."""
    measuring = {key: str(value) for key, value in settings.measuring().items()}
    if device is None and settings.bench_device == "auto":
        device = "cuda" if visible_gpus() else "cpu"
    return measuring | {"bench_device": device or settings.bench_device}


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
    make_dirs(output.parent)
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
    try:
        os.link(measured, partial)
        os.utime(partial)
        # A rename onto another name of the same file does nothing at all.
        output.unlink(missing_ok=True)
        os.replace(partial, output)
    except OSError:
        atomic_write(output, read_regular(measured, MAX_TABLE))
    finally:
        partial.unlink(missing_ok=True)


def _quarantine(record: Manifest, work: WorkDir, rows: list[MeasuredRow]) -> None:
    """Set unusable shards aside, each with its reason; what is moved already stays.

    Raises
    ------
    ReplayError
        If the rows name a shard that is not the batch's.
    """
    bad = {row.header.shard: row.reason for row in rows if row.outcome is Outcome.QUARANTINED}
    strange = bad.keys() - {shard.file for shard in record.shards}
    if strange:
        raise ReplayError(
            f"{work.measured(record.rank, record.batch)}: {min(strange)!r:.80} is no shard of "
            f"batch {record.batch}; nothing was moved; start with another work_dir"
        )
    target = work.quarantine(record.rank, record.step)
    if bad:
        make_dirs(target)
    for file, reason in bad.items():
        note = {"shard": file, "spool": record.spool, "batch": record.batch, "reason": reason}
        # What is not UTF-8 in a path has an escape of its own in JSON.
        text = json.dumps(note, ensure_ascii=False).encode("utf-8", "backslashreplace")
        atomic_write(target / f"{file}.json", text + b"\n")
        with contextlib.suppress(FileNotFoundError), record.opened() as here:
            _move(here / file, target / file)


def _move(source: Path, target: Path) -> None:
    """Move a refused shard, or take it out of the way if it is no file at all.

    Nothing is followed, waited for or read that is not a regular file: whoever can
    write to the spool may have put a link, a pipe or a directory there.
    """
    try:
        mode = os.lstat(source).st_mode
        if not stat.S_ISREG(mode):
            _discard(source, is_directory=stat.S_ISDIR(mode))
            return
        os.replace(source, target)
        if not is_regular(target):
            _discard(target, is_directory=target.is_dir() and not target.is_symlink())
    except FileNotFoundError:
        return
    except OSError:  # another file system, or a spool that is mounted read-only
        if _copy(source, target):
            with contextlib.suppress(OSError):
                source.unlink()
    fsync_dir(target.parent)


def _discard(path: Path, *, is_directory: bool) -> None:
    with contextlib.suppress(OSError):  # a spool that is mounted read-only
        if is_directory:
            path.rename(path.with_name(f".{path.name}.refused"))
        else:
            path.unlink()


def _copy(source: Path, target: Path) -> bool:
    """Copy a regular file; False if it has become something else or cannot be opened."""
    try:
        file = open_regular(source)
    except OSError:
        return False
    copy_open(file, target)
    return True


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
    with open(journal, "ab", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: waiting for another job that replays it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield os.fstat(file.fileno()).st_size > 0


def _say_kept(measured: Path, record: Manifest, settings: ReplaySettings) -> None:
    stored = read_meta(measured)
    wanted = _measuring(settings)
    kept = [f"{key}={stored[key]}" for key in wanted if stored.get(key, wanted[key]) != wanted[key]]
    if kept:
        print(
            f"rank {record.rank}: batch {record.batch} was measured under {', '.join(kept)}; "
            "it keeps that",
            file=sys.stderr,
        )
