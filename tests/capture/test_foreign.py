"""Default devices, subclassed parameters, other people's modes: they see what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import spool

if TYPE_CHECKING:
    from conftest import Spool

    from spool.capture.session import Session


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []


# Programs that set a device before, while and after `on` runs until `off`. Each gives
# back the device of new tensors at every moment.
Switch = Callable[[], object]


def where() -> str:
    assert torch.get_default_device() == torch.ones(1).device
    return torch.ones(1).device.type


def setter_around(on: Switch, off: Switch) -> list[str]:
    torch.set_default_device("cpu")
    on()
    seen = [where()]
    off()
    seen.append(where())
    torch.set_default_device(None)
    return [*seen, where()]


def setter_before_and_another_after(on: Switch, off: Switch) -> list[str]:
    torch.set_default_device("cpu")
    on()
    seen = [where()]
    for device in ("meta", "cpu", None, "meta"):
        torch.set_default_device(device)
        seen.append(where())
    off()
    seen.append(where())
    torch.set_default_device(None)
    return [*seen, where()]


def setter_after(on: Switch, off: Switch) -> list[str]:
    on()
    torch.set_default_device("meta")
    seen = [where()]
    torch.set_default_device("cpu")
    seen.append(where())
    off()
    seen.append(where())
    torch.set_default_device(None)
    return [*seen, where()]


def setter_before_given_back_after_the_end(on: Switch, off: Switch) -> list[str]:
    torch.set_default_device("meta")
    on()
    torch.set_default_device(None)
    seen = [where()]
    off()
    return [*seen, where()]


def context_around(on: Switch, off: Switch) -> list[str]:
    with torch.device("cpu"):
        on()
        seen = [where()]
        with torch.device("meta"):
            seen.append(where())
        seen.append(where())
        off()
        seen.append(where())
    return [*seen, where()]


def context_after(on: Switch, off: Switch) -> list[str]:
    on()
    with torch.device("meta"):
        seen = [where()]
        with torch.device("cpu"):
            seen.append(where())
        off()
        seen.append(where())
    return [*seen, where()]


def context_within_a_setter(on: Switch, off: Switch) -> list[str]:
    torch.set_default_device("cpu")
    with torch.device("meta"):
        on()
        seen = [where()]
        with torch.device("cpu"):
            seen.append(where())
        off()
        seen.append(where())
    seen.append(where())
    torch.set_default_device(None)
    return [*seen, where()]


@pytest.mark.parametrize(
    "program",
    [
        setter_around,
        setter_before_and_another_after,
        setter_after,
        setter_before_given_back_after_the_end,
        context_around,
        context_after,
        context_within_a_setter,
    ],
)
def test_new_tensors_lie_where_they_lay(
    spooled: Spool, said: Callable[[], str], program: Callable[[Switch, Switch], list[str]]
) -> None:
    plain = program(lambda: None, lambda: None)
    sessions: list[Session] = []
    x = torch.ones(2)

    def on() -> None:
        sessions.append(spooled.enable())
        torch.sin(x)

    def off() -> None:
        torch.cos(x)
        sessions[0].disable()

    assert program(on, off) == plain
    assert spooled.names() == ["Torch.sin.0", "Torch.cos.0"]
    assert "gone" not in said()


@pytest.fixture
def cleaned() -> Iterator[None]:
    """Takes away what torch's setter leaves behind when it fails."""
    yield
    if _get_current_function_mode_stack():
        spool.disable()
        while _get_current_function_mode_stack():
            torch.overrides._pop_mode()
        torch._GLOBAL_DEVICE_CONTEXT.device_context = None
        torch.utils._device.CURRENT_DEVICE = None


@pytest.mark.parametrize("first", [None, "cpu"])
@pytest.mark.parametrize("paused", ["by stop", "by steps"])
def test_a_default_device_that_is_set_while_capture_pauses(
    spooled: Spool, cleaned: None, paused: str, first: str | None
) -> None:
    torch.set_default_device(first)
    session = spooled.enable(**({"step": [0, 2]} if paused == "by steps" else {}))
    session.step()
    if paused == "by stop":
        session.stop()
    torch.set_default_device("meta")
    session.step()
    session.start()
    assert torch.ones(1).is_meta
    torch.set_default_device("cpu")
    torch.sin(torch.ones(1))
    torch.set_default_device(None)
    torch.cos(torch.ones(1))
    session.disable()
    assert spooled.names(2) == ["Torch.sin.0", "Torch.cos.0"]


class Plain(nn.Parameter):
    """A parameter that somebody marked."""

    mark = "mine"


class Watched(torch.Tensor):
    """Which writes down every use of it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Leaving(torch.Tensor):
    """Whose results are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def parameter(kind: type[torch.Tensor], value: torch.Tensor) -> nn.Parameter:
    if issubclass(kind, nn.Parameter):
        return kind(value)
    if kind is Watched:
        return nn.Parameter(value.as_subclass(kind))
    weight: Any = value.as_subclass(kind).requires_grad_()
    weight._is_param = True  # as torch marks one of another class
    return weight


class Net(nn.Module):
    def __init__(self, kind: type[torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = parameter(kind, torch.randn(4, 6))
        self.bias = parameter(kind, torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, self.weight, self.bias) * self.bias.exp())


def train(kind: type[torch.Tensor], **options: Any) -> list[Any]:
    """Losses, gradients, weights, and the types of all of them."""
    model = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    kept: list[Any] = []
    for _ in range(2):
        loss = model(torch.randn(3, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        kept += [loss, *(p.grad for p in model.parameters())]
    kept += [*model.parameters()]
    with torch._C.DisableTorchFunctionSubclass():
        return [(type(x), x.detach().as_subclass(torch.Tensor).clone()) for x in kept]


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}], ids=["foreach", "loop"]
)
@pytest.mark.parametrize("kind", [Plain, Watched, Leaving])
def test_subclassed_parameters(
    spooled: Spool, said: Callable[[], str], kind: type[torch.Tensor], options: dict[str, Any]
) -> None:
    Watched.seen.clear()
    plain, uses = train(kind, **options), list(Watched.seen)
    Watched.seen.clear()
    with spooled.enable():
        captured = train(kind, **options)
    assert Watched.seen == uses
    assert (len(uses) > 20) == (kind is Watched)
    for (a, x), (b, y) in zip(plain, captured, strict=True):
        assert a is b
        assert torch.equal(x, y)
    counts = spooled.store().step_closed(0, 0)
    assert counts is not None
    assert (counts.dropped, counts.skipped) == (0, {})
    assert "hook failed" not in said()
    names = spooled.names()
    assert counts.shards == len(names)
    for name in ("Functional.linear.1", "Functional.gelu.1", "Aten.gelu_backward.1", "Aten.mm.1"):
        assert name in names


def test_calls_of_a_subclass_are_those_of_a_parameter(spooled: Spool, tmp_path: Path) -> None:
    found = []
    for number, kind in enumerate((nn.Parameter, Plain, Watched, Leaving)):
        spooled.root = tmp_path / str(number)
        calls = spooled.capture(partial(train, kind, foreach=False))
        found.append(
            [
                (call.name, call.args, call.outputs, [part.tobytes() for part in call.regions])
                for call in calls
            ]
        )
    assert len(found[0]) > 60
    assert found[1:] == [found[0]] * 3


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


Mode = Functions | Operators


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("kind", [Functions, Operators])
def test_other_modes_see_what_they_saw(spooled: Spool, kind: type[Mode], when: str) -> None:
    """Neither our copies, nor less, nor in another order; with the same bits."""

    def run(*, on: bool) -> tuple[list[Mode], list[Any]]:
        modes = [kind() for _ in range(2)]
        with ExitStack() as stack:
            if when != "after":
                stack.enter_context(modes[0])
            if on:
                session = spooled.enable()
            if when != "before":
                stack.enter_context(modes[1])
            kept = train(nn.Parameter, foreach=True)
            if on:
                session.step()
                seen = [len(mode.seen) for mode in modes]
                session.disable()
                assert [len(mode.seen) for mode in modes] == seen
        return modes, kept

    plain, values = run(on=False)
    modes, captured = run(on=True)
    assert [mode.seen for mode in modes] == [mode.seen for mode in plain]
    assert sum(len(mode.seen) > 50 for mode in modes) == (2 if when == "both" else 1)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(values, captured, strict=True))
    names = spooled.names()
    for name in ("Functional.linear.1", "Aten.gelu_backward.1", "Torch._foreach_addcdiv_.3"):
        assert name in names


class Replaced(TorchDispatchMode):
    """A fault of somebody's, inside backward too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.gelu_backward.default else result


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_dispatch_mode_makes_of_a_result_stays(spooled: Spool, when: str) -> None:
    def run(*, on: bool) -> torch.Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        with ExitStack() as stack:
            if when == "before":
                stack.enter_context(Replaced())
            if on:
                stack.enter_context(spooled.enable())
            if when == "after":
                stack.enter_context(Replaced())
            F.gelu(x).sum().backward()
        assert x.grad is not None
        return x.grad

    plain, captured = run(on=False), run(on=True)
    assert torch.equal(plain, captured)
    (call,) = [c for c in spooled.calls() if c.api == "Aten.gelu_backward"]
    assert call.regions[call.outputs.region].tolist() == plain.tolist()
