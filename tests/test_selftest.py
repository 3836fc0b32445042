"""The command that checks the fused operators of a device."""

from __future__ import annotations

import sys

import pytest
import torch

from spool.cli import main
from spool.replay import selftest as selftest_module
from spool.replay.selftest import Row


def test_the_references_themselves_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(lines) - 1} calls, 0 wrong"
    assert lines[0].split() == ["pass", "float32", "fast_gelu"]
    assert all(line.startswith("pass") for line in lines[:-1])


def test_a_wrong_operator_is_shown_and_changes_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def operators_of(device: str) -> object:
        right = selftest_module._reference
        broken = {
            "npu_mish": lambda x: right("npu_mish").function(x) * 1.01,
            "npu_sort_v2": lambda *_: 1 / 0,
        }
        return lambda name: None if name == "npu_linear" else broken.get(name, right(name).function)

    monkeypatch.setattr(selftest_module, "operators_of", operators_of)
    assert main(["selftest", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if not line.startswith("pass")][:-1] == [
        ["error", "float32", "npu_mish"],
        *[["absent", "float32", "npu_linear"]] * 2,
        *[["failed", "float32", "npu_sort_v2"]] * 2,
        ["error", "float16", "npu_mish"],
        *[["absent", "float16", "npu_linear"]] * 2,
        *[["failed", "float16", "npu_sort_v2"]] * 2,
        ["error", "bfloat16", "npu_mish"],
        *[["absent", "bfloat16", "npu_linear"]] * 2,
        *[["failed", "bfloat16", "npu_sort_v2"]] * 2,
    ]
    assert "ZeroDivisionError" in next(line for line in lines if line.startswith("failed"))
    assert lines[-1].endswith("calls, 9 wrong")


def test_a_device_that_is_not_here_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert main(["selftest"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("spool: torch_npu cannot be imported here (")
    assert "run this on the training host, or with --device cpu" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch sees no GPU on this host; use --device cpu" in capsys.readouterr().err


def test_only_errors_and_failures_are_bad() -> None:
    verdicts = ("pass", "warning", "error", "SKIP", "failed", "absent")
    assert [v for v in verdicts if Row("x", "", "float32", v, "").is_bad] == ["error", "failed"]
