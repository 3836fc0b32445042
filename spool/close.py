"""Closing a rank whose training died: by hand, and why else it may be closed by another."""

from __future__ import annotations

from spool.errors import StoreError
from spool.processes import runs_on
from spool.store import RankCounts, StepCounts, Store

BY_HAND = "closed by hand"
KILLED = "killed"
"""The writer process closed it: the training process was gone without a word."""


def close_rank(store: Store, rank: int, *, force: bool = False) -> RankCounts:
    """Mark a rank as complete with what is there now.

    A step that its writer closed keeps its counts; of another the shards that lie
    in the spool are counted. (Those that were checked and deleted already are known
    to the checking host, which never demands fewer than it has seen.) It stays without
    a marker of its own: should training go on, it is captured anew.

    Parameters
    ----------
    force : bool
        Also when the training process is alive on this host.

    Returns
    -------
    RankCounts
        What was written.

    Raises
    ------
    StoreError
        If the trainer is alive.
    """
    if not force:
        refuse_living(store, rank)
    counts = {}
    for step in store.steps(rank):
        known = store.step_closed(rank, step)
        if known is None:
            shards = store.shards(rank, step)
            known = StepCounts(shards=len(shards), bytes=sum(entry.nbytes for entry in shards))
        counts[step] = known
    closed = RankCounts(counts, BY_HAND)
    store.close_rank(rank, closed)
    return closed


def refuse_living(store: Store, rank: int) -> None:
    """Make sure that no process of this host still captures a rank.

    Raises
    ------
    StoreError
        If one does.
    """
    beat = store.read_heartbeat(rank)
    if store.rank_closed(rank) is not None or beat is None:
        return
    for pid in (beat.pid, beat.writer):
        if runs_on(beat.host, pid):
            raise StoreError(
                f"rank {rank} of {store.root} is still written by process {pid}; "
                "end that, or add --force"
            )
