"""How far capture and checking are, read from what both leave on disk."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

from spool.errors import StoreError
from spool.intake.progress import failing_calls
from spool.processes import is_running
from spool.store import Store
from spool.workdir import Bound, Manifest, WorkDir


def status_lines(spool_dir: Path | None, work_dir: Path, now: float | None = None) -> Iterator[str]:
    """Describe a run, rank by rank.

    Parameters
    ----------
    spool_dir : Path or None
        None is the spool that the work directory follows, else ``spool-data``.
    work_dir : Path
        Need not exist yet.
    now : float, optional
        Seconds since the epoch.

    Raises
    ------
    StoreError
        If there is no readable spool, or the work directory belongs to another run.
    """
    work = WorkDir(work_dir)
    bound = Bound.load(work.run)
    store = Store.open(spool_dir or Path(bound.spool if bound else "spool-data"))
    if bound and bound.run_id != store.run.run_id:
        raise StoreError(
            f"{work_dir}: holds another run, that of {bound.spool}; "
            "name the work directory of this one: --work-dir DIR"
        )
    now = time.time() if now is None else now
    yield f"{store.root}: run of {store.run.timestamp}"
    ranks = store.ranks()
    if not ranks:
        yield "no rank has begun"
    for rank in ranks:
        yield f"rank {rank}: {_captured(store, rank, now)}"
        yield f"rank {rank}: {_checked(work, rank)}"


def _captured(store: Store, rank: int, now: float) -> str:
    closed, beat = store.rank_closed(rank), store.read_heartbeat(rank)
    if closed is not None:
        calls = sum(counts.shards for counts in closed.steps.values())
        dropped = sum(counts.dropped for counts in closed.steps.values())
        lost = f", {dropped} dropped" if dropped else ""
        return f"closed ({closed.reason}): {calls} calls in {len(closed.steps)} steps{lost}"
    if beat is None:
        return "open, no heartbeat yet"
    trainer = "trainer BLOCKED, the spool is full" if beat.blocked else "trainer not blocked"
    if beat.host == socket.gethostname() and not is_running(beat.pid):
        trainer = f"process {beat.pid} is gone: `spool close {store.root} --rank {rank}` ends it"
    return (
        f"step {beat.step} open, {beat.captured} calls captured ({_size(beat.bytes)}), "
        f"last heartbeat {max(0.0, now - beat.time):.0f} s ago, {trainer}"
    )


def _checked(work: WorkDir, rank: int) -> str:
    seen = done = batches_done = 0
    finished: list[tuple[float, int]] = []
    batches = work.batches(rank)
    for number in batches:
        calls = len(Manifest.load(work.batch(rank, number)).shards)
        seen += calls
        measured = work.measured(rank, number)
        if measured.exists():
            done += calls
            batches_done += 1
            finished.append((measured.stat().st_mtime, calls))
    failing = sum(failing_calls(work.retired(rank, number)) for number in work.segments(rank))
    rate = f", {_rate(finished):.0f} calls/s" if len(finished) > 1 else ""
    end = ", all of it known" if work.end(rank).exists() else ""
    return (
        f"{done} of {seen} calls replayed ({batches_done} of {len(batches)} batches{end}){rate}, "
        f"{failing} failing so far"
    )


def _rate(finished: list[tuple[float, int]]) -> float:
    """Calls per second from batches' times and calls; how long the first took is not known."""
    finished = sorted(finished)
    span = finished[-1][0] - finished[0][0]
    return sum(calls for _, calls in finished[1:]) / max(span, 1e-3)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
