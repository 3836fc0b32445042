"""The work directory's lock: dead owners, living ones, other hosts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spool.errors import SpoolError
from spool.intake.lock import LockError, Owner, WorkLock

HOLD = """
import sys, time
from pathlib import Path
from spool.intake.lock import WorkLock
WorkLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work" / "intake.lock"


def test_a_living_owner_is_refused_with_its_pid(path: Path) -> None:
    process = hold(path)
    try:
        with pytest.raises(
            LockError, match=f"process {process.pid} already fills .*; end it, or use another"
        ) as caught:
            WorkLock(path).acquire()
        assert "\n" not in str(caught.value)
        with pytest.raises(
            LockError, match=f"process {process.pid} .* is running; end it instead of unlocking"
        ):
            WorkLock(path).force()
    finally:
        process.kill()
        process.wait()


def test_a_killed_owner_is_taken_over_with_a_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = hold(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with WorkLock(path):
        line = capsys.readouterr().err
        assert f"process {process.pid} on" in line
        assert "is gone; taking over" in line
    # Given back in order, nobody is told of anything.
    with WorkLock(path):
        assert capsys.readouterr().err == ""


def test_a_reused_pid_is_not_the_owner(path: Path) -> None:
    path.parent.mkdir()
    owner = replace(Owner.me(), started=Owner.me().started + 1)
    path.write_text(json.dumps(asdict(owner)))
    assert not owner.is_alive
    with WorkLock(path):
        pass


def test_an_owner_before_the_last_boot_is_dead(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(replace(Owner.me(), boot="earlier"))))
    with WorkLock(path):
        pass


def test_another_host_is_refused_until_it_is_released(path: Path) -> None:
    path.parent.mkdir()
    far = replace(Owner.me(), host="far", boot="other", pid=77)
    path.write_text(json.dumps(asdict(far)))
    with pytest.raises(
        LockError, match=r"held by .*process 77 on far.*; if it no longer runs"
    ) as caught:
        WorkLock(path).acquire()
    assert f"spool unlock {path.parent}" in str(caught.value)
    assert WorkLock(path).force() == far
    with WorkLock(path):
        pass
    assert WorkLock(path).force() is None


@pytest.mark.parametrize("text", ["", "{", '{"host": "x"}', "null", "\x00\xff"])
def test_a_torn_lock_file_does_not_lock(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    with WorkLock(path):
        assert Owner.parse(path.read_text()) is not None


def test_without_flock_the_start_of_the_process_decides(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(Owner.me())))
    with pytest.raises(LockError, match=f"process {os.getpid()}"):
        WorkLock(path).acquire()
    path.write_text(json.dumps(asdict(replace(Owner.me(), started=1))))
    with WorkLock(path):
        pass


def test_release_twice_is_harmless(path: Path) -> None:
    lock = WorkLock(path)
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()
    assert path.read_text() == ""
    assert issubclass(LockError, SpoolError)


@pytest.mark.parametrize("text", ["[" * 4000, '{"pid": 1e999}', '{"pid": ' + "9" * 4000 + "}"])
def test_an_owner_of_any_text_is_none(text: str) -> None:
    whole = {**asdict(Owner.me()), "pid": "HERE"}
    for content in (text, json.dumps(whole).replace('"HERE"', "1e999")):
        assert Owner.parse(content) is None
