"""Following a spool: what is queued, when a rank is over, and what is said meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from spools import make_call, make_spool, publish_step

from spool.close import close_rank
from spool.errors import SpoolError, StoreError
from spool.intake.follow import Intake
from spool.intake.rank import SILENT
from spool.settings import BatchLimits, Settings
from spool.status import status_lines
from spool.store import Heartbeat, RankCounts, StepCounts, Store, parse_shard_name
from spool.workdir import Manifest, RankEnd, Segment, WorkDir


class Run:
    """One intake, looked at by hand under a clock of its own."""

    def __init__(self, root: Path, **changes: object) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.targets: list[str] = []
        self.is_finished = False
        settings = Settings(root / "spool", root / "work", root / "results")
        limits = BatchLimits(calls=4, nbytes=10**9, seconds=20.0)
        self.settings = replace(settings, **{"batch": limits, **changes})  # type: ignore[arg-type]
        self.work: WorkDir = self.settings.work
        self.intake = Intake(
            self.settings, self._put, self._finish, clock=lambda: self.now, say=self.lines.append
        )

    def _put(self, path: Path) -> None:
        self.targets.append(str(path.relative_to(self.settings.work_dir.parent)))

    def _finish(self) -> None:
        self.is_finished = True

    def look(self, seconds: float = 0.0) -> bool:
        self.now += seconds
        return self.intake.look()

    def taken(self) -> list[str]:
        """Targets since the last call."""
        targets, self.targets = self.targets, []
        return targets

    def close(self) -> None:
        if self.intake._watch is not None:
            self.intake._watch.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def beat(step: int = 0, blocked: bool = False, host: str = "far", **changes: float) -> Heartbeat:
    values = {"time": 1.0, "pid": 1, "captured": 0, "bytes": 0, **changes}
    return Heartbeat(host=host, step=step, blocked=blocked, **values)  # type: ignore[arg-type]


def segment(number: str) -> list[str]:
    """What is asked for when rank 0's segment `number` is closed."""
    kinds = ("two_way/rank0/{}.parquet", "three_way/rank0/{}.parquet", "retired/rank0/{}.json")
    return ["work/" + kind.format(number) for kind in kinds]


def tables(rank: int, stamp: str) -> list[str]:
    stems = (
        "accuracy_checking_result",
        "accuracy_checking_details",
        "api_precision_compare_result",
        "api_precision_compare_details",
        "summary",
        "coverage",
    )
    return [f"results/{stem}_{stamp}_rank{rank}.csv" for stem in stems]


def test_a_closed_spool_is_queued_whole_and_ends_with_the_verdict(root: Path) -> None:
    stamp = make_spool(root / "spool", steps=2, calls=5).run.timestamp
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    assert run.targets == [
        "work/replay/rank0/000000.parquet",
        "work/replay/rank0/000001.parquet",
        "work/replay/rank0/000002.parquet",
        "work/replay/rank0/000003.parquet",
        *segment("000000"),
        *segment("000001"),
        *tables(0, stamp),
        "work/verdict.txt",
    ]
    end = RankEnd.load(run.work.end(0))
    assert (end.segments, end.batches, end.found) == ((0, 1), 4, {0: 5, 1: 5})
    assert end.expected is not None
    assert end.expected["steps"]["1"]["shards"] == 5
    assert (end.missing, end.note, end.timestamp) == ({}, "", stamp)
    assert run.lines == ["rank 0 is over: 10 calls in 4 batches"]


def test_jobs_begin_while_training_runs(root: Path) -> None:
    store = Store.create(root / "spool", {})
    run = Run(root)
    run.intake.prepare()
    for order in range(4):
        store.publish(make_call(order=order))
    assert not run.look()
    assert run.taken() == ["work/replay/rank0/000000.parquet"]
    # The fifth call waits for more, or for its seconds.
    store.publish(make_call(order=4))
    run.look(5)
    assert run.taken() == []
    run.look(20)
    assert run.taken() == ["work/replay/rank0/000001.parquet"]
    # A closed step closes its segment at once.
    store.close_step(0, 0, StepCounts(5, 1))
    run.look(5)
    assert run.taken() == [*segment("000000")]
    counts = {0: StepCounts(5, 1), 1: publish_step(store, 0, 1, 2)}
    store.close_rank(0, RankCounts(counts, "disabled"))
    assert run.look(0)
    assert run.taken()[:4] == ["work/replay/rank0/000002.parquet", *segment("000001")]
    run.close()


def test_partial_files_are_not_read(root: Path) -> None:
    store = Store.create(root / "spool", {})
    entry = store.publish(make_call())
    for name in (
        ".000001.Torch.add.1.h5.0123abcd-1-0123abcd.partial",
        "x.h5",
        "000001.Torch.add.h5",
    ):
        shutil.copy(entry.path, entry.path.with_name(name))
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    manifest = Manifest.load(run.work.batch(0, 0))
    assert [(shard.file, shard.nbytes) for shard in manifest.shards] == [
        (entry.path.name, entry.nbytes)
    ]
    assert manifest.step_dir == root / "spool" / "rank0" / "step0"


def test_no_event_is_needed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where events of another host never arrive."""
    monkeypatch.setattr("spool.intake.follow.Watch.take", lambda self: ({}, False))
    store = Store.create(root / "spool", {})
    run = Run(root, rescan_seconds=5.0)
    run.intake.prepare()
    run.look()
    for order in range(4):
        store.publish(make_call(order=order))
    run.look(1)
    assert run.taken() == []
    run.look(5)
    assert run.taken() == ["work/replay/rank0/000000.parquet"]
    run.close()


def test_a_blocked_trainer_is_served_at_once(root: Path) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call())
    store.heartbeat(0, beat())
    run = Run(root)
    run.intake.prepare()
    run.look()
    assert run.taken() == []
    store.heartbeat(0, beat(blocked=True))
    run.look(1)
    assert run.taken() == ["work/replay/rank0/000000.parquet", *segment("000000")]
    run.close()


def test_shards_that_appear_after_closed_json_are_waited_for(root: Path) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call(order=0))
    store.close_rank(0, RankCounts({0: StepCounts(3, 1)}, "disabled"))
    run = Run(root, missing_seconds=30.0)
    run.intake.prepare()
    assert not run.look()
    assert any("closed with 3 calls, 1 seen; waiting for the rest" in line for line in run.lines)
    store.publish(make_call(order=1))
    assert not run.look(10)
    store.publish(make_call(order=2))
    assert run.look(10)
    assert RankEnd.load(run.work.end(0)).missing == {}
    run.close()


@pytest.mark.parametrize("watch", [True, False])
def test_what_never_appears_is_counted_as_missing(root: Path, watch: bool) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call(order=0))
    counts = {0: StepCounts(3, 1), 7: StepCounts(2, 1)}
    store.close_rank(0, RankCounts(counts, "disabled"))
    run = Run(root, watch=watch, missing_seconds=30.0)
    run.intake.prepare()
    assert not run.look()
    assert not run.look(29)
    assert run.look(1)
    end = RankEnd.load(run.work.end(0))
    assert (end.found, end.missing) == ({0: 1}, {0: 2, 7: 2})
    assert run.lines[-1] == "rank 0 is over: 1 call in 1 batch, 4 missing"
    run.close()


def test_late_shards_change_the_end_when_started_again(root: Path) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call(order=0))
    store.close_rank(0, RankCounts({0: StepCounts(2, 1)}, "disabled"))
    run = Run(root, watch=False, missing_seconds=0.0)
    run.intake.prepare()
    assert run.look()
    store.publish(make_call(order=1))
    again = Run(root, watch=False, missing_seconds=0.0)
    again.intake.prepare()
    assert again.look()
    end = RankEnd.load(run.work.end(0))
    assert (end.found, end.missing, end.segments) == ({0: 2}, {}, (0, 1))


def test_a_restart_queues_old_manifests_first_and_names_nothing_twice(root: Path) -> None:
    store = Store.create(root / "spool", {})
    for order in range(6):
        store.publish(make_call(order=order))
    run = Run(root)
    run.intake.prepare()
    run.look()
    run.close()
    assert run.taken() == ["work/replay/rank0/000000.parquet"]
    os.utime(run.work.batch(0, 0), (5, 5))
    # What a manifest names may be gone from the spool.
    store.shard_path(0, 0, 1, "Torch.add.1").unlink()
    again = Run(root)
    again.intake.prepare()
    assert again.taken() == ["work/replay/rank0/000000.parquet"]
    store.close_rank(0, RankCounts({0: StepCounts(6, 1)}, "disabled"))
    assert again.look()
    assert again.taken()[:4] == [
        "work/replay/rank0/000001.parquet",
        *segment("000000"),
    ]
    assert run.work.batch(0, 0).stat().st_mtime == 5
    orders = [
        shard.order
        for number in run.work.batches(0)
        for shard in Manifest.load(run.work.batch(0, number)).shards
    ]
    assert orders == [0, 1, 2, 3, 4, 5]
    again.close()


def test_an_end_is_not_written_again_without_change(root: Path) -> None:
    make_spool(root / "spool")
    times = []
    for _ in range(2):
        run = Run(root)
        run.intake.prepare()
        assert run.look()
        run.close()
        times.append(run.work.end(0).stat().st_mtime_ns)
    assert times[0] == times[1]


def test_only_wanted_ranks_are_followed(root: Path) -> None:
    make_spool(root / "spool", ranks=3)
    run = Run(root, rank_list=(1,))
    run.intake.prepare()
    assert run.look()
    assert run.work.ranks() == [1]
    run.close()


def test_ranks_that_begin_late_or_after_another_ended(root: Path) -> None:
    store = Store.create(root / "spool", {})
    run = Run(root, rank_list=(0, 1))
    run.intake.prepare()
    store.close_rank(0, RankCounts({0: publish_step(store, 0, 0, 1)}, "disabled"))
    assert not run.look()
    assert any("waiting for rank 1" in line and "(ranks there: 0)" in line for line in run.lines)
    assert "work/verdict.txt" not in run.targets
    store.close_rank(1, RankCounts({0: publish_step(store, 1, 0, 1)}, "disabled"))
    assert run.look(1)
    assert run.targets[-1] == "work/verdict.txt"
    run.close()


def test_a_rank_that_never_appears_without_watching_is_an_error(root: Path) -> None:
    make_spool(root / "spool", ranks=2)
    run = Run(root, watch=False, rank_list=(0, 5))
    with pytest.raises(
        StoreError, match=r"rank 5 is not in .* \(ranks there: 0, 1\); name ranks that were"
    ):
        run.intake.prepare()


def test_a_missing_spool_without_watching_is_an_error(root: Path) -> None:
    with pytest.raises(
        StoreError, match="no spool there; name the directory that the training host"
    ):
        Run(root, watch=False).intake.prepare()


def test_a_missing_spool_is_waited_for_with_a_repeating_line(root: Path) -> None:
    run = Run(root)
    run.intake.prepare()
    for _ in range(65):
        assert not run.look(1)
    line = f"waiting for a spool in {root / 'spool'}, which is not there yet "
    assert run.lines == [line + "(--config spool_dir=DIR names another)"] * 3
    make_spool(root / "spool")
    assert run.look(1)
    run.close()


@pytest.mark.parametrize("watch", [True, False])
def test_a_newer_spool_is_refused(root: Path, watch: bool) -> None:
    make_spool(root / "spool")
    path = root / "spool" / "run.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StoreError, match="format 2"):
        Run(root, watch=watch).intake.prepare()


def test_a_work_directory_of_another_run_is_refused(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root)
    run.intake.prepare()
    shutil.rmtree(root / "spool")
    make_spool(root / "spool")
    with pytest.raises(SpoolError, match="another run began"):
        run.look()
    with pytest.raises(StoreError, match="work: holds another run"):
        Run(root).intake.prepare()
    run.close()


def test_silence_is_told_and_ends_after_the_idle_timeout(root: Path) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call())
    store.heartbeat(0, beat())
    run = Run(root, idle_timeout=100.0)
    run.intake.prepare()
    run.look()
    run.look(50)
    assert run.lines == []
    # A heartbeat of whatever time is a sign of life.
    store.heartbeat(0, beat(time=-5.0))
    run.look(1)
    run.look(61)
    assert run.lines == [f"rank 0 silent for 61 s; `spool close {root / 'spool'} --rank 0` ends it"]
    assert run.look(40)
    end = RankEnd.load(run.work.end(0))
    assert end.expected is None
    assert "silent for 100 s (idle_timeout)" in end.note
    run.close()


def test_a_process_of_this_host_that_is_gone_is_told_soon(root: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    store = Store.create(root / "spool", {})
    store.publish(make_call())
    store.heartbeat(0, beat(host=socket.gethostname(), pid=child.pid, writer=os.getpid()))
    run = Run(root)
    run.intake.prepare()
    run.look()
    run.look(50)
    assert run.lines == []  # its writer process lives
    store.heartbeat(0, beat(host=socket.gethostname(), pid=child.pid))
    run.look()
    run.look(9)
    assert run.lines == []
    run.look(2)
    assert run.lines == [
        f"rank 0: process {child.pid} of this host, which captured it, is gone; "
        f"`spool close {root / 'spool'} --rank 0` ends it"
    ]
    run.close()


def test_without_an_idle_timeout_silence_never_ends_a_rank(root: Path) -> None:
    store = Store.create(root / "spool", {})
    store.publish(make_call())
    run = Run(root)
    run.intake.prepare()
    run.look()
    assert not run.look(10**6)
    assert "silent for 1000000 s" in run.lines[0]
    run.close()


def test_a_rank_never_seen_ends_after_the_idle_timeout(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root, idle_timeout=100.0, rank_list=(0, 3))
    run.intake.prepare()
    assert not run.look()
    assert run.look(100)
    end = RankEnd.load(run.work.end(3))
    assert (end.batches, end.segments) == (0, ())
    assert "never appeared" in end.note
    run.close()


def test_an_unclosed_rank_is_taken_as_it_is_without_watching(root: Path) -> None:
    store = Store.create(root / "spool", {})
    publish_step(store, 0, 0, 2)
    store.publish(make_call(step=1))
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    end = RankEnd.load(run.work.end(0))
    assert (end.found, end.expected, end.missing) == ({0: 2, 1: 1}, None, {})
    assert "not closed" in end.note


def test_a_mount_that_goes_away_is_waited_for(root: Path) -> None:
    store = make_spool(root / "spool", calls=2)
    (root / "spool" / "rank0" / "closed.json").unlink()
    run = Run(root)
    run.intake.prepare()
    run.look()
    (root / "spool").rename(root / "away")
    assert not run.look(10)
    assert any("waiting for a spool" in line for line in run.lines)
    (root / "away").rename(root / "spool")
    store.close_rank(0, RankCounts({0: StepCounts(2, 1)}, "disabled"))
    assert run.look(10)
    assert RankEnd.load(run.work.end(0)).found == {0: 2}
    run.close()


def test_a_work_directory_that_is_full_ends_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_spool(root / "spool")
    run = Run(root)
    run.intake.prepare()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "work/batches/rank0/000000.json")

    monkeypatch.setattr(Manifest, "save", refuse)
    with pytest.raises(StoreError, match="No space left on device; mend that and start again"):
        run.look()
    run.close()


def test_a_directory_is_not_listed_again_for_each_shard(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks between two listings cost what is new, not what is there."""
    store = Store.create(root / "spool", {})
    store.publish(make_call(order=0))
    run = Run(root, rescan_seconds=1000.0)
    run.intake.prepare()
    run.look()
    listings = []
    real = Store.shards

    def counted(self: Store, *args: object) -> object:
        listings.append(args)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "shards", counted)
    hints: dict[tuple[int, int], set[str] | None] = {}
    monkeypatch.setattr("spool.intake.follow.Watch.take", lambda self: (hints, False))
    for order in range(1, 50):
        hints = {(0, 0): {store.publish(make_call(order=order)).path.name}}
        run.look(0.1)
    assert len(run.work.batches(0)) == 12
    assert listings == []
    run.close()


def test_the_thread_ends_by_itself_and_reports_a_failure(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root)
    run.intake.prepare()
    run.intake.start()
    deadline = time.monotonic() + 30
    while not run.is_finished and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.is_finished
    assert run.intake.error is None
    run.intake.stop()
    run.intake.join(30)
    assert not run.intake.is_alive()

    broken = Run(root)
    broken.intake.prepare()
    (root / "spool" / "rank0" / "closed.json").write_text("{}")
    broken.intake.run()
    assert broken.is_finished
    assert isinstance(broken.intake.error, StoreError)


def publish(store: Store, orders: range, error: float = 0.0) -> None:
    for order in orders:
        store.publish(make_call(order=order, error=error))


def test_a_step_captured_anew_ends_what_had_begun_with_it(root: Path) -> None:
    """Shards of the same names are other calls: never judged by the old ones, never deleted."""
    store = Store.create(root / "spool", {})
    publish(store, range(5))
    run = Run(root)
    run.intake.prepare()
    run.look()
    assert Manifest.load(run.work.batch(0, 0)).take == 0
    store.drop_step(0, 0)
    publish(store, range(5), error=0.5)
    said = "rank 0 step 0 was captured anew after this work directory had begun with it"
    with pytest.raises(StoreError, match=said) as caught:
        run.look(5)
    assert "the same command again" in str(caught.value)
    assert "\n" not in str(caught.value)
    run.close()
    again = Run(root)
    again.intake.prepare()
    again.look()
    manifest = Manifest.load(again.work.batch(0, 0))
    assert (manifest.take, len(manifest.shards)) == (1, 4)
    again.close()


def test_a_rank_cleared_and_captured_anew_is_another_take_too(root: Path) -> None:
    store = make_spool(root / "spool")
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    store.clear(0)
    store.close_rank(0, RankCounts({0: publish_step(store, 0, 0, 3)}, "disabled"))
    run.close()
    again = Run(root, watch=False)
    again.intake.prepare()
    assert again.look()
    manifest = Manifest.load(again.work.batch(0, 0))
    assert (manifest.take, len(manifest.shards)) == (1, 3)
    again.close()


def test_what_no_manifest_names_is_forgotten_with_its_take(root: Path) -> None:
    store = Store.create(root / "spool", {})
    publish(store, range(3))
    run = Run(root)
    run.intake.prepare()
    run.look()
    assert run.taken() == []
    store.drop_step(0, 0)
    publish(store, range(2), error=0.5)
    store.close_rank(0, RankCounts({0: StepCounts(2, 1)}, "disabled"))
    assert run.look(5)
    manifest = Manifest.load(run.work.batch(0, 0))
    assert (manifest.take, [shard.order for shard in manifest.shards]) == (1, [0, 1])
    run.close()


def test_shards_listed_while_their_step_is_dropped_are_not_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(root / "spool", {})
    publish(store, range(4))
    real = Store.shards

    def dropped_meanwhile(self: Store, *args: object) -> object:
        entries = real(self, *args)  # type: ignore[arg-type]
        monkeypatch.undo()
        store.drop_step(0, 0)
        return entries

    monkeypatch.setattr(Store, "shards", dropped_meanwhile)
    run = Run(root)
    run.intake.prepare()
    run.look()
    assert run.taken() == []
    publish(store, range(4))
    run.look(5)
    assert Manifest.load(run.work.batch(0, 0)).take == 1
    run.close()


def test_a_closed_rank_that_goes_on_is_not_over(root: Path) -> None:
    store = Store.create(root / "spool", {})
    counts = publish_step(store, 0, 0, 2)
    store.close_rank(0, RankCounts({0: counts, 1: StepCounts(9, 1)}, "SIGTERM"))
    run = Run(root, missing_seconds=30.0)
    run.intake.prepare()
    assert not run.look()
    store.reopen_rank(0)
    assert not run.look(10)
    assert not run.look(60)
    store.close_rank(0, RankCounts({0: counts}, "disabled"))
    assert run.look(5)
    assert RankEnd.load(run.work.end(0)).missing == {}
    run.close()


def test_a_spool_that_moved_is_found_where_it_is_now(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    assert Manifest.find(run.work.batch(0, 0)).step_dir == root / "spool" / "rank0" / "step0"
    (root / "spool").rename(root / "moved")
    run = Run(root, watch=False, spool_dir=root / "moved")
    run.intake.prepare()
    path = run.work.batch(0, 0)
    assert Manifest.load(path).spool == str(root / "spool")
    assert Manifest.find(path).step_dir == root / "moved" / "rank0" / "step0"


def test_manifests_of_another_run_are_refused(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root, watch=False)
    run.intake.prepare()
    run.look()
    # As when somebody removes the record that binds the directory to its run.
    run.work.run.unlink()
    shutil.rmtree(root / "spool")
    make_spool(root / "spool")
    with pytest.raises(StoreError, match="belongs to another run") as caught:
        Run(root, watch=False).intake.prepare()
    assert "\n" not in str(caught.value)


def test_a_changed_end_is_later_than_the_tables(root: Path) -> None:
    """Also if the clock was set back since they were written."""
    store = Store.create(root / "spool", {})
    store.publish(make_call(order=0))
    store.close_rank(0, RankCounts({0: StepCounts(2, 1)}, "disabled"))
    run = Run(root, watch=False, missing_seconds=0.0)
    run.intake.prepare()
    assert run.look()
    table = root / tables(0, store.run.timestamp)[4]
    table.parent.mkdir()
    table.touch()
    os.utime(table, (4e9, 4e9))
    store.publish(make_call(order=1))
    again = Run(root, watch=False, missing_seconds=0.0)
    again.intake.prepare()
    assert again.look()
    assert run.work.end(0).stat().st_mtime == 4e9 + 1


@pytest.mark.parametrize("text", ["{", "{}", '{"run_id": 1, "spool": "/x"}'])
def test_a_damaged_binding_is_one_line_and_may_be_removed(root: Path, text: str) -> None:
    make_spool(root / "spool")
    run = Run(root, watch=False)
    run.intake.prepare()
    run.work.run.write_text(text)
    with pytest.raises(SpoolError, match=r"not a usable record of a run.*remove it and rerun"):
        Run(root, watch=False).intake.prepare()
    run.work.run.unlink()
    again = Run(root, watch=False)
    again.intake.prepare()
    assert again.look()


def test_a_segment_that_was_removed_is_made_again(root: Path) -> None:
    make_spool(root / "spool", steps=2)
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    run.work.segment(0, 0).unlink()
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    end = RankEnd.load(run.work.end(0))
    assert (end.batches, end.found) == (2, {0: 3, 1: 3})
    segments = [Segment.load(run.work.segment(0, number)) for number in end.segments]
    assert sorted((item.step, item.batches) for item in segments) == [(0, (0,)), (1, (1,))]


def test_a_mount_that_fails_while_ranks_are_restored_loses_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(root, rank_list=(0, 1))
    run.intake.prepare()
    make_spool(root / "spool", ranks=2)
    real = Store.takes

    def fail_once(self: Store, rank: int) -> dict[int, int]:
        if rank == 1:
            monkeypatch.setattr(Store, "takes", real)
            raise StoreError("cannot read it") from OSError(116, "Stale file handle", "takes")
        return real(self, rank)

    monkeypatch.setattr(Store, "takes", fail_once)
    assert not run.look()
    assert run.lines[-1] == "takes: Stale file handle; trying again"
    assert run.targets == []
    assert run.look(1)
    assert run.work.ranks() == [0, 1]
    run.close()


def test_clocks_that_jump_neither_end_nor_keep_a_rank(root: Path) -> None:
    """Days ahead or behind, in the heartbeat and in the times of files."""
    store = Store.create(root / "spool", {})
    run = Run(root, idle_timeout=100.0)
    store.publish(make_call())
    run.intake.prepare()
    for jump in (0.0, 1e6, -1e6, 4e9, 1.0):
        store.heartbeat(0, beat(time=jump))
        for path in (root / "spool").rglob("*"):
            os.utime(path, (jump, jump) if jump > 0 else (0, 0))
        assert not run.look(99)
    assert not run.look(99)
    assert run.look(1)
    assert "silent for 100 s (idle_timeout)" in RankEnd.load(run.work.end(0)).note
    run.close()


def test_a_marker_that_is_removed_is_waited_for_and_changes_nothing(root: Path) -> None:
    make_spool(root / "spool")
    run = Run(root)
    run.intake.prepare()
    assert run.look()
    run.close()
    end = run.work.end(0).read_bytes()
    marker = root / "spool" / "rank0" / "closed.json"
    content = marker.read_bytes()
    marker.unlink()
    again = Run(root)
    again.intake.prepare()
    assert not again.look()
    assert not again.look(61)
    assert "silent for 61 s" in again.lines[-1]
    assert run.work.end(0).read_bytes() == end
    marker.write_bytes(content)
    assert again.look(1)
    assert run.work.end(0).read_bytes() == end
    again.close()


FOREIGN = (
    b"\xff.h5",
    b"000001.\xff\xfe.0.h5",
    b"000001.Torch.add.1.h5\n",
    b"a\nb.h5",
    b"000002." + b"x" * 240 + b".h5",
    b"step\xe9",
    b"rank\xe9",
    "000001.Torch.ädd.1.h5".encode(),
    "step٣".encode(),
)


def test_foreign_names_are_ignored_everywhere(root: Path) -> None:
    """Names in another encoding, too long, or with line breaks: as files and directories."""
    store = Store.create(root / "spool", {})
    run = Run(root)
    run.intake.prepare()
    run.look()
    places = [root / "spool" / "rank0" / "step0", root / "spool" / "rank0", root / "spool"]
    for number, place in enumerate(places):
        place.mkdir(parents=True, exist_ok=True)
        for name in FOREIGN:
            path = os.fsencode(place) + b"/" + name
            os.mkdir(path) if number == 1 else os.close(os.open(path, os.O_CREAT))
    assert not run.look(10)
    store.publish(make_call())
    closed = close_rank(store, 0)
    assert closed.steps[0].shards == 1
    assert run.look(10)
    assert RankEnd.load(run.work.end(0)).found == {0: 1}
    assert "1 calls in 1 steps" in "".join(status_lines(root / "spool", root / "work"))
    assert store.usage() > 0
    run.close()


def test_a_copy_that_is_still_going_on_is_waited_for(root: Path) -> None:
    """As `cp` and `rsync` write one: markers first, files of their own beside the shards."""
    source = make_spool(root / "source", steps=2).root
    target = root / "spool"
    run = Run(root, missing_seconds=30.0)
    run.intake.prepare()
    assert not run.look()
    order = sorted(source.rglob("*"), key=lambda path: (path.suffix == ".h5", str(path)))
    for number, path in enumerate(order):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.Xa{number}")
        partial.write_bytes(path.read_bytes()[:100])
        assert not run.look(5)
        shutil.copy2(path, partial)
        partial.rename(place)
    (target / "rank0" / "step0" / ".000009.Torch.add.9.h5.Xb").write_bytes(b"half")
    assert run.look(5)
    end = RankEnd.load(run.work.end(0))
    assert (end.found, end.missing) == ({0: 3, 1: 3}, {})
    run.close()


def test_a_step_of_twenty_thousand_shards_costs_what_is_new(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(root / "spool", {})
    directory = root / "spool" / "rank0" / "step0"
    directory.mkdir(parents=True)

    def touch(first: int, last: int) -> set[str]:
        names = {f"{order:06d}.Torch.add.{order}.h5" for order in range(first, last)}
        for name in names:
            os.close(os.open(directory / name, os.O_CREAT))
        return names

    touch(0, 20_000)
    hints: dict[tuple[int, int], set[str] | None] = {}
    monkeypatch.setattr("spool.intake.follow.Watch.take", lambda self: (hints, False))
    run = Run(root, rescan_seconds=100.0, batch=BatchLimits(calls=5000))
    run.intake.prepare()
    run.look()
    scanned: list[str] = []
    parsed: list[str] = []
    scan, parse = os.scandir, parse_shard_name
    # A directory is listed as an open one, under another name.
    monkeypatch.setattr(
        os, "scandir", lambda path: scanned.append(os.path.realpath(path)) or scan(path)
    )
    monkeypatch.setattr(
        "spool.store.parse_shard_name", lambda name: parsed.append(name) or parse(name)
    )
    for burst in range(20):
        hints = {(0, 0): touch(20_000 + 10 * burst, 20_010 + 10 * burst)}
        run.look(1)
    assert scanned.count(os.path.realpath(directory)) == 0
    hints = {}
    new = touch(20_200, 20_300)
    run.look(1000)
    assert scanned.count(os.path.realpath(directory)) == 1
    assert len(parsed) == 300
    assert new < set(parsed)
    store.close_rank(0, RankCounts({0: StepCounts(20_300, 1)}, "disabled"))
    assert run.look(1000)
    assert RankEnd.load(run.work.end(0)).found == {0: 20_300}
    assert len(run.work.batches(0)) == 5
    run.close()


@pytest.mark.parametrize("kind", ["measured", "segment"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_lost_manifest_is_named_and_its_number_not_used_again(
    root: Path, kind: str, number: int
) -> None:
    make_spool(root / "spool", steps=2)
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    if kind == "measured":
        shutil.rmtree(root / "work" / "segments")
        run.work.measured(0, number).parent.mkdir(parents=True)
        run.work.measured(0, number).touch()
    lost = run.work.batch(0, number)
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(SpoolError, match="the manifest is gone; restore it from a copy") as caught:
        Run(root, watch=False).intake.prepare()
    assert str(caught.value).startswith(str(lost))
    lost.write_bytes(content)
    again = Run(root, watch=False)
    again.intake.prepare()
    assert again.look()


def test_published_rows_are_not_the_only_ones(root: Path) -> None:
    """Snakemake deletes an output before its job runs again."""
    make_spool(root / "spool")
    run = Run(root, watch=False)
    run.intake.prepare()
    assert run.look()
    run.work.replay(0, 0).parent.mkdir(parents=True)
    run.work.replay(0, 0).write_bytes(b"rows")
    again = Run(root, watch=False)
    again.intake.prepare()
    assert run.work.measured(0, 0).read_bytes() == b"rows"
    # What is measured is not touched.
    run.work.replay(0, 0).write_bytes(b"other")
    Run(root, watch=False).intake.prepare()
    assert run.work.measured(0, 0).read_bytes() == b"rows"


def test_a_torn_heartbeat_stops_nothing(root: Path) -> None:
    """It is not synchronised, so a crash of the training host may leave it empty."""
    store = Store.create(root / "spool", {})
    counts = publish_step(store, 0, 0, 2)
    store.heartbeat(0, beat())
    run = Run(root)
    run.intake.prepare()
    (store.rank_dir(0) / "heartbeat.json").write_bytes(b"")
    run.look()
    run.look(SILENT + 1)
    assert any("rank 0 silent" in line for line in run.lines)
    store.close_rank(0, RankCounts({0: counts}, "disabled"))
    assert run.look(10)
    assert RankEnd.load(run.work.end(0)).found == {0: 2}
    run.close()
