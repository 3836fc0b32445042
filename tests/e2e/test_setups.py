"""Every common kind of model and training: not a bit changes, every call is judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from replaying import Outcomes, replay_all
from torch.utils._pytree import tree_leaves

# Name of a model, options of the training, and the least number of calls of two steps.
SETUPS = {
    "gpt2 in bf16": ("gpt2", "--amp bfloat16 --optimizer foreach --clip 1.0", 1000),
    "llama in fp16 with a fused optimizer": ("llama", "--amp float16 --optimizer fused", 800),
    "experts": ("qwen2-moe", "--accumulate 2", 2000),
    "bert": ("bert", "--optimizer foreach", 1000),
    "bert in bf16": ("bert", "--amp bfloat16", 1000),
    "vision transformer in fp16": ("vit", "--amp float16", 1000),
    "residual network in bf16": ("resnet", "--amp bfloat16 --accumulate 2", 600),
    "residual network": ("resnet", "--optimizer fused --clip 0.5", 300),
    "rnn": ("rnn", "", 600),
    "gru": ("gru", "--clip 1.0", 1000),
    "lstm": ("lstm", "", 250),
    "fused operators of torch_npu": ("npu", "--optimizer npu", 150),
    "checkpoints, reentrant": ("reentrant", "", 400),
    "checkpoints, not reentrant": ("nonreentrant", "--amp bfloat16", 400),
    "checkpoints, selective": ("selective", "", 400),
}
# Reasons for which a call of these may have no verdict.
REASONS = {
    "SKIP: draws random numbers",  # attention with dropout
    "SKIP: output 0: no elements to compare",
    "SKIP: output 0: no standard for torch.float64",
}
LEFT_ALONE = {
    "operator without replay: aten.mkldnn_rnn_layer_backward",  # its workspace is opaque
    "operator without replay: aten._amp_foreach_non_finite_check_and_unscale_",
    "operator without replay: aten._amp_update_scale_",
    "DTensor",
    "distributed",
}


def same(one: Path, other: Path) -> bool:
    """Whether losses, gradients, parameters and buffers of two trainings are equal bit for bit."""
    a, b = (tree_leaves(torch.load(path, weights_only=True)) for path in (one, other))
    assert len(a) == len(b) > 10
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in map(flat, a, b))


def flat(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    return x.reshape(-1).contiguous(), y.reshape(-1).contiguous()


def check(found: Outcomes, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n  compared {found.compared:.1%}; {dict(found.reasons)}; {dict(found.skipped)}")
    assert {verdict for _, verdict in found.verdicts} <= {"pass", "SKIP"}, found.reasons
    assert {reason for _, reason in found.reasons} <= REASONS, found.reasons
    assert set(found.skipped) <= LEFT_ALONE
    assert found.compared >= 0.95
    assert sum(found.verdicts.values()) >= least
    assert found.verdicts["backward", "pass"] > 0


@pytest.mark.parametrize("setup", SETUPS)
def test_healthy_training(setup: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, options, least = SETUPS[setup]
    command = ["--model", model, *options.split()]
    harness.train(tmp_path, *command, "--out", "off.pt")
    harness.train(tmp_path, *command, "--out", "on.pt", "--spool-dir", "spool-data")
    assert same(tmp_path / "off.pt", tmp_path / "on.pt")
    check(replay_all(tmp_path / "spool-data"), least, capsys)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("off", []), ("on", ["--spool-dir", "spool-data"])):
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, str(harness.TRAIN), "--model", "llama", "--rank", str(rank)),
                    *("--parallel", way, "--meet", str(tmp_path / f"meet-{name}")),
                    *("--out", f"{name}{rank}.pt", *more),
                ],
                cwd=tmp_path,
                env=harness.environment() | {"RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        errors = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], errors
    for rank in (0, 1):
        assert same(tmp_path / f"off{rank}.pt", tmp_path / f"on{rank}.pt")
        check(replay_all(tmp_path / "spool-data", rank), 800, capsys)
    assert os.listdir(tmp_path / "spool-data")


def test_a_fault_in_backward_is_found_and_only_it(tmp_path: Path) -> None:
    """Through the whole workflow; the fault sits below capture, in torch's dispatcher."""
    harness.train(
        tmp_path,
        *("--model", "gpt2", "--steps", "1", "--defect", "gelu_backward"),
        *("--out", "on.pt", "--spool-dir", "spool-data"),
    )
    harness.workflow(tmp_path)
    summary = harness.rows(tmp_path, "summary")
    failing = [row for row in summary if row["verdict"] == "error"]
    assert {harness.api_of(row["api"]) for row in failing} == {"Aten.gelu_backward"}
    assert len(failing) == 2, "one in each layer"
    assert {row["module"] for row in failing} == {
        "GPT2LMHeadModel.transformer.h.0.mlp.act",
        "GPT2LMHeadModel.transformer.h.1.mlp.act",
    } or all("mlp" in row["module"] for row in failing)
    assert all("(gradient of Functional.gelu." in row["location"] for row in failing)
