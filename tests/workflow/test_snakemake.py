"""The workflow under the real Snakemake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from spools import make_call, make_spool, publish_step

from spool.intake.follow import Intake
from spool.intake.lock import Owner
from spool.settings import Settings
from spool.store import RankCounts, StepCounts, Store

ROOT = Path(__file__).parents[2]
LIMIT = 300.0
# Small batches, and no waiting that a test does not need.
CONFIG = ("threads=1", "bench_device=cpu", "batch={calls: 3, seconds: 1}", "rescan_seconds=0.5")


def command(*arguments: str, config: tuple[str, ...] = ()) -> list[str]:
    base = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), *arguments]
    return [*base, "--config", *CONFIG, *config]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(
    directory: Path, *arguments: str, config: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*(arguments or ("--cores", "2")), config=config),
        cwd=directory,
        text=True,
        capture_output=True,
        env=environment(),
        timeout=LIMIT,
    )


def tables(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "results").iterdir()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def complain(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that are ours."""
    return [line for line in done.stderr.splitlines() if line.startswith("spool: ")]


@pytest.mark.parametrize(
    ("arguments", "spool"),
    [
        (("-n",), "missing"),
        (("-n",), "empty"),
        (("-n",), "open"),
        (("--lint",), "open"),
        (("--dag", "dot"), "open"),
        (("--unlock",), "missing"),
        (("--summary",), "open"),
        (("--report", "report.html"), "open"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].strip("-"),
)
def test_commands_that_only_look_end_at_once(
    tmp_path: Path, arguments: tuple[str, ...], spool: str
) -> None:
    if spool != "missing":
        store = Store.create(tmp_path / "spool-data", {})
        if spool == "open":
            store.publish(make_call())
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    # They look and do not touch.
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (("rank_lst=0",), "unknown key 'rank_lst'"),
        (("precision=many",), "precision: 'many' is not allowed"),
        (("watch=false",), "no spool there"),
        (("watch=false", "spool_dir=one", "rank_list=[0,5]"), "rank 5 is not in"),
        (("spool_dir=newer",), "format 9"),
        (("spool_dir=one", "work_dir=held"), "spool unlock held"),
    ],
)
def test_bad_input_is_one_line_and_no_job(
    tmp_path: Path, config: tuple[str, ...], words: str
) -> None:
    make_spool(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "newer")
    path = tmp_path / "newer" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    (tmp_path / "held").mkdir()
    owner = replace(Owner.me(), host="far", boot="other")
    (tmp_path / "held" / "intake.lock").write_text(json.dumps(asdict(owner)))
    done = run(tmp_path, config=config)
    assert done.returncode == 1
    lines = complain(done)
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_following_killed_and_started_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Started before training; SIGKILL for Snakemake and its jobs; the same command again."""
    live, calm = tmp_path / "live", tmp_path / "calm"
    live.mkdir()
    calm.mkdir()
    process = subprocess.Popen(
        command("--cores", "2"),
        cwd=live,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for a spool" in line:
            break
    else:
        pytest.fail("it did not wait for a spool")
    store = Store.create(live / "spool-data", {})
    counts = {0: publish_step(store, 0, 0, 7)}
    (calm / "spool-data").mkdir()
    shutil.copy(live / "spool-data" / "run.json", calm / "spool-data")
    measured = live / "work" / "measured" / "rank0"
    wait_until(lambda: any(measured.glob("*.parquet")) if measured.exists() else False)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    counts[1] = publish_step(store, 0, 1, 5, error=0.5)
    store.close_rank(0, RankCounts(counts, "disabled"))
    done = run(live)
    assert done.returncode == 0, done.stderr
    assert any("taking over" in line for line in complain(done))
    assert any("12 of 12 calls replayed" in line for line in complain(done))

    other = Store.open(calm / "spool-data")
    again = {0: publish_step(other, 0, 0, 7), 1: publish_step(other, 0, 1, 5, error=0.5)}
    other.close_rank(0, RankCounts(again, "disabled"))
    done = run(calm, "--cores", "1", config=("batch={calls: 100}", "watch=false"))
    assert done.returncode == 0, done.stderr
    assert len(tables(calm)) == 6
    assert tables(live) == tables(calm)


def test_what_changes_is_made_again_and_nothing_else(tmp_path: Path) -> None:
    """After the shards were retired: a judging key, a lost table, a failing verdict."""
    make_spool(tmp_path / "spool-data", calls=4)
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    before = tables(tmp_path)
    assert not list((tmp_path / "spool-data").rglob("*.h5"))

    def age() -> dict[str, int]:
        paths = [path for path in (tmp_path / "work").rglob("*.*") if path.is_file()]
        return {str(path.relative_to(tmp_path)): path.stat().st_mtime_ns for path in paths}

    ages = age()
    done = run(tmp_path, config=("black_list=[add]",))
    assert done.returncode == 1
    assert "nothing was compared" in done.stderr
    changed = {name for name, when in age().items() if ages.get(name) != when}
    assert "work/settings/judging.json" in changed
    assert "work/two_way/rank0/000000.parquet" in changed
    assert not [name for name in changed if name.startswith(("work/replay", "work/measured"))]
    # The tables are there although the verdict failed.
    assert set(tables(tmp_path)) == set(before)
    assert tables(tmp_path) != before

    (tmp_path / "work" / "replay" / "rank0" / "000001.parquet").unlink()
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert tables(tmp_path) == before

    summary = next((tmp_path / "results").glob("summary_*"))
    summary.unlink()
    ages = age()
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert tables(tmp_path) == before
    changed = {name for name, when in age().items() if ages.get(name) != when}
    assert not [name for name in changed if name.startswith(("work/two_way", "work/replay"))]


def test_findings_fail_the_run_only_if_asked_to(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "spool-data", {})
    counts = {0: publish_step(store, 0, 0, 2, error=0.5)}
    store.close_rank(0, RankCounts(counts, "disabled"))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    kept = list((tmp_path / "work" / "failed" / "rank0" / "step0").glob("*.h5"))
    assert len(kept) == 2
    done = run(tmp_path, config=("fail_on=error",))
    assert done.returncode == 1
    assert "2 calls with errors" in done.stderr


def test_two_ranks_or_the_second_alone(tmp_path: Path) -> None:
    make_spool(tmp_path / "spool-data", ranks=2, calls=2)
    shutil.copytree(tmp_path / "spool-data", tmp_path / "copy")
    done = run(tmp_path, config=("rank_list=[0,1]",))
    assert done.returncode == 0, done.stderr
    both = tables(tmp_path)
    assert len(both) == 12
    alone = ("spool_dir=copy", "work_dir=w1", "results_dir=r1", "rank_list=[1]")
    done = run(tmp_path, config=alone)
    assert done.returncode == 0, done.stderr
    second = {path.name: path.read_bytes() for path in (tmp_path / "r1").iterdir()}
    assert second == {name: data for name, data in both.items() if name.endswith("_rank1.csv")}


def test_missing_shards_are_told_and_fail_the_run(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "spool-data", {})
    store.publish(make_call())
    store.close_rank(0, RankCounts({0: StepCounts(3, 1)}, "disabled"))
    done = run(tmp_path, config=("missing_seconds=1",))
    assert done.returncode == 1
    assert "2 shards are missing" in done.stderr
    assert len(tables(tmp_path)) == 6


def test_a_setting_changed_elsewhere_and_changed_back_counts(tmp_path: Path) -> None:
    """From two directories on one work directory: each has records of its own."""
    make_spool(tmp_path / "spool", calls=2)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    where = tuple(f"{key}_dir={tmp_path / key}" for key in ("spool", "work", "results"))
    first = run(here, config=where)
    assert first.returncode == 0, first.stderr
    before = tables(tmp_path)
    done = run(there, config=(*where, "black_list=[add]"))
    assert "nothing was compared" in done.stderr
    assert tables(tmp_path) != before
    done = run(here, config=where)
    assert done.returncode == 0, done.stderr
    assert tables(tmp_path) == before


def test_a_spool_that_moved_before_its_batches_ran(tmp_path: Path) -> None:
    make_spool(tmp_path / "spool-data", calls=2)
    settings = Settings(tmp_path / "spool-data", tmp_path / "work", tmp_path / "results")
    intake = Intake(settings, lambda path: None, lambda: None, say=lambda line: None)
    intake.prepare()
    assert intake.look()
    if intake._watch is not None:
        intake._watch.stop()
    (tmp_path / "spool-data").rename(tmp_path / "moved")
    done = run(tmp_path, config=("spool_dir=moved",))
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "moved").rglob("*.h5"))


def test_steps_captured_anew_are_checked_anew(tmp_path: Path) -> None:
    """As if they had been captured so in the first place."""

    def capture(store: Store) -> None:
        counts = {step: publish_step(store, 0, step, 2, error=0.5 * step) for step in (0, 1)}
        store.close_rank(0, RankCounts(counts, "disabled"))

    def contents(directory: Path) -> list[bytes]:
        newest = max(name.split("_rank")[0][-14:] for name in tables(directory) if "_rank" in name)
        return [text for name, text in sorted(tables(directory).items()) if newest in name]

    again, fresh = tmp_path / "again", tmp_path / "fresh"
    store = make_spool(again / "spool-data", steps=2, calls=2)
    done = run(again)
    assert done.returncode == 0, done.stderr
    before = contents(again)
    store.clear(0)
    capture(store)
    done = run(again)
    assert done.returncode == 0, done.stderr
    for step in (0, 1):
        said = f"rank 0 step {step} was captured anew: what was checked of it before is dropped"
        assert said in done.stderr
    capture(Store.create(fresh / "spool-data", {"torch": "2.13.0"}))
    done = run(fresh)
    assert done.returncode == 0, done.stderr
    assert contents(again) == contents(fresh) != before
    assert len(contents(again)) >= 5
    kept = [sorted(p.name for p in (d / "work/failed").rglob("*.h5")) for d in (again, fresh)]
    assert kept[0] == kept[1] != []


def test_modes_of_everything_that_a_run_makes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = tmp_path / "run"
        root.mkdir()
        store = Store.create(root / "spool-data", {})
        for order, error in ((0, 0.0), (1, 1.0), (2, 0.0)):
            path = store.publish(make_call(order=order, error=error)).path
        # One passes, one fails and is kept, one is refused.
        path.write_bytes(path.read_bytes()[:-1])
        store.close_rank(0, RankCounts({0: StepCounts(3, 1)}, "disabled"))
        done = run(root)
    finally:
        os.umask(before)
    assert done.returncode == 1
    assert "1 shard is unusable" in done.stderr
    # What Snakemake keeps for itself it made before it read the Snakefile.
    ours = [
        path
        for name in ("spool-data", "work", "results")
        for path in (root / name, *(root / name).rglob("*"))
    ]
    made = {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in ours}
    assert "work/failed/rank0/step0/000001.Torch.add.1.h5" in made
    assert "work/quarantine/rank0/step0/000002.Torch.add.2.h5.json" in made
    assert any(name.startswith("results/summary") for name in made)
    assert {name: oct(mode) for name, mode in made.items() if mode & 0o027} == {}
