"""Real models through the whole chain: nothing changed, nothing lost, the fault named."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import pytest
import torch


def load(path: Path) -> dict[str, list[torch.Tensor]]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(("model", "optimizer"), [("gpt2", "foreach"), ("llama", "loop")])
def test_healthy_run(model: str, optimizer: str, tmp_path: Path) -> None:
    options = ["--model", model, "--optimizer", optimizer]
    harness.train(tmp_path, *options, "--out", "off.pt")
    harness.train(tmp_path, *options, "--out", "on.pt", "--spool-dir", "spool-data")

    off, on = load(tmp_path / "off.pt"), load(tmp_path / "on.pt")
    for kind in ("losses", "parameters"):
        assert len(on[kind]) == len(off[kind]) > 0
        assert all(torch.equal(a, b) for a, b in zip(on[kind], off[kind], strict=True)), kind
    for a, b in zip(on["gradients"], off["gradients"], strict=True):
        assert len(a) == len(b) > 20
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    closed = json.loads((tmp_path / "spool-data/rank0/closed.json").read_text())
    captured = sum(step["shards"] for step in closed["steps"].values())
    assert captured == len(harness.shards(tmp_path / "spool-data")) > 300
    assert all(step["dropped"] == 0 for step in closed["steps"].values())

    harness.workflow(tmp_path)
    summary = harness.rows(tmp_path, "summary")
    assert len(summary) == captured
    assert [r for r in summary if r["verdict"] in ("error", "Warning")] == []
    unexplained = [r for r in summary if r["verdict"] == "SKIP" and not r["reason"].strip()]
    assert unexplained == []
    judged = sum(r["verdict"] == "pass" for r in summary)
    assert judged >= 0.95 * captured, [r["api"] for r in summary if r["verdict"] == "SKIP"]
    routes = {"two-way": "accuracy_checking_result", "three-way": "api_precision_compare_result"}
    for route, table in routes.items():
        expected = sorted(r["api"] for r in summary if r["route"] == route)
        key = "API name" if route == "two-way" else "API Name"
        assert sorted(r[key] for r in harness.rows(tmp_path, table)) == expected
    for table in harness.TABLES:
        assert harness.rows(tmp_path, table), f"{table} is empty"


@pytest.mark.parametrize(
    ("model", "defect", "api"),
    [
        ("gpt2", "gelu", "Functional.gelu"),
        ("gpt2", "layer_norm", "Functional.layer_norm"),
        ("llama", "silu", "Functional.silu"),
        ("llama", "linear", "Functional.linear"),
    ],
)
def test_fault_is_found_and_only_it(model: str, defect: str, api: str, tmp_path: Path) -> None:
    options = ("--model", model, "--steps", "1", "--defect", defect)
    harness.train(tmp_path, *options, "--out", "on.pt", "--spool-dir", "spool-data")
    harness.workflow(tmp_path)
    summary = harness.rows(tmp_path, "summary")
    failing = [r for r in summary if r["verdict"] == "error"]
    assert {harness.api_of(r["api"]) for r in failing} == {api}
    assert len(failing) == sum(harness.api_of(r["api"]) == api for r in summary)
    first = failing[0]
    assert (tmp_path / "work" / first["shard"]).is_file(), "the failing call's shard is kept"
    assert (
        "modeling_" in first["location"]
        or "transformers" in first["location"]
        or (first["location"])
    )
