"""What befalls a replay job from outside: signals before it is ready, a full disk, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shard_writing import record, spool_calls

from spool.errors import SpoolError
from spool.parquet import read_measured, read_meta
from spool.records import MeasuredRow, Outcome
from spool.replay import batch
from spool.replay.batch import replay_batch
from spool.settings import ReplaySettings
from spool.workdir import WorkDir

SETTINGS = ReplaySettings(bench_device="cpu", threads=1)

# Acts on worker processes only, before they import anything or inside a call. Each
# file that ONCE names by a prefix is one more time.
WORKER = """
import glob, os, resource, signal, sys
if "spool.replay.worker" in getattr(sys, "orig_argv", []):
    def take():
        for path in glob.glob(os.environ["SPOOL_TEST_ONCE"] + "*"):
            os.unlink(path)
            return True
        return False
    how = os.environ["SPOOL_TEST_HOW"]
    if how == "kill" and take():
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv" and take():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
    if how == "interrupt":
        import torch
        def kernel(x, *rest, **more):
            if take():
                os.kill(os.getpid(), signal.SIGINT)
            return x.clone()
        library = torch.library.Library("aten", "IMPL")
        library.impl("lgamma", kernel, "CPU")
"""


@pytest.fixture
def disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def choose(how: str, times: int) -> None:
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(WORKER)
        for number in range(times):
            (tmp_path / f"once{number}").touch()
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.setenv("SPOOL_TEST_HOW", how)
        monkeypatch.setenv("SPOOL_TEST_ONCE", str(tmp_path / "once"))

    return choose


def replayed(root: Path, settings: ReplaySettings = SETTINGS) -> list[MeasuredRow]:
    call = record("Torch.lgamma", torch.lgamma, torch.full((4,), 1.5))
    manifest = spool_calls(root, [call])
    output = WorkDir(root / "work").replay(0, 0)
    replay_batch(manifest, root / "work", output, settings)
    return read_measured(output)


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_killed_before_it_is_ready_is_started_again(
    tmp_path: Path, disturb, times: int
) -> None:
    disturb("kill", times)
    (row,) = replayed(tmp_path)
    assert row.outcome is Outcome.MEASURED
    assert list(tmp_path.glob("once*")) == []


def test_workers_that_are_killed_again_and_again_are_given_up(tmp_path: Path, disturb) -> None:
    disturb("kill", 9)
    with pytest.raises(SpoolError) as caught:
        replayed(tmp_path)
    assert "died of SIGKILL before it replayed anything, 3 times in a row" in str(caught.value)
    assert "above" not in str(caught.value)
    assert len(list(tmp_path.glob("once*"))) == 6


def test_a_worker_that_crashes_before_it_is_ready_is_not_tried_again(
    tmp_path: Path, disturb
) -> None:
    disturb("segv", 9)
    with pytest.raises(SpoolError, match=r"died of SIGSEGV before it replayed anything; see "):
        replayed(tmp_path)
    assert len(list(tmp_path.glob("once*"))) == 8


def test_an_interrupted_worker_says_nothing_and_its_call_is_tried_again(
    tmp_path: Path, disturb, capfd: pytest.CaptureFixture[str]
) -> None:
    disturb("interrupt", 1)
    (row,) = replayed(tmp_path)
    assert row.outcome is Outcome.MEASURED
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    assert list(tmp_path.glob("once*")) == []


def test_a_full_disk_is_one_line(
    tmp_path: Path, disturb, capfd: pytest.CaptureFixture[str]
) -> None:
    disturb("full", 0)
    with pytest.raises(SpoolError) as caught:
        replayed(tmp_path)
    assert "File too large; rerun when that is mended" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


def test_a_work_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "measured").write_text("in the way")
    with pytest.raises(SpoolError, match=r"in the way|exists|Not a directory") as caught:
        replayed(tmp_path)
    assert "\n" not in str(caught.value)


def test_auto_is_stored_as_the_device_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    auto = replace(SETTINGS, bench_device="auto")
    first = replayed(tmp_path, auto)
    assert read_meta(WorkDir(tmp_path / "work").measured(0, 0))["bench_device"] == "cpu"
    for settings in (auto, SETTINGS):
        assert repr(replayed(tmp_path, settings)) == repr(first)
    assert capsys.readouterr().err == ""
    replayed(tmp_path, replace(SETTINGS, bench_device="cuda"))
    assert "was measured under bench_device=cpu; it keeps that" in capsys.readouterr().err


def test_auto_is_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = replace(SETTINGS, bench_device="auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert batch._measuring(auto)["bench_device"] == "cpu"
    assert batch._measuring(auto, "cuda")["bench_device"] == "cuda"
    code = "import sys, spool.replay.batch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
