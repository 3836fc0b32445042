"""A short form of `kill.py`: each process of a run is killed once, storage fails, same bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from iofault import ERRORS, KILL, KILL_ALL, NoCompilerError
from kill import ROLES, Bench, Outcome, Point

# On one worker, so that what they share is made once.
pytestmark = pytest.mark.xdist_group("kill")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    try:
        return Bench(tmp_path_factory.mktemp("kill"))
    except NoCompilerError as error:
        pytest.skip(str(error))


# One run after another is disturbed, each one stage further, and then one is not. A kill strikes
# where it does the most harm: between two records that belong together. Check and compare run
# beside each other, so that one of them may be through when the other is killed: two runs.
TRAINING = [
    ("trainer", "link spool-data/run.json", KILL),
    ("writer process", "rename spool-data/rank0/step1/000001.Tensor.add.1.h5", KILL_ALL),
]
CHECKING = [
    ("intake", "rename work/batches/rank0/000001.json", KILL),
    ("worker of replay", "write work/measured/rank0/.000000.journal", KILL_ALL),
    ("replay", "link work/measured/rank0/000000.parquet", KILL),
    ("check", "rename work/two_way/rank0/000000.parquet", KILL_ALL),
    ("retire", "unlink spool-data/rank0/step0/000001.Torch.add.1.h5", KILL_ALL),
    ("merge", "rename results/summary_*_rank0.csv", KILL),
    ("verdict", "rename work/verdict.txt", KILL_ALL),
]
STORAGE = [
    ("replay", "write work/measured/rank0/..000000.parquet.*.partial.*.partial", "ENOSPC"),
    ("compare", "fsync work/three_way/rank0", KILL),
    ("retire", "write work/failed/rank0/.ledger.json.*.partial", "EROFS"),
    ("merge", "write results/.summary_*_rank0.csv.*.partial", "EDQUOT"),
    ("verdict", "fsync work/.verdict.txt.*.partial", "EIO"),
]


def disturb(bench: Bench, points: list[tuple[str, str, str]]) -> list[Outcome]:
    outcomes = bench.disturb([(Point(role, what, 1), action) for role, what, action in points])
    print(*(outcome.row() for outcome in outcomes), sep="\n")
    for outcome in outcomes:
        assert outcome.is_met
        assert outcome.is_good
    return outcomes


def test_every_process_of_a_run_is_traced(bench: Bench) -> None:
    assert {point.role for point in bench.points} == set(ROLES)
    assert len(bench.points) > 300
    assert {role for role, _, _ in TRAINING + CHECKING + STORAGE} == set(ROLES)


@pytest.mark.parametrize("points", [TRAINING, CHECKING], ids=["training", "checking"])
def test_the_same_command_after_kills_gives_the_same_bytes(
    bench: Bench, points: list[tuple[str, str, str]]
) -> None:
    for outcome in disturb(bench, points):
        assert outcome.status != 0


def test_storage_that_fails_is_one_line_with_the_file_and_loses_nothing(bench: Bench) -> None:
    for outcome in disturb(bench, STORAGE):
        assert outcome.result == "same bytes"
        assert outcome.status == 1
        if outcome.action in ERRORS:
            assert "Traceback" not in outcome.said
            lines = [line for line in outcome.said.splitlines() if line.startswith("spool: ")]
            number = getattr(errno, outcome.action)
            (line,) = {line for line in lines if os.strerror(number) in line}
            # Of a file that is replaced, its own name or that of the new one.
            assert f"{Path(outcome.point.what.split()[1]).parent}/" in line
            assert "run the same command again" in line or "rerun when that is mended" in line
