"""Whoever may write to the spool cannot make the checking host act outside of it.

The tests run as root too: what is refused is refused by what it is, not by its mode.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rowmaker import Run, call_verdict, measured, unmeasured
from spools import make_spool, publish_step

from spool import retire
from spool.beneath import beneath
from spool.cli import main
from spool.close import close_rank
from spool.errors import ConfigError, SpoolError, StoreError
from spool.files import make_dirs, restrict_umask
from spool.gpus import claimed_gpu
from spool.intake.follow import Intake
from spool.intake.lock import WorkLock
from spool.job import job
from spool.judging import check_segment
from spool.ledger import Ledger, LedgerError, kept_shards, ledger_path
from spool.merge import merge_rank
from spool.parquet import TableError, _sealed, read_measured, read_verdicts, write_measured
from spool.records import Outcome
from spool.replay import batch
from spool.replay.journal import Journal, recover
from spool.replay.result import CallResult
from spool.replay.supervise import Job
from spool.settings import ReplaySettings, RetireSettings, Settings
from spool.standards.rows import Status
from spool.store import Heartbeat, RankCounts, StepCounts, Store
from spool.tables import read_verdict_info
from spool.workdir import Bound, Manifest, RankEnd, Segment, ShardRef, WorkDir, WorkDirError

pytestmark = pytest.mark.timeout(120)  # none of it waits for a pipe

SECRET = "000000.Torch.add.0.h5"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory like a rank's that is not the spool's; it stays as it is."""
    directory = tmp_path / "outside"
    (directory / "step0").mkdir(parents=True)
    for place in (directory / SECRET, directory / "step0" / SECRET, directory / "closed.json"):
        place.write_text("secret")
    yield directory
    assert {str(path.relative_to(directory)): path.read_text() for path in files(directory)} == {
        SECRET: "secret",
        f"step0/{SECRET}": "secret",
        "closed.json": "secret",
    }


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def put(what: str, path: Path, target: Path) -> None:
    """Put something at `path` that is not a file."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what == "a symbolic link":
        path.symlink_to(target)
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)


THINGS = ["a symbolic link", "a pipe", "a socket", "a directory"]


def one_line(error: pytest.ExceptionInfo[SpoolError]) -> str:
    assert "\n" not in str(error.value)
    assert "/proc/self" not in str(error.value)
    return str(error.value)


# What is no file of a spool.


MARKERS: dict[str, Callable[[Store], object]] = {
    "run.json": lambda store: Store.open(store.root),
    "rank0.takes.json": lambda store: store.takes(0),
    "rank0/heartbeat.json": lambda store: store.read_heartbeat(0),
    "rank0/closed.json": lambda store: store.rank_closed(0),
    "rank0/step0/closed.json": lambda store: store.step_closed(0, 0),
}


@pytest.mark.parametrize("what", THINGS)
@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_that_is_no_file_is_refused(tmp_path: Path, name: str, what: str) -> None:
    store = make_spool(tmp_path / "spool")
    target = tmp_path / "target.json"
    target.write_text((store.root / "run.json").read_text())
    put(what, store.root / name, target)
    with pytest.raises(StoreError) as error:
        MARKERS[name](store)
    assert one_line(error).startswith(f"{store.root / name} is {what}, which a spool does not have")
    # Not taken for a mount that may come back.
    assert error.value.__cause__ is None


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_without_end_is_not_read(tmp_path: Path, name: str) -> None:
    store = make_spool(tmp_path / "spool")
    with open(store.root / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="is not what Spool writes"):
        MARKERS[name](store)


@pytest.mark.parametrize(
    "change",
    [
        {"host": "a\x1b[2J"},
        {"host": "a\nb"},
        {"host": "\ud800"},
        {"host": "x" * 5000},
        {"time": float("nan")},
        {"time": 10**400},
        {"captured": 10**30},
    ],
)
def test_values_that_no_trainer_writes_are_refused(
    tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_spool(tmp_path / "spool")
    store.reopen_rank(0)
    store.heartbeat(0, Heartbeat(1.0, 1, "h", 0, 0, 0))
    path = store.root / "rank0" / "heartbeat.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["status", "--spool-dir", str(store.root), "--work-dir", str(tmp_path / "w")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"member {next(iter(change))!r}, is not what Spool writes" in line


# Links in place of directories.


def test_the_spool_itself_may_be_reached_over_a_link(tmp_path: Path) -> None:
    run = Run(tmp_path, [[[call_verdict(status=Status.ERROR)]]]).write()
    run.spool.rename(tmp_path / "real")
    run.spool.symlink_to(tmp_path / "real")
    retire_all(run)
    assert len(run.kept()) == 1
    store = make_spool(tmp_path / "other")
    (tmp_path / "link").symlink_to(store.root)
    assert len(Store.open(tmp_path / "link").shards(0, 0)) == 3


@pytest.mark.parametrize("name", ["rank0", "rank0/step0"])
def test_nothing_is_read_or_written_through_a_link(
    tmp_path: Path, outside: Path, name: str
) -> None:
    store = make_spool(tmp_path / "spool")
    target = outside if name == "rank0" else outside / "step0"
    put("a symbolic link", store.root / name, target)
    readers: list[Callable[[], object]] = [
        lambda: store.shards(0, 0),
        lambda: store.look_up(0, 0, [SECRET]),
        lambda: store.step_closed(0, 0),
        lambda: store.close_step(0, 0, StepCounts(1, 1)),
        lambda: store.unclosed_steps(0),
        lambda: store.drop_step(0, 0),
        lambda: store.remove_partials(0),
    ]
    if name == "rank0":
        readers += [lambda: store.rank_closed(0), lambda: store.clear(0)]
        readers += [lambda: store.close_rank(0, RankCounts({}, "")), lambda: store.reopen_rank(0)]
        assert store.ranks() == []
    readers.append(lambda: close_rank(store, 0))
    for read in readers:
        with pytest.raises(StoreError) as error:
            read()
        assert one_line(error).startswith(f"{store.root / name} is a symbolic link, which a spool")


def test_clear_deletes_a_link_and_not_what_it_leads_to(tmp_path: Path, outside: Path) -> None:
    store = make_spool(tmp_path / "spool", ranks=2)
    (store.root / "rank0" / "step1").symlink_to(outside)
    (store.root / "rank1" / "inside").symlink_to(outside)
    assert main(["clear", str(store.root), "--yes"]) == 0
    assert list(store.root.iterdir()) == []


def test_a_directory_that_becomes_a_link_meanwhile_changes_nothing(
    tmp_path: Path, outside: Path
) -> None:
    store = make_spool(tmp_path / "spool")
    step = store.step_dir(0, 0)
    with beneath(store.root, step) as here:
        step.rename(tmp_path / "moved")
        step.symlink_to(outside)
        names = sorted(os.listdir(here))
        assert (here / names[0]).read_bytes() != b"secret"
        for name in names:
            os.unlink(here / name)
    assert list((tmp_path / "moved").iterdir()) == []


def test_errors_within_a_directory_name_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error, beneath(tmp_path, tmp_path) as here:
        os.rename(here / "a", here / "b")
    assert (error.value.filename, error.value.filename2) == (f"{tmp_path}/a", f"{tmp_path}/b")
    with (
        pytest.raises(StoreError),
        beneath(tmp_path, tmp_path / ".." / tmp_path.name),
    ):
        pass


# The intake.


class Look:
    """One look at a spool."""

    def __init__(self, root: Path, **changes: object) -> None:
        settings = Settings(root / "spool", root / "work", root / "results")
        self.settings = replace(settings, **changes)  # type: ignore[arg-type]
        self.targets: list[Path] = []
        self.lines: list[str] = []
        self.intake = Intake(
            self.settings, self.targets.append, lambda: None, say=self.lines.append
        )

    def __call__(self) -> bool:
        try:
            return self.intake.look()
        finally:
            if self.intake._watch is not None:
                self.intake._watch.stop()


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize(
    "name", ["rank0", "rank0/step0", "run.json", "rank0/closed.json", "rank0/heartbeat.json"]
)
def test_the_intake_refuses_a_link(tmp_path: Path, outside: Path, name: str, watch: bool) -> None:
    store = make_spool(tmp_path / "spool")
    put("a symbolic link", store.root / name, outside)
    look = Look(tmp_path, watch=watch)
    with pytest.raises(StoreError, match="is a symbolic link, which a spool does not have"):
        look()
    assert look.targets == []


def test_the_intake_names_a_step_that_is_a_link_and_not_counted(
    tmp_path: Path, outside: Path
) -> None:
    store = Store.create(tmp_path / "spool", {})
    publish_step(store, 0, 0, 3)
    (store.root / "rank0" / "step1").symlink_to(outside)
    with pytest.raises(StoreError, match="step1 is a symbolic link"):
        Look(tmp_path)()


def test_what_a_rank_is_closed_with_is_kept_as_it_was_checked(tmp_path: Path) -> None:
    store = make_spool(tmp_path / "spool")
    path = store.root / "rank0" / "closed.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "more": {"a": 1}}))
    look = Look(tmp_path)
    assert look()
    end = RankEnd.load(look.settings.work.end(0))
    assert end.expected == json.loads(text)


@pytest.mark.parametrize(
    ("uid", "mode", "is_said"),
    [(0, 0o777, True), (0, 0o1777, True), (0, 0o775, False), (1000, 0o777, False)],
)
def test_root_is_warned_of_a_spool_that_anybody_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, mode: int, is_said: bool
) -> None:
    make_spool(tmp_path / "spool").root.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    look = Look(tmp_path)
    look()
    look()
    said = [line for line in look.lines if "anybody may write there" in line]
    assert len(said) == is_said
    assert all(line.startswith(f"{tmp_path / 'spool'}: ") for line in said)


# Replay.


def queue(root: Path) -> tuple[Look, Manifest]:
    """A look at a closed spool, and its first manifest."""
    look = Look(root)
    assert look()
    return look, Manifest.find(look.settings.work.batch(0, 0))


def test_shards_that_are_no_files_are_set_aside_and_counted(tmp_path: Path, outside: Path) -> None:
    store = make_spool(tmp_path / "spool", calls=5)
    entries = store.shards(0, 0)
    for what, entry in zip(THINGS, entries, strict=False):
        put(what, entry.path, outside / SECRET)
    look, manifest = queue(tmp_path)
    assert len(manifest.shards) == 5
    work = look.settings.work
    settings = ReplaySettings(bench_device="cpu", threads=1)
    batch.replay_batch(work.batch(0, 0), work.root, work.replay(0, 0), settings)
    rows = read_measured(work.replay(0, 0))
    reasons = {row.header.shard: row.reason for row in rows if row.outcome is Outcome.QUARANTINED}
    assert reasons == {
        entries[0].path.name: "a symbolic link, not a file",
        **{entry.path.name: "not a regular file" for entry in entries[1:4]},
    }
    assert sorted(path.name for path in work.quarantine(0, 0).iterdir()) == [
        f"{name}.json" for name in sorted(reasons)
    ]
    # Only the directory stays, out of the way.
    left = [path.name for path in store.step_dir(0, 0).iterdir()]
    refused = f".{entries[3].path.name}.refused"
    assert sorted(left) == sorted([refused, entries[4].path.name, "closed.json"])


def test_a_step_that_became_a_link_is_neither_read_nor_emptied(
    tmp_path: Path, outside: Path
) -> None:
    store = make_spool(tmp_path / "spool", calls=1)
    look, manifest = queue(tmp_path)
    put("a symbolic link", store.step_dir(0, 0), outside / "step0")
    work = look.settings.work
    rows = unmeasured("Torch.add.0", 0, Outcome.QUARANTINED, "torn")
    with pytest.raises(StoreError, match="step0 is a symbolic link"):
        batch._quarantine(manifest, work, rows)
    settings = ReplaySettings(bench_device="cpu", threads=1)
    with pytest.raises(SpoolError, match="step0 is a symbolic link") as error:
        batch.replay_batch(work.batch(0, 0), work.root, work.replay(0, 0), settings)
    one_line(error)
    assert not work.replay(0, 0).exists()


def test_rows_that_name_other_files_move_nothing(tmp_path: Path, outside: Path) -> None:
    make_spool(tmp_path / "spool", calls=1)
    look, manifest = queue(tmp_path)
    name = f"../../../outside/{SECRET}"
    rows = unmeasured("Torch.add.0", 0, Outcome.QUARANTINED, "torn", shard=name)
    with pytest.raises(SpoolError, match="is no shard of batch 0; nothing was moved") as error:
        batch._quarantine(manifest, look.settings.work, rows)
    one_line(error)


IDENTITY = {"a": 1}


@pytest.mark.parametrize(
    "record",
    [
        {"start": [0]},
        {"start": "0"},
        {"header": {}},
        {"done": 0},
        {"done": "0", "result": {}},
        {"done": 0, "result": []},
        {"lost": 0},
        {"lost": 0, "reason": {}},
        {"start": 0, "header": 1},
        {"evil": 1},
    ],
)
def test_a_record_that_no_job_writes_ends_a_journal(
    tmp_path: Path, record: dict[str, object]
) -> None:
    path = tmp_path / "journal"
    recover(path, IDENTITY)
    with Journal(path) as journal:
        journal.add({"lost": 1, "reason": "x"}, 0.0)
        journal.add(record, 0.0)
        journal.add({"lost": 2, "reason": "x"}, 0.0)
    assert recover(path, IDENTITY).lost == {1: "x"}
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"header": {"shard": "../x.h5"}},
        {"header": {"rank": 3}},
        {"header": {"rank": "0"}},
        {"header": {"more": 1}},
        {"header": 1},
        {"outcome": "fine"},
        {"reason": 1},
        {"outputs": [{"count": "many"}]},
        {"outputs": [{"count": 1 << 63}]},
        {"outputs": [{"two_way.max_abs": 1 << 62}]},
        {"outputs": [{"unheard": 1}]},
        {"outputs": 3},
        {"inputs": None},
    ],
)
def test_a_journal_with_other_results_is_one_line(
    tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_spool(tmp_path / "spool", calls=1)
    look, manifest = queue(tmp_path)
    sound = CallResult(batch.header_of_file(manifest, manifest.shards[0]), Outcome.SKIPPED, "x")
    data = {**sound.to_json(), **change}
    if isinstance(change.get("header"), dict):
        data["header"] = {**sound.to_json()["header"], **change["header"]}  # type: ignore[dict-item]
    work = look.settings.work
    settings = ReplaySettings(bench_device="cpu")
    journal = work.measured(0, 0).with_name(".000000.journal")
    make_dirs(journal.parent)
    for result, is_sound in ((data, False), (sound.to_json(), True)):
        journal.unlink(missing_ok=True)
        job = Job(work.batch(0, 0), journal, settings, tuple(range(len(manifest.shards))))
        recover(journal, batch._identity(manifest, job))
        with Journal(journal) as file:
            file.add({"done": 0, "result": result}, 0.0)
        if is_sound:
            batch.replay_batch(work.batch(0, 0), work.root, work.replay(0, 0), settings)
            assert len(read_measured(work.replay(0, 0))) == 1
            continue
        with pytest.raises(SpoolError, match="not a usable journal: ") as error:
            batch.replay_batch(work.batch(0, 0), work.root, work.replay(0, 0), settings)
        assert one_line(error).endswith("; remove it and rerun")
        assert not work.measured(0, 0).exists()


# Retire.


def retire_all(run: Run, settings: RetireSettings = RetireSettings()) -> None:  # noqa: B008
    work = run.work
    for number in range(len(run.segments)):
        places = (work.two_way(0, number), work.three_way(0, number), work.retired(0, number))
        retire.retire_segment(work.segment(0, number), *places, settings)


def other_file_system(self: Path, target: Path) -> Path:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("what", ["a symbolic link", "a pipe", "a socket"])
def test_a_failing_shard_that_is_no_file_is_not_kept(
    tmp_path: Path,
    outside: Path,
    what: str,
    is_known: bool,
    across: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [call_verdict(f"Torch.add.{n}", n, Status.ERROR) for n in range(2)]
    run = Run(tmp_path, [[calls]]).write()
    if across:
        monkeypatch.setattr(Path, "rename", other_file_system)
    if is_known:
        # The ledger was written, and the shard became something else before it was moved.
        with monkeypatch.context() as patch:
            patch.setattr(retire, "_act", interrupt)
            with pytest.raises(KeyboardInterrupt):
                retire_all(run)
    put(what, run.shard(0, SECRET), outside / SECRET)
    retire_all(run)
    assert list(run.kept()) == ["rank0/step0/000001.Torch.add.1.h5"]
    assert list(kept_shards(run.work, 0)) == [(0, "000001.Torch.add.1.h5")]
    assert list(run.spool.rglob("*.h5")) == []


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["rank0", "rank0/step0"])
@pytest.mark.parametrize("status", [Status.PASS, Status.ERROR])
def test_nothing_is_moved_or_deleted_through_a_link(
    tmp_path: Path, outside: Path, name: str, status: Status
) -> None:
    run = Run(tmp_path, [[[call_verdict("Torch.add.0", 0, status)]]]).write()
    put("a symbolic link", run.spool / name, outside if name == "rank0" else outside / "step0")
    with pytest.raises(StoreError, match="is a symbolic link, which a spool does not") as error:
        retire_all(run)
    one_line(error)
    assert not run.work.retired(0, 0).exists()
    # Also when it is not asked whether the spool is there, because that was retired before.
    Ledger(segments=(0,)).save(ledger_path(run.work, 0))
    with pytest.raises(StoreError, match="is a symbolic link"):
        retire_all(run)


# Records of the work directory.


def manifest_with(**changes: object) -> dict[str, object]:
    shards = (ShardRef(SECRET, 10),)
    return {**Manifest(0, 0, 0, "/spool", "run", shards).to_json(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [{"file": f"../{SECRET}", "bytes": 1}]},
        {"shards": [{"file": f"000000.Torch.add/../../{SECRET}", "bytes": 1}]},
        {"shards": [{"file": f"/{SECRET}", "bytes": 1}]},
        {"shards": [{"file": "..", "bytes": 1}]},
        {"shards": [{"file": "0000000.Torch.add.0.h5", "bytes": 1}]},
        {"shards": [{"file": SECRET + "\n", "bytes": 1}]},
        {"shards": [{"file": SECRET, "bytes": -1}]},
        {"shards": [{"file": SECRET, "bytes": 1 << 70}]},
        {"shards": [SECRET]},
        {"spool": "spool"},
        {"spool": ["/spool"]},
        {"rank": "0/../1"},
        {"rank": 1},
        {"batch": 1},
        {"step": -1},
        {"take": "x" * 10_000},
    ],
)
def test_a_manifest_of_somebody_else_is_one_line(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = WorkDir(tmp_path).batch(0, 0)
    make_dirs(path.parent)
    path.write_text(json.dumps(manifest_with()))
    assert Manifest.find(path).shards[0].file == SECRET
    path.write_text(json.dumps(manifest_with(**changes)))
    with pytest.raises(WorkDirError, match="not a usable manifest") as error:
        Manifest.find(path)
    assert len(one_line(error)) < 500


def test_a_manifest_that_names_another_spool_is_of_another_run_or_does_not_count(
    tmp_path: Path, outside: Path
) -> None:
    work = WorkDir(tmp_path / "work")
    path = work.batch(0, 0)
    Bound("run", str(tmp_path / "spool")).save(work.run)
    make_dirs(path.parent)
    path.write_text(json.dumps(manifest_with(spool=str(outside))))
    assert Manifest.find(path).step_dir == tmp_path / "spool" / "rank0" / "step0"
    path.write_text(json.dumps(manifest_with(spool=str(outside), run_id="other")))
    with pytest.raises(WorkDirError, match="it is of another run than the work directory"):
        Manifest.find(path)


def test_a_segment_of_another_step_deletes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [[[call_verdict()]]]).write()
    Segment(0, 7, 0, (0,)).save(run.work.segment(0, 0))
    with pytest.raises(SpoolError, match="of step 0, but its segment 0 is of step 7; nothing was"):
        retire_all(run)
    assert len(run.in_spool()) == 1


SOUND = {"version": 1, "directory": "failed", "segments": [], "candidates": [], "evict": []}


@pytest.mark.parametrize(
    "change",
    [
        {"evict": [[0, f"../../../../outside/{SECRET}"]]},
        {"evict": [[0, "/etc/passwd"]]},
        {"evict": [["0/../..", SECRET]]},
        {"evict": [["0", SECRET]]},
        {"directory": "../outside"},
        {"directory": "a\0b"},
        {"directory": 1},
        {"segments": ["0"]},
        {"segments": [-1]},
        {"segments": [1e400]},
        {"candidates": [[[0, 0, 0, "../../x.0"], SECRET, 1, True]]},
        {"candidates": [[[0, 0, 0, "Torch.add.0"], f"../{SECRET}", 1, True]]},
        {"candidates": [[[0, 1, 0, "Torch.add.0"], SECRET, 1, True]]},
        {"candidates": [[[0, "0", 0, "Torch.add.0"], SECRET, 1, True]]},
        {"candidates": [[[0, 0, 0, "Torch.add.0"], SECRET, 1, 2]]},
        {"candidates": [[[0, 0], SECRET, 1, True]]},
    ],
)
def test_a_ledger_of_somebody_else_is_one_line(
    tmp_path: Path, outside: Path, change: dict[str, object]
) -> None:
    run = Run(tmp_path, [[[call_verdict()]]]).write()
    path = ledger_path(run.work, 0)
    make_dirs(path.parent)
    path.write_text(json.dumps({**SOUND, **change}))
    with pytest.raises(LedgerError, match="not a usable ledger") as error:
        retire_all(run)
    one_line(error)
    assert len(run.in_spool()) == 1
    path.write_text(json.dumps(SOUND))
    retire_all(run)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (RetireSettings(), {"retain": "everything"}),
        (RetireSettings(), {"max_failed_bytes": "1"}),
        (RetireSettings(), {"keep_per_api": True}),
        (ReplaySettings(), {"golden": "none"}),
        (ReplaySettings(), {"gpu": "0"}),
        (ReplaySettings(), {"standards": []}),
        (ReplaySettings(), {"call_timeout": float("nan")}),
    ],
)
def test_settings_that_no_configuration_gives_are_one_line(
    tmp_path: Path, settings: RetireSettings | ReplaySettings, change: dict[str, object]
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings.to_json()))
    assert type(settings).load(path) == settings
    path.write_text(json.dumps({**settings.to_json(), **change}))
    with pytest.raises(ConfigError, match=next(iter(change))) as error:
        type(settings).load(path)
    one_line(error)


@pytest.mark.parametrize("what", THINGS)
def test_a_record_that_is_no_file_is_one_line(tmp_path: Path, what: str) -> None:
    run = Run(tmp_path, [[[call_verdict()]]]).write()
    for path, read in (
        (run.work.batch(0, 0), Manifest.load),
        (run.work.segment(0, 0), Segment.load),
        (run.work.end(0), RankEnd.load),
        (run.work.two_way(0, 0), read_verdict_info),
    ):
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        put(what, path, copy)
        with pytest.raises(SpoolError) as error:
            read(path)  # type: ignore[operator]
        assert str(path) in one_line(error)
        assert "not a regular file" in str(error.value) or "a symbolic link" in str(error.value)


GONE = object()


def rewritten(path: Path, column: str, value: object) -> None:
    """Give a column of a table one other value throughout, and the table a right checksum."""
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    other = table.remove_column(place)
    if value is not GONE:
        other = other.add_column(place, column, pa.array([value] * table.num_rows))
    sink = pa.BufferOutputStream()
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), sink)
    path.write_bytes(_sealed(sink.getvalue().to_pybytes()))


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("call_rank", "0", "call_rank is not what it must be"),
        ("outcome", "fine", "'fine' is not a valid Outcome"),
        ("m_schema", 999, "schema 999"),
        ("call_name", 1, "call_name is not what it must be"),
        ("call_name", GONE, "call_name is not what it must be"),
        ("m_count", "many", "m_count is not what it must be"),
    ],
)
def test_measured_rows_of_somebody_else_are_one_line(
    tmp_path: Path, column: str, value: object, why: str
) -> None:
    path = tmp_path / "rows.parquet"
    write_measured(path, measured(), {})
    assert len(read_measured(path)) == 1
    rewritten(path, column, value)
    with pytest.raises(TableError, match=f"not a table of Spool: .*{why}") as error:
        read_measured(path)
    assert str(path) in one_line(error)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("order", "0", "order is not what it must be"),
        ("route", "both", "'both' is not a valid Route"),
        ("name", None, "name is not what it must be"),
        ("output", 1.5, "output is not what it must be"),
        ("shard", GONE, "shard is not what it must be"),
    ],
)
def test_verdicts_of_somebody_else_are_one_line(
    tmp_path: Path, column: str, value: object, why: str
) -> None:
    run = Run(tmp_path, [[[call_verdict()]]]).write()
    path = run.work.two_way(0, 0)
    assert len(list(read_verdicts(path))) == 1
    rewritten(path, column, value)
    with pytest.raises(TableError, match=f"not a table of Spool: .*{why}") as error:
        list(read_verdicts(path))
    assert str(path) in one_line(error)


# Modes.


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("mask", "file", "directory"),
    [(0, 0o640, 0o750), (0o022, 0o640, 0o750), (0o077, 0o600, 0o700)],
)
def test_modes_of_what_the_checking_host_writes(
    tmp_path: Path, mask: int, file: int, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", other_file_system)  # kept shards are copies
    root = tmp_path / "made"
    with umask(mask):
        run = Run(root, [[[call_verdict(status=Status.ERROR)]]])
        make_dirs(run.spool / "rank0" / "step0")
        run.write()
        run.shard(0, "000000.Tensor.mul.0.h5").chmod(0o666)
        retire_all(run)
        merge_rank(run.work.root, 0, run.results)
        rows = run.work.measured(0, 0)
        write_measured(rows, measured(), {})
        check_segment(
            run.work.segment(0, 0), [rows], run.work.two_way(0, 1), Settings(*[root] * 3).judge
        )
        Settings(run.spool, run.work.root, run.results).save()
        with Journal(rows.with_name(".000000.journal")):
            pass
        recover(rows.with_name(".000001.journal"), IDENTITY)
        with WorkLock(run.work.lock), claimed_gpu(run.work.root / "gpus", [0]):
            pass
        with pytest.raises(SystemExit), job(str(run.work.root / "logs" / "check" / "x.log")):
            raise SpoolError("x")
    modes = {
        str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")
    }
    assert {"work/failed/rank0/.ledger.lock", "work/intake.lock", "work/logs/check/x.log"} <= set(
        modes
    )
    assert "work/failed/rank0/step0/000000.Tensor.mul.0.h5" in modes
    assert any(name.startswith("results/summary") for name in modes)
    wrong = {
        name: oct(mode)
        for name, mode in modes.items()
        if mode != (directory if (root / name).is_dir() else file)
    }
    assert wrong == {}


@pytest.mark.parametrize(("before", "after"), [(0, 0o027), (0o002, 0o027), (0o077, 0o077)])
def test_the_umask_becomes_no_looser(before: int, after: int) -> None:
    with umask(before):
        restrict_umask()
        assert os.umask(0) == after
