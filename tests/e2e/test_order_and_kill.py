"""The same bytes whatever the order, the number of cores, and the kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import harness
import pytest


def start(cwd: Path, **config: object) -> subprocess.Popen[bytes]:
    """Start the workflow in a process group of its own."""
    config.setdefault("rank_list", "[0]")
    log = (cwd / "workflow.log").open("ab")
    return subprocess.Popen(
        harness.command(**config),
        cwd=cwd,
        env=harness.environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def test_workflow_first_and_one_core(tmp_path: Path) -> None:
    options = ("--model", "plain", "--out", "on.pt", "--spool-dir", "spool-data")
    first, second = tmp_path / "workflow-first", tmp_path / "training-first"
    first.mkdir()
    second.mkdir()
    process = start(first)
    try:
        harness.train(first, *options, "--pause", "3")
        status = process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, (first / "workflow.log").read_text()[-4000:]
    harness.train(second, *options)
    harness.workflow(second, cores=1, batch="{calls: 70}")
    a, b = harness.tables(first), harness.tables(second)
    assert sorted(a) == sorted(b)
    assert len(a) >= 5
    for name in a:
        assert a[name] == b[name], name


@pytest.mark.xdist_group("faulty")
def test_kill_again_and_again(
    faulty_spool: Path, faulty_tables: dict[str, bytes], tmp_path: Path
) -> None:
    harness.copy_spool(faulty_spool, tmp_path)
    for seconds in (1.5, 3.0, 4.5, 6.0):
        process = start(tmp_path, batch="{calls: 140}")
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    harness.workflow(tmp_path, batch="{calls: 140}")
    assert harness.tables(tmp_path) == faulty_tables


def test_two_ranks_one_spool(tmp_path: Path) -> None:
    """Two processes at once; `rank_list=[1]` alone gives exactly rank 1's tables."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(harness.TRAIN), "--model", "gpt2", "--steps", "1"),
                *("--out", f"rank{rank}.pt", "--spool-dir", "spool-data", "--rank", str(rank)),
            ],
            cwd=tmp_path,
            env={**harness.environment(), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]
    assert [p.wait(timeout=200) for p in processes] == [0, 0]
    alone = tmp_path / "alone"
    alone.mkdir()
    harness.copy_spool(tmp_path / "spool-data", alone)
    harness.workflow(alone, rank_list="[1]")
    harness.workflow(tmp_path, rank_list="[0,1]")
    both, one = harness.tables(tmp_path), harness.tables(alone)
    of_rank_1 = {name: data for name, data in both.items() if name.endswith("rank1.csv")}
    assert one == of_rank_1
    assert len(both) == 2 * len(one)
    assert both["summary_rank0.csv"] != both["summary_rank1.csv"]
