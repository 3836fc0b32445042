"""The queue that Snakemake reads: when the intake runs, and how waiting is kept cheap."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from spools import make_spool

from spool.intake.calm import quieten, share_timer
from spool.intake.feed import Feed, is_live
from spool.settings import Settings


def workflow(**changes: object) -> SimpleNamespace:
    """What the feed asks of Snakemake's workflow, as when jobs will run."""
    values = {
        "is_main_process": True,
        "execution_settings": object(),
        "executor_plugin": object(),
        "dryrun": False,
        "touch": False,
        "scheduler": None,
        "output_settings": SimpleNamespace(verbose=True),
    }
    return SimpleNamespace(**{**values, **changes})


def drain(feed: Feed) -> list[object]:
    """All targets until the end, as Snakemake takes them."""
    items: list[object] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            items.append(feed.get_nowait())
        except queue.Empty:
            time.sleep(0.02)
            continue
        if items[-1] is Feed.END:
            return items
    raise AssertionError(items)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_main_process": False},
        {"execution_settings": None},
        {"executor_plugin": None},
        {"dryrun": True},
        {"touch": True},
    ],
)
def test_who_only_looks_starts_no_intake(tmp_path: Path, changes: dict[str, object]) -> None:
    assert not is_live(workflow(**changes))
    make_spool(tmp_path / "spool")
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    assert drain(Feed(settings, workflow(**changes))) == [Feed.END]
    assert not (tmp_path / "work").exists()


def test_a_run_gets_everything_and_a_look_afterwards_the_same(tmp_path: Path) -> None:
    make_spool(tmp_path / "spool", steps=2)
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    live = drain(Feed(settings, workflow()))
    assert len(live) == 2 + 2 * 3 + 6 + 1 + 1
    assert sorted(map(str, drain(Feed(settings, workflow(dryrun=True))))) == sorted(map(str, live))


def test_a_held_work_directory_ends_snakemake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool")
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    first = Feed(settings, workflow())
    drain(first)
    with pytest.raises(SystemExit) as caught:
        Feed(settings, workflow()).get_nowait()
    assert caught.value.code == 1
    assert "already fills" in capsys.readouterr().err


def test_a_failing_intake_ends_snakemake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool")
    (tmp_path / "spool" / "rank0" / "closed.json").write_text("[]")
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    feed = Feed(settings, workflow())
    with pytest.raises(SystemExit):
        drain(feed)
    assert "closed.json" in capsys.readouterr().err


def test_chatter_is_left_out_and_errors_stay() -> None:
    logger = logging.getLogger("test-of-calm")
    logger.setLevel(logging.INFO)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    quieten(logger)
    logger.info("Waiting for queue input...")
    logger.info("rule replay", extra={"event": "job_info"})
    logger.error("failed", extra={"event": "job_info"})
    logger.info("Complete log(s): x")
    assert seen == ["failed", "Complete log(s): x"]


def test_many_requests_to_look_again_share_one_timer() -> None:
    lock = threading.Semaphore(0)
    scheduler = SimpleNamespace(_open_jobs=lock, _schedule_reevalutation=None)
    share_timer(scheduler)
    for _ in range(50):
        scheduler._schedule_reevalutation(0.05)
    assert lock.acquire(timeout=30)
    assert not lock.acquire(timeout=0.3)
    # A later request gets a timer again.
    scheduler._schedule_reevalutation(0.05)
    assert lock.acquire(timeout=30)


def test_another_kind_of_scheduler_is_left_alone() -> None:
    scheduler = SimpleNamespace()
    share_timer(scheduler)
    assert vars(scheduler) == {}


def test_this_snakemake_has_what_the_timer_needs() -> None:
    from snakemake.scheduling.job_scheduler import JobScheduler

    assert callable(JobScheduler._schedule_reevalutation)


@pytest.mark.parametrize("key", ["work_dir", "results_dir"])
@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_directory_that_cannot_be_written_ends_snakemake(
    tmp_path: Path, key: str, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool")
    (tmp_path / "file").touch()
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    settings = replace(settings, **{key: tmp_path / "file" / below})
    with pytest.raises(SystemExit):
        Feed(settings, workflow()).get_nowait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"spool: config: {key}: ")
    assert line.endswith(f"{tmp_path / 'file'}: Not a directory; name another directory")
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("dryrun", [True, False])
def test_a_damaged_segment_ends_snakemake(
    tmp_path: Path, dryrun: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool")
    settings = Settings(tmp_path / "spool", tmp_path / "work", tmp_path / "results")
    path = settings.work.segment(0, 0)
    path.parent.mkdir(parents=True)
    path.write_text("garbage")
    with pytest.raises(SystemExit):
        Feed(settings, workflow(dryrun=dryrun)).get_nowait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"spool: {path}: not a usable segment: no JSON object; remove it and rerun"
