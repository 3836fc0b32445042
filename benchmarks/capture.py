"""What capture costs a training step, on three small models.

Per model and kind of writer: the step without Spool; with Spool enabled and no step
selected; with calls captured and thrown away (``null``: everything but writing); the first
captured step with a sink that takes all of it (``burst``); and twenty captured steps with
the drain counted (``sustained``). Times are of this machine; compare columns of one run.

    python benchmarks/capture.py [--steps 20] [--models transformer gpt resnet]
                                 [--writers process threads] [--directory /dev/shm]
                                 [--peer VENV/bin/python]

With ``--peer``, a Python that holds the same torch and mindstudio-probe (8.1.2 captures
unpatched), a row for its L1 tensor dump of the same steps: first and median step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from _training import MODELS, Training

import spool
from spool.capture.sink import Sink
from spool.store import Store


def measure(name: str, writer: str, steps: int, where: str | None) -> str:
    """One row of the table."""
    training = Training(name)
    training.median(5)
    off = training.median(steps)
    with tempfile.TemporaryDirectory(prefix="spool-bench-", dir=where) as directory:
        with spool.enable(spool_dir=f"{directory}/idle", step=[10**6]):
            idle = training.median(steps)
        submit = Sink.submit
        Sink.submit = lambda self, record, ledger: self.free(record.blocks)  # type: ignore[method-assign]
        with spool.enable(spool_dir=f"{directory}/null", writer=writer):
            null = training.median(max(3, steps // 4))
        Sink.submit = submit  # type: ignore[method-assign]
        session = spool.enable(spool_dir=f"{directory}/real", writer=writer)
        time.sleep(1)  # a process is up as soon as somebody trains in earnest
        burst = training.step()
        session.step()
        begin = time.perf_counter()
        for _ in range(steps):
            training.step()
            session.step()
        spool.disable()
        sustained = (time.perf_counter() - begin) / (steps + 1)
        counts = Store.open(Path(directory) / "real").step_closed(0, 1)
    assert counts is not None
    assert counts.dropped == 0
    return (
        f"{name:12}{writer:8}{off * 1e3:8.1f}{idle / off:8.2f}x{null / off:8.1f}x"
        f"{burst / off:8.1f}x{sustained / off:10.1f}x{counts.shards:8}{counts.bytes / 1e6:8.1f}"
        f"{counts.shards / sustained:10.0f}{(null - off) / counts.shards * 1e6:10.0f}"
    )


def measure_peer(name: str, python: str, where: str | None) -> str:
    """The peer's row of the table: its files hold one tensor each."""
    with tempfile.TemporaryDirectory(prefix="spool-bench-", dir=where) as directory:
        done = subprocess.run(
            [python, str(Path(__file__).with_name("_peer_capture.py")), name, "3", directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    peer = json.loads(done.stdout.splitlines()[-1])
    off = peer["off"]
    return (
        f"{name:12}{'peer':8}{off * 1e3:8.1f}{'':9}{'':9}{peer['first'] / off:8.1f}x"
        f"{peer['sustained'] / off:10.1f}x{'':8}{peer['bytes'] / 1e6:8.1f}"
        f"{peer['files'] / peer['sustained']:10.0f}   (mindstudio-probe {peer['version']})"
    )


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    kinds = ("process", "threads")
    parser.add_argument("--writers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--directory", help="where spools go, default that of temporary files")
    parser.add_argument("--peer", help="Python of an environment that holds the peer")
    arguments = parser.parse_args()
    logging.getLogger("spool").setLevel(logging.ERROR)
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(
        f"{'model':12}{'writer':8}{'off ms':>8}{'idle':>9}{'null':>9}{'burst':>9}{'sustained':>11}"
        f"{'calls':>8}{'MB':>8}{'shards/s':>10}{'us/call':>10}"
    )
    for name in arguments.models:
        for writer in arguments.writers:
            row = measure(name, writer, arguments.steps, arguments.directory)
            print(row, flush=True)
        if arguments.peer:
            print(measure_peer(name, arguments.peer, arguments.directory), flush=True)


if __name__ == "__main__":
    main()
