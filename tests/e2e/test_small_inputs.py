"""Small inputs that broke other tools, through the whole chain."""

from __future__ import annotations

from pathlib import Path

import harness
import torch

from spool import shard, tensors

SCRIPT = """
import os, torch, torch.nn.functional as F, spool
spool.enable(spool_dir="spool-data")
{body}
spool.disable()
"""


def run(tmp_path: Path, body: str, **config: object) -> list[dict[str, str]]:
    """Capture `body`, check it keeping every shard, return the summary."""
    harness.python(tmp_path, SCRIPT.format(body=body))
    harness.workflow(tmp_path, retain="all", **config)
    return harness.rows(tmp_path, "summary")


def only(tmp_path: Path, name: str) -> Path:
    (path,) = [p for p in harness.shards(tmp_path / "spool-data") if name in p.name]
    return path


def test_in_place_call_keeps_its_input_from_before(tmp_path: Path) -> None:
    summary = run(tmp_path, "x = torch.tensor([3.])\nx.add_(1)")
    (row,) = [r for r in summary if r["api"] == "Tensor.add_.0"]
    assert row["verdict"] == "pass"
    call = shard.read(only(tmp_path, "add_"))
    args = tensors.thaw(list(call.args), call.regions)
    output = tensors.thaw(call.outputs, call.regions)
    assert args[0].tolist() == [3.0]
    assert output.tolist() == [4.0]


def test_two_ranks_of_one_spool_are_two_rows(tmp_path: Path) -> None:
    for rank in (0, 1):
        body = f"os.environ['RANK'] = '{rank}'"
        script = SCRIPT.format(body="F.relu(torch.arange(3.) - 1)")
        harness.python(tmp_path, script.replace("spool.enable", f"{body}\nspool.enable"))
    assert len([p for p in harness.shards(tmp_path / "spool-data") if "relu" in p.name]) == 2
    harness.workflow(tmp_path, rank_list="[0,1]")
    for rank in (0, 1):
        table = harness.rows(tmp_path, "accuracy_checking_result", rank)
        assert "Functional.relu.0" in [row["API name"] for row in table]


def test_same_api_in_two_steps(tmp_path: Path) -> None:
    run(tmp_path, "x = torch.ones(3)\nF.relu(x)\nspool.step()\nF.relu(x)\nspool.step()")
    table = harness.rows(tmp_path, "accuracy_checking_result")
    assert [r["Step"] for r in table if r["API name"] == "Functional.relu.0"] == ["0", "1"]


def test_transposed_argument_keeps_its_stride(tmp_path: Path) -> None:
    summary = run(
        tmp_path, "a = torch.arange(6.).view(2, 3).t()\ntorch.matmul(a, torch.ones(2, 2))"
    )
    call = shard.read(only(tmp_path, "matmul"))
    assert (call.args[0].shape, call.args[0].stride) == ((3, 2), (1, 3))
    a = tensors.thaw(list(call.args), call.regions)[0]
    assert torch.equal(a, torch.arange(6.0).view(2, 3).t())
    assert [r["verdict"] for r in summary if "matmul" in r["api"]] == ["pass"]


def test_small_view_of_large_storage(tmp_path: Path) -> None:
    body = "x = torch.zeros(1 << 20)[5:15]\ntorch.maximum(x, x)"
    summary = run(tmp_path, body)
    assert [r["verdict"] for r in summary if "maximum" in r["api"]] == ["pass"]
    assert only(tmp_path, "maximum").stat().st_size < 16 * 1024


def test_unfinished_files_are_never_read(tmp_path: Path) -> None:
    """A torn partial file, as a killed writer leaves it, is ignored and cleaned away."""
    harness.python(tmp_path, SCRIPT.format(body="F.relu(torch.ones(3))\nspool.step()"))
    step = tmp_path / "spool-data/rank0/step0"
    whole = harness.shards(tmp_path / "spool-data")
    (step / ".000099.Tensor.add.0.h5.0.partial").write_bytes(whole[0].read_bytes()[:500])
    harness.workflow(tmp_path)
    assert [r["verdict"] for r in harness.rows(tmp_path, "summary")].count("pass") == len(whole)


def test_ranks_that_start_together_or_late_are_complete(tmp_path: Path) -> None:
    """Rank 1 starts after rank 0 ended, while the workflow already runs."""
    import subprocess

    process = subprocess.Popen(
        harness.command(rank_list="[0,1]"),
        cwd=tmp_path,
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for rank in (0, 1):
        start = f"os.environ['RANK'] = '{rank}'\nspool.enable"
        body = "F.relu(torch.arange(3.) - 1)\nspool.step()"
        harness.python(tmp_path, SCRIPT.format(body=body).replace("spool.enable", start))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    for rank in (0, 1):
        table = harness.rows(tmp_path, "accuracy_checking_result", rank)
        assert "Functional.relu.0" in [row["API name"] for row in table]
