"""A training that calls torch_npu's fused operators is checked like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import harness
import pytest
import torch
from npu_models import everything
from replaying import captured_as_without

# Under a name that no library takes for the real one.
sys.path.insert(0, str(Path(__file__).parents[1]))
from fakes import torch_npu

OPERATORS = sorted({schema.partition("(")[0].removesuffix(".out") for schema in torch_npu.SCHEMAS})


def off(result: torch.Tensor) -> torch.Tensor:
    """A few wrong numbers, as of a broken tile."""
    wrong = result.clone(memory_format=torch.contiguous_format)
    flat = wrong.view(-1)
    flat[: max(1, flat.numel() // 8)] *= 1.05
    flat[0] += 0.1
    return wrong


def test_every_operator_is_called() -> None:
    assert len(OPERATORS) == 25


def test_healthy_operators_are_judged_and_pass(tmp_path: Path) -> None:
    found = captured_as_without(tmp_path / "spool", everything)
    assert set(found.verdicts) == {("forward", "pass"), ("backward", "pass")}, found.reasons
    assert not found.skipped


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_fault_is_found_by_name_and_only_it(operator: str, tmp_path: Path) -> None:
    with torch_npu.fault(operator, off):
        found = captured_as_without(tmp_path / "spool", everything)
    failing = {api for api, reason in found.reasons if reason.startswith("error")}
    assert failing == {f"NPU.{operator}"}, found.reasons


def test_a_training_with_fused_operators_through_the_workflow(tmp_path: Path) -> None:
    options = ("--model", "npu", "--optimizer", "npu", "--steps", "2")
    harness.train(tmp_path, *options, "--out", "on.pt", "--spool-dir", "spool-data")
    harness.workflow(tmp_path, fused="{npu_unused: 'spool.replay.fused:npu_mish'}")
    summary = harness.rows(tmp_path, "summary")
    verdicts = {row["api"]: row["verdict"] for row in summary if row["api"].startswith("NPU.")}
    assert set(verdicts.values()) == {"pass"}
    assert {harness.api_of(name) for name in verdicts} == {
        f"NPU.{name}"
        for name in (
            *("npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "npu_swiglu"),
            *("npu_rotary_mul_backward", "npu_swiglu_backward", "npu_fusion_attention"),
            *("npu_fusion_attention_grad", "npu_apply_adam_w"),
        )
    }
    assert not [row for row in summary if row["verdict"] == "error"]
