"""How the workflow's time grows with the number of batches.

Each size is a spool of that many batches of one trivial call, and one whole run of
Snakemake with the real rules: watch, replay, check, compare, retire, merge, verdict.
The measured rows are there beforehand, as after a restart, so that a replay job
publishes them and costs what a job costs, not what torch costs. Prints seconds and
CPU seconds, and the exponents of their growth between the sizes: CPU time is what
another load on the machine disturbs least.

    python benchmarks/workflow.py [--cores 2] [--sizes 300 1000 3000]
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from spool.call import Call, CallContext, TensorRef
from spool.records import MeasuredRow
from spool.replay.batch import replay_batch
from spool.settings import ReplaySettings
from spool.store import RankCounts, StepCounts, Store
from spool.tables import read_measured, write_measured
from spool.workdir import Manifest, ShardRef, WorkDir
from spool.workflow import workflow_dir

# A step of so many calls, as a model has; each call is a batch here.
STEP = 500


def main() -> None:
    """Run all sizes and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 1000, 3000])
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"{'batches':>8}{'seconds':>10}{'exponent':>10}{'CPU s':>10}{'exponent':>10}", flush=True)
    last: tuple[int, float, float] | None = None
    for size in sorted(arguments.sizes):
        with tempfile.TemporaryDirectory(prefix="spool-bench-") as directory:
            make_run(Path(directory), size)
            before = cpu_seconds()
            seconds = run_workflow(Path(directory), arguments.cores)
            cpu = cpu_seconds() - before
        growth = cpu_growth = "-"
        if last is not None:
            growth = f"{math.log(seconds / last[1]) / math.log(size / last[0]):.2f}"
            cpu_growth = f"{math.log(cpu / last[2]) / math.log(size / last[0]):.2f}"
        print(f"{size:>8}{seconds:>10.1f}{growth:>10}{cpu:>10.1f}{cpu_growth:>10}", flush=True)
        last = (size, seconds, cpu)


def cpu_seconds() -> float:
    """CPU seconds of all processes that ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_run(root: Path, size: int) -> None:
    """Write a closed spool of `size` calls, and what each batch would measure."""
    store, work = Store.create(root / "spool-data", {}), WorkDir(root / "work")
    counts: dict[int, StepCounts] = {}
    model: list[MeasuredRow] = []
    for number in range(size):
        step, order = divmod(number, STEP)
        entry = store.publish(make_call(step, order))
        model = model or measure(root, store, entry.path.name, entry.nbytes)
        rows = [
            replace(
                row,
                header=replace(
                    row.header,
                    step=step,
                    order=order,
                    index=order,
                    name=entry.name,
                    shard=entry.path.name,
                ),
            )
            for row in model
        ]
        path = work.measured(0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_measured(path, rows, {})
        counts[step] = StepCounts(shards=order + 1, bytes=(order + 1) * entry.nbytes)
    for step, closed in counts.items():
        store.close_step(0, step, closed)
    store.close_rank(0, RankCounts(counts, "disabled"))


def make_call(step: int, order: int) -> Call:
    """``torch.add`` of two small vectors."""
    x = np.arange(8, dtype=np.float32)
    refs = [TensorRef(region, "float32", (8,), (1,), 0) for region in range(3)]
    return Call(
        api="Torch.add",
        index=order,
        rank=0,
        step=step,
        order=order,
        direction="forward",
        args=(refs[0], refs[1]),
        kwargs={},
        outputs=refs[2],
        mutated={},
        context=CallContext(),
        regions=[x, x, x + x],
    )


def measure(root: Path, store: Store, file: str, nbytes: int) -> list[MeasuredRow]:
    """Rows of one call, measured for real in a work directory of its own."""
    work = WorkDir(root / "model")
    run = store.run.run_id
    manifest = Manifest(0, 0, 0, str(store.root), run, (ShardRef(file, nbytes),))
    manifest.save(work.batch(0, 0))
    settings = ReplaySettings(bench_device="cpu", threads=1)
    replay_batch(work.batch(0, 0), work.root, work.replay(0, 0), settings)
    return read_measured(work.replay(0, 0))


def run_workflow(root: Path, cores: int) -> float:
    """Seconds of one whole run in `root`.

    Raises
    ------
    SystemExit
        With Snakemake's output, if it fails.
    """
    command = [sys.executable, "-m", "snakemake", "--cores", str(cores)]
    command += ["-s", str(workflow_dir() / "Snakefile")]
    command += ["--config", "batch={calls: 1}", "threads=1", "bench_device=cpu"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=root,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise SystemExit(done.stderr[-5000:])
    return seconds


if __name__ == "__main__":
    main()
