"""start, stop, step, second enables, foreign modes, threads, forks."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch.overrides import (
    BaseTorchFunctionMode,
    TorchFunctionMode,
    _get_current_function_mode_stack,
)

import spool
from spool.errors import SpoolError, StoreError


def sin():
    torch.sin(torch.ones(1))


class Passing(TorchFunctionMode):
    """A mode of somebody else."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_start_and_stop(spooled):
    session = spooled.enable(autostart=False)
    sin()
    for _ in range(10):
        assert not session.active
        session.start()
        assert session.active
        sin()
        sin()
        session.stop()
        sin()
        session.step()
    session.disable()
    assert [len(spooled.names(step)) for step in range(10)] == [2] * 10
    assert _get_current_function_mode_stack() == []


def test_second_enable_is_refused_and_the_first_goes_on(spooled):
    with spooled.enable():
        with pytest.raises(SpoolError, match=r"call spool.disable\(\) first"):
            spooled.enable()
        sin()
    assert spooled.names() == ["Torch.sin.0"]


def test_spool_with_shards_of_this_rank_names_the_ways_out(spooled):
    spooled.capture(sin)
    with pytest.raises(StoreError) as caught:
        spooled.enable()
    for way in ("resume=True", "another spool_dir", "`spool clear "):
        assert way in str(caught.value)
    assert _get_current_function_mode_stack() == []


def test_resume_keeps_closed_steps_and_captures_the_rest_anew(spooled):
    def crash():
        with spooled.enable():
            sin()
            spool.step()
            sin()
            sin()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    assert spooled.store().rank_closed(0).reason == "exception: RuntimeError"
    assert spooled.store().unclosed_steps(0) == [1]
    before = [entry.path.stat().st_mtime_ns for entry in spooled.store().shards(0, 0)]
    with spooled.enable(resume=True):
        for _ in range(3):
            sin()
            spool.step()
    after = [entry.path.stat().st_mtime_ns for entry in spooled.store().shards(0, 0)]
    assert before == after
    assert [len(spooled.names(step)) for step in range(3)] == [1, 1, 1]
    closed = spooled.store().rank_closed(0)
    assert {step: counts.shards for step, counts in closed.steps.items()} == {0: 1, 1: 1, 2: 1}
    assert closed.reason == "disabled"


def test_disable_closes_a_step_that_was_not_ended(spooled):
    spooled.capture(sin)
    assert spooled.store().step_closed(0, 0).shards == 1


def test_step_and_disable_without_a_session_do_nothing(spooled, said):
    spool.disable()
    spool.step()
    spool.step()
    assert said().count("does nothing") <= 1


def test_modes_below_see_every_call_and_modes_above_stay(spooled, said):
    below, above = Passing(), Passing()
    with below:
        session = spooled.enable()
        above.__enter__()
        sin()
        session.disable()
        assert _get_current_function_mode_stack() == [below, above]
        above.__exit__(None, None, None)
    assert torch.sin in below.seen
    assert torch.sin in above.seen
    assert spooled.names() == ["Torch.sin.0"]
    assert "(Passing) must stay open until disable()" in said()


def test_lower_modes_do_not_see_the_snapshot(spooled):
    below = Passing()
    with below, spooled.enable():
        x = torch.ones(2)
        below.seen.clear()
        torch.sin(x)
    assert below.seen == [torch.sin]


def test_fault_below_capture_is_captured(spooled):
    class Faulty(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out + 1 if func is torch.sin else out

    x = torch.zeros(1)
    with Faulty():
        (call,) = spooled.capture(lambda: torch.sin(x))
    assert call.regions[call.outputs.region].tolist() == [1.0]


def test_hook_that_somebody_popped_is_an_error_line_and_training_goes_on(spooled, said):
    mode = torch.device("cpu")
    mode.__enter__()
    session = spooled.enable()
    mode.__exit__(None, None, None)  # pops ours, leaves theirs
    sin()
    session.step()
    sin()
    session.step()
    session.disable()
    torch.overrides._pop_mode()
    assert said().count("capture's hook is gone from torch's mode stack: ") == 1
    assert spooled.store().step_closed(0, 0).skipped == {"capture hook removed by others": 1}
    assert spooled.store().rank_closed(0).reason == "disabled"


def test_default_device_below_still_works(spooled):
    with torch.device("meta"):
        session = spooled.enable()
        assert torch.ones(1).is_meta
        session.disable()
        assert torch.ones(1).is_meta
    assert not torch.ones(1).is_meta


def test_default_device_set_while_capturing(spooled, said):
    session = spooled.enable()
    try:
        torch.set_default_device("meta")
        assert torch.ones(1).is_meta
        torch.set_default_device(None)
        sin()
        torch.set_default_device("cpu")
        sin()
        with torch.device("cpu"):
            sin()
        session.step()
    finally:
        session.disable()
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []
    assert spooled.names() == ["Torch.sin.0", "Torch.sin.1", "Torch.sin.2"]
    assert "hook is gone" not in said()


def test_threads_are_captured_if_they_attach(spooled):
    session = spooled.enable()
    errors = []

    def work(attach):
        try:
            if attach:
                with session.attach():
                    torch.cos(torch.ones(1))
            else:
                torch.tan(torch.ones(1))
            assert _get_current_function_mode_stack() == []
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.disable()
    assert errors == []
    assert spooled.names() == ["Torch.cos.0", "Torch.cos.1", "Torch.cos.2"]


def test_attached_thread_after_the_end_passes_through(spooled):
    session = spooled.enable()
    entered, ended = threading.Event(), threading.Event()
    results = []

    def work():
        with session.attach():
            entered.set()
            ended.wait(30)
            results.append(torch.sin(torch.zeros(1)).item())

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    session.disable()
    ended.set()
    thread.join()
    assert results == [0.0]
    assert spooled.names() == []


def test_forked_child_is_inert(spooled):
    session = spooled.enable()
    sin()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sin()
            spool.step()
            spool.disable()
            clean = _get_current_function_mode_stack() == []
            status = 0 if clean and not session.active else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    sin()
    session.disable()
    assert spooled.names() == ["Torch.sin.0", "Torch.sin.1"]


def test_data_loader_workers(spooled):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.sin(torch.ones(1) * index)

    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
    with spooled.enable():
        total = sum(float(batch.sum()) for batch in loader)
    assert total == pytest.approx(sum(float(torch.sin(torch.tensor(float(n)))) for n in range(8)))
    assert "Torch.sin.0" not in spooled.names()
    assert "Tensor.sum.1" in spooled.names()


def test_step_line_tells_what_was_captured(spooled, said):
    with spooled.enable() as session:
        sin()
        torch.sin(torch.ones(1, device="meta"))
        session.step()
    assert (
        "rank 0 step 0: 1 calls captured, 8 B of tensors, dropped 0, "
        "skipped meta tensor 1, blocked 0.00 s" in said()
    )


def test_heartbeat(spooled):
    with spooled.enable() as session:
        sin()
        session.step()
    beat = spooled.store().read_heartbeat(0)
    assert beat.pid == os.getpid()
    assert (beat.step, beat.captured, beat.blocked) == (1, 1, False)


@pytest.mark.parametrize("name", ["there/not/spool", "file", "file/spool"])
def test_unusable_directory(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="spool_dir="):
        spool.enable(spool_dir=tmp_path / name)
    assert _get_current_function_mode_stack() == []


def test_package_import_is_light():
    import subprocess
    import sys

    code = "import sys, spool; sys.exit('torch' in sys.modules or 'h5py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError):
        _ = spool.nothing


def test_two_processes_of_one_rank(spooled):
    from spool.store import Heartbeat

    with spooled.enable():
        spooled.store().heartbeat(0, Heartbeat(0.0, 1, "elsewhere", 0, 0, 0))
    with pytest.raises(StoreError, match="holds a capture of rank 0 already"):
        spooled.enable()
    import socket
    import time

    beat = Heartbeat(time.time(), os.getppid(), socket.gethostname(), 0, 0, 0)
    spooled.store().heartbeat(0, beat)
    with pytest.raises(StoreError, match="holds a capture of rank 0 already"):
        spooled.enable()  # the other process has closed it
    spooled.store().reopen_rank(0)
    for resume in (False, True):
        with pytest.raises(StoreError, match=f"is being captured by process {os.getppid()}"):
            spooled.enable(resume=resume)


def test_a_capture_ended_by_another_thread_leaves_no_mode_behind(spooled, tmp_path):
    with Passing() as theirs:
        session = spooled.enable()
        sin()
        thread = threading.Thread(target=spool.disable)
        thread.start()
        thread.join()
        session.disable()
        assert _get_current_function_mode_stack() == [theirs]
        spooled.enable(resume=True)
        thread = threading.Thread(target=spool.disable)
        thread.start()
        thread.join()
        # Nobody told this thread; the next capture cleans up.
        with spool.enable(spool_dir=tmp_path / "next"):
            assert len(_get_current_function_mode_stack()) == 2
        assert _get_current_function_mode_stack() == [theirs]


def test_steps_that_are_not_captured_have_no_mode(spooled):
    def kinds():
        return [type(mode).__name__ for mode in _get_current_function_mode_stack()]

    class Other(BaseTorchFunctionMode):
        pass

    with Other(), spooled.enable(step=[1, 3]) as session:
        assert kinds() == ["Other"]
        session.step()
        assert kinds() == ["Other", "Interceptor"]
        session.stop()
        assert kinds() == ["Other"]
        session.start()
        torch.sin(torch.ones(2))
        session.step()
        assert kinds() == ["Other"]
        # A block that spans the beginning of a captured step closes as it would without us.
        with torch.device("cpu"):
            session.step()
            assert kinds() == ["Other", "Interceptor", "DeviceContext"]
            torch.cos(torch.ones(2))
        assert kinds() == ["Other", "Interceptor"]
        torch.tan(torch.ones(2))
        session.step()
        assert kinds() == ["Other"]
    assert spooled.names(1) == ["Torch.sin.0"]
    assert spooled.names(3) == ["Torch.cos.0", "Torch.tan.0"]


def test_who_trains_closed_steps_once_more_is_told(spooled, said):
    with spooled.enable():
        torch.sin(torch.ones(2))
    with spooled.enable(resume=True):
        torch.cos(torch.ones(2))
    assert "begins with step 0 (first_step): the closed ones are not captured again" in said()
    assert spooled.names() == ["Torch.sin.0"]


def test_who_goes_on_from_a_checkpoint_names_the_step(spooled, said):
    with spooled.enable() as session:
        for _ in range(3):
            torch.sin(torch.ones(2))
            session.step()
    with spooled.enable(resume=True, first_step=3, step=["0-4"]) as session:
        for _ in range(4):
            torch.cos(torch.ones(2))
            session.step()
    assert "3 steps from 0 to 2 are closed already and stay; this run begins with step 3" in said()
    assert "not captured again" not in said()
    assert [spooled.names(step) for step in range(6)] == [
        *[["Torch.sin.0"]] * 3,
        *[["Torch.cos.0"]] * 2,
        [],
    ]
    assert sorted(spooled.store().rank_closed(0).steps) == [0, 1, 2, 3, 4]
