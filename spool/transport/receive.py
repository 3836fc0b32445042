"""`spool receive`: a receiver of its own, and what it shows."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from spool.transport.receiver import Counts, Receiver

_SHOW_SECONDS = 10.0
_LOOK_SECONDS = 0.2


def receive(root: Path, host: str, port: int, directory: Path | None, ranks: Sequence[int]) -> int:
    """Receive until told to end, or until some ranks are closed; return the exit status.

    Parameters
    ----------
    root, host, port, directory
        As in `Receiver`.
    ranks : sequence of int
        Ends when these are closed; empty for never.
    """
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    receiver = Receiver(root, host, port, directory, _say)
    receiver.start()
    _say(f"receiving at port {receiver.port} into {receiver.root}")
    if directory is None:
        _say("without TLS: everybody on the way can read and change what comes")
    next_line = time.monotonic() + _SHOW_SECONDS
    before: dict[int, int] = {}
    while not told.wait(_LOOK_SECONDS) and not _all_closed(receiver, ranks):
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _SHOW_SECONDS
            before = _show(receiver, before)
    receiver.stop()
    _show(receiver, {})
    return 0


def _all_closed(receiver: Receiver, ranks: Sequence[int]) -> bool:
    known = receiver.ranks
    return bool(ranks) and all(rank in known and known[rank].closed for rank in ranks)


def _show(receiver: Receiver, before: dict[int, int]) -> dict[int, int]:
    """A line for each rank that has sent something since; how many shards each has now."""
    now = {rank: counts.shards for rank, counts in sorted(receiver.ranks.items())}
    for rank, shards in now.items():
        if shards != before.get(rank, 0):
            _say(_line(rank, receiver.ranks[rank], (shards - before.get(rank, 0)), bool(before)))
    return now


def _line(rank: int, counts: Counts, new: int, is_rate: bool) -> str:
    rate = f", {new / _SHOW_SECONDS:.0f} shards/s" if is_rate else ""
    state = "closed" if counts.closed else "connected" if counts.connected else "not connected"
    return (
        f"rank {rank}: {counts.shards} shards, {counts.bytes / 1e6:.1f} MB{rate}, "
        f"{counts.waiting} waiting for the disk, last {counts.last}, {state}"
    )


def _say(line: str) -> None:
    print(f"spool: {line}", file=sys.stderr, flush=True)
