"""Stages of a pipeline in threads of their own: who attaches is captured, nobody is disturbed."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import spool

if TYPE_CHECKING:
    from conftest import Spool

STEPS, BATCHES, PATIENCE = 2, 3, 60
Attach = Callable[[int], Any]


def nobody(stage: int) -> Any:
    return nullcontext()


class Stages:
    """Two stages, each forward and backward in its thread, an optimizer in the caller's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        self.parameters = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, foreach=True)
        self.errors: list[BaseException] = []
        self.losses: list[torch.Tensor] = []

    def train(self, attach: Attach, end_step: Callable[[], None]) -> list[torch.Tensor]:
        """What must not change."""
        kept = []
        for _ in range(STEPS):
            self.batches(attach)
            kept += [p.grad.clone() for p in self.parameters if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
            end_step()
        assert self.errors == []
        return [*kept, *self.losses, *(p.detach() for p in self.parameters)]

    def batches(self, attach: Attach) -> None:
        data = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(BATCHES)]
        down: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        up: queue.Queue[torch.Tensor] = queue.Queue()

        def one() -> None:
            results = []
            for x, target in data:
                results.append(self.first(x))
                down.put((results[-1].detach(), target))
            for result in results:
                result.backward(up.get(timeout=PATIENCE))

        def two() -> None:
            for _ in range(BATCHES):
                x, target = down.get(timeout=PATIENCE)
                loss = F.cross_entropy(self.second(x.requires_grad_()), target)
                loss.backward()
                assert x.grad is not None
                up.put(x.grad)
                self.losses.append(loss.detach())

        threads = [
            threading.Thread(target=self.stage, args=(number, work, attach))
            for number, work in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    def stage(self, number: int, work: Callable[[], None], attach: Attach) -> None:
        try:
            with attach(number):
                work()
            assert _get_current_function_mode_stack() == []
        except BaseException as error:
            self.errors.append(error)


def bases(names: list[str]) -> Counter[str]:
    return Counter(name.rpartition(".")[0] for name in names)


@pytest.mark.parametrize("attached", [{0, 1}, {0}, {1}, set()], ids=str)
def test_stages(spooled: Spool, attached: set[int]) -> None:
    plain = Stages().train(nobody, lambda: None)
    with spooled.enable() as session:

        def attach(stage: int) -> Any:
            return session.attach() if stage in attached else nullcontext()

        captured = Stages().train(attach, session.step)
    assert len(plain) == len(captured)
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    for step in range(STEPS):
        names = spooled.names(step)
        assert len(set(names)) == len(names) == closed.steps[step].shards
        assert (closed.steps[step].dropped, closed.steps[step].skipped) == (0, {})
        found = bases(names)
        first, second = BATCHES * (0 in attached), BATCHES * (1 in attached)
        # Forward and backward of each stage, and the optimizer of the enabling thread.
        assert found["Functional.linear"] == first + 2 * second
        assert found["Functional.gelu"] == found["Aten.gelu_backward"] == first
        assert found["Functional.layer_norm"] == second
        assert found["Aten.native_layer_norm_backward"] == second
        assert found["Functional.cross_entropy"] == found["Aten._log_softmax_backward_data"]
        assert found["Functional.cross_entropy"] == second
        assert found["Torch._foreach_addcdiv_"] == 8
        for api, uses in found.items():
            assert {f"{api}.{n}" for n in range(uses)} <= set(names)
        orders = [call.order for call in spooled.calls(step) if "_foreach_" not in call.api]
        assert len(set(orders)) == len(orders)


def test_two_threads_at_once(spooled: Spool) -> None:
    """Each in its own loops of forward and backward, without any order between them."""
    rounds, layers = 40, 3

    def work(model: nn.Module, x: torch.Tensor) -> None:
        for _ in range(rounds):
            model(x).sum().backward()

    def pair() -> list[tuple[nn.Module, torch.Tensor]]:
        torch.manual_seed(0)
        return [
            (nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)], nn.Tanh()), torch.randn(2, 4))
            for _ in range(2)
        ]

    alone, together = pair(), pair()
    for model, x in alone:
        work(model, x)
    meet, errors = threading.Barrier(2), []

    def attached(model: nn.Module, x: torch.Tensor) -> None:
        try:
            with session.attach():
                meet.wait(PATIENCE)
                work(model, x)
        except BaseException as error:
            errors.append(error)

    with spooled.enable() as session:
        threads = [threading.Thread(target=attached, args=one) for one in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert errors == []
    for (a, _), (b, _) in zip(alone, together, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
    names = spooled.names()
    counts = spooled.store().step_closed(0, 0)
    assert counts is not None
    assert (counts.shards, counts.dropped, counts.skipped) == (len(names), 0, {})
    found = bases(names)
    assert len(set(names)) == len(names)
    assert found["Functional.linear"] == 2 * rounds * layers
    assert found["Torch.tanh"] == found["Aten.tanh_backward"] == 2 * rounds
    assert found["Aten.mm"] == 2 * rounds * (2 * layers - 1)
    assert {f"Aten.mm.{n}" for n in range(found["Aten.mm"])} <= set(names)


def elsewhere(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)


def test_an_attached_thread_follows_steps_and_stops(spooled: Spool) -> None:
    def work() -> None:
        with session.attach(), session.attach():
            torch.sin(torch.ones(2))
        with pytest.raises(KeyError), session.attach():
            raise KeyError
        assert _get_current_function_mode_stack() == []

    session = spooled.enable(step=[1, 2])
    for _ in range(2):
        elsewhere(work)
        session.stop()
        elsewhere(work)
        session.start()
        elsewhere(work)
        session.step()
    session.disable()
    assert spooled.store().steps(0) == [1]
    assert spooled.names(1) == ["Torch.sin.0", "Torch.sin.1"]


def test_steps_end_while_attached_threads_work(spooled: Spool) -> None:
    """Whatever a call is in the middle of: it is in one step, and counted there."""
    steps, done, errors = 10, threading.Event(), []

    def work() -> None:
        try:
            layer, x = nn.Linear(4, 4), torch.randn(2, 4)
            with session.attach():
                while not done.is_set():
                    layer(x).tanh().sum().backward()
        except BaseException as error:
            errors.append(error)

    session = spooled.enable()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(steps):
        time.sleep(0.05)
        session.step()
    session.disable()
    done.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert set(range(steps)) <= set(closed.steps)
    assert sum(counts.shards for counts in closed.steps.values()) > 50
    for step, counts in closed.steps.items():
        names = spooled.names(step)
        assert len(set(names)) == len(names) == counts.shards
        assert (counts.dropped, counts.skipped) == (0, {})


def test_a_step_that_begins_in_another_thread_is_said_and_counted(
    spooled: Spool, said: Callable[[], str]
) -> None:
    spooled.enable(step=[1, 3])
    elsewhere(spool.step)
    torch.sin(torch.ones(2))
    spool.step()
    spool.step()
    torch.cos(torch.ones(2))
    spool.step()
    spool.disable()
    counts = spooled.store().step_closed(0, 1)
    assert counts is not None
    assert (counts.dropped, counts.skipped) == (1, {"step began in another thread": 1})
    assert said().count("step 1 began in another thread than the one that enabled capture") == 1
    assert spooled.names(3) == ["Torch.cos.0"]
