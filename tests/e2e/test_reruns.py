"""The same command again, or a changed one: the tables of an undisturbed run, or one line."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import harness
import pytest

from spool import shard
from spool.store import RankCounts, StepCounts, Store

CONFIG: dict[str, object] = {
    "threads": 1,
    "bench_device": "cpu",
    "rescan_seconds": 0.5,
    "missing_seconds": 1,
}
CAPTURE = """
import torch, spool
torch.manual_seed(0)
spool.enable(spool_dir="spool-data")
for _ in range(2):
    x = torch.tanh(torch.rand(4, 8) + 1)
    y = torch.mul(x, x)
    y = torch.atan2(y, x)
    spool.step()
spool.disable()
"""
FAULTY = ("tanh", "mul")
ROWS = ("measured", "replay")
PLACES = {"spool_dir": "spool-data", "work_dir": "work", "results_dir": "results"}


def run(
    cwd: Path, *arguments: str, check: bool = True, **config: object
) -> subprocess.CompletedProcess[str]:
    return harness.workflow(cwd, *arguments, check=check, **{**CONFIG, **config})


def break_shards(spool: Path) -> None:
    """Make the calls of `FAULTY` wrong, so that some shards are kept, and count what is there."""
    store = Store.open(spool)
    counts = {}
    for step in store.steps(0):
        for entry in store.shards(0, step):
            if entry.name.split(".")[1] not in FAULTY:
                continue
            call = shard.read(entry.path)
            region = call.outputs.region
            regions = [item.copy() for item in call.regions]
            regions[region].view("f4")[3] += 0.5
            entry.path.unlink()
            shard.write(replace(call, regions=regions), entry.path)
        entries = store.shards(0, step)
        counts[step] = StepCounts(len(entries), sum(entry.nbytes for entry in entries))
        store.close_step(0, step, counts[step])
    store.close_rank(0, RankCounts(counts, "disabled"))


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool of two steps, some of whose calls err on both routes."""
    root = tmp_path_factory.mktemp("captured")
    harness.python(root, CAPTURE)
    break_shards(root / "spool-data")
    assert len(harness.shards(root / "spool-data")) >= 8
    return root


@pytest.fixture(scope="session")
def whole(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with ``retain=all``: measured, judged, and all shards still there."""
    root = harness.copy_run(captured, tmp_path_factory.mktemp("whole") / "run")
    run(root, retain="all")
    return root


@pytest.fixture(scope="session")
def retired(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with the default: what passed is deleted."""
    root = harness.copy_run(whole, tmp_path_factory.mktemp("retired") / "run")
    run(root)
    left = harness.shards(root / "spool-data")
    assert left == []
    assert len(list((root / "work/failed").rglob("*.h5"))) == 4
    return root


@pytest.fixture(params=["whole", "retired"])
def before(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """A finished run before and after its shards were retired, and its settings."""
    source: Path = request.getfixturevalue(request.param)
    config = {"retain": "all"} if request.param == "whole" else {}
    return harness.copy_run(source, tmp_path / "run"), config


def remove(root: Path, *patterns: str) -> None:
    for pattern in patterns:
        paths = sorted(root.glob(pattern))
        assert paths, pattern
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def said(done: subprocess.CompletedProcess[str], words: str) -> str:
    """The one line that says so; no traceback."""
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output[-3000:]
    (line,) = {line for line in output.splitlines() if words in line}
    return line


def test_a_retired_run_has_the_tables_of_one_from_scratch(
    captured: Path, retired: Path, tmp_path: Path
) -> None:
    """Changing `retain` from all to failed is as if it had never been all."""
    fresh = harness.copy_run(captured, tmp_path / "run")
    run(fresh)
    assert harness.tables(fresh) == harness.tables(retired)


@pytest.mark.parametrize(
    "victims",
    [
        (
            *("results/coverage_*", "work/retired/rank0/000000.json", "work/verdict.txt"),
            *("work/measured/rank0/000000.parquet", ".snakemake", "work/logs"),
        ),
        ("work/ends", "work/segments/rank0/000000.json", "work/settings", "work/run.json"),
    ],
)
def test_what_is_deleted_is_made_again(
    victims: tuple[str, ...], before: tuple[Path, dict[str, object]]
) -> None:
    root, config = before
    tables = harness.tables(root)
    remove(root, *victims)
    run(root, **config)
    assert harness.tables(root) == tables
    for victim in victims:
        assert victim == "work/logs" or "segments" in victim or list(root.glob(victim))


def test_forced_jobs(before: tuple[Path, dict[str, object]]) -> None:
    """Measured rows that somebody deleted are not lost with the output that Snakemake deletes."""
    root, config = before
    tables = harness.tables(root)
    remove(root, "work/measured")
    run(root, "--forcerun", "replay", "merge", batch="{calls: 1}", **config)
    assert harness.tables(root) == tables
    assert len(list((root / "work/measured/rank0").glob("*.parquet"))) == 2


def test_a_lost_manifest_is_one_line_until_it_is_back(retired: Path, tmp_path: Path) -> None:
    root = harness.copy_run(retired, tmp_path / "run")
    tables = harness.tables(root)
    manifest = root / "work/batches/rank0/000000.json"
    text = manifest.read_text()
    manifest.unlink()
    done = run(root, check=False)
    assert done.returncode == 1
    line = said(done, "spool: ")
    assert "000000.json: the manifest is gone; restore it from a copy" in line
    assert harness.tables(root) == tables
    manifest.write_text(text)
    run(root)
    assert harness.tables(root) == tables


def test_rows_that_are_gone_with_their_shards_are_one_line(retired: Path, tmp_path: Path) -> None:
    root = harness.copy_run(retired, tmp_path / "run")
    tables = harness.tables(root)
    remove(root, "work/measured/rank0/000000.parquet", "work/replay/rank0/000000.parquet")
    done = run(root, check=False)
    assert done.returncode == 1
    line = said(done, "no shard of batch 0 of rank 0 is there any more")
    assert line.endswith("000000.parquet is missing; restore one of them and rerun")
    assert harness.tables(root) == tables
    shutil.copy(retired / "work/measured/rank0/000000.parquet", root / "work/measured/rank0")
    run(root)
    assert harness.tables(root) == tables


def test_another_work_directory_leaves_finished_tables_alone(retired: Path, tmp_path: Path) -> None:
    cwd = harness.copy_run(retired, tmp_path / "run")
    finished = harness.tables(cwd)
    done = run(cwd, check=False, work_dir="other")
    assert done.returncode == 1
    (line,) = {line for line in done.stderr.splitlines() if "holds tables of rank 0" in line}
    owner = f"{socket.gethostname()}:{retired / 'work'}"  # the run was copied since
    assert f"of its shards are not in the spool: {owner} has their rows; use that one" in line
    assert harness.tables(cwd) == finished
    # With other results too: at once, and by name.
    began = time.monotonic()
    done = run(cwd, check=False, work_dir="third", results_dir="elsewhere", missing_seconds=100)
    assert done.returncode == 1
    assert time.monotonic() - began < 100
    assert f"missing: a check with work_dir {owner} took them" in done.stderr
    said(done, f"a check with work_dir {owner} has deleted or moved them (retain): use that work")
    run(cwd)
    assert harness.tables(cwd) == finished


def test_without_word_of_who_took_them_shards_are_missing(retired: Path, tmp_path: Path) -> None:
    """The word may be gone, unreadable, or a link: it only tells."""
    cwd = harness.copy_run(retired, tmp_path / "run")
    spoil = [path.unlink for path in cwd.glob("spool-data/rank0/*/retired.json")]
    (first, *_) = cwd.glob("spool-data/rank0/*/retired.json")
    for change in (*spoil, lambda: first.symlink_to("/etc/passwd")):
        change()
    done = run(cwd, check=False, work_dir="other")
    line = said(done, "of its shards are not in the spool")
    assert "another work_dir, which checked them, has their rows" in line


def test_retain_changed_after_shards_were_retired(retired: Path, tmp_path: Path) -> None:
    """`all` brings nothing back and says so; `none` deletes what was kept."""
    root = harness.copy_run(retired, tmp_path / "run")
    tables = harness.tables(root)
    done = run(root, retain="all")
    assert "rank 0: segment 0 was retired before retain=all; its shards stay" in done.stderr
    assert harness.tables(root) == tables
    run(root, retain="none")
    assert not list((root / "work/failed").rglob("*.h5"))
    summary = harness.rows(root, "summary")
    assert {row["shard"] for row in summary} == {" "}
    assert "kept 0, not kept 4" in (root / "work/verdict.txt").read_text()


def test_ranks_results_and_threads_changed(retired: Path, tmp_path: Path) -> None:
    root = harness.copy_run(retired, tmp_path / "run")
    tables = harness.tables(root)
    shutil.copytree(root / "spool-data/rank0", root / "spool-data/rank1")
    store = Store.open(root / "spool-data")
    store.close_rank(1, RankCounts({}, "disabled"))
    done = run(root, check=False, rank_list="[0,1]", threads=2)
    # Rank 1 has captured nothing, and only that is a problem.
    said(done, "error: rank 1: nothing was compared")
    assert {k: v for k, v in harness.tables(root).items() if "rank0" in k} == tables
    done = run(root, results_dir="elsewhere")
    assert "elsewhere/summary" in done.stderr
    assert "rank 1" not in done.stderr
    there = {re.sub(r"_\d{14}_", "_", p.name): p.read_bytes() for p in root.glob("elsewhere/*")}
    assert there == tables


def test_another_spool_judges_again(retired: Path, tmp_path: Path) -> None:
    """Settings that an older Spool wrote: judged and merged again, never replayed."""
    root = harness.copy_run(retired, tmp_path / "run")
    tables = harness.tables(root)
    for name in ("judging", "tables"):
        path = root / f"work/settings/{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "spool": "0.0.1"}))
    verdicts = root / "work/two_way/rank0/000000.parquet"
    published = root / "work/replay/rank0/000000.parquet"
    times = verdicts.stat().st_mtime_ns, published.stat().st_mtime_ns
    run(root)
    assert harness.tables(root) == tables
    assert verdicts.stat().st_mtime_ns > times[0]
    assert published.stat().st_mtime_ns == times[1]


def test_interrupted_then_changed(whole: Path, tmp_path: Path) -> None:
    """Killed after one batch was measured; other batch limits, lists and a standard after it."""
    root = harness.copy_run(whole, tmp_path / "run")
    work = ("two_way", "three_way", "retired", "ends", "segments", "verdict.txt")
    remove(root, "results", *(f"work/{name}" for name in work))
    for kind in ("batches/rank0/000001.json", *(f"{k}/rank0/000001.parquet" for k in ROWS)):
        remove(root, f"work/{kind}")
    config = {"black_list": "[mul]", "retain": "all", "batch": "{calls: 2}", "golden": "bench"}
    done = run(root, **config)
    said(done, "rank 0: batch 0 was measured under golden=cpu; it keeps that")
    undisturbed = harness.copy_run(whole, tmp_path / "undisturbed")
    run(undisturbed, black_list="[mul]", retain="all")
    assert harness.tables(root) == harness.tables(undisturbed)


def test_two_workflows_on_one_work_directory(captured: Path, tmp_path: Path) -> None:
    """From two directories: the second is refused with the pid of the first, which ends well."""
    first, second = harness.copy_run(captured, tmp_path / "first"), tmp_path / "second"
    second.mkdir()
    places = {key: first / name for key, name in PLACES.items()}
    closed = first / "spool-data/rank0/closed.json"
    marker = closed.read_bytes()
    closed.unlink()
    log = (first / "log").open("w")
    line = harness.command(**{**CONFIG, **places, "rank_list": "[0]", "retain": "all"})
    process = subprocess.Popen(line, cwd=first, env=harness.environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (first / "work/batches").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        done = run(second, check=False, **places)
        assert done.returncode == 1
        refusal = said(done, "spool: ")
        assert f"process {process.pid} already fills {first / 'work'}" in refusal
        closed.write_bytes(marker)
        assert process.wait(timeout=120) == 0, (first / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
        log.close()
    assert len(harness.tables(first)) == 6
