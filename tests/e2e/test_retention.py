"""A run that is far larger than its spool may be is checked whole, in bounded space."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import harness
import pytest

from spool.store import Store

LIMIT = 4_000_000
QUEUE = 1_000_000
TRAINING = f"""
import sys, torch, spool
torch.manual_seed(0)
with spool.enable(
    spool_dir="spool-data", step=["0-3"], max_spool_bytes={LIMIT}, queue_bytes={QUEUE}
) as session:
    for _ in range(4):
        x = torch.randn(256, 64)
        for _ in range(int(sys.argv[1])):
            x = x + 1
        session.step()
"""


def size(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # retired meanwhile
                continue
    return total


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_a_run_that_is_larger_than_its_spool(times: int, tmp_path: Path) -> None:
    calls = 8 * times
    command = harness.command(rank_list="[0]")
    log = (tmp_path / "workflow.log").open("wb")
    workflow = subprocess.Popen(
        command, cwd=tmp_path, env=harness.environment(), stdout=log, stderr=log
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINING), str(calls)],
        cwd=tmp_path,
        env=harness.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    largest = 0
    deadline = time.monotonic() + 400
    while workflow.poll() is None and time.monotonic() < deadline:
        largest = max(largest, size(tmp_path / "spool-data"))
        time.sleep(0.02)
    _, said = trainer.communicate(timeout=60)
    output = (tmp_path / "workflow.log").read_text()
    assert (trainer.returncode, workflow.poll()) == (0, 0), said + output[-4000:]
    closed = Store.open(tmp_path / "spool-data").rank_closed(0)
    assert closed is not None
    captured = sum(counts.bytes for counts in closed.steps.values())
    assert captured > times * LIMIT
    assert sum(counts.dropped for counts in closed.steps.values()) == 0
    assert LIMIT / 2 < largest <= LIMIT + QUEUE
    assert len(harness.rows(tmp_path, "accuracy_checking_result")) == 4 * calls
    assert size(tmp_path / "spool-data") < LIMIT / 10
