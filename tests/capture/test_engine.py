"""Operators that the autograd engine runs: all of them, once, and nothing changes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import spool
from spool.capture import operators


def bases(calls: list[Any], direction: str = "backward") -> Counter[str]:
    return Counter(call.api for call in calls if call.direction == direction)


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(shape, requires_grad=True)


def by_method(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.backward()
    assert x.grad is not None
    return x.grad


def by_function(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward([y])
    assert x.grad is not None
    return x.grad


def by_grad(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, x)[0]


@pytest.mark.parametrize("way", [by_method, by_function, by_grad])
def test_every_way_into_the_engine(spooled, way):
    x, w = leaf(3, 4), leaf(5, 4)
    plain = way(F.gelu(F.linear(x, w)).sum(), x).clone()
    x.grad = None
    got = []
    calls = spooled.capture(lambda: got.append(way(F.gelu(F.linear(x, w)).sum(), x)))
    assert torch.equal(got[0], plain)
    found = bases(calls)
    assert found["Aten.gelu_backward"] == 1
    assert found["Aten.mm"] == (1 if way is by_grad else 2)
    backward = [call for call in calls if call.direction == "backward"]
    assert [call.order for call in backward] == sorted(call.order for call in backward)
    assert all(call.overload for call in backward)
    assert all(not call.overload for call in calls if call.direction == "forward")


def test_names_places_and_context(spooled):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.inner(x).tanh()

    net = Net()

    def body():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.ones(3, 4)).float().sum().backward()

    calls = spooled.capture(body)
    (tanh,) = [call for call in calls if call.api == "Aten.tanh_backward"]
    assert (tanh.context.forward, tanh.context.module) == ("Tensor.tanh.0", "Net")
    assert tanh.context.stack[0].endswith("in forward")
    assert tanh.context.autocast == {"cpu": "bfloat16"}
    assert not tanh.context.grad_enabled
    products = [call for call in calls if call.api == "Aten.mm"]
    assert {call.context.module for call in products} == {"Net.inner"}
    assert {call.context.forward for call in products} == {"Functional.linear.0"}
    assert products[0].args[0].dtype == "bfloat16"
    assert [call.name for call in products] == ["Aten.mm.0"]


def test_double_backward(spooled):
    def run():
        x = leaf(4)
        (first,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    plain = run()
    got = []
    calls = spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0], plain)
    assert bases(calls)["Aten.mul"] >= 8


def test_hooks_and_custom_functions_are_operators(spooled):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.special.expit(grad)

    def body():
        x = leaf(4)
        x.register_hook(lambda grad: grad.cosh())
        Twice.apply(x).sum().backward()

    calls = spooled.capture(body)
    found = bases(calls)
    assert found == {"Aten.sigmoid": 1, "Aten.cosh": 1}
    (hook,) = [call for call in calls if call.api == "Aten.cosh"]
    assert "in <lambda>" in hook.context.stack[0]
    assert bases(calls, "forward")["Tensor.mul"] == 1


def test_in_place_operators_have_their_inputs_from_before(spooled):
    x = leaf(3)
    x.grad = torch.full((3,), 7.0)
    before = x.grad
    calls = spooled.capture(lambda: (x * 2).sum().backward())
    assert x.grad is before
    (add,) = [call for call in calls if call.api == "Aten.add_"]
    assert add.regions[add.args[0].region].tolist() == [7.0] * 3
    assert add.regions[add.outputs.region].tolist() == [9.0] * 3


def test_optimizer_in_a_hook_is_split_per_tensor(spooled):
    x, y = leaf(3), leaf(2)

    def step(_):
        torch._foreach_add_([x.data, y.data], [torch.ones(3), torch.ones(2)], alpha=0.5)

    x.register_post_accumulate_grad_hook(step)
    calls = spooled.capture(lambda: (x.sum() + y.sum()).backward())
    parts = [call for call in calls if call.api == "Aten._foreach_add_"]
    assert [call.name for call in parts] == ["Aten._foreach_add_.0", "Aten._foreach_add_.1"]
    assert len({call.order for call in parts}) == 1
    assert [len(call.mutated) for call in parts] == [1, 1]


@pytest.mark.parametrize(
    ("way", "create_graph"),
    [
        *[(way, False) for way in ("none", "reentrant", "nonreentrant", "selective")],
        *[(way, True) for way in ("none", "nonreentrant", "selective")],
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_recomputation_is_not_captured_again(spooled, way, create_graph):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))

    def block(x):
        if way == "none":
            return layer(x)
        more: dict[str, Any] = {"use_reentrant": way == "reentrant"}
        if way == "selective":
            from functools import partial

            from torch.utils.checkpoint import create_selective_checkpoint_contexts

            save = [torch.ops.aten.addmm.default]
            more["context_fn"] = partial(create_selective_checkpoint_contexts, save)
        return checkpoint(layer, x, **more)

    def run():
        layer.zero_grad()
        x = leaf(3, 4)
        block(block(x)).square().sum().backward(create_graph=create_graph)
        return [p.grad.detach().clone() for p in layer.parameters()]

    plain = run()
    got = []
    calls = spooled.capture(lambda: got.extend(run()))
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    assert bases(calls, "forward")["Functional.linear"] == 4
    assert bases(calls, "forward")["Functional.gelu"] == 2
    found = bases(calls)
    assert found["Aten.gelu"] == found["Aten.addmm"] == 0
    assert found["Aten.gelu_backward"] == 2
    assert found["Aten.mm"] == 8


def test_checkpoint_gives_the_same_names(spooled, tmp_path):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    names = []
    for number, way in enumerate((layer, lambda x: checkpoint(layer, x, use_reentrant=False))):
        layer.zero_grad()
        root = tmp_path / str(number)
        with spool.enable(spool_dir=root):
            way(leaf(3, 4)).square().sum().backward()
        names.append(sorted(entry.name for entry in spool.store.Store.open(root).shards(0, 0)))
    assert names[0] == names[1]


def test_another_mode_around_and_inside(spooled):
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operators.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(mode):
        x = leaf(4)
        y = F.gelu(x).sum()
        with mode:
            y.backward()
        return mode.operators

    plain = run(Seen())
    got = []
    calls = spooled.capture(lambda: got.extend(run(Seen())))
    assert got == plain, "another mode sees what it saw, and none of our copies"
    assert bases(calls)["Aten.gelu_backward"] == 1
    assert _get_current_dispatch_mode_stack() == []


def test_an_exception_in_the_engine_propagates(spooled):
    x = leaf(4)

    def fail(_):
        raise KeyError("mine")

    x.register_hook(fail)
    with spooled.enable(), pytest.raises(KeyError, match="mine"):
        (x.sin() * 2).sum().backward()
    assert _get_current_dispatch_mode_stack() == []
    assert bases(spooled.calls())["Aten.cos"] == 1


def is_seen():
    """Whether the key that shows operators is in this thread's state."""
    return torch._C._dispatch_tls_is_dispatch_key_included(operators._key())


@pytest.mark.parametrize(
    ("setting", "expected"), [("on", True), ("stopped", False), ("backward=False", False)]
)
def test_the_engine_is_left_alone_where_nothing_of_it_is_captured(spooled, setting, expected):
    seen = []
    x = leaf(4)
    x.register_hook(lambda _: seen.append(is_seen()))
    session = spooled.enable(backward=setting != "backward=False")
    if setting == "stopped":
        session.stop()
    x.sin().sum().backward()
    session.disable()
    assert seen == [expected]
    assert bool(bases(spooled.calls())) == expected
    assert not is_seen()


def test_an_engine_of_another_thread_is_not_captured(spooled):
    def work():
        leaf(4).sin().sum().backward()

    def body():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert spooled.capture(body) == []


def test_operators_that_replay_does_not_know_are_counted_by_name(spooled):
    lengths = torch.tensor([3])
    with spooled.enable():
        x = leaf(5, 1, 4)
        loss = F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]), lengths + 2, lengths - 1)
        loss.backward()
    skipped = spooled.store().step_closed(0, 0).skipped
    assert skipped == {"operator without replay: aten._ctc_loss_backward": 1}


def test_views_add_nothing(spooled):
    def body():
        x = leaf(4, 4)
        x.view(2, 8).t().unsqueeze(0).sum().backward()

    calls = spooled.capture(body)
    assert bases(calls) == {}, "the gradient of views and of a sum is views"


def test_looking_at_the_graph_does_not_change_it(spooled):
    """In-place changes of views make nodes when they are looked at; the order must stay."""

    def run():
        base = leaf(6, 3) * 1
        view = base[1:3]
        view.mul_(3.0)
        a = base.sin()
        b = view.cos()
        c = base.exp()
        loss = a.sum() + b.sum() * 0.1 + c.sum() * 0.3 + (view * base[0:2]).sum()
        return torch.autograd.grad(loss, base, retain_graph=True)[0], loss.detach()

    def order():
        base = leaf(6, 3) * 1
        view = base[1:3]
        view.mul_(3.0)
        a = base.sin()
        return view.grad_fn._sequence_nr() - a.grad_fn._sequence_nr()

    plain, distance = run(), order()
    got = []
    spooled.capture(lambda: got.extend([run(), order()]))
    assert all(torch.equal(a, b) for a, b in zip(got[0], plain, strict=True))
    assert got[1] == distance


def test_experts_are_captured_in_both_directions(spooled):
    x = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    calls = spooled.capture(lambda: F.grouped_mm(x, w, offs=ends).square().sum().backward())
    assert next(call.api for call in calls) == "Torch._grouped_mm"
    assert bases(calls)["Aten._grouped_mm"] == 2
    assert spooled.store().step_closed(0, 0).skipped == {}


def test_private_functions_that_compute_are_counted(spooled):
    with spooled.enable():
        torch._amp_update_scale_(torch.ones(1), torch.zeros(1).int(), torch.zeros(1), 2.0, 0.5, 9)
        torch._C._set_grad_enabled(True)
    skipped = spooled.store().step_closed(0, 0).skipped
    assert skipped == {"operator without replay: aten._amp_update_scale_": 1}


def test_zero_tensors_of_a_second_derivative(spooled):
    """torch alone ends the process here under a dispatch mode that only passes on."""

    def run():
        x, y = leaf(5, 5), leaf(5, 5)
        first = torch.autograd.grad((x + 2 * y).abs().sum(), [x, y], create_graph=True)
        loss = torch.add(x, y, alpha=2).abs().sum()
        second = torch.autograd.grad(loss, [x, y], create_graph=True)
        return torch.autograd.grad(sum(g.abs().sum() for g in (*first, *second)), [x, y])

    plain = run()
    got = []
    spooled.capture(lambda: got.extend(run()))
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_complex_gradients(spooled):
    def run():
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
        y = (x.conj() @ x.T).mul(3).imag.sum() + torch.linalg.svdvals(x.conj()).sum()
        (y + (x * 2).conj().real.sum() + (-x.conj().imag).sin().sum()).backward()
        return x.grad

    plain = run()
    got = []
    calls = spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0], plain)
    assert bases(calls)["Aten.mm"] > 0


def learned_mask() -> torch.Tensor:
    value = torch.tensor(0.3, requires_grad=True)
    mask = torch.rand(64, 33) > 0.5
    (torch.randn(64, 33).masked_fill(mask, value) * torch.randn(64, 33)).sum().backward()
    assert value.grad is not None
    return value.grad


def product_with_a_zero() -> torch.Tensor:
    x = torch.randn(5, 5, 5)
    x[1, 2, 3] = 0
    x.requires_grad_().prod(1).mul(torch.randn(5, 5)).sum().backward()
    assert x.grad is not None
    return x.grad


def product_twice() -> torch.Tensor:
    x = torch.randn(4, 9, requires_grad=True)
    (first,) = torch.autograd.grad(x.cumprod(1).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", [learned_mask, product_with_a_zero, product_twice])
def test_gradient_formulas_take_the_same_paths(spooled, way):
    """While a dispatch mode is active they take others, with other last bits."""

    def run():
        torch.manual_seed(4)
        return way()

    plain = run()
    got = []
    assert bases(spooled.capture(lambda: got.append(run())))
    assert torch.equal(got[0], plain)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_by_position(spooled):
    def body():
        x = leaf(3)
        torch.autograd.backward([x.sin()], [torch.ones(3)], True, True)
        leaf(3).sin().backward(torch.ones(3), True, True)
        torch.autograd.grad([x.sin().sum()], [x], None, True, True)

    assert bases(spooled.capture(body))["Aten.cos"] == 3


@pytest.mark.parametrize("way", ["nonreentrant", "reentrant", "own"])
def test_parts_without_gradient_are_not_captured_again(spooled, tmp_path, way):
    class Own(torch.autograd.Function):
        """A checkpoint of somebody else."""

        @staticmethod
        def forward(ctx, layer, x):
            ctx.layer = layer
            ctx.save_for_backward(x)
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.layer(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].exp()

    class Layer(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                largest = x.abs().amax(-1, keepdim=True)
            return Exponential.apply(x / largest).tanh()

    layer = Layer()
    found = []
    for number, recomputing in enumerate((False, True)):
        x = leaf(2, 3)
        root = tmp_path / str(number)
        with spool.enable(spool_dir=root):
            if not recomputing:
                y = layer(x)
            elif way == "own":
                y = Own.apply(layer, x)
            else:
                y = checkpoint(layer, x, use_reentrant=way == "reentrant")
            y.sum().backward()
        entries = spool.store.Store.open(root).shards(0, 0)
        found.append(sorted(entry.name for entry in entries if entry.name.startswith("Aten.")))
    assert found[0] == found[1] != []


@pytest.mark.parametrize("selection", [{}, {"white_list": ["mm", "cos", "gelu_backward"]}])
def test_a_place_is_that_of_the_node_s_own_call(spooled, selection):
    layer = torch.nn.Linear(4, 4)

    def body():
        y = layer(leaf(3, 4))[:, 1:3]
        y = F.gelu(y * 2)
        (torch.sin(y) * 3).sum().backward()

    calls = spooled.capture(body, **selection)
    place = {call.api: call.context.forward for call in calls if call.direction == "backward"}
    assert place["Aten.cos"] == "Torch.sin.0"
    assert place["Aten.gelu_backward"] == "Functional.gelu.0"
    assert place["Aten.mm"] == "Functional.linear.0"


def test_engines_inside_engines_in_other_threads(spooled):
    """Beyond a depth torch goes on in a thread of its own."""

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, n):
            ctx.n = n
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = Deep.apply(x, ctx.n - 1) if ctx.n else x.cos()
                y.sum().backward()
            return grad * x.grad, None

    def run():
        x = leaf(3)
        Deep.apply(x, 80).sum().backward()
        return x.grad

    plain = run()
    got = []
    calls = spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0], plain)
    assert bases(calls)["Aten.mul"] >= 81


def test_two_threads_in_their_engines_at_once(spooled):
    """One captured, one not: the other's operators stay out."""
    session = spooled.enable()
    started, go = threading.Event(), threading.Event()

    def work():
        x = leaf(3)
        x.register_hook(lambda grad: (started.set(), go.wait(30), grad.cosh())[-1])
        x.sin().sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    leaf(4).exp().sum().backward()
    go.set()
    thread.join()
    session.disable()
    assert bases(spooled.calls()) == {"Aten.mul": 1}


def test_a_linear_whose_result_is_a_view_has_its_place(spooled):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)

        def forward(self, x):
            return self.second(self.first(x))

    net = Net()
    calls = spooled.capture(
        lambda: F.mse_loss(net(torch.randn(2, 3, 4)), torch.randn(2, 3, 4)).backward()
    )
    products = [call for call in calls if call.api == "Aten.mm"]
    assert [call.context.module for call in products] == ["Net.second", "Net.second", "Net.first"]


def test_operators_that_torch_dispatches_in_python(spooled):
    def run():
        x = leaf(4, 4)
        y = torch.cond(x.sum() > 100, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))
        y.sum().backward()
        return x.grad

    plain = run()
    got = []
    spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0], plain)
    assert spooled.store().step_closed(0, 0).skipped["compiled graph"] >= 1


class Doubled(torch.Tensor):
    """Whose every use from Python counts double."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                return (result * 2).as_subclass(torch.Tensor)
            return result


class Shy(torch.Tensor):
    """Which knows one function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.mul:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return torch.mul(*args).as_subclass(torch.Tensor)


class Named(torch.Tensor):
    """Which says nothing."""


@pytest.mark.parametrize("kind", [Doubled, Shy, Named])
def test_tensor_subclasses_are_not_asked_in_the_engine(spooled, kind):
    def run():
        torch.manual_seed(0)
        with torch._C.DisableTorchFunctionSubclass():
            weight = torch.randn(4).as_subclass(kind).requires_grad_()
        x = torch.randn(4, requires_grad=True)
        seen = []
        scaled = x * 1
        scaled.register_hook(lambda grad: seen.append(type(grad)))
        y = torch.mul(scaled, weight)
        with torch._C.DisableTorchFunctionSubclass():
            y = y.as_subclass(torch.Tensor)
        y.sum().backward()
        return x.grad, seen

    plain = run()
    got = []
    calls = spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0][0], plain[0])
    assert got[0][1] == plain[1]
    assert bases(calls)["Aten.mul"] >= 1


def test_a_step_may_end_in_a_hook(spooled, said):
    with spooled.enable() as session:
        x = leaf(4)
        x.register_hook(lambda _: session.step())
        x.sin().sum().backward()
        x.cos()
    assert [e.name for e in spooled.store().shards(0, 1)] == ["Tensor.cos.0"]
    assert "hook is gone" not in said()


def test_a_capture_may_end_in_a_hook(spooled, said):
    spooled.enable()
    x = leaf(4)
    x.register_hook(lambda _: spool.disable())
    x.sin().sum().backward()
    assert "gone" not in said()
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert closed.reason == "disabled"
    x.cos()
    with spool.enable(spool_dir=spooled.root.with_name("next")):
        x.tan()
    assert len([m for m in _get_current_function_mode_stack() if "Interceptor" in str(m)]) <= 1


def test_create_graph_of_another_type_is_torch_s_to_refuse(spooled):
    x = leaf(4)
    with spooled.enable(), pytest.raises(TypeError):
        x.sin().sum().backward(create_graph=torch.ones(2))


def test_jagged_tensors_are_counted_by_their_type(spooled):
    with spooled.enable():
        rows = [torch.randn(3, 4), torch.randn(5, 4)]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        F.layer_norm(jagged.sin() * 2, (4,)).values().sum().backward()
    skipped = spooled.store().step_closed(0, 0).skipped
    assert "hook failed" not in skipped
    assert skipped["torch.nested._internal.nested_tensor.NestedTensor"] > 2


def test_a_torch_that_does_not_show_its_operators(spooled, said, monkeypatch):
    from spool.capture import operators

    def missing(ops):
        raise AttributeError("no such list")

    monkeypatch.setattr(operators, "_libraries", {})
    monkeypatch.setattr(operators, "_library", lambda namespace: missing(namespace))
    monkeypatch.setattr(operators, "_is_unable", False)
    calls = spooled.capture(lambda: leaf(4).sin().sum().backward())
    assert [call.name for call in calls] == ["Tensor.sin.0", "Tensor.sum.0"]
    assert "does not show the operators inside backward, they are not captured: no such" in said()


def test_a_subclass_that_does_not_tell_its_device_is_no_obstacle(spooled):
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, dispatch_device=True, device="cpu"
            )

        def __init__(self, inner):
            self.inner = inner.detach()

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.prim.device.default:
                raise KeyError("nobody asks for this")
            args = [x.inner if isinstance(x, Wrapped) else x for x in args]
            result = func(*args, **(kwargs or {}))
            return Wrapped(result) if isinstance(result, torch.Tensor) else result

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 0.5

        @staticmethod
        def backward(ctx, grad):
            return grad * (Wrapped(grad) * 0.5).inner

    def run():
        x = leaf(4)
        Half.apply(x).sum().backward()
        return x.grad

    plain = run()
    got = []
    spooled.capture(lambda: got.append(run()))
    assert torch.equal(got[0], plain)
