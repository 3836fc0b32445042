"""References that a user gives: by configuration or by a call, never by a shard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_writing import record
from test_execute import replayed

import spool
from spool.errors import ConfigError
from spool.records import Outcome
from spool.replay import registry
from spool.settings import load_schema, load_settings
from spool.userreferences import check_references

SCHEMA = load_schema(Path(__file__).parents[2] / "config" / "schema.yaml")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's, which processes that are started find too."""
    name = f"references_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def double(self, times=2):\n    return self * times\n\nnumber = 3\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    return name


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_reference_of_the_configuration_replays_the_call(module: str) -> None:
    call = record("NPU.npu_double", double, torch.ones(3) / 3)
    assert replayed(call).reason == "no reference for npu_double"
    registry.load({"npu_double": f"{module}:double"})
    result = replayed(call)
    assert result.outcome is Outcome.MEASURED
    assert result.outputs[0].npu is not None


def test_a_registered_reference_may_leave_results_out(module: str) -> None:
    def pair(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, 5

    call = record("NPU.npu_pair", lambda x: (x * 2, 77), torch.ones(3))
    spool.register_reference("npu_pair", pair)
    assert len(replayed(call).outputs) == 2
    spool.register_reference("npu_pair", pair, compared=(0,))
    (output,) = replayed(call).outputs
    assert output.path == "[0]"
    assert spool.reference("npu_pair") is pair


def test_a_users_reference_takes_the_place_of_ours(module: str) -> None:
    ours = spool.reference("npu_mish")
    spool.register_reference("npu_mish", double)
    assert spool.reference("npu_mish") is double
    assert ours is not double


WRONG: dict[str, tuple[Any, str]] = {
    "no such module": (
        {"npu_x": "absent_module:f"},
        "npu_x: absent_module:f: cannot be imported: ModuleNotFoundError: No module named "
        "'absent_module'; check the name and PYTHONPATH",
    ),
    "no such function": ({"npu_x": "{module}:f"}, "has no f"),
    "not callable": ({"npu_x": "{module}:number"}, "npu_x: 3 cannot be called"),
    "no function named": ({"npu_x": "module"}, "it must be a mapping of an operator to its"),
    "no name": ({"npu x": "a:b"}, "is not allowed; it must be a mapping"),
    "not a text": ({"npu_x": 3}, "is not allowed; it must be a mapping"),
    "something else": (["npu_x"], "it must be a mapping"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_loaded_is_one_line_at_the_start(case: str, module: str) -> None:
    fused, words = WRONG[case]
    if isinstance(fused, dict):
        fused = {
            key: value.format(module=module) if isinstance(value, str) else value
            for key, value in fused.items()
        }
    with pytest.raises(ConfigError) as caught:
        load_settings({"fused": fused}, SCHEMA)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_is_imported_elsewhere_when_the_workflow_starts(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text("raise SystemExit('gone')\n")
    with pytest.raises(ConfigError, match="gone"):
        check_references({"npu_x": f"{module}:f"})
    assert module not in sys.modules
    settings = load_settings({"fused": {}}, SCHEMA)
    assert settings.replay.fused == {}


def test_only_functions_are_registered() -> None:
    with pytest.raises(ConfigError, match="is no name of an operator, such as npu_my_op"):
        spool.register_reference("a.b", double)
    with pytest.raises(ConfigError, match="cannot be called"):
        spool.register_reference("npu_x", 3)  # type: ignore[arg-type]


def test_what_a_reference_does_not_support_is_a_skip() -> None:
    x = torch.ones(1, 2, 3, 4)
    call = record("NPU.npu_fusion_attention", lambda *_: x, x, x, x, 2, "NTD")
    result = replayed(call)
    assert result.outcome is Outcome.SKIPPED
    assert result.reason == "no reference for npu_fusion_attention with input_layout='NTD'"
    call = record("NPU.npu_fusion_attention", lambda *_, **__: x, x, x, x, 2, "BNSD", keep_prob=0.5)
    assert replayed(call).reason == "draws random numbers"


def test_what_a_module_prints_does_not_hide_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that is edited has another digest; one in another module has its own."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "loud_module.py"
    file.write_text("print('{}', end='')\ndef f(x):\n    return x\n")
    first = check_references({"npu_x": "loud_module:f"})
    assert list(first) == ["loud_module"]
    assert check_references({"npu_x": "loud_module:f"}) == first
    file.write_text(file.read_text() + "\n")
    assert check_references({"npu_x": "loud_module:f"}) != first


@pytest.mark.parametrize("how", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_module_that_ends_the_process_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ending_module.py").write_text(f"{how}\n")
    with pytest.raises(ConfigError) as refused:
        check_references({"npu_x": "ending_module:f"})
    words = "a module ends the process while it is imported; keep what it does below"
    assert words in str(refused.value)
