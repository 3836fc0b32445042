"""A replay job as a whole: real worker processes that crash, hang and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from shard_writing import record, spool_calls

from spool.call import Call
from spool.errors import SpoolError
from spool.parquet import read_measured, read_meta
from spool.records import MeasuredRow, Outcome
from spool.replay import supervise
from spool.replay.batch import replay_batch
from spool.settings import ReplaySettings
from spool.workdir import WorkDir

SETTINGS = ReplaySettings(bench_device="cpu", threads=1)
ROOT = Path(__file__).parents[2]

# Kernels below every call, as a broken driver would have them. Each file of the
# directory SINKS means one more death by it.
SABOTAGE = """
import os, signal, time
try:
    import torch
except ImportError:
    torch = None

def die(how):
    def kernel(x, *rest, **more):
        if how == "abort":
            os.abort()
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(10_000)
        if how == "raise":
            raise ValueError("broken\\nkernel")
        if how == "sticky":
            raise RuntimeError("CUDA error: device-side assert triggered")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(0.5)
        if how == "kill-once":
            try:
                os.unlink(os.environ["SPOOL_TEST_ONCE"])
            except FileNotFoundError:
                return x.clone()
            os.kill(os.getpid(), signal.SIGKILL)
        return x.clone()
    return kernel

if torch is not None:
    library = torch.library.Library("aten", "IMPL")
    for name, how in (
        ("sinh", "abort"), ("cosh", "segv"), ("asinh", "exit"), ("acosh", "hang"),
        ("atanh", "raise"), ("digamma", "kill"), ("lgamma", "kill-once"), ("erfinv", "slow"),
        ("i0", "sticky"),
    ):
        library.impl(name, die(how), "CPU")
"""


@pytest.fixture
def sabotaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Worker processes get broken kernels for some operators."""
    directory = tmp_path / "site"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setenv("SPOOL_TEST_ONCE", str(tmp_path / "once"))
    return tmp_path


def unary(name: str, order: int) -> Call:
    function: Callable[..., object] = getattr(torch, name)
    return record(f"Torch.{name}", function, torch.full((4,), 1.5), index=order, order=order)


def replayed(root: Path, manifest: Path, settings: ReplaySettings = SETTINGS) -> list[MeasuredRow]:
    output = WorkDir(root / "work").replay(0, 0)
    replay_batch(manifest, root / "work", output, settings)
    measured = WorkDir(root / "work").measured(0, 0)
    assert output.read_bytes() == measured.read_bytes()
    assert [path.name for path in measured.parent.iterdir()] == [measured.name]
    return read_measured(output)


def reasons(rows: list[MeasuredRow]) -> dict[str, str]:
    return {row.header.name: row.reason for row in rows}


def ordinary_calls() -> list[Call]:
    torch.manual_seed(1)
    return [
        record("Tensor.add_", torch.Tensor.add_, torch.tensor([3.0]), 1),
        record("Functional.linear", F.linear, torch.rand(3, 4), torch.rand(5, 4), order=1),
        record("Torch.max", torch.max, torch.rand(3, 4), 0, order=2),
        record("Functional.dropout", F.dropout, torch.rand(20, 20), order=3),
        record("Torch.bernoulli", torch.bernoulli, torch.rand(3), order=4),
        record("NPU.npu_my_op", F.mish, torch.rand(3), order=5),
    ]


def test_rows_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = spool_calls(tmp_path, ordinary_calls()[::-1])
    rows = replayed(tmp_path, manifest)
    assert [row.header.name for row in rows] == [
        "Tensor.add_.0",
        "Functional.linear.0",
        "Torch.max.0",
        "Torch.max.0",
        "Functional.dropout.0",
        "Torch.bernoulli.0",
        "NPU.npu_my_op.0",
    ]
    assert [row.outcome for row in rows] == [Outcome.MEASURED] * 5 + [Outcome.SKIPPED] * 2
    assert [row.output.path for row in rows[2:4] if row.output] == ["[0]", "[1]"]
    first = rows[0]
    assert first.output is not None
    assert first.output.two_way is not None
    assert first.output.two_way.max_abs == 0
    assert json.loads(first.inputs)[0]["max_abs"] == 3.0
    assert (first.header.route, first.header.standard) == ("two-way", "absolute")
    assert (first.header.bench_device, first.header.golden) == ("cpu", "")
    assert (rows[1].header.route, rows[1].header.golden) == ("three-way", "cpu")
    assert (
        rows[1].header.nbytes
        == next(path for path in (tmp_path / "spool").rglob("*linear*")).stat().st_size
    )
    facts = read_meta(WorkDir(tmp_path / "work").measured(0, 0))
    assert (facts["golden"], facts["bench_device"]) == ("cpu", "cpu")
    assert capsys.readouterr().err == ""


def test_measured_rows_are_published_again_without_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = spool_calls(tmp_path, ordinary_calls()[:2])
    rows = replayed(tmp_path, manifest)
    output = WorkDir(tmp_path / "work").replay(0, 0)
    output.unlink()
    for shard in (tmp_path / "spool").rglob("*.h5"):
        shard.unlink()
    os.utime(manifest, (time.time() + 5, time.time() + 5))
    capsys.readouterr()
    again = replayed(tmp_path, manifest, replace(SETTINGS, golden="bench"))
    assert repr(again) == repr(rows)
    text = capsys.readouterr().err
    assert text == "rank 0: batch 0 was measured under golden=cpu; it keeps that\n"
    replayed(tmp_path, manifest)
    assert capsys.readouterr().err == ""


def test_deaths_cost_one_call_each(sabotaged: Path) -> None:
    names = ["add", "sinh", "cosh", "asinh", "atanh", "digamma", "lgamma", "acosh", "i0", "sub"]
    calls = [
        record("Tensor.add", torch.Tensor.add, torch.ones(2), 1, order=0),
        *(unary(name, order) for order, name in enumerate(names) if order and name != "sub"),
        record("Tensor.sub", torch.Tensor.sub, torch.ones(2), 1, order=9),
    ]
    (sabotaged / "once").touch()
    manifest = spool_calls(sabotaged, calls)
    rows = replayed(sabotaged, manifest, replace(SETTINGS, call_timeout=4.0))
    assert reasons(rows) == {
        "Tensor.add.0": "",
        "Torch.sinh.1": "Crash: the replay process died of SIGABRT",
        "Torch.cosh.2": "Crash: the replay process died of SIGSEGV",
        "Torch.asinh.3": "Crash: the replay process exited with status 3",
        "Torch.atanh.4": "ValueError: broken kernel",
        "Torch.digamma.5": "Crash: the replay process died of SIGKILL (out of memory?)",
        "Torch.lgamma.6": "",
        "Torch.acosh.7": "Timeout: took longer than 4 s",
        "Torch.i0.8": "RuntimeError: CUDA error: device-side assert triggered",
        "Tensor.sub.0": "",
    }
    for row in rows:
        expected = Outcome.REPLAY_FAILED if row.reason else Outcome.MEASURED
        assert row.outcome is expected
    # The header of a lost call is that of a replayed one.
    lost = rows[1].header
    assert (lost.route, lost.standard, lost.device) == ("three-way", "benchmark", "cpu")


@pytest.mark.parametrize("defect", ["torn", "flipped", "missing", "renamed", "refused", "foreign"])
def test_an_unusable_shard_is_set_aside(tmp_path: Path, defect: str) -> None:
    calls = ordinary_calls()[:3]
    if defect == "refused":
        calls[1] = record("Torch.load", F.relu, torch.rand(3), order=1)
    manifest = spool_calls(tmp_path, calls)
    shard = sorted((tmp_path / "spool").rglob("*.h5"))[1]
    content = shard.read_bytes()
    if defect == "torn":
        shard.write_bytes(content[: len(content) // 2])
    elif defect == "flipped":
        middle = len(content) // 2
        shard.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif defect == "missing":
        shard.unlink()
    elif defect == "renamed":
        shard.write_bytes(sorted((tmp_path / "spool").rglob("*.h5"))[0].read_bytes())
    elif defect == "foreign":
        shard.write_bytes(b"\x80\x04cos\nsystem\n")
    rows = replayed(tmp_path, manifest)
    assert [row.outcome for row in rows] == [
        Outcome.MEASURED,
        Outcome.QUARANTINED,
        Outcome.MEASURED,
        Outcome.MEASURED,
    ]
    aside = WorkDir(tmp_path / "work").quarantine(0, 0)
    note = json.loads((aside / f"{shard.name}.json").read_text())
    assert note["reason"] == rows[1].reason != ""
    assert "\n" not in note["reason"]
    assert not shard.exists()
    assert (aside / shard.name).exists() == (defect != "missing")
    assert repr(replayed(tmp_path, manifest)) == repr(rows)


def test_a_spool_that_is_not_mounted_fails_the_job(tmp_path: Path) -> None:
    manifest = spool_calls(tmp_path, ordinary_calls()[:2])
    (tmp_path / "spool").rename(tmp_path / "away")
    with pytest.raises(SpoolError, match="mount the spool again") as caught:
        replayed(tmp_path, manifest)
    assert "\n" not in str(caught.value)
    assert not WorkDir(tmp_path / "work").measured(0, 0).exists()
    (tmp_path / "away").rename(tmp_path / "spool")
    assert len(replayed(tmp_path, manifest)) == 2


def test_a_batch_whose_shards_are_all_gone_has_no_rows(tmp_path: Path) -> None:
    """As when its measured rows are deleted after its shards were retired."""
    manifest = spool_calls(tmp_path, ordinary_calls()[:2])
    shards = {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.h5")}
    for path in shards:
        path.unlink()
    measured = WorkDir(tmp_path / "work").measured(0, 0)
    said = f"no shard of batch 0 of rank 0 is there any more, and {measured} is missing"
    with pytest.raises(SpoolError, match=said) as caught:
        replayed(tmp_path, manifest)
    assert "\n" not in str(caught.value)
    assert not measured.exists()
    for path, content in shards.items():
        path.write_bytes(content)
    assert len(replayed(tmp_path, manifest)) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_bench_device_that_is_not_there(tmp_path: Path) -> None:
    manifest = spool_calls(tmp_path, ordinary_calls()[:1])
    with pytest.raises(SpoolError, match="bench_device: 'cuda': torch sees no GPU"):
        replayed(tmp_path, manifest, replace(SETTINGS, bench_device="cuda"))


def job(root: Path, manifest: Path) -> subprocess.Popen[bytes]:
    """The rule's job as a process of its own."""
    code = (
        "import sys; from pathlib import Path; from spool.replay.batch import replay_batch;"
        "from spool.settings import ReplaySettings; from spool.workdir import WorkDir;"
        "root = Path(sys.argv[1]); work = root / 'work';"
        "replay_batch(Path(sys.argv[2]), work, WorkDir(work).replay(0, 0),"
        " ReplaySettings(bench_device='cpu', threads=1))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(root), str(manifest)], cwd=ROOT)


def journal_of(root: Path) -> Path:
    return WorkDir(root / "work").measured(0, 0).with_name(".000000.journal")


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_killed_job_resumes_to_the_same_bytes(sabotaged: Path) -> None:
    undisturbed, killed = sabotaged / "a", sabotaged / "b"
    calls = [unary("erfinv" if order % 2 else "exp", order) for order in range(6)]
    calls.append(unary("sinh", 6))
    for root in (undisturbed, killed):
        root.mkdir()
    manifest = spool_calls(undisturbed, calls)
    replayed(undisturbed, manifest)
    manifest = spool_calls(killed, calls)
    for done in (0, 1, 4):
        process = job(killed, manifest)
        journal = journal_of(killed)
        mark = b'{"done":%d,' % done
        wait_for(lambda: journal.exists() and mark in journal.read_bytes())  # noqa: B023
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert workers
        wait_for(lambda: not any(w.is_running() and w.status() != "zombie" for w in workers))  # noqa: B023
    resumed = journal_of(killed).read_bytes()
    assert resumed.count(b'{"done":0,') == 1
    replayed(killed, manifest)
    ours, theirs = (WorkDir(root / "work").measured(0, 0) for root in (killed, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def test_two_jobs_on_one_batch_give_one_result(
    sabotaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = spool_calls(sabotaged, [unary("erfinv", order) for order in range(3)])
    first = job(sabotaged, manifest)
    wait_for(lambda: journal_of(sabotaged).exists() and journal_of(sabotaged).stat().st_size > 0)
    rows: list[list[MeasuredRow]] = []
    thread = threading.Thread(
        target=lambda: rows.append(replayed(sabotaged, manifest)),
    )
    thread.start()
    assert first.wait() == 0
    thread.join()
    assert [row.outcome for row in rows[0]] == [Outcome.MEASURED] * 3
    assert "batch 0: waiting for another job that replays it" in capsys.readouterr().err


def test_a_shard_that_does_not_fit_is_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import spool.shard\ndef read(*_): raise MemoryError\nspool.shard.read = read\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (row,) = replayed(tmp_path, spool_calls(tmp_path, ordinary_calls()[:1]))
    assert row.reason == "MemoryError: the shard does not fit into memory"


@pytest.mark.parametrize(
    ("code", "seconds", "words"),
    [
        ("os._exit(4)", 60, "the replay process ends before it replays anything (status 4)"),
        ("time.sleep(60)", 2, "the replay process does not get ready within 2 s; see whether"),
    ],
)
def test_workers_that_do_not_get_ready(
    code: str, seconds: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import os, time\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(supervise, "_START_SECONDS", seconds)
    manifest = spool_calls(tmp_path, ordinary_calls()[:1])
    with pytest.raises(SpoolError) as caught:
        replayed(tmp_path, manifest, replace(SETTINGS, call_timeout=1.0))
    assert words in str(caught.value)


def test_the_supervisor_does_without_torch() -> None:
    code = "import sys, spool.replay.batch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_golden_may_run_on_the_bench_device(tmp_path: Path) -> None:
    manifest = spool_calls(tmp_path, ordinary_calls()[1:2])
    rows = replayed(tmp_path, manifest, replace(SETTINGS, golden="bench"))
    assert rows[0].header.golden == "cpu"
    other = tmp_path / "other"
    other.mkdir()
    again = replayed(other, spool_calls(other, ordinary_calls()[1:2]))
    assert repr(again[0].output) == repr(rows[0].output)
