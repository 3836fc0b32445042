"""A trainer that ends in any way leaves only whole shards, and closes its rank if it can."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spool import shard
from spool.store import Store

PROLOGUE = """
import os, signal, sys, threading, time
import torch, spool
session = spool.enable(spool_dir={root!r}, {options})
def work(n=20):
    for _ in range(n):
        torch.sin(torch.ones(2000))
"""


def start(root: Path, body: str, options: str = "") -> subprocess.Popen[str]:
    code = PROLOGUE.format(root=str(root), options=options) + textwrap.dedent(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPOOL_")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


def run(root: Path, body: str, options: str = "") -> tuple[int, str]:
    process = start(root, body, options)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def whole(root: Path, step: int = 0) -> int:
    """Read every shard of a step; how many there are."""
    entries = Store.open(root).shards(0, step)
    for entry in entries:
        shard.read(entry.path)
    return len(entries)


def closed(root: Path) -> dict | None:
    path = root / "rank0" / "closed.json"
    return json.loads(path.read_text()) if path.exists() else None


def wait_closed(root: Path, seconds: float = 60) -> dict:
    """What the rank's marker says, once there is one."""
    end = time.monotonic() + seconds
    while closed(root) is None:
        assert time.monotonic() < end, "the rank is not closed"
        time.sleep(0.05)
    return closed(root)


def agree(root: Path) -> None:
    """The rank's marker says what is there, and nothing half written is left."""
    marker = closed(root)
    for step, counts in marker["steps"].items():
        assert whole(root, int(step)) == counts["shards"]
    assert not list(root.rglob("*.partial"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_end_without_disable(root):
    code, err = run(root, "work()")
    assert (code, closed(root)["reason"]) == (0, "exit")
    assert whole(root) == 20
    agree(root)
    assert "spool: rank 0 closed (exit): 20 calls" in err


def test_sys_exit(root):
    code, _ = run(root, "work(); sys.exit(3)")
    assert (code, closed(root)["reason"]) == (3, "exit")
    agree(root)


def test_exception(root):
    code, err = run(root, "work(); spool.step(); work(5); raise ValueError('mine')")
    assert code == 1
    assert "ValueError: mine" in err
    assert closed(root)["reason"] == "exception: ValueError"
    assert {s: c["shards"] for s, c in closed(root)["steps"].items()} == {"0": 20, "1": 5}
    agree(root)
    assert Store.open(root).step_closed(0, 0).shards == 20
    assert Store.open(root).step_closed(0, 1) is None  # it was cut short


def test_exception_inside_the_with_block(root):
    code, _ = run(root, "with session:\n    work()\n    raise KeyError('k')")
    assert (code, closed(root)["reason"]) == (1, "exception: KeyError")
    agree(root)


def test_sigterm(root):
    code, err = run(root, "work(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)")
    assert code == -signal.SIGTERM
    assert closed(root)["reason"] == "SIGTERM"
    assert whole(root) == 20
    agree(root)
    assert "Traceback" not in err


def test_sigterm_in_the_middle_of_calls(root):
    process = start(root, "print('up', flush=True)\nwhile True: work(1)")
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert closed(root)["reason"] == "SIGTERM"
    assert whole(root) > 0
    agree(root)


def test_sigterm_while_the_trainer_waits_for_room(root):
    body = "print('up', flush=True)\nwork(1000)"
    process = start(root, body, "max_spool_bytes=100_000, max_wait=1000")
    assert process.stdout.readline() == "up\n"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        beat = Store.open(root).read_heartbeat(0)
        if beat is not None and beat.blocked:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert closed(root)["reason"] == "SIGTERM"
    agree(root)


def test_sigterm_during_disable_is_delivered_after_it(root):
    body = """
    import threading
    from spool.store import Store
    publish = Store.publish
    worked = threading.Event()
    def slow(self, call):
        if call.index == 10:
            worked.wait(60)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return publish(self, call)
    Store.publish = slow
    work()
    worked.set()
    spool.disable()
    time.sleep(60)
    """
    code, _ = run(root, body, "writers=1, writer='threads'")
    assert code == -signal.SIGTERM
    assert whole(root) == 20
    agree(root)


def test_own_sigterm_handler_still_runs(root):
    body = """
    spool.disable()
    signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), sys.exit(7)))
    session = spool.enable(spool_dir=sys.argv[0] and {other!r})
    work()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    """
    other = root.with_name("other")
    process = start(root, body.replace("{other!r}", repr(str(other))))
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (7, "mine\n")
    assert closed(other)["reason"] == "SIGTERM"
    agree(other)


def test_handler_is_given_back(root):
    body = """
    before = signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) != before
    spool.disable()
    assert signal.getsignal(signal.SIGTERM) == before
    """
    code, err = run(root, body)
    assert code == 0, err


def test_os_exit(root):
    code, _ = run(root, "work(); spool.step(); work(); os._exit(9)")
    assert code == 9
    marker = wait_closed(root)
    assert marker["reason"] == "killed"
    agree(root)


def test_sigkill_then_resume(root):
    process = start(root, "print('up', flush=True)\nwhile True:\n    work(10); spool.step()")
    assert process.stdout.readline() == "up\n"
    deadline = time.monotonic() + 60
    while Store.open(root).step_closed(0, 1) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    store = Store.open(root)
    assert wait_closed(root)["reason"] == "killed"
    agree(root)
    for step in store.steps(0):
        count = whole(root, step)
        counts = store.step_closed(0, step)
        assert counts is None or counts.shards == count == 10
    body = "for _ in range(60): work(10); spool.step()"
    code, err = run(root, body, "resume=True, step=['0-49']")
    assert code == 0, err
    shards = {int(step): counts["shards"] for step, counts in closed(root)["steps"].items()}
    assert {step: n for step, n in shards.items() if step < 50} == dict.fromkeys(range(50), 10)
    agree(root)


def test_exit_right_after_the_last_step_waits_for_its_shards(root):
    code, _ = run(root, "work(200); spool.step()", "step=[0]")
    assert code == 0
    assert closed(root)["reason"] == "steps done"
    assert whole(root) == 200
    agree(root)


def test_forked_child_that_ends_by_itself_leaves_the_rank_open(root):
    body = """
    work()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    assert not os.path.exists(os.path.join({root!r}, "rank0", "closed.json"))
    work()
    """
    code, err = run(root, body.replace("{root!r}", repr(str(root))))
    assert code == 0, err
    assert whole(root) == 40
    agree(root)


def test_unwritable_stderr_and_configured_logging(root):
    body = """
    import logging
    logging.basicConfig(format="LOG %(message)s", force=True)
    work(1)
    spool.disable()
    os.close(2)
    """
    code, err = run(root, body)
    assert code == 0
    lines = err.splitlines()
    assert lines[0].startswith("spool: rank 0 is captured into")
    assert any(line.startswith("LOG rank 0 closed") for line in lines)
    assert not any(line.startswith("spool: rank 0 closed") for line in lines)
