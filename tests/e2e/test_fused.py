"""A training that calls torch_npu's fused operators is checked like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import harness
import pytest
import torch
from npu_models import everything
from replaying import captured_as_without

from spool.parquet import read_meta

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


OWN = """
import torch, spool
library = torch.library.Library("npu", "DEF")
library.define("npu_my_op(Tensor x, float scale) -> Tensor")
library.impl("npu_my_op", lambda x, scale: x * scale + 1, "CPU")
with spool.enable(spool_dir="spool-data") as session:
    for _ in range(2):
        for _ in range(4):
            torch.ops.npu.npu_my_op(torch.ones(3) * 2, 3.0)
        session.step()
"""
REFERENCE = "def my_op(x, scale):\n    return {formula}\n"


def test_a_reference_that_comes_later_or_is_mended_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no reference keeps its shard, and what the first reference refuted too."""
    harness.python(tmp_path, OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def check(formula: str = "", **config: object) -> tuple[str, dict[str, int]]:
        if formula:
            (tmp_path / "my_references.py").write_text(REFERENCE.format(formula=formula))
            config["fused"] = "{npu_my_op: 'my_references:my_op'}"
        done = harness.workflow(tmp_path, keep_per_api=6, **config)
        verdicts = [
            row["verdict"] for row in harness.rows(tmp_path, "summary") if "my_op" in row["api"]
        ]
        return done.stderr, {verdict: verdicts.count(verdict) for verdict in set(verdicts)}

    def kept() -> int:
        return len(list((tmp_path / "work/failed").rglob("*my_op*.h5")))

    _, verdicts = check()
    assert verdicts == {"SKIP": 8}
    assert kept() == 6
    assert not harness.shards(tmp_path / "spool-data")
    said, verdicts = check("x * scale")
    assert verdicts == {"SKIP": 2, "error": 6}
    assert "other references (fused): 4 calls measured again, 0 keep what they have" in said
    assert "other references (fused): 2 calls measured again, 2 keep what they have" in said
    said, verdicts = check("x * scale + 1")
    assert verdicts == {"SKIP": 2, "pass": 6}
    assert kept() == 6
    # Once: the batches say under which references they are measured now.
    facts = [read_meta(path) for path in (tmp_path / "work/measured").rglob("*.parquet")]
    assert [fact["fused"] for fact in facts] == ["{'npu_my_op': 'my_references:my_op'}"] * 2
    assert len({fact["references"] for fact in facts}) == 1
