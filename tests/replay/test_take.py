"""A batch whose shards are not those that its manifest means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shard_writing import record, spool_calls

from spool.errors import StoreError
from spool.parquet import read_measured
from spool.replay.batch import replay_batch
from spool.settings import ReplaySettings
from spool.workdir import Bound, Manifest, WorkDir

SETTINGS = ReplaySettings(bench_device="cpu", threads=1)


def test_shards_captured_anew_are_not_measured_and_a_moved_spool_is_found(tmp_path: Path) -> None:
    manifest = spool_calls(tmp_path, [record("Torch.sin", torch.sin, torch.ones(3))])
    work = WorkDir(tmp_path / "work")
    (tmp_path / "spool" / "rank0.takes.json").write_text('{"0": 1}')
    with pytest.raises(StoreError, match="rank 0 step 0 was captured anew"):
        replay_batch(manifest, work.root, work.replay(0, 0), SETTINGS)
    assert not work.measured(0, 0).exists()
    assert not work.replay(0, 0).exists()
    # A manifest of that take is right, wherever the spool is mounted now.
    manifest.write_text(json.dumps(replace(Manifest.load(manifest), take=1).to_json()))
    (tmp_path / "spool").rename(tmp_path / "moved")
    Bound("run", str(tmp_path / "moved")).save(work.run)
    replay_batch(manifest, work.root, work.replay(0, 0), SETTINGS)
    assert [row.header.name for row in read_measured(work.replay(0, 0))] == ["Torch.sin.0"]
