"""Capture that is interrupted at its start or end, or whose descriptors and rights go away."""

from __future__ import annotations

import os
import signal
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from test_process_end import agree, closed, run, wait_closed, whole

from spool.errors import StoreError

LEFT = """
def left():
    import gc
    gc.collect()
    files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{name}")}
    ours = [file for file in files.values() if "memfd" in file or "pipe" in file]
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    threads = [thread.name for thread in threading.enumerate() if "spool" in thread.name]
    return ours, children, threads
spool.disable()
before = left()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that are started from the trainer take a second to come up."""
    directory = tmp_path / "patch"
    directory.mkdir()
    code = "import os, time\nif 'HURRY' not in os.environ: time.sleep(1)"
    (directory / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def again(root: Path, body: str) -> tuple[int, str]:
    """Run a body that enables by itself, into a directory of its own."""
    return run(root.with_name("first"), LEFT + textwrap.dedent(body))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "TimeoutError"])
def test_enable_that_is_interrupted_leaves_nothing_and_may_be_tried_again(root, error):
    body = f"""
    def handler(number, frame):
        raise {error}("mine")
    signal.signal(signal.SIGALRM, handler)
    for delay in (0.2, 0.5):
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            spool.enable(spool_dir={str(root)!r})
        except {error} as caught:
            assert str(caught) == "mine"
        else:
            raise AssertionError("not interrupted")
        assert left() == before, (left(), before)
    os.environ["HURRY"] = ""
    with spool.enable(spool_dir={str(root)!r}):
        work(5)
    """
    code, err = again(root, body)
    assert code == 0, err
    assert "not captured" not in err
    time.sleep(3)  # whoever is left behind would close the rank by now
    assert closed(root)["reason"] == "disabled"
    assert whole(root) == 5
    agree(root)


def test_a_refused_enable_leaves_nothing(root):
    body = f"""
    for writer in ("process", "threads"):
        for _ in range(3):
            try:
                spool.enable(spool_dir={str(root.with_name("first"))!r}, writer=writer)
            except Exception as error:
                assert "holds a capture" in str(error)
            else:
                raise AssertionError("not refused")
    assert left() == before, (left(), before)
    """
    code, err = again(root, body)
    assert code == 0, err


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "TimeoutError"])
def test_disable_that_is_interrupted_goes_on_behind(root, error):
    body = f"""
    def handler(number, frame):
        raise {error}("mine")
    signal.signal(signal.SIGALRM, handler)
    writer = session._live._sink.backend.process
    os.kill(writer, signal.SIGSTOP)
    work(20)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        spool.disable()
    except {error} as caught:
        assert str(caught) == "mine"
    else:
        raise AssertionError("not interrupted")
    os.kill(writer, signal.SIGCONT)
    session.disable()
    assert [thread.name for thread in threading.enumerate() if "spool" in thread.name] == []
    assert not spool.processes.is_running(writer)
    """
    code, err = run(root, body)
    assert code == 0, err
    assert closed(root)["reason"] == "disabled"
    assert whole(root) == 20
    agree(root)


@pytest.mark.parametrize("writer", ["process", "threads"])
def test_an_exception_like_the_systems_own_reaches_the_program(root, writer):
    """A ``TimeoutError`` of a signal handler is an `OSError`."""
    body = """
    fired = caught = 0
    def handler(number, frame):
        global fired
        fired += 1
        raise TimeoutError("mine")
    signal.signal(signal.SIGALRM, handler)
    x = torch.ones(4)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        before = fired
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.00005 + 0.0003 * (fired % 11))
            for n in range(300):
                x + 1
                if n % 3 == 0:
                    time.sleep(0.0003)
                if fired > before:
                    break
            else:
                signal.pause()
        except TimeoutError:
            caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    spool.disable()
    assert fired == caught > 100, (fired, caught)
    """
    code, err = run(root, body, f"writer={writer!r}")
    assert code == 0, err
    agree(root)


def test_no_descriptor_that_came_after_is_closed(root):
    """Programs that become daemons close all there are; theirs have the numbers then."""
    body = """
    import asyncio
    work(10)
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    os.closerange(3, 256)
    time.sleep(0.5)
    async def main():
        files = [os.memfd_create("mine") for _ in range(max(numbers))]
        files += [os.eventfd(0) for _ in range(20)]
        await asyncio.sleep(0.1)
        work(10)
        spool.disable()
        await asyncio.sleep(0.1)
        for file in files:
            os.fstat(file)
            assert os.lseek(file, 0, os.SEEK_END) == 0 if file < max(files) - 20 else True
    asyncio.run(main())
    import gc
    del session
    gc.collect()
    """
    code, err = run(root, body)
    assert code == 0, err
    assert whole(root) == 20
    agree(root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_rights_and_descriptors_that_are_given_up():
    body = """
    work(10)
    for directory, names, files in os.walk({root!r}):
        os.chown(directory, 65534, 65534)
        for name in files:
            os.chown(os.path.join(directory, name), 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
    os.closerange(3, 256)
    work(10)
    spool.disable()
    """
    # Other users do not get into pytest's own directories.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        root = Path(directory) / "spool"
        code, err = run(root, body.replace("{root!r}", repr(str(root))))
        assert code == 0, err
        assert whole(root) == 20
        agree(root)


def test_memory_is_given_back_when_capture_ends_and_to_a_forked_child(root):
    body = """
    def held():
        text = open("/proc/self/status").read()
        return int(text.split("RssShmem:")[1].split()[0])
    before = held()
    x = torch.ones(1 << 20)
    for _ in range(8):
        x + 1
    assert held() > before + 8000
    child = os.fork()
    if child == 0:
        os._exit(held() > before + 4000)
    assert os.waitpid(child, 0)[1] == 0
    spool.disable()
    assert held() < before + 4000, (before, held())
    """
    code, err = run(root, body)
    assert code == 0, err
    agree(root)


def test_a_trainer_that_becomes_another_program_leaves_a_closed_rank(root):
    body = """
    work(400)
    time.sleep(0.5)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(4)"])
    """
    code, err = run(root, body)
    assert code == 0, err
    assert wait_closed(root)["reason"] == "killed"
    assert whole(root) == 400
    agree(root)


def test_what_enables_at_the_start_of_every_python_starts_no_chain(root, tmp_path, monkeypatch):
    directory = tmp_path / "start"
    directory.mkdir()
    code = f"import os, spool\nopen({str(tmp_path)!r} + f'/started{{os.getpid()}}', 'w')\n"
    code += f"spool.enable(spool_dir={str(root)!r})"
    (directory / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    body = """
    work(10)
    time.sleep(5)
    spool.disable()
    """
    run(root.with_name("unused"), body)
    started = list(tmp_path.glob("started*"))
    # The program, and the two processes of its writer's start.
    assert 1 < len(started) <= 3, started


@pytest.mark.parametrize("writer", ["process", "threads"])
@pytest.mark.parametrize("missing", [(0, 1), (0, 1, 2)])
def test_standard_streams_that_are_closed(root, missing, writer):
    body = f"""
    spool.disable()
    for file in {missing}:
        os.close(file)
    session = spool.enable(spool_dir={str(root)!r}, writer={writer!r})
    for _ in range(100):
        work(1)
        for file in {missing}:
            try:
                os.write(file, b"garbage")
            except OSError:
                pass
    work(5)
    spool.disable()
    """
    code, err = run(root.with_name("first"), body)
    assert code == 0, err
    assert whole(root) == 105
    agree(root)


def test_where_no_thread_can_be_started_capture_is_refused(spooled, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreError, match=r"no thread can be started .*ulimit -u"):
        spooled.enable()
    monkeypatch.undo()
    with spooled.enable():
        torch.sin(torch.ones(3))
    assert spooled.names() == ["Torch.sin.0"]


def test_a_takeover_needs_no_new_thread(spooled, said, monkeypatch):
    session = spooled.enable()
    start = threading.Thread.start

    def refuse(thread):
        if "writer" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(50):
        if number == 25:
            os.kill(session._live._sink.backend.process, signal.SIGKILL)
        torch.sin(torch.ones(1000))
    session.disable()
    assert len(spooled.names()) == 50
    assert spooled.store().rank_closed(0).steps[0].dropped == 0
    assert "threads of the training process write from here on" in said()


def test_where_proc_shows_other_processes_threads_write(spooled, said, monkeypatch):
    readlink = os.readlink
    monkeypatch.setattr(
        os, "readlink", lambda path: "1" if path == "/proc/self" else readlink(path)
    )
    with spooled.enable():
        torch.sin(torch.ones(3))
    assert spooled.names() == ["Torch.sin.0"]
    assert "threads write: /proc is of another set of processes" in said()
