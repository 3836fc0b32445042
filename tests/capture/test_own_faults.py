"""A fault of ours, in any stage of capture, is not a fault of the training."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import spool
from spool.capture import (
    engine,
    operators,
    recorder,
    sink,
    taking,
)
from spool.capture.arena import Arena
from spool.capture.context import Places, Settings
from spool.capture.filters import Filters
from spool.capture.interceptor import Interceptor
from spool.capture.mutation import Watch
from spool.capture.naming import Counters, Names
from spool.capture.snapshot import Transfers
from spool.capture.watermark import Watermark
from spool.store import Store
from spool.tensors import Plan

if TYPE_CHECKING:
    from conftest import Spool

# Called for each call, in the thread that trains.
PER_CALL: dict[str, tuple[Any, str]] = {
    "name": (Names, "identify"),
    "arguments": (recorder, "call_tensors"),
    "tracing": (recorder, "tracing"),
    "foreign": (recorder, "foreign"),
    "place": (Places, "of_call"),
    "settings": (Settings, "context"),
    "counter": (Counters, "count"),
    "filter": (Filters, "wants"),
    "written arguments": (taking, "watch"),
    "plan": (Plan, "__init__"),
    "room": (sink.Sink, "reserve"),
    "memory": (Arena, "take"),
    "watermark": (Watermark, "has_room"),
    "copy": (Transfers, "copy"),
    "text": (taking, "dump_body"),
    "what was written": (Watch, "written"),
    "graph": (recorder, "edges"),
    "marks": (recorder, "mark"),
    "list": (recorder, "split_arguments"),
    "result": (recorder, "split_result"),
    "hand-over": (sink.Sink, "submit"),
    "recomputation": (engine.Engine, "_is_recomputed"),
    "operator": (operators, "_device"),
}
# Called at the end of a step or of the run, or by other threads.
BESIDE: dict[str, tuple[Any, str]] = {
    "step": (Filters, "new_step"),
    "seal": (sink.Sink, "seal"),
    "hook": (Interceptor, "present"),
    "line": (sink.Sink, "line"),
    "publish": (Store, "publish"),
    "sync": (Store, "sync"),
    "step marker": (Store, "close_step"),
    "rank marker": (Store, "close_rank"),
    "heartbeat": (Store, "heartbeat"),
    "usage": (Store, "usage"),
    "unmet": (Filters, "unmet"),
}


class Fault(Exception):
    """What is injected."""


def training() -> list[torch.Tensor]:
    """Two steps of a small network with lists of tensors; everything it computes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    seen: list[torch.Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 4)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        spool.step()
    return seen + [t.detach().clone() for t in net.state_dict().values()]


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return training()


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Makes a function fail at every `nth` call of it, counted in the list it gives back."""

    def begin(where: Any, name: str, nth: int) -> list[int]:
        original, calls = getattr(where, name), [0]

        def failing(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] % nth == 0:
                raise Fault(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, failing)
        return calls

    yield begin
    monkeypatch.undo()
    spool.disable()


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("stage", PER_CALL)
def test_a_fault_costs_the_call_and_is_counted(
    spooled: Spool,
    inject: Callable[..., list[int]],
    plain: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    stage: str,
    nth: int,
) -> None:
    caplog.set_level(logging.INFO, logger="spool")
    session = spooled.enable(max_spool_bytes=1 << 30, writer="threads")
    calls = inject(*PER_CALL[stage], nth)
    assert equal(training(), plain)
    session.disable()
    assert calls[0] >= nth, "the stage was never reached"
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    for step, counts in closed.steps.items():
        assert counts.shards == len(spooled.names(step))
        assert counts.skipped.get("hook failed", 0) == counts.dropped
    dropped = sum(counts.dropped for counts in closed.steps.values())
    assert (dropped > 0) == (stage != "operator")  # which is taken as a whole then
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == (stage != "operator")


@pytest.mark.parametrize("stage", BESIDE)
def test_a_fault_beside_the_calls_is_said(
    spooled: Spool,
    inject: Callable[..., list[int]],
    plain: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    stage: str,
) -> None:
    caplog.set_level(logging.INFO, logger="spool")
    # The first measurement is part of enable(), where an error is in place.
    session = spooled.enable(max_spool_bytes=1 << 30, max_wait=1.0, writer="threads")
    session._live._sink._watermark._stale = True
    calls = inject(*BESIDE[stage], 1)
    if stage in ("heartbeat", "usage"):
        end = threading.Event()
        end.wait(6 if stage == "heartbeat" else 1)
    assert equal(training(), plain)
    session.disable()
    assert calls[0] >= 1, "the stage was never reached"
    problems = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert problems
    if stage == "heartbeat":
        assert "the spool cannot be looked after: " in problems[0].getMessage()
    assert not session.active


def test_a_courier_that_dies_is_replaced(
    spooled: Spool,
    inject: Callable[..., list[int]],
    plain: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from spool.capture import remote

    session = spooled.enable()
    inject(remote, "task_message", 5)
    assert equal(training(), plain)
    session.disable()
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert sum(counts.dropped for counts in closed.steps.values()) == 0
    assert all(counts.shards == len(spooled.names(n)) > 20 for n, counts in closed.steps.items())
    assert "the writer process is given up" in caplog.text


def test_a_writer_process_that_is_killed_again_and_again(
    spooled: Spool, plain: list[torch.Tensor]
) -> None:
    session = spooled.enable()
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.001):
            process = session._live._sink.backend.process
            if process:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert equal(training(), plain)
    session.disable()
    done.set()
    thread.join()
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert all(counts.dropped == 0 < counts.shards for counts in closed.steps.values())
