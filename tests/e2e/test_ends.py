"""Training that never ended: what is there is checked, and what follows is as if nothing was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import harness

from spool.store import Store

TRAIN = """
import json, os, pathlib, signal, sys, time, torch, spool
spool.enable(spool_dir="spool-data", resume="resume" in sys.argv)
x = torch.ones(4, 8)
y = torch.tanh(x)
if "die" in sys.argv:
    rank = pathlib.Path("spool-data/rank0")
    while not any(rank.glob("step0/0*tanh*.h5")) or not (rank / "heartbeat.json").exists():
        time.sleep(0.05)
    os.kill(json.loads((rank / "heartbeat.json").read_text())["writer"], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
torch.mul(y, x)
spool.step()
spool.disable()
"""


def train(cwd: Path, *options: str) -> int:
    """Run the same program, so that calls are made at the same lines."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *options],
        cwd=cwd,
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def check(cwd: Path, **config: object) -> str:
    """Check what is there; what the workflow says."""
    quick = {"threads": 1, "bench_device": "cpu", "rescan_seconds": 0.5, "missing_seconds": 1}
    return harness.workflow(cwd, **{**quick, **config}).stderr


def test_killed_checked_closed_and_resumed(tmp_path: Path) -> None:
    """Trainer and writer are killed within a step, and the part of it that is there is checked.

    First because the rank is silent, then because it is closed by hand; at last training
    goes on, after shards were retired, and all is as if it had not been killed.
    """
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    killed.mkdir()
    calm.mkdir()
    assert train(killed, "die") == -signal.SIGKILL
    store = Store.open(killed / "spool-data")
    assert store.rank_closed(0) is None
    assert store.unclosed_steps(0) == [0]

    said = check(killed, idle_timeout=1)
    assert "warning: rank 0 was never closed" in said
    assert "silent for 1 s (idle_timeout); taken as ended" in said
    part = harness.rows(killed, "summary")
    assert [row["verdict"] for row in part] == ["pass"]
    assert harness.shards(killed / "spool-data") == []

    code = "from spool.cli import main\nassert main(['close', 'spool-data', '--rank', '0']) == 0"
    harness.python(killed, code)
    said = check(killed)
    assert "warning: rank 0 was closed by hand" in said
    assert harness.rows(killed, "summary") == part

    assert train(killed, "resume") == 0
    said = check(killed)
    assert "rank 0 step 0 was captured anew: what was checked of it before is dropped" in said
    assert train(calm) == 0
    check(calm)
    assert harness.tables(killed) == harness.tables(calm)
    assert len(harness.rows(killed, "summary")) > len(part)
    takes = json.loads((killed / "spool-data/rank0.takes.json").read_text())
    assert takes == {"0": 1}
