"""A whole run in small: train a model with one faulty operator, and find it.

One process trains a transformer on the CPU under capture while a second process
runs the workflow on what arrives, exactly as on a training host and a checking
host that share a directory.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from spool.errors import SpoolError
from spool.files import FILE_MODE, make_dirs, opener
from spool.workflow import require_checker, workflow_dir


def main(directory: Path, cores: int = 2) -> int:
    """Run the demo in `directory` and print what it found.

    Parameters
    ----------
    directory : Path
        Created if missing; must be empty or hold an earlier demo, which is replaced.
    cores : int
        Given to Snakemake.

    Returns
    -------
    int
        0 if the workflow ended well and found the faulty operator and nothing else.

    Raises
    ------
    SpoolError
        If `directory` holds something else than a demo, a process failed, or this Python
        cannot run the workflow.
    """
    require_checker()
    prepare(directory)
    began = time.monotonic()
    print(
        f"1. training: a small transformer, 2 steps, its gelu is faulty -> {directory}/spool-data"
    )
    print("2. checking: the workflow follows the spool while training runs", flush=True)
    log = directory / "workflow.log"
    with open(log, "w", opener=opener) as sink:
        checker = subprocess.Popen(workflow_command(cores), cwd=directory, stdout=sink, stderr=sink)
        try:
            train(directory)
            status = wait(checker, directory)
        finally:
            if checker.poll() is None:
                checker.terminate()
                checker.wait()
    if status != 0:
        raise SpoolError(f"the workflow ended with exit status {status}; its output is in {log}")
    return report(directory / "results", time.monotonic() - began)


def prepare(directory: Path) -> None:
    """Make `directory` an empty demo directory."""
    marker = directory / ".spool-demo"
    if directory.exists() and any(directory.iterdir()):
        if not marker.exists():
            raise SpoolError(
                f"{directory} is not empty and not an earlier demo; "
                "name another place: spool demo --dir DIR"
            )
        shutil.rmtree(directory)
    make_dirs(directory)
    marker.touch(FILE_MODE)


def workflow_command(cores: int) -> list[str]:
    """The command a person would type, with the Snakefile named."""
    snakefile = workflow_dir() / "Snakefile"
    command = [sys.executable, "-m", "snakemake", "--cores", str(cores)]
    return [*command, "-s", str(snakefile), "--config", "rank_list=[0]"]


def train(directory: Path) -> None:
    """Train in a process of its own; its output is shown."""
    command = [sys.executable, "-m", "spool.demo.train", "spool-data"]
    status = subprocess.run(command, cwd=directory).returncode
    if status != 0:
        raise SpoolError(f"the training process ended with exit status {status}")


def wait(checker: subprocess.Popen[bytes], directory: Path) -> int:
    """Wait for the workflow, telling every few seconds how far it is."""
    while True:
        try:
            return checker.wait(timeout=5)
        except subprocess.TimeoutExpired:
            done = len(list((directory / "work" / "measured").rglob("*.parquet")))
            made = len(list((directory / "work" / "batches").rglob("*.json")))
            print(f"   batches replayed: {done} of {made} seen so far", flush=True)


def report(results: Path, seconds: float) -> int:
    """Print the verdicts by API, the first failing call, and the files."""
    (summary,) = results.glob("summary_*_rank0.csv")
    with summary.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        base = row["api"].rsplit(".", 1)[0]
        counts.setdefault(base, Counter())[row["verdict"]] += 1
    order = sorted(counts, key=lambda api: (-counts[api]["error"], -counts[api].total(), api))
    print(f"\n{'API':<44}{'calls':>7}{'pass':>7}{'Warning':>9}{'error':>7}{'SKIP':>6}")
    for api in order[:12]:
        tally = counts[api]
        cells = (tally.total(), tally["pass"], tally["Warning"], tally["error"], tally["SKIP"])
        print(f"{api:<44}{cells[0]:>7}{cells[1]:>7}{cells[2]:>9}{cells[3]:>7}{cells[4]:>6}")
    if len(order) > 12:
        rest = sum((counts[api] for api in order[12:]), Counter())
        print(f"{f'... {len(order) - 12} more APIs':<44}{rest.total():>7}{rest['pass']:>7}", end="")
        print(f"{rest['Warning']:>9}{rest['error']:>7}{rest['SKIP']:>6}")
    failing = [row for row in rows if row["verdict"] == "error"]
    if failing:
        first = failing[0]
        print(f"\nfirst failing call: {first['api']} in step {first['step']}")
        print(f"  where in the model: {first['module']}  ({first['location']})")
        print(f"  {first['worst_metric']} = {first['value']}, allowed {first['limit']}")
        print(f"  kept for reproduction: {results.parent / 'work' / first['shard']}")
    print(f"\nchecked {len(rows)} calls in {seconds:.0f} s; tables:")
    for path in sorted(results.glob("*.csv")):
        print(f"  {path}")
    found = {row["api"].rsplit(".", 1)[0] for row in failing}
    if found == {"Functional.gelu"}:
        print("the faulty operator, and only it, was found: Functional.gelu")
        return 0
    print(f"expected Functional.gelu to fail and nothing else, but found: {sorted(found)}")
    return 1
