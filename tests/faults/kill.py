"""Disturbs every process of a run at every kind of file operation, and runs the same command again.

    python tests/faults/kill.py [--points 60] [--seed 0] [--table FILE]

An undisturbed training and an undisturbed check are traced first: who does which file
operations. From these points are drawn by a seed, spread over processes and kinds. At each
one the process, or its whole process group, gets SIGKILL, or the operation fails with an
error of the storage; then the same command runs undisturbed. After that a training must
have the same shards and a check the same tables, byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from iofault import KILL, KILL_ALL, Fault, build, environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from spools import make_call

import spool
from spool.store import RankCounts, StepCounts, Store

ROOT = Path(__file__).parents[2]
ROLES = {
    "trainer": "kill.py train",
    "writer process": "spool.capture.writer_process",
    "intake": "snakemake -s",
    "replay": ".replay.py",
    "worker of replay": "spool.replay.worker",
    "check": ".check.py",
    "compare": ".compare.py",
    "retire": ".retire.py",
    "merge": ".merge.py",
    "verdict": ".verdict.py",
}
TRAINING = ("trainer", "writer process")
ACTIONS = (KILL, KILL_ALL, "EIO", "ENOSPC")
# What it means to be killed while reading is nothing else than between two writes.
READING = ("EIO", "ESTALE")
STEPS = 3
CALLS = 10
_CONFIG = ("rank_list=[0]", "threads=1", "bench_device=cpu", "batch={calls: 3, seconds: 1}")
_LIMIT = 300.0
# Numbers of processes, random names and times, which differ from run to run.
_UNIQUE = re.compile(r"(?<=\.)([0-9a-f]{8}-\d+-[0-9a-f]{8}|[0-9a-f]{32})|(?<=_)\d{14}(?=_)")


@dataclass(frozen=True, order=True)
class Point:
    """A file operation of a process.

    Parameters
    ----------
    role : str
        Name of the process, a key of `ROLES`.
    what : str
        The operation and its file, with "*" for what differs from run to run.
    at : int
        Which of these in the process, from 1.
    """

    role: str
    what: str
    at: int

    def fault(self, action: str) -> Fault:
        """What to do here."""
        operation, _, path = self.what.partition(" ")
        return Fault(ROLES[self.role], self.at, action, operation, f"*/{path}")

    @property
    def kind(self) -> tuple[str, str, str]:
        """Points of one kind do the same to files of one directory."""
        operation, _, path = self.what.partition(" ")
        return self.role, operation, str(Path(path).parent)


@dataclass(frozen=True)
class Outcome:
    """What became of a run that was disturbed at a point.

    Parameters
    ----------
    point : Point
    action : str
    status : int
        Exit status of the disturbed run.
    result : str
        "same bytes", or what differs.
    is_met : bool
        Whether the point was met; else nothing is shown.
    said : str
        What the disturbed run printed.
    """

    point: Point
    action: str
    status: int
    result: str
    is_met: bool
    said: str

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, or what was lost was counted."""
        return self.result == "same bytes" or self.result.endswith("counted as dropped")

    def row(self) -> str:
        """A row of the table, in Markdown."""
        ended = "killed" if self.status < 0 else f"status {self.status}"
        result = self.result if self.is_met else "not met"
        return f"| {self.point.role} | `{self.point.what}` | {self.action} | {ended} | {result} |"


class Bench:
    """An undisturbed training and check, traced, and what others are compared with.

    Parameters
    ----------
    directory : Path
        Empty; what differed stays in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = build(directory)
        self._count = 0
        make_spool(directory / "spool")
        log = directory / "operations"
        training, check = self._fresh("trainer"), self._fresh("check")
        for path, role in ((training, "trainer"), (check, "check")):
            status, output = self._run(path, role, log=log)
            assert status == 0, output
        self._shards, self._tables = shards(training), tables(check)
        assert len(self._shards) == STEPS * CALLS
        assert len(self._tables) == 6
        self.points = sorted(set(_points(log.read_text(), [training, check])))

    def disturb(self, points: list[tuple[Point, str]]) -> list[Outcome]:
        """Disturb one run after another at points of training or of checking, then compare.

        The first run starts anew; each goes on with what the one before it left.
        """
        role = points[0][0].role
        directory = self._fresh(role)
        met = []
        for number, (point, action) in enumerate(points):
            fired = directory / f"fired{number}"
            fault = point.fault(action)
            status, said = self._run(directory, point.role, fault=fault, fired=fired)
            met.append((point, action, status, fired.exists(), said))
        status, said = self._run(directory, role)
        result = self._compare(directory, role) if status == 0 else f"again: status {status}"
        if result == "same bytes":
            shutil.rmtree(directory)
        else:
            output = [
                f"--- {point} {action}: {ended}\n{text}" for point, action, ended, _, text in met
            ]
            output.append(f"--- again: {status}\n{said}")
            (directory / "output").write_text("".join(output))
            result += f" in {directory}" * (not result.endswith("dropped"))
        return [
            Outcome(point, action, status, result, is_met, said)
            for point, action, status, is_met, said in met
        ]

    def _compare(self, directory: Path, role: str) -> str:
        expected = self._shards if role in TRAINING else self._tables
        found = shards(directory) if role in TRAINING else tables(directory)
        if found == expected:
            return "same bytes"
        missing = len(expected.keys() - found.keys())
        if role in TRAINING and found.items() <= expected.items():
            closed = Store.open(directory / "spool-data").rank_closed(0)
            dropped = sum(counts.dropped for counts in closed.steps.values()) if closed else 0
            if dropped == missing:
                return f"{dropped} counted as dropped"
        other = sum(found.get(name, data) != data for name, data in expected.items())
        return f"{missing} missing, {other} differ, {len(found.keys() - expected.keys())} more"

    def _fresh(self, role: str) -> Path:
        self._count += 1
        directory = self._directory / f"run{self._count}"
        directory.mkdir()
        if role not in TRAINING:
            # Links: nothing that reads a shard changes it.
            shutil.copytree(
                self._directory / "spool", directory / "spool-data", copy_function=os.link
            )
        return directory

    def _run(
        self,
        directory: Path,
        role: str,
        *,
        fault: Fault | None = None,
        fired: Path | None = None,
        log: Path | None = None,
    ) -> tuple[int, str]:
        """Train or check in a directory; the exit status and what was said."""
        command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--cores", "2"]
        command += ["--config", *_CONFIG]
        if role in TRAINING:
            command = [sys.executable, __file__, "train", str(directory / "spool-data")]
        under = [directory / name for name in ("spool-data", "work", "results")]
        process = subprocess.Popen(
            # A process learns the group that it is in, and that is to be killed, from the shell.
            ["sh", "-c", 'IOFAULT_GROUP=$$ exec "$@"', "sh", *command],
            cwd=directory,
            env={
                **environment(self._library, under, fault, fired=fired, log=log),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nhung for {_LIMIT:g} s\n"
        if fault is not None and fault.action == KILL_ALL:
            _kill_writer_of(process.pid)
        return process.returncode, output


def draw(points: list[Point], count: int, seed: int) -> list[tuple[Point, str]]:
    """Some points with what to do at each, spread over roles, kinds and actions."""
    random_ = random.Random(seed)
    by_role: dict[str, dict[tuple[str, str, str], list[Point]]] = {role: {} for role in ROLES}
    for point in points:
        by_role[point.role].setdefault(point.kind, []).append(point)
    queues = []
    for kinds in by_role.values():
        order = sorted(kinds)
        random_.shuffle(order)
        queues.append([random_.choice(kinds[kind]) for kind in order])
    drawn: list[Point] = []
    while len(drawn) < count and any(queues):
        drawn += [queue.pop() for queue in queues if queue]
    offset = random_.randrange(len(ACTIONS))
    todo = []
    for number, point in enumerate(drawn[:count], offset):
        actions = READING if point.what.startswith("read ") else ACTIONS
        todo.append((point, actions[number % len(actions)]))
    return todo


def make_spool(root: Path) -> None:
    """A closed spool: two steps of five calls, two of them wrong."""
    store = Store.create(root, {"torch": str(torch.__version__)})
    steps = {}
    for step in range(2):
        calls = [make_call(0, step, order, error=float(order in (2, 3))) for order in range(5)]
        size = sum(store.publish(call).nbytes for call in calls)
        steps[step] = StepCounts(shards=len(calls), bytes=size)
        store.close_step(0, step, steps[step])
    store.close_rank(0, RankCounts(steps, "disabled"))


def train(root: str) -> None:
    """Capture the same few calls each time, of any step, from any state of the spool."""
    with spool.enable(spool_dir=root, resume=True, step=[f"0-{STEPS - 1}"], max_wait=10) as session:
        for step in range(STEPS):
            x = torch.full((500,), float(step))
            for _ in range(CALLS):
                x = x + 1
            session.step()


def shards(directory: Path) -> dict[str, bytes]:
    """Bytes of every shard of the spool in a directory."""
    root = directory / "spool-data"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("[!.]*.h5")}


def tables(directory: Path) -> dict[str, bytes]:
    """Bytes of every table, by name."""
    return {path.name: path.read_bytes() for path in (directory / "results").glob("*.csv")}


def _points(text: str, roots: list[Path]) -> Iterator[Point]:
    """The operations of a log, by the role of whoever did them."""
    roles: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        process, operation, path = line.split(" ", 2)
        if operation == "start":
            found = [role for role, words in ROLES.items() if words in path]
            roles[process] = found[0] if found and "bash -c" not in path else ""
        elif roles.get(process):
            for root in roots:
                path = path.removeprefix(f"{root}/")
            what = f"{operation} {_UNIQUE.sub('*', path)}"
            counts[process, what] += 1
            yield Point(roles[process], what, counts[process, what])


def _kill_writer_of(trainer: int) -> None:
    """End the writer process of a trainer, which is in no group with it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(trainer).encode() in words and ROLES["writer process"].encode() in words[2]:
                os.kill(int(path.parent.name), signal.SIGKILL)


def main() -> None:
    """Disturb, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="file that the table is written to as well")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="spool-kill-"))
    bench = Bench(directory)
    todo = draw(bench.points, arguments.points, arguments.seed)
    print(f"{len(bench.points)} file operations traced, {len(todo)} drawn by seed {arguments.seed}")
    outcomes = []
    begin = time.monotonic()
    for number, (point, action) in enumerate(todo, 1):
        outcomes += bench.disturb([(point, action)])
        left = (time.monotonic() - begin) / number * (len(todo) - number)
        print(f"{number}/{len(todo)}, {left:.0f} s left: {outcomes[-1].row()}", flush=True)
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    met = sum(outcome.is_met for outcome in outcomes)
    if arguments.table:
        head = "| process | at | what happens | run ends with | the same command again |\n"
        rows = "\n".join(outcome.row() for outcome in outcomes)
        arguments.table.write_text(f"{head}|---|---|---|---|---|\n{rows}\n")
    print(f"{met} points met, {len(bad)} bad, {platform.platform()}, torch {torch.__version__}")
    if bad:
        sys.exit(f"see {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main()
