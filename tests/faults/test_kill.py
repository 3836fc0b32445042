"""A short form of `kill.py`: each process of a run is killed once, and the bytes are the same."""

from __future__ import annotations

import errno
import os

import pytest
from iofault import NoCompilerError
from kill import ACTIONS, ROLES, TRAINING, Bench, Point


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    try:
        return Bench(tmp_path_factory.mktemp("kill"))
    except NoCompilerError as error:
        pytest.skip(str(error))


# Where a kill does the most harm: between two records that belong together.
EDGES = {
    "trainer": "link spool-data/run.json",
    "writer process": "rename spool-data/rank0/step1/000001.Tensor.add.1.h5",
    "intake": "rename work/batches/rank0/000001.json",
    "worker of replay": "write work/measured/rank0/.000000.journal",
    "replay": "link work/measured/rank0/000000.parquet",
    "check": "rename work/two_way/rank0/000000.parquet",
    "compare": "fsync work/three_way/rank0",
    "retire": "unlink spool-data/rank0/step0/000001.Torch.add.1.h5",
    "merge": "rename results/summary_.*_rank0.csv",
    "verdict": "rename work/verdict.txt",
}


def edges(bench: Bench, training: bool) -> list[Point]:
    found = {}
    for point in bench.points:
        if EDGES[point.role] == point.what and (point.role in TRAINING) == training:
            found.setdefault(point.role, point)
    return [found[role] for role in EDGES if role in found]


def test_every_process_of_a_run_is_traced(bench: Bench) -> None:
    assert {point.role for point in bench.points} == set(ROLES)
    assert len(bench.points) > 300
    assert len(edges(bench, training=True)) == 2
    assert len(edges(bench, training=False)) == 8


def test_the_same_command_after_kills_gives_the_same_bytes(bench: Bench) -> None:
    """One run after another is killed, each one stage further; then one is not."""
    for training in (True, False):
        points = edges(bench, training)
        actions = [ACTIONS[number % 2] for number in range(len(points))]
        outcomes = bench.disturb(list(zip(points, actions, strict=True)))
        print(*(outcome.row() for outcome in outcomes), sep="\n")
        assert all(outcome.is_good for outcome in outcomes)
        assert sum(outcome.is_met for outcome in outcomes) >= len(points) - 1


STORAGE = {
    "replay": ("write work/measured/rank0/..000000.parquet.*.partial.*.partial", "ENOSPC"),
    "check": ("fsync work/two_way/rank0/.000000.parquet.*.partial", "EIO"),
    "retire": ("rename work/failed/rank0/ledger.json", "EROFS"),
    "merge": ("write results/.summary_.*_rank0.csv.*.partial", "EDQUOT"),
}


def test_storage_that_fails_is_one_line_with_the_file_and_loses_nothing(bench: Bench) -> None:
    by_what = {(point.role, point.what): point for point in bench.points}
    points = [(by_what[role, what], error) for role, (what, error) in STORAGE.items()]
    outcomes = bench.disturb(points)
    assert {outcome.result for outcome in outcomes} == {"same bytes"}
    # The operations of a run that goes on differ a little from those that were traced.
    failed = [outcome for outcome in outcomes if outcome.is_met and outcome.status]
    assert failed
    for outcome in failed:
        assert outcome.status == 1
        assert "Traceback" not in outcome.said
        lines = [line for line in outcome.said.splitlines() if line.startswith("spool: ")]
        number = getattr(errno, outcome.action)
        (line,) = {line for line in lines if os.strerror(number) in line}
        assert outcome.point.what.split()[1].partition("/")[0] + "/" in line
        assert "run the same command again" in line or "rerun when that is mended" in line
