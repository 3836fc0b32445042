"""Regions of autocast, no_grad and inference_mode: calls are replayed as they ran in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replaying import Outcomes, captured_as_without
from torch import nn

from spool import shard
from spool.call import Call
from spool.store import Store

BF16, FP16 = torch.bfloat16, torch.float16
Training = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPOOL_CONFIG", "SPOOL_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)


def on(dtype: torch.dtype, **more: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, **more)


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def net(width: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(width, width) for _ in range(5))


def trained(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """What must not change: the loss, every gradient, every weight."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *model.parameters()]


def calls(root: Path) -> list[Call]:
    store = Store.open(root)
    return [shard.read(e.path) for step in store.steps(0) for e in store.shards(0, step)]


def linears(root: Path) -> list[tuple[dict[str, str], str]]:
    """Autocast and dtype of the result of every linear, in their order."""
    found = [call for call in calls(root) if call.api == "Functional.linear"]
    return [(call.context.autocast, call.outputs.dtype) for call in found]


def all_pass(found: Outcomes, least: int, skipped: dict[str, int] | None = None) -> None:
    """Every call was captured, replayed and compared."""
    assert {verdict for _, verdict in found.verdicts} == {"pass"}, found.reasons
    assert sum(found.verdicts.values()) >= least
    assert found.skipped == (skipped or {})


def nested() -> list[torch.Tensor]:
    """One region within another, a region that is off, and one that goes on after both."""
    model = net()
    a, b, c, d, e = model
    x = torch.randn(4, 12)
    with on(FP16):
        x = F.gelu(a(x))
        with on(BF16):
            x = F.gelu(b(x))
            with on(FP16):
                x = c(x)
        with off():
            x = F.layer_norm(d(x.float()), (12,))
        x = e(x)
    loss = x.float().square().mean()
    loss.backward()
    return trained(model, loss)


def test_nested_regions(tmp_path: Path) -> None:
    all_pass(captured_as_without(tmp_path / "spool", nested), 30)
    assert linears(tmp_path / "spool") == [
        ({"cpu": "float16"}, "float16"),
        ({"cpu": "bfloat16"}, "bfloat16"),
        ({"cpu": "float16"}, "float16"),
        ({}, "float32"),
        ({"cpu": "float16"}, "float16"),
    ]
    backward = [call for call in calls(tmp_path / "spool") if call.direction == "backward"]
    assert len(backward) > 10
    assert all(call.context.autocast == {} for call in backward)
    products = {ref.dtype for c in backward if c.api == "Aten.mm" for ref in (c.outputs,)}
    assert products == {"float16", "bfloat16", "float32"}


def test_backward_within_a_region(tmp_path: Path) -> None:
    """Against torch's advice, and done all the same: the engine computes under autocast."""

    def training() -> list[torch.Tensor]:
        model = net()
        with on(BF16):
            x = model[0](torch.randn(4, 12))
            loss = model[1](F.silu(x)).float().square().mean()
            loss.backward()
        return trained(model, loss)

    all_pass(captured_as_without(tmp_path / "spool", training), 12)
    backward = [call for call in calls(tmp_path / "spool") if call.direction == "backward"]
    assert {tuple(call.context.autocast.items()) for call in backward} == {(("cpu", "bfloat16"),)}


@pytest.mark.parametrize("cache", [True, False], ids=["cached", "cast anew"])
def test_a_weight_that_is_used_twice_in_a_region(tmp_path: Path, cache: bool) -> None:
    """autocast casts it once, or twice: gradients of the two uses meet in bf16, or in fp32."""

    def training() -> list[torch.Tensor]:
        model = net()
        x = torch.randn(4, 12)
        for _ in range(2):
            with on(BF16, cache_enabled=cache):
                y = model[0](F.gelu(model[0](x)))
                with on(BF16):
                    y = F.linear(y, model[0].weight.t())
                loss = (y + model[1](y)).float().square().mean()
            loss.backward()
        return trained(model, loss)

    all_pass(captured_as_without(tmp_path / "spool", training), 40)
    met = [
        call.outputs.dtype
        for call in calls(tmp_path / "spool")
        if call.api == "Aten.add" and call.outputs.shape == (12, 12)
    ]
    assert met.count("bfloat16") == (2 if cache else 0)
    assert met.count("float32") == (2 if cache else 4)


def test_fp32_weights_in_bf16(tmp_path: Path) -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8, requires_grad=True)

    def training() -> list[torch.Tensor]:
        with on(BF16):
            y = F.linear(x, w)
        (gradient,) = torch.autograd.grad(y.sum(), w)
        assert (y.dtype, gradient.dtype) == (BF16, torch.float32)
        return [y, gradient]

    found = captured_as_without(tmp_path / "spool", training)
    all_pass(found, 4)
    linear = next(call for call in calls(tmp_path / "spool") if call.api == "Functional.linear")
    assert [ref.dtype for ref in linear.args[:2]] == ["float32", "float32"]
    assert linear.outputs.dtype == "bfloat16"
    assert found.verdicts["forward", "pass"] == 2


def test_a_weight_that_changes_within_a_region(tmp_path: Path) -> None:
    """autocast goes on with its cast of the old weight; that is no error of the operator."""

    def training() -> list[torch.Tensor]:
        model = net()
        x = torch.randn(4, 12)
        with on(BF16):
            before = model[0](x)
            with torch.no_grad():
                model[0].weight.mul_(2)
            after = model[0](x)
            assert torch.equal(before, after), "torch uses its cast of the old weight"
        return trained(model, after.float().sum())

    found = captured_as_without(tmp_path / "spool", training)
    assert {verdict for _, verdict in found.verdicts} <= {"pass", "SKIP"}, found.reasons
    assert found.skipped == {"weight changed within an autocast region": 1}


@pytest.mark.parametrize("where", ["outside", "in between", "in a part without"])
def test_a_weight_that_changes_where_its_cast_is_not_kept(tmp_path: Path, where: str) -> None:
    def training() -> list[torch.Tensor]:
        model = net()
        x = torch.randn(4, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(2):
            with on(BF16) if where != "outside" else nullcontext():
                loss = model[1](model[0](x)).float().square().mean()
                if where == "in a part without":
                    with torch.autocast("cpu", enabled=False):
                        losses.append(model[0](x).sum())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return trained(model, torch.stack([loss.detach() for loss in losses]))

    found = captured_as_without(tmp_path / "spool", training)
    assert found.skipped == {}
    assert {verdict for _, verdict in found.verdicts} == {"pass"}, found.reasons


class Scaled(torch.autograd.Function):
    """Computes in a dtype of its own, in both directions."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w) * 0.5

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return torch.mm(grad, w.t()) * 0.5, torch.mm(x.t(), grad) * 0.5


class Kept(torch.autograd.Function):
    """Whose backward runs under the autocast of its forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return torch.mm(grad, w.t()), torch.mm(x.t(), grad)


def test_functions_with_an_autocast_of_their_own(tmp_path: Path) -> None:
    def training() -> list[torch.Tensor]:
        model = net()
        with on(BF16):
            x = model[0](torch.randn(4, 12))
            x = Kept.apply(Scaled.apply(x, model[1].weight), model[2].weight)
            loss = x.float().square().mean()
        loss.backward()
        return trained(model, loss)

    all_pass(captured_as_without(tmp_path / "spool", training), 20)
    products = [call for call in calls(tmp_path / "spool") if call.api.endswith(".mm")]
    assert {(c.direction, c.context.autocast.get("cpu"), c.outputs.dtype) for c in products} == {
        ("forward", None, "float32"),  # in Scaled
        ("forward", "bfloat16", "bfloat16"),  # in Kept
        ("backward", "bfloat16", "bfloat16"),
        ("backward", None, "float32"),
        ("backward", None, "bfloat16"),  # of the linear
    }


def teacher() -> list[torch.Tensor]:
    """Parts without gradients within a training: no_grad, inference_mode, enable_grad again."""
    model, other = net(), net()
    x = torch.randn(4, 12)
    with torch.no_grad():
        target = other[0](x)
        with torch.enable_grad():
            inner = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(other[1](inner).sum(), inner)
    with torch.inference_mode():
        score = other[2](x).softmax(-1)
        score.mul_(0.5)
        score[0] = 1.0
        with torch.inference_mode(False):
            plain = other[3](x)
    y = model[0](x)
    loss = F.mse_loss(y, target + slope) + (y * score.clone()).mean() + plain.detach().mean()
    loss.backward()
    return [*trained(model, loss), score.clone(), target]


def within_autocast() -> list[torch.Tensor]:
    """A validation inside the region of a training step, which casts the same weights."""
    model = net()
    x = torch.randn(4, 12)
    with on(BF16):
        loss = model[0](x).float().square().mean()
        with torch.no_grad():
            valid = model[0](x * 2) + model[1](x)
        with torch.inference_mode():
            score = model[0](x * 3).float().mean()
        loss = loss + model[0](x + valid).float().mean()
    loss.backward()
    return [*trained(model, loss), valid, score.clone()]


@pytest.mark.parametrize("training", [teacher, within_autocast])
def test_parts_without_gradients(tmp_path: Path, training: Training) -> None:
    all_pass(captured_as_without(tmp_path / "spool", training), 15)
    found = calls(tmp_path / "spool")
    forward = {
        (c.context.grad_enabled, c.context.inference_mode)
        for c in found
        if c.direction == "forward"
    }
    assert forward == {(True, False), (False, False), (False, True)}
