"""Mistakes and damage: one line that says what, where and the way out."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import harness
import pytest

from spool import shard

HEALTHY = """
import torch, torch.nn.functional as F, spool
torch.manual_seed(0)
spool.enable(spool_dir="spool-data")
x = torch.randn(4, 8)
for _ in range(3):
    x = F.softmax(torch.tanh(x) * 2, dim=-1)
spool.step()
spool.disable()
"""


def refused(done: subprocess.CompletedProcess[str], *words: str) -> str:
    """The run failed with one line that holds all `words`; no traceback."""
    output = done.stdout + done.stderr
    assert done.returncode != 0, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    lines = [line for line in output.splitlines() if all(word in line for word in words)]
    assert lines, f"no line with {words} in:\n{output[-3000:]}"
    return lines[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    harness.python(tmp_path, HEALTHY)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"no_such_key": "1"}, ("no_such_key",)),
        ({"golden": "tpu"}, ("golden", "tpu", "cpu", "bench")),
        ({"rank_list": "[a]"}, ("rank_list",)),
        ({"precision": "many"}, ("precision", "many")),
        ({"batch": "{calls: 0}"}, ("batch",)),
        ({"standards": "{gelu: nonsense}"}, ("standards", "nonsense")),
        ({"watch": "false", "spool_dir": "nowhere"}, ("nowhere",)),
        ({"watch": "false", "rank_list": "[7]"}, ("rank", "7")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_configuration(config: dict[str, str], words: tuple[str, ...], run: Path) -> None:
    refused(harness.workflow(run, check=False, **config), *words)


def test_work_directory_that_cannot_be_made(run: Path) -> None:
    (run / "file").write_text("")
    refused(harness.workflow(run, check=False, work_dir="file/work"), "file", "Not a directory")


def test_newer_format(run: Path) -> None:
    path = run / "spool-data/run.json"
    info = json.loads(path.read_text())
    info["format"] += 1
    path.chmod(0o640)
    path.write_text(json.dumps(info))
    refused(harness.workflow(run, check=False), "format")


def test_nothing_compared(tmp_path: Path) -> None:
    harness.python(
        tmp_path,
        "import torch, spool\n"
        "spool.enable(spool_dir='spool-data')\ntorch.rand(3)\nspool.step()\nspool.disable()",
    )
    refused(harness.workflow(tmp_path, check=False), "nothing was compared")
    assert "nothing was compared" in (tmp_path / "work/logs/verdict.log").read_text()


def test_empty_run(tmp_path: Path) -> None:
    harness.python(
        tmp_path,
        "import spool\nspool.enable(spool_dir='spool-data')\nspool.step()\nspool.disable()",
    )
    refused(harness.workflow(tmp_path, check=False), "nothing was compared")


def test_rank_that_never_appears_is_named(run: Path) -> None:
    """With `watch` the workflow waits and says for what."""
    process = subprocess.Popen(
        harness.command(rank_list="[7]"),
        cwd=run,
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "rank 7" in line and "wait" in line:
                break
        else:
            pytest.fail(f"ended without saying what it waits for:\n{said}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_damaged_and_hostile_shards(run: Path) -> None:
    """Truncated, flipped and hostile shards are set aside; the rest is judged."""
    spool = run / "spool-data"
    paths = harness.shards(spool)
    assert len(paths) == 9
    truncated, flipped, hostile = paths[1], paths[4], paths[7]
    truncated.chmod(0o640)
    truncated.write_bytes(truncated.read_bytes()[:-100])
    data = bytearray(flipped.read_bytes())
    call = shard.read(flipped)
    at = data.index(call.regions[0].tobytes())
    data[at + 5] ^= 0x10
    flipped.chmod(0o640)
    flipped.write_bytes(bytes(data))
    call = replace(shard.read(hostile), api="Torch.load")
    hostile.unlink()
    order = hostile.name.split(".")[0]
    shard.write(call, hostile.with_name(f"{order}.Torch.load.{call.index}.h5"))

    done = harness.workflow(run, check=False)
    refused(done, "3", "quarantine")
    summary = harness.rows(run, "summary")
    assert sum(row["verdict"] == "pass" for row in summary) == 6
    kept = sorted((run / "work/quarantine").rglob("*.h5"))
    assert len(kept) == 3
    reasons = [json.loads(Path(f"{path}.json").read_text())["reason"] for path in kept]
    assert any("Torch.load" in reason for reason in reasons)
    assert any("crc32" in reason or "checksum" in reason for reason in reasons)
    assert not (run / "spool-data/rank0/step0" / truncated.name).exists()
    again = harness.workflow(run, check=False)
    refused(again, "3", "quarantine")


@pytest.mark.parametrize(
    "arguments",
    [("-n",), ("--lint",), ("--dag",), ("--unlock",), ("--summary",)],
    ids=lambda a: a[0].strip("-"),
)
@pytest.mark.parametrize("state", ["missing", "open"])
def test_inspection_ends_at_once(arguments: tuple[str, ...], state: str, tmp_path: Path) -> None:
    """Inspecting a run never waits for training (the call's time limit would tell)."""
    if state == "open":
        harness.python(tmp_path, HEALTHY.replace("spool.disable()", ""))
        (tmp_path / "spool-data/rank0/closed.json").unlink()
    done = harness.workflow(tmp_path, *arguments, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not (tmp_path / "results").exists()
