"""Replay and judge every call of a spool in this process, without the workflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import spool
from spool import shard
from spool.call import Call
from spool.errors import BadShard
from spool.judging import judge_call
from spool.records import CallHeader, MeasuredRow, Outcome
from spool.replay.calls import replay_call
from spool.replay.execute import Bench
from spool.replay.result import CallResult, header_of_call
from spool.settings import JudgeSettings
from spool.store import Store

CPU = torch.device("cpu")
BENCH = Bench(CPU, CPU)
LIMIT = 10**10


@dataclass
class Outcomes:
    """Verdicts of a rank's calls, and why calls have none.

    Parameters
    ----------
    verdicts : Counter of (direction, verdict)
    reasons : Counter of (API, reason)
        Of calls without a verdict, and of those that err.
    skipped : Counter of str
        What capture left alone, by reason.
    """

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def compared(self) -> float:
        """Share of the captured calls that have a verdict."""
        with_verdict = sum(n for (_, verdict), n in self.verdicts.items() if verdict != "SKIP")
        return with_verdict / sum(self.verdicts.values())


def replay_all(root: Path, rank: int = 0) -> Outcomes:
    """Replay and judge every call of a rank, on one thread, as `train.py` trains.

    Some kernels add up in an order that hangs on the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _replayed(root, rank)
    finally:
        torch.set_num_threads(threads)


def _replayed(root: Path, rank: int) -> Outcomes:
    store, found = Store.open(root), Outcomes()
    for step in store.steps(rank):
        counts = store.step_closed(rank, step)
        assert counts is not None
        assert counts.dropped == 0
        found.skipped.update(counts.skipped)
        entries = store.shards(rank, step)
        assert len(entries) == counts.shards
        for entry in entries:
            call = shard.read(entry.path)
            verdict, reason = _judged(call, entry.path)
            found.verdicts[call.direction, verdict] += 1
            if verdict != "pass":
                found.reasons[call.api, f"{verdict}: {reason}"] += 1
    return found


def replayed(call: Call, path: Path) -> CallResult:
    """Replay and measure one call."""
    blank = CallHeader(
        call.rank, call.step, call.order, call.index, call.name, call.api, call.direction,
        "", "", "", "", str(path), 1, "", "", "", False,
    )  # fmt: skip
    return replay_call(call, header_of_call(blank, call, {}, "cpu"), BENCH, LIMIT)


def _judged(call: Call, path: Path) -> tuple[str, str]:
    try:
        result = replayed(call, path)
    except BadShard as error:
        return "bad shard", str(error)
    outputs = result.outputs if result.outcome is Outcome.MEASURED else [None]
    rows = [MeasuredRow(result.header, result.outcome, result.reason, o) for o in outputs or [None]]
    verdict = judge_call(rows, JudgeSettings())
    return str(verdict.status), verdict.message


def captured_as_without(root: Path, training: Callable[[], list[torch.Tensor]]) -> Outcomes:
    """Run a training without capture and with it, and replay every call of the second.

    What it gives back (losses, gradients, weights) must be the same, bit for bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = training()
        with spool.enable(spool_dir=root):
            captured = training()
    finally:
        torch.set_num_threads(threads)
        spool.disable()
    assert len(plain) == len(captured) > 0
    assert all(map(identical, plain, captured))
    return replay_all(root)


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = (x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (one, other))
    return torch.equal(a, b)
