"""What the program could do without capture, it can do with it."""

from __future__ import annotations

import functools
import signal
import sys
import time

import pytest
import torch


@pytest.mark.parametrize("n", [3, 100_000])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_captured_storage_can_still_be_resized(spooled, n):
    """Arguments and results: `out=` buffers grow, and FSDP frees what it gathered."""

    def body():
        buffer = torch.empty(0)
        for size in (n, 2 * n):
            torch.add(torch.ones(size), 1, out=buffer)
        assert buffer.shape == (2 * n,)
        x = torch.ones(n)
        y = x + 1
        for tensor in (x, y):
            tensor.untyped_storage().resize_(0)
            assert tensor.untyped_storage().resizable()
        z = torch.ones(n)
        (z * 2).resize_(4)

    calls = spooled.capture(body)
    assert [call.name for call in calls][:2] == ["Torch.add.0", "Torch.add.1"]
    assert calls[1].regions[-1].nbytes == 2 * n * 4


class Preempted(Exception):
    """What a program raises from its own signal handler."""


def preempt(*arguments):
    raise Preempted


class Preemption:
    def __call__(self, number, frame):
        raise Preempted

    def told(self, number, frame):
        raise Preempted


@pytest.mark.parametrize(
    "handler",
    [preempt, functools.partial(preempt, "job"), Preemption(), Preemption().told],
    ids=["function", "partial", "object", "method"],
)
def test_an_exception_of_a_signal_handler_reaches_the_program(spooled, monkeypatch, handler):

    def rearm(unraisable):
        # The signal fell into a finalizer, from which Python lets no exception out:
        # not a case of this test, so the signal is sent again.
        assert unraisable.exc_type is Preempted
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    monkeypatch.setattr(sys, "unraisablehook", rearm)
    before = signal.signal(signal.SIGALRM, handler)
    session = spooled.enable()
    x = torch.ones(10_000)

    def work(delay):
        signal.setitimer(signal.ITIMER_REAL, delay)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            x * 2

    try:
        for delay in [0.0004 * n for n in range(1, 30)]:
            with pytest.raises(Preempted):
                work(delay)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    session.disable()
    assert session._live._sink._held >= 0
    counts = spooled.store().rank_closed(0).steps[0]
    assert counts.shards == len(spooled.names()) > 0


def test_an_exception_of_a_signal_handler_leaves_no_state(spooled):
    """Gradients stay on, and torch's dispatcher as it was, wherever the signal falls."""

    def handler(number, frame):
        raise Preempted

    def state():
        return (
            torch.is_grad_enabled(),
            torch._C._dispatch_tls_local_include_set().raw_repr(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr(),
            torch._C._is_torch_function_enabled(),
        )

    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])
    x = torch.randn(2, 4)
    first = state()
    before = signal.signal(signal.SIGALRM, handler)
    session = spooled.enable()
    end = time.monotonic() + 5
    rounds = 0
    try:
        while time.monotonic() < end:
            rounds += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0137 * (rounds % 17) / 17)
                until = time.monotonic() + 2
                while time.monotonic() < until:
                    net(x).sum().backward()
            except Preempted:
                pass
            assert state() == first, rounds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    session.disable()
    assert rounds > 10
