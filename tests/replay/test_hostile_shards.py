"""Shards that are sound in form and would harm the job that replays them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_writing import record, spool_calls

from spool import shard
from spool.call import CallContext
from spool.parquet import read_measured
from spool.records import Outcome
from spool.replay import worker
from spool.replay.batch import replay_batch
from spool.settings import ReplaySettings
from spool.workdir import WorkDir

SETTINGS = ReplaySettings(bench_device="cpu", threads=1)


def calls() -> list[Any]:
    """A call whose context says too much in characters that no file can hold, and a plain one."""
    context = CallContext(module="m\ud800" * 1000, stack=("\udcff" * 100_000,) * 60)
    x = torch.arange(1000.0)
    odd = record("Torch.unbind", torch.unbind, x, context=context)
    return [odd, record("Torch.add", torch.add, x, 1, order=1)]


def test_what_a_shard_tells_of_its_place_stops_no_batch(tmp_path: Path) -> None:
    manifest = spool_calls(tmp_path, calls())
    work = WorkDir(tmp_path / "work")
    replay_batch(manifest, work.root, work.replay(0, 0), SETTINGS)
    rows = read_measured(work.replay(0, 0))
    assert {row.outcome for row in rows} == {Outcome.MEASURED}
    assert [row.header.name for row in rows] == ["Torch.unbind.0"] * 1000 + ["Torch.add.0"]
    first, second = rows[:2]
    assert "\\udcff" in first.header.stack
    assert "\\ud800" in first.header.module
    # Of megabytes, what a person reads; and of the inputs, once.
    assert len(first.header.stack) < 100_000
    assert len(json.loads(first.inputs)) == 1
    assert second.inputs == "[]"


def test_a_shard_that_does_not_fit_into_memory_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file takes no room on the disk, and all of its size when it is read."""
    (_, call) = calls()
    manifest = spool_calls(tmp_path, [call])
    monkeypatch.setattr(worker, "limit_process", lambda limit: None)
    job = {"manifest": str(manifest), "settings": SETTINGS.to_json(), "todo": [0], "again": False}
    under_test = worker.Worker(job, lambda line: None)
    assert under_test.readable.region_bytes > 1 << 30
    under_test.readable = shard.Limits(region_bytes=100)

    class NoJournal:
        def add(self, record: dict[str, Any], now: float) -> None:
            pass

    result = under_test.replay(0, NoJournal())  # type: ignore[arg-type]
    assert result.outcome is Outcome.REPLAY_FAILED
    assert result.reason == "MemoryError: the tensors take 8000 bytes, the limit is 100"


def test_the_limit_is_looked_at_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "call.h5"
    (_, call) = calls()
    shard.write(call, path)
    with pytest.raises(MemoryError, match="the tensors take 8000 bytes, the limit is 7999"):
        shard.read(path, shard.Limits(region_bytes=7999))
    assert shard.read(path, shard.Limits(region_bytes=8000)).name == call.name
