"""Whether a process runs, told from one that has ended and from one that got its number."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spool.processes import Process, is_running, runs_on, start_ticks


@pytest.fixture
def sleeper(tmp_path: Path):
    # A name with what separates the fields of /proc/<pid>/stat.
    program = tmp_path / "a) S 1 (b"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_lives_until_it_is_killed(sleeper):
    process = Process.of(sleeper.pid)
    assert process.is_alive()
    assert is_running(sleeper.pid)
    assert process.started == start_ticks(sleeper.pid) > start_ticks(os.getpid())
    process.kill()
    deadline = time.monotonic() + 10
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    # Nobody has waited for it: its number is still taken.
    os.kill(sleeper.pid, 0)
    assert not process.is_alive()
    assert not is_running(sleeper.pid)
    assert sleeper.wait() == -signal.SIGKILL
    assert not process.is_alive()
    assert start_ticks(sleeper.pid) == 0
    with pytest.raises(ProcessLookupError):
        Process.of(sleeper.pid)


def test_another_process_with_the_number_is_let_be(sleeper):
    earlier = Process(sleeper.pid, start_ticks(sleeper.pid) - 1)
    assert not earlier.is_alive()
    earlier.kill()
    assert Process.of(sleeper.pid).is_alive()


def test_a_first_thread_that_has_ended_is_not_the_process():
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    state = ""
    deadline = time.monotonic() + 20
    while state != "Z" and time.monotonic() < deadline:
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "Z"
    process = Process.of(child.pid)
    assert process.is_alive()
    assert is_running(child.pid)
    process.kill()
    assert child.wait(10) == -signal.SIGKILL


def test_processes_that_cannot_run_here():
    assert is_running(1)
    assert not is_running(0)
    assert not is_running(1 << 70)
    assert runs_on(socket.gethostname(), os.getpid())
    assert not runs_on("another-host", os.getpid())
