"""The ``spool`` command, and what it says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from spools import make_call, make_spool, publish_step

from spool.cli import main
from spool.intake.lock import Owner, WorkLock
from spool.status import status_lines
from spool.store import Heartbeat, RankCounts, StepCounts, Store
from spool.workdir import Manifest, Segment, ShardRef, WorkDir, write_if_changed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def beat(**changes: object) -> Heartbeat:
    made = Heartbeat(time=100.0, pid=1, host="far", step=2, captured=7, bytes=1500)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_without_a_command_it_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "usage: spool" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["status"], ["close"], ["clear", "--yes"], ["close", "--rank", "3", "one"]]
)
def test_a_user_error_is_one_line_and_status_two(
    here: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(here / "one")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("spool: ")
    assert error.count("\n") == 1


def test_init_writes_a_workflow_and_overwrites_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "new"]) == 0
    assert (here / "new" / "Snakefile").is_file()
    assert (here / "new" / "profiles" / "default" / "config.yaml").is_file()
    assert main(["init", "new"]) == 2
    assert "exists and would be overwritten; name an empty directory" in capsys.readouterr().err


def test_status_tells_of_the_trainer_and_of_the_checks(here: Path) -> None:
    store = Store.create(here / "spool-data", {})
    work = WorkDir(here / "work")
    store.heartbeat(0, beat())
    lines = list(status_lines(store.root, work.root, now=103.0))
    assert "step 2 open, 7 calls captured (1.5 KB)" in lines[1]
    assert "last heartbeat 3 s ago, trainer not blocked" in lines[1]
    assert lines[2] == "rank 0: 0 of 0 calls replayed (0 of 0 batches), 0 failing so far"
    store.heartbeat(0, beat(blocked=True))
    assert "trainer BLOCKED" in list(status_lines(store.root, work.root))[1]
    gone = subprocess.Popen(["true"])
    gone.wait()
    store.heartbeat(0, Heartbeat(100.0, gone.pid, socket.gethostname(), 0, 2, 9, blocked=True))
    line = list(status_lines(store.root, work.root))[1]
    assert f"process {gone.pid} is gone: `spool close {store.root} --rank 0` ends it" in line

    for number in range(3):
        shards = tuple(ShardRef(f"{n:06d}.Torch.add.{n}.h5", 1) for n in range(10))
        Manifest(0, 0, number, str(store.root), "run", shards).save(work.batch(0, number))
    Segment(0, 0, 0, (0, 1)).save(work.segment(0, 0))
    write_if_changed(work.retired(0, 0), {"failing": 4})
    for number in range(2):
        work.measured(0, number).parent.mkdir(parents=True, exist_ok=True)
        work.measured(0, number).touch()
        os.utime(work.measured(0, number), (100 + 2 * number, 100 + 2 * number))
    store.close_rank(0, RankCounts({0: StepCounts(30, 1, dropped=2)}, "disabled"))
    lines = list(status_lines(store.root, work.root))
    assert lines[1] == "rank 0: closed (disabled): 30 calls in 1 steps, 2 dropped"
    assert lines[2] == (
        "rank 0: 20 of 30 calls replayed (2 of 3 batches), 5 calls/s, 4 failing so far"
    )


def test_close_counts_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create(here / "spool-data", {})
    closed = publish_step(store, 0, 0, 2)
    for order in range(3):
        store.publish(make_call(step=1, order=order))
    assert main(["close"]) == 0
    assert capsys.readouterr().out == "rank 0 closed: 5 calls in 2 steps\n"
    counts = store.rank_closed(0)
    assert counts is not None
    assert counts.reason == "closed by hand"
    assert counts.steps[0] == closed
    assert counts.steps[1].shards == 3
    # Training that goes on captures what was cut short anew.
    assert store.unclosed_steps(0) == [1]
    assert main(["close"]) == 0
    assert "closed already" in capsys.readouterr().out


def test_close_refuses_a_living_trainer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create(here / "spool-data", {})
    publish_step(store, 0, 0, 1)
    store.heartbeat(0, beat(host=socket.gethostname(), pid=os.getpid()))
    assert main(["close"]) == 2
    assert f"still written by process {os.getpid()}" in capsys.readouterr().err
    assert store.rank_closed(0) is None
    assert main(["close", "--force"]) == 0
    assert store.rank_closed(0) is not None


def test_clear_deletes_only_when_sure(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_spool(here / "spool-data", ranks=2)
    (here / "spool-data" / "notes.txt").touch()
    # Nobody can be asked here.
    assert main(["clear"]) == 2
    assert "would be deleted (" in (said := capsys.readouterr().err)
    assert "bytes); add --yes" in said
    assert store.ranks() == [0, 1]
    assert main(["clear", "--rank", "1", "--yes"]) == 0
    assert store.ranks() == [0]
    assert main(["clear", "--yes"]) == 0
    assert sorted(path.name for path in (here / "spool-data").iterdir()) == ["notes.txt"]


def test_unlock_releases_another_host(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unlock"]) == 0
    assert "nobody holds it" in capsys.readouterr().out
    (here / "work").mkdir()
    far = replace(Owner.me(), host="far", boot="other", pid=77)
    (here / "work" / "intake.lock").write_text(json.dumps(asdict(far)))
    assert main(["unlock"]) == 0
    assert "was held by process 77 on far" in capsys.readouterr().out
    with WorkLock(here / "work" / "intake.lock"):
        assert main(["unlock"]) == 2
        assert "end it instead" in capsys.readouterr().err


def test_short_jobs_do_not_import_torch() -> None:
    """What check, compare, merge, retire and the intake import stays light."""
    modules = ["judging", "retire", "merge", "verdict", "intake.feed", "gpus", "job", "status"]
    modules += ["replay.batch", "cli"]
    code = "import sys, " + ", ".join(f"spool.{name}" for name in modules)
    code += "; print([name for name in ('torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "below")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "Not a directory" in line
    assert "file" in line


def test_a_python_that_cannot_check_is_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    for command in (["init", "new"], ["demo", "--dir", "new"]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert line.startswith("spool: checking needs Python 3.11 or newer")
        assert line.count("\n") == 1
    assert not (here / "new").exists()


def test_clear_leaves_a_living_trainer_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.create(here / "one", {})
    publish_step(store, 0, 0, 3)
    store.heartbeat(0, beat(pid=os.getpid(), host=socket.gethostname()))
    assert main(["clear", "--yes", "one"]) == 2
    assert f"still written by process {os.getpid()}" in capsys.readouterr().err
    assert store.shards(0, 0)
    assert main(["clear", "--yes", "--force", "one"]) == 0
    assert not (here / "one" / "rank0").exists()


def test_status_takes_the_spool_that_the_work_directory_follows(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = make_spool(here / "one"), make_spool(here / "other")
    write_if_changed(WorkDir(here / "work").run, {"run_id": one.run.run_id, "spool": str(one.root)})
    assert main(["status"]) == 0
    assert f"{here / 'one'}: run of " in capsys.readouterr().out
    assert main(["status", "other"]) == 2
    assert f"work: holds another run, that of {one.root}" in capsys.readouterr().err
    assert other.run.run_id != one.run.run_id
