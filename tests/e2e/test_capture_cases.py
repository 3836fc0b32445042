"""Small inputs that broke other tools: captured, replayed, and judged as they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replaying import Outcomes, captured_as_without, replayed
from torch.utils.checkpoint import checkpoint

import spool
from spool import shard
from spool.call import Call, Slice, TorchValue
from spool.store import Store
from spool.tensors import thaw


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPOOL_CONFIG", "SPOOL_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def calls(root: Path, step: int = 0) -> dict[str, Call]:
    return {entry.name: shard.read(entry.path) for entry in Store.open(root).shards(0, step)}


def judged(call: Call) -> int:
    """How many outputs of a call are compared."""
    return len(replayed(call, Path()).outputs)


def all_pass(found: Outcomes) -> None:
    assert {verdict for _, verdict in found.verdicts} == {"pass"}, found.reasons
    assert found.skipped == {}


def test_a_checkpointed_sine(tmp_path: Path) -> None:
    """One ``sin``, its backward operators, the same gradient."""

    def training() -> list[torch.Tensor]:
        x = torch.linspace(-3, 3, 7, requires_grad=True)
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return [x.grad]

    all_pass(captured_as_without(tmp_path / "spool", training))
    assert list(calls(tmp_path / "spool")) == [
        "Torch.sin.0",
        "Tensor.sum.0",
        "Aten.cos.0",
        "Aten.mul.0",
    ]


def test_indices_of_every_kind(tmp_path: Path) -> None:
    """Slices, Ellipsis, None, a mask and integers, read and written, in both directions."""

    def training() -> list[torch.Tensor]:
        mask, rows = torch.tensor([True, False, True]), torch.tensor([2, 0])
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        y = x * 1
        y[mask, ..., 1:3] = 7.0
        y[rows] = y[rows].flip(0)
        y[..., None][:, ::2] = x[:, :2, None]
        y[1, -1] = x[0, 0]
        kept = [y[mask], y[None, rows], y[..., 1], y[1:, rows.view(2, 1)], y[:, [0, 3]], y[-1]]
        torch.cat([k.flatten() for k in kept]).square().sum().backward()
        assert x.grad is not None
        return [y, x.grad, *kept]

    found = captured_as_without(tmp_path / "spool", training)
    all_pass(found)
    assert found.verdicts["backward", "pass"] > 5
    stored = calls(tmp_path / "spool")
    writes = [call for call in stored.values() if call.api == "Tensor.__setitem__"]
    reads = [call for call in stored.values() if call.api == "Tensor.__getitem__"]
    assert (len(writes), len(reads)) == (4, 10)
    assert writes[0].args[1][1:] == (Ellipsis, Slice(1, 3, None))
    assert thaw(writes[0].args[1][0], writes[0].regions).tolist() == [True, False, True]
    assert all(set(call.mutated) == {"args.0"} for call in writes)


def test_dtype_and_memory_format_arguments(tmp_path: Path) -> None:
    def training() -> list[torch.Tensor]:
        x = torch.arange(48.0).view(1, 3, 4, 4)
        last = x.to(memory_format=torch.channels_last)
        assert last.stride() == (48, 1, 12, 3)
        return [torch.sum(x.half(), dim=-1, dtype=torch.float32), last, last.clone()]

    all_pass(captured_as_without(tmp_path / "spool", training))
    stored = calls(tmp_path / "spool")
    assert stored["Torch.sum.0"].kwargs == {"dim": -1, "dtype": TorchValue("dtype", "float32")}
    assert stored["Tensor.to.0"].kwargs == {
        "memory_format": TorchValue("memory_format", "channels_last")
    }
    assert stored["Tensor.to.0"].outputs.stride == (48, 1, 12, 3)


def test_dotted_names_and_three_outputs(tmp_path: Path) -> None:
    def training() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        u, s, v = torch.linalg.svd(x)
        inverse = torch.linalg.inv(x)
        (u.abs().sum() + s.sum() + v.abs().sum() + inverse.sum()).backward()
        assert x.grad is not None
        return [u, s, v, inverse, x.grad]

    all_pass(captured_as_without(tmp_path / "spool", training))
    stored = calls(tmp_path / "spool")
    assert judged(stored["Torch.linalg.svd.0"]) == 3
    assert judged(stored["Torch.linalg.inv.0"]) == 1


def stacked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([a.sin(), b.cos()]).square()


def normalized(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(torch.stack([a, b]), (3,), a, b)


@pytest.mark.parametrize(
    ("way", "operators", "several"),
    [
        (stacked, ["cos", "sin", "neg", "mul", "pow"], {}),
        (normalized, ["native_layer_norm_backward"], {"Aten.native_layer_norm_backward.0": 3}),
    ],
)
def test_gradients_of_a_stack(
    tmp_path: Path,
    way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    operators: list[str],
    several: dict[str, int],
) -> None:
    """The stack's own gradient is views of one tensor; who gets them computes with them."""

    def training() -> list[torch.Tensor]:
        a, b = (torch.linspace(n, n + 1, 3, requires_grad=True) for n in (1, 2))
        way(a, b).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return [a.grad, b.grad]

    all_pass(captured_as_without(tmp_path / "spool", training))
    stored = calls(tmp_path / "spool")
    (stack,) = [call for call in stored.values() if call.api == "Torch.stack"]
    assert [len(stack.args[0]), judged(stack)] == [2, 1]
    found = {call.api for call in stored.values() if call.direction == "backward"}
    assert {f"Aten.{name}" for name in operators} <= found
    assert {name: judged(stored[name]) for name in several} == several


def test_a_list_of_gradients_is_judged(tmp_path: Path) -> None:
    """What an operator of the engine returns as a list is compared element by element."""

    class Stacked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, y])

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.unbind_copy(grad * 2))

    def training() -> list[torch.Tensor]:
        a, b = (torch.linspace(n, n + 1, 3, requires_grad=True) for n in (1, 2))
        (Stacked.apply(a, b) * torch.arange(3.0)).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return [a.grad, b.grad]

    all_pass(captured_as_without(tmp_path / "spool", training))
    stored = calls(tmp_path / "spool")
    assert judged(stored["Aten.unbind_copy.0"]) == 2


def test_start_and_stop_ten_times(tmp_path: Path) -> None:
    """The tenth step is like the first, and between the steps backward is not captured."""
    w = torch.randn(4, 3, requires_grad=True)

    def work() -> None:
        F.gelu(F.linear(torch.ones(2, 3), w)).sum().backward()

    w.grad = torch.zeros_like(w)
    session = spool.enable(spool_dir=tmp_path / "spool", autostart=False)
    try:
        for _ in range(10):
            work()
            session.start()
            work()
            session.stop()
            work()
            session.step()
    finally:
        session.disable()
    first = list(calls(tmp_path / "spool", 0))
    assert [name for name in first if "gelu" in name] == [
        "Functional.gelu.0",
        "Aten.gelu_backward.0",
    ]
    for step in range(1, 10):
        assert list(calls(tmp_path / "spool", step)) == first


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_nobody_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: str,
) -> None:
    """Of two ranks none is 4 or 5: that is said, training runs, nothing is written."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    caplog.set_level("INFO", logger="spool")
    x = torch.ones(2, requires_grad=True)
    with spool.enable(spool_dir=tmp_path / "spool", rank=[4, 5]) as session:
        x.sin().sum().backward()
        session.step()
    assert x.grad is not None
    assert f"rank {rank} is not among the captured ranks [4, 5]" in caplog.text
    beyond = "rank: [4, 5] will never come: there are 2 ranks"
    assert (beyond in caplog.text) == (rank == "0")
    assert list(tmp_path.iterdir()) == []
