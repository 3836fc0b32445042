"""Claiming a rank of a spool, and what is there of an earlier capture."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from spool.errors import StoreError
from spool.processes import runs_on
from spool.store import Heartbeat, StepCounts, Store

logger = logging.getLogger("spool")

HEARTBEAT_SECONDS = 5.0
WRITER = "spool.capture.writer_process"
"""Part of the command line of a writer process."""


def claim(store: Store, rank: int, resume: bool, patience: float) -> dict[int, StepCounts]:
    """Make sure that no capture of a rank is in the way.

    Parameters
    ----------
    store : Store
    rank : int
    resume : bool
        Whether to go on with what is there; a step that was cut short is deleted.
    patience : float
        Seconds for which the writer process of a trainer that is gone is waited for.

    Returns
    -------
    dict of int to StepCounts
        Steps that stay.

    Raises
    ------
    StoreError
        If the rank is captured by another process, or was captured and `resume` is not set.
    """
    beat = store.read_heartbeat(rank)
    if resume and beat is not None:
        beat = _wait_for_writer(store, rank, beat, patience)
    if beat is not None and _alive(beat) and store.rank_closed(rank) is None:
        raise StoreError(
            f"{store.root}: rank {rank} is being captured by process {beat.pid}: "
            "end that one first, or set RANK if this process is another rank"
        )
    if not resume:
        if beat is not None or store.steps(rank) or store.rank_closed(rank) is not None:
            raise already_there(store, rank)
        return {}
    store.reopen_rank(rank)
    store.remove_partials(rank)
    for number in store.unclosed_steps(rank):
        store.drop_step(rank, number)
    kept = {number: store.step_closed(rank, number) for number in store.steps(rank)}
    return {number: counts for number, counts in kept.items() if counts is not None}


def already_there(store: Store, rank: int) -> StoreError:
    """What to raise where an earlier capture of a rank is in the way."""
    return StoreError(
        f"{store.root} holds a capture of rank {rank} already: enable with resume=True to "
        f"go on with it, name another spool_dir, or run `spool clear {store.root}`"
    )


def _wait_for_writer(store: Store, rank: int, beat: Heartbeat, patience: float) -> Heartbeat | None:
    """Wait for the writer process of a trainer that was killed, which still publishes."""
    begin = time.monotonic()
    # This process may be the trainer itself, by exec.
    while _is_writer(beat) and (beat.pid == os.getpid() or not runs_on(beat.host, beat.pid)):
        if time.monotonic() - begin > patience:
            raise StoreError(
                f"{store.root}: rank {rank} is still written by process {beat.writer}, whose "
                "trainer is gone: end that one first"
            )
        logger.info("rank %d: process %d still writes what was captured", rank, beat.writer)
        time.sleep(1.0)
        again = store.read_heartbeat(rank)
        if again is None or store.rank_closed(rank) is not None:
            return again
        beat = again
    return beat


def _is_writer(beat: Heartbeat) -> bool:
    """Whether the writer process of a heartbeat runs, and its number is not another's by now."""
    try:
        command = Path(f"/proc/{beat.writer}/cmdline").read_bytes()
    except OSError:
        return False
    return runs_on(beat.host, beat.writer) and WRITER.encode() in command


def _alive(beat: Heartbeat) -> bool:
    """Whether the process behind a heartbeat is surely another one and running."""
    recent = time.time() - beat.time < 3 * HEARTBEAT_SECONDS
    return recent and beat.pid != os.getpid() and runs_on(beat.host, beat.pid)
