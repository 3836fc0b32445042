"""torch.compile, FX, jit tracing, functorch, fake tensors: left alone and counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import spool


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def f(a, b):
    return F.gelu(a) + torch.mm(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_function(spooled, backend, said):
    x = torch.randn(4, 4)
    expected = f(x, x)
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    with spooled.enable():
        results = []
        for _ in range(3):
            results.append(compiled(x, x))
            torch.sin(x)
            spool.step()
    for result in results:
        torch.testing.assert_close(result, expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for step in range(3):
        assert spooled.names(step) == ["Torch.sin.0"]
    assert "hook failed" not in said()


def test_compiled_before_enable_is_not_compiled_again_each_time(spooled):
    x = torch.randn(4, 4)
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    compiled(x, x)
    with spooled.enable() as session:
        for _ in range(3):
            compiled(x, x)
        once = counters["stats"]["unique_graphs"]
        session.stop()
        compiled(x, x)
        session.start()
        compiled(x, x)
        assert counters["stats"]["unique_graphs"] == once <= 2
        session.step()
    skipped = spooled.store().step_closed(0, 0).skipped
    assert skipped["compiled graph"] >= 9
    assert spooled.names() == []


def test_training_through_a_compiled_module(spooled):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    net(x).sum().backward()
    expected = net.weight.grad.clone()
    net.zero_grad()
    with spooled.enable():
        for _ in range(2):
            net.zero_grad()
            compiled(x).sum().backward()
    assert torch.equal(net.weight.grad, expected)
    assert spooled.names() == ["Tensor.sum.0", "Tensor.sum.1"]
    assert spooled.store().step_closed(0, 0).skipped["compiled graph"] > 0


def test_what_runs_eagerly_after_a_graph_break_is_captured(spooled):
    def broken(a):
        b = torch.sin(a)
        torch._dynamo.graph_break()
        return torch.cos(b)

    @torch.compiler.disable
    def eager(a):
        return torch.tan(a)

    def with_eager(a):
        return eager(torch.sin(a))

    x = torch.ones(2)
    g, h = torch.compile(broken, backend="eager"), torch.compile(with_eager, backend="eager")
    with spooled.enable():
        for _ in range(2):
            g(x), h(x)
    assert [n for n in spooled.names() if "tan" in n] == ["Torch.tan.0", "Torch.tan.1"]
    assert not [n for n in spooled.names() if "cos" in n]


def test_graph_modules_that_run_eagerly_are_captured(spooled):
    x = torch.ones(2)
    graph = torch.fx.symbolic_trace(lambda a: torch.sin(a))
    spooled.capture(lambda: graph(x))
    assert spooled.names() == ["Torch.sin.0"]


def test_left_alone_and_counted(spooled, said):
    from torch._subclasses import FakeTensorMode

    with spooled.enable() as session:
        torch.jit.trace(lambda a: torch.sin(a), torch.ones(3), check_trace=False)
        torch.func.vmap(torch.sin)(torch.ones(2, 3))
        torch.func.grad(lambda a: torch.sin(a).sum())(torch.ones(3))
        with FakeTensorMode():
            torch.cos(torch.ones(3))
        torch.fx.symbolic_trace(lambda a: torch.exp(a))
        session.step()
    skipped = spooled.store().step_closed(0, 0).skipped
    assert skipped["torch.jit tracing"] >= 1
    assert skipped["functorch"] >= 3
    assert skipped["fake tensor"] == 1
    assert any("Proxy" in reason for reason in skipped)
    assert "hook failed" not in said()
    assert not [n for n in spooled.names() if "cos" in n or "exp" in n]


def test_export_while_capturing(spooled, said):
    with spooled.enable():
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        program.module()(torch.ones(1, 2))
    assert "hook failed" not in said()
