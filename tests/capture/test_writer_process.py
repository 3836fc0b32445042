"""The writer process: it outlives the trainer, and the trainer outlives it."""

from __future__ import annotations

import gc
import operator
import os
import re
import resource
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from test_process_end import agree, closed, run, start, wait_closed, whole
from torch.overrides import TorchFunctionMode

import spool
from spool.capture import live
from spool.capture.wire import Frames, frame, task_message, task_of
from spool.capture.writers import Closing, Shard
from spool.cli import main
from spool.errors import StoreError
from spool.files import partial_path
from spool.processes import is_running
from spool.store import StepCounts, Store


def sin(elements=1):
    torch.sin(torch.ones(elements))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gives Python processes that are started from here a line of code to begin with."""

    def patch(code: str) -> None:
        directory = tmp_path / "patch"
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(directory))

    return patch


def test_a_killed_writer_process_loses_nothing(spooled, said):
    session = spooled.enable(queue_bytes=400_000)  # memory is used again and again
    for number in range(200):
        if number == 100:
            os.kill(session._live._sink.backend.process, signal.SIGKILL)
        torch.sin(torch.full((1000,), float(number)))
    session.step()
    sin()
    session.disable()
    assert spooled.names(0) == [f"Torch.sin.{n}" for n in range(200)]
    assert spooled.names(1) == ["Torch.sin.0"]
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped, counts.skipped) == (200, 0, {})
    for number, call in enumerate(spooled.calls()):
        assert set(call.regions[0].tolist()) == {float(number)}
        assert set(call.regions[1].tolist()) == set(torch.full((1,), float(number)).sin().tolist())
    assert not list(spooled.root.rglob("*.partial"))
    assert said().count("the writer process ended: threads") == 1


def test_where_no_process_can_be_started_threads_write(spooled, said, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with spooled.enable():
        sin()
    assert spooled.names() == ["Torch.sin.0"]
    assert "no writer process can be started, threads write: " in said()


def test_a_writer_process_that_does_not_come_up(spooled, said, patched):
    patched("raise SystemExit(7)")
    with spooled.enable():
        sin()
    assert spooled.names() == ["Torch.sin.0"]
    assert "threads write: it ended at its start (exit code 1)" in said()


def test_a_full_disk_is_waited_for(spooled, said, patched):
    patched(
        """
        import os
        writev, left = os.writev, [3]
        def full(*arguments):
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(28, "No space left on device")
            return writev(*arguments)
        os.writev = full
        """
    )
    with spooled.enable():
        sin()
        sin()
    assert spooled.names() == ["Torch.sin.0", "Torch.sin.1"]
    assert spooled.store().step_closed(0, 0).dropped == 0


def test_failing_writes_are_counted_and_logged_once(spooled, said, patched):
    patched(
        """
        import os
        def broken(*arguments):
            raise OSError(5, "Input/output error")
        os.writev = broken
        """
    )
    with spooled.enable():
        sin()
        sin()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped, counts.skipped) == (0, 2, {"write failed": 2})
    assert said().count("could not be written") == 1
    assert re.search(r"Torch.sin.[01] could not be written and is dropped", said())
    assert "Input/output error" in said()


def test_what_a_killed_trainer_had_handed_over_is_published(root):
    body = """
    work(30); spool.step()
    work(40)
    while session._live._sink._inbox or session._live._sink.backend._backlog:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    code, _ = run(root, body)
    assert code == -signal.SIGKILL
    marker = wait_closed(root)
    assert marker["reason"] == "killed"
    assert {step: counts["shards"] for step, counts in marker["steps"].items()} == {
        "0": 30,
        "1": 40,
    }
    agree(root)
    # A step that was cut short is not marked as complete.
    assert Store.open(root).step_closed(0, 0).shards == 30
    assert Store.open(root).step_closed(0, 1) is None


def test_forked_children_do_not_keep_the_end_from_being_seen(root):
    body = """
    work(10)
    if os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run(root, body)
    assert wait_closed(root, 10)["reason"] == "killed"
    agree(root)


def test_signals_to_the_group_of_the_trainer_do_not_reach_the_writer(root):
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = session._live._sink.backend.process
    work(50)
    os.kill(writer, signal.SIGTERM)
    os.kill(writer, signal.SIGINT)
    assert os.getpgid(writer) != os.getpgid(0)
    work(50)
    spool.disable()
    """
    code, err = run(root, body)
    assert code == 0, err
    assert whole(root) == 100
    assert "writer process ended" not in err


SLOW = """
import os, time
writev = os.writev
def slow(*arguments):
    time.sleep(0.2)
    return writev(*arguments)
os.writev = slow
"""


def test_who_resumes_waits_for_the_writer_of_a_killed_trainer(root, patched, capsys):
    patched(SLOW)
    body = """
    time.sleep(1); session._live._beat(); work(24); print("up", flush=True); time.sleep(60)
    """
    process = start(root, body, "writers=1")
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    process.kill()
    process.wait(60)
    assert closed(root) is None
    # Nobody closes the rank by hand meanwhile, or captures into it.
    assert main(["close", str(root)]) != 0
    assert "is still written by process" in capsys.readouterr().err
    code, err = run(root, "work(5); spool.step(); work(6)", "resume=True")
    assert code == 0, err
    assert "still writes what was captured" in err
    assert (whole(root, 0), whole(root, 1)) == (5, 6)
    assert closed(root)["reason"] == "exit"
    agree(root)


def test_no_process_descriptor_or_thread_is_left(spooled):
    def state():
        gc.collect()  # the mapping goes with the session
        files = len(os.listdir("/proc/self/fd"))
        return files, sum(thread.name.startswith("spool-") for thread in threading.enumerate())

    def capture(number):
        with spooled.enable(resume=number > 0):
            sin()

    capture(0)
    before = state()
    for number in range(1, 4):
        capture(number)
    end = time.monotonic() + 10
    while any(map(operator.gt, state(), before)) and time.monotonic() < end:
        time.sleep(0.05)
    files, threads = state()
    assert files <= before[0]
    assert threads <= before[1]


def test_a_program_that_closes_all_descriptors(root, tmp_path):
    body = """
    work(20)
    time.sleep(0.5)
    os.closerange(3, 256)
    files = [open({path!r} + str(n), "wb") for n in range(64)]
    work(20)
    spool.step()
    work(20)
    spool.disable()
    for file in files:
        assert os.fstat(file.fileno()).st_size == 0
        file.write(b"mine")
        file.close()
    """
    code, err = run(root, body.replace("{path!r}", repr(str(tmp_path / "mine"))))
    assert code == 0, err
    assert (whole(root, 0), whole(root, 1)) == (40, 20)
    agree(root)
    assert err.count("the writer process is given up (OSError: [Errno 9]") == 1
    for path in tmp_path.glob("mine*"):
        assert path.read_bytes() == b"mine"


def test_more_descriptors_than_select_takes(root):
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    body = """
    spool.disable()
    files = [open("/dev/null") for _ in range(1100)]
    with spool.enable(spool_dir={root!r}, resume=True):
        work(20)
        assert session._live is not None
    """
    code, err = run(root, body.replace("{root!r}", repr(str(root))))
    assert code == 0, err
    assert whole(root) == 20
    assert "writer process" not in err


def test_modules_of_the_current_directory_are_not_the_writers(spooled, said, tmp_path, monkeypatch):
    for name in ("numpy", "spool", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with spooled.enable():
        sin()
    assert spooled.names() == ["Torch.sin.0"]
    assert "writer process" not in said()


def test_a_fork_within_a_call_writes_nothing_into_the_memory_of_both(spooled):
    """The child finishes the call that forked it, in memory that its parent uses."""
    children = []

    class Forks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.sin:
                children.append(os.fork())
                if children[-1] == 0:
                    time.sleep(0.5)
                    return torch.full((1000,), -7.0)
            return func(*args, **(kwargs or {}))

    with Forks():
        session = spooled.enable(backward=False)
        torch.sin(torch.zeros(1000))
        if children[-1] == 0:
            os._exit(0)
        writer = session._live._sink.backend.process
        os.kill(writer, signal.SIGSTOP)
        for number in range(100):
            torch.full((1000,), float(number)) + 0.5
        os.waitpid(children[-1], 0)
        os.kill(writer, signal.SIGCONT)
        session.disable()
    calls = spooled.calls()
    assert len(calls) == 101
    for call in calls:
        for region in call.regions:
            assert len(set(region.tolist())) == 1
            assert region[0] >= 0


def test_what_prints_at_the_start_of_python_does_not_disturb_the_writer(spooled, said, patched):
    patched("print('welcome to this machine', flush=True)")
    with spooled.enable():
        sin()
    assert spooled.names() == ["Torch.sin.0"]
    assert "writer process" not in said()


def test_a_trainer_that_becomes_another_program_waits_for_its_old_writer(root, patched):
    patched(SLOW)
    body = """
    time.sleep(1)
    session._live._beat()
    work(24)
    os.execv(sys.executable, [sys.executable, "-c", {again!r}])
    """
    again = f"""
import torch, spool
with spool.enable(spool_dir={str(root)!r}, resume=True):
    torch.cos(torch.ones(3))
"""
    code, err = run(root, body.replace("{again!r}", repr(again)), "writers=1")
    assert code == 0, err
    time.sleep(1)
    assert [entry.name for entry in Store.open(root).shards(0, 0)] == ["Torch.cos.0"]
    assert closed(root)["reason"] == "disabled"
    agree(root)


@pytest.mark.parametrize("writer", ["process", "threads"])
def test_a_python_without_shared_memory(spooled, said, monkeypatch, writer):
    monkeypatch.delattr(os, "memfd_create")
    with spooled.enable(writer=writer):
        sin()
    assert spooled.names() == ["Torch.sin.0"]
    words = "threads write: the system gives no memory that two processes share"
    assert said().count(words) == (writer == "process")


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_where_memory_is_limited(root, limit):
    body = f"""
    import resource
    spool.disable()
    used = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
    value = used + (3 << 30) if "AS" in {limit!r} else 1 << 20
    resource.setrlimit(resource.{limit}, (value, value))
    with spool.enable(spool_dir={str(root)!r}, resume=True):
        work(20)
    """
    code, err = run(root, body)
    assert code == 0, err
    assert whole(root) == 20


def test_memory_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(StoreError, match=r"no memory of .* set a lower queue_bytes"):
        spool.enable(spool_dir=tmp_path / "spool", queue_bytes=1 << 60)
    assert not (tmp_path / "spool").exists()


def test_a_writer_that_is_stuck_is_given_up_and_counted(spooled, said, monkeypatch):
    monkeypatch.setattr(live, "_LEAST_PATIENCE", 1.0)
    session = spooled.enable(max_wait=0.5, writers=1)
    for _ in range(20):
        sin(1000)
    process = session._live._sink.backend.process
    while not spooled.names():
        time.sleep(0.001)
    os.kill(process, signal.SIGSTOP)
    for _ in range(20):
        sin(1000)
    session.disable()
    counts = spooled.store().rank_closed(0).steps[0]
    assert counts.shards == len(spooled.names()) > 0
    assert counts.shards + counts.dropped == 40
    assert counts.dropped == counts.skipped["write failed"] > 0
    assert not list(spooled.root.rglob("*.partial"))
    assert "the spool took nothing for 1 s" in said()
    assert not is_running(process)


def test_a_directory_that_was_being_removed_disturbs_nothing(spooled, tmp_path):
    with spooled.enable():
        sin()
    doomed = partial_path(spooled.root / "rank0" / "step7")
    doomed = doomed.with_name(doomed.name.replace(str(os.getpid()), "4194304"))
    (doomed / "inside").mkdir(parents=True)
    with spooled.enable(resume=True) as session:
        os.kill(session._live._sink.backend.process, signal.SIGKILL)
        session.step()
        sin()
    assert not doomed.exists()
    assert spooled.names(1) == ["Torch.sin.0"]


FULL = """
import errno, os
for name in ("writev", "write"):
    def full(file, data, original=getattr(os, name)):
        kind = os.readlink(f"/proc/self/fd/{{file}}")
        if os.path.exists({flag!r}) and not kind.startswith("pipe:"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(file, data)
    setattr(os, name, full)
"""


def test_a_disk_that_is_full_when_the_trainer_is_killed(root, tmp_path, patched):
    flag = tmp_path / "full"
    patched(FULL.format(flag=str(flag)))
    body = """
    time.sleep(1)
    session._live._beat()
    open({flag!r}, "w").close()
    work(30)
    print("up", flush=True)
    time.sleep(60)
    """
    process = start(root, body.replace("{flag!r}", repr(str(flag))), "max_wait=60")
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    process.kill()
    process.wait(60)
    time.sleep(3)
    assert closed(root) is None
    flag.unlink()
    assert wait_closed(root)["reason"] == "killed"
    assert whole(root) == 30
    agree(root)


def test_frames_come_in_any_pieces():
    tasks = [
        Shard(("Torch.sin", 0, 1, 2, 3, "forward"), b"{}", [("<f4", 64, 8), ("<i8", 0, 0)]),
        Closing(1, 2, StepCounts(3, 4, 5, {"why": 6}, 0.5)),
        Closing(1, 2, None),
        Shard(("Torch.cos", 0, 1, 2, 4, "forward"), b"x" * 100_000, []),
    ]
    stream = b"".join(frame(task_message(n, task)) for n, task in enumerate(tasks))
    for size in (7, 4096, len(stream)):
        frames, got = Frames(), []
        for begin in range(0, len(stream), size):
            got += [task_of(message) for message in frames.feed(stream[begin : begin + size])]
        assert got == list(enumerate(tasks))


def test_a_program_that_waits_for_all_its_children_does_not_wait_for_the_writer(root):
    body = """
    writer = session._live._sink.backend.process
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(0)
    signal.alarm(60)
    waited = []
    while True:
        work(10)
        try:
            waited.append(os.wait()[0])
        except ChildProcessError:
            break
    assert sorted(waited) == sorted(children)
    assert writer and session._live._sink.backend.process == writer
    spool.disable()
    """
    code, err = run(root, body)
    assert code == 0, err
    assert whole(root) == 40


def test_a_writer_process_leaves_nothing_behind(root):
    body = """
    writer = session._live._sink.backend.process
    work(10)
    spool.disable()
    assert not spool.processes.is_running(writer)
    """
    code, err = run(root, body)
    assert code == 0, err
