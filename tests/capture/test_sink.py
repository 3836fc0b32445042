"""Bounded memory, full spools, failing writes: nothing hangs, everything is counted."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
import torch

import spool
from spool.capture.arena import Arena
from spool.capture.sink import NoRoom, Record, Sink
from spool.capture.watermark import Watermark
from spool.capture.writers import Shard, Writers
from spool.store import Store


def sin(elements=1):
    torch.sin(torch.ones(elements))


@pytest.fixture
def threads(spooled):
    """Threads of this process write, where a test can reach them."""
    spooled.writer = "threads"


@pytest.fixture
def slow(threads, monkeypatch):
    """Holds every write back until it is set."""
    gate = threading.Event()
    publish = Store.publish

    def held(self, call):
        assert gate.wait(60)
        return publish(self, call)

    monkeypatch.setattr(Store, "publish", held)
    yield gate
    gate.set()


def test_full_queue_drops_after_max_wait_and_says_so(spooled, slow, said):
    session = spooled.enable(queue_bytes=10_000, max_wait=0.2)
    sin(1000)  # 8000 bytes are held
    sin(1000)
    sin(1000)
    sin(1)
    slow.set()
    session.step()
    session.disable()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped) == (2, 2)
    assert counts.skipped == {"queue full": 2}
    assert counts.blocked_seconds >= 0.2
    assert said().count("queue full: calls are dropped and counted until there is room") == 1
    assert spooled.names() == ["Torch.sin.0", "Torch.sin.3"]


def test_trainer_goes_on_when_room_is_made(spooled, slow):
    session = spooled.enable(queue_bytes=10_000, max_wait=60)
    sin(1000)
    threading.Timer(0.3, slow.set).start()
    sin(1000)
    session.step()
    session.disable()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped) == (2, 0)
    assert counts.blocked_seconds > 0.1


def test_call_larger_than_the_queue_never_waits(spooled, said):
    with spooled.enable(queue_bytes=5000, max_wait=60) as session:
        sin(1000)  # the argument fits, argument and result do not
        sin(2000)
        sin(10)
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert counts.skipped == {"larger than queue_bytes": 2}
    assert (counts.dropped, counts.blocked_seconds) == (2, 0.0)
    assert spooled.names() == ["Torch.sin.2"]


def test_call_larger_than_max_call_bytes_is_named(spooled, said):
    with spooled.enable(max_call_bytes=5000) as session:
        sin(1000)
        sin(2000)
        sin(10)
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert counts.skipped == {"larger than max_call_bytes": 2}
    assert counts.dropped == 2
    assert "Torch.sin.0 holds 8.0 kB and is not captured" in said()
    assert said().count("is not captured; max_call_bytes") == 1


@pytest.mark.parametrize("limit", ["max_call_bytes", "queue_bytes"])
def test_what_would_not_be_captured_is_not_counted_as_dropped(spooled, limit):
    x = torch.ones(100)
    with spooled.enable(**{limit: 10}) as session:
        x.to(torch.float32)  # converts nothing
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        torch.sin(x)
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped) == (0, 1)
    assert counts.skipped == {f"larger than {limit}": 1}


def test_list_call_larger_than_the_queue_is_captured_as_far_as_it_fits(spooled):
    xs = [torch.ones(100) for _ in range(10)]
    with spooled.enable(queue_bytes=2000) as session:
        torch._foreach_add_(xs, 1.0)
        session.step()
    assert xs[9].sum() == 200
    counts = spooled.store().step_closed(0, 0)
    assert counts.shards + counts.dropped == 10
    assert counts.shards >= 2


def test_spool_at_its_watermark_drops(spooled, said):
    with spooled.enable(max_spool_bytes=60_000, on_full="drop") as session:
        for _ in range(10):
            sin(2000)
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert counts.shards + counts.dropped == 10
    assert 2 <= counts.shards < 5
    assert counts.skipped == {"spool full": counts.dropped}
    assert spooled.store().usage() < 70_000
    assert "spool full: calls are dropped" in said()


def test_spool_at_its_watermark_blocks_until_somebody_makes_room(spooled):
    session = spooled.enable(max_spool_bytes=60_000, max_wait=60)
    stop = threading.Event()

    def checker():
        store = spooled.store()
        while not stop.wait(0.05):
            for entry in store.shards(0, 0):
                entry.path.unlink(missing_ok=True)

    thread = threading.Thread(target=checker)
    thread.start()
    for _ in range(10):
        sin(2000)
    session.step()
    session.disable()
    stop.set()
    thread.join()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped) == (10, 0)


def test_at_the_edge_of_the_watermark_only_the_first_call_waits(spooled, said):
    # Small calls still fit where large ones do not; these wait once, not once each.
    with spooled.enable(max_spool_bytes=60_000, max_wait=1.0) as session:
        for _ in range(8):
            sin(3000)
            sin(1)
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert counts.dropped > 2
    assert said().count("spool full: calls are dropped") == 1


def test_failing_write_is_counted_logged_once_and_training_goes_on(
    spooled, threads, monkeypatch, said
):
    def broken(self, call):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Store, "publish", broken)
    with spooled.enable() as session:
        sin()
        sin()
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped, counts.skipped) == (0, 2, {"write failed": 2})
    assert said().count("could not be written") == 1


def test_full_disk_is_waited_for(spooled, threads, monkeypatch):
    publish = Store.publish
    tries = []

    def full_once(self, call):
        tries.append(call.name)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return publish(self, call)

    monkeypatch.setattr(Store, "publish", full_once)
    spooled.capture(sin, writers=1)
    assert tries == ["Torch.sin.0"] * 2
    assert spooled.names() == ["Torch.sin.0"]


def test_hook_failure_costs_the_call_and_is_logged_once_with_its_traceback(
    spooled, monkeypatch, caplog
):
    from spool.capture import taking

    def broken(*arguments):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(taking, "watch", broken)
    with spooled.enable() as session:
        assert torch.sin(torch.zeros(1)).item() == 0
        assert torch.cos(torch.zeros(1)).item() == 1
        session.step()
    counts = spooled.store().step_closed(0, 0)
    assert (counts.shards, counts.dropped, counts.skipped) == (0, 2, {"hook failed": 2})
    failures = [r for r in caplog.records if r.exc_info]
    assert len(failures) == 1
    assert failures[0].exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("where", ["before", "after"])
def test_hook_failure_frees_its_room(spooled, monkeypatch, where):
    from spool.capture import taking
    from spool.capture.mutation import Watch

    def broken(*arguments):
        raise ZeroDivisionError("ours")

    if where == "before":
        monkeypatch.setattr(taking, "watch", broken)
    else:
        monkeypatch.setattr(Watch, "written", broken)
    session = spooled.enable(queue_bytes=9000, max_wait=0.0)
    for _ in range(10):
        sin(1000)
    monkeypatch.undo()
    sin(1000)
    session.disable()
    assert spooled.names() == ["Torch.sin.10"]


def test_nothing_accepted_is_lost_with_many_calls_and_threads(spooled):
    session = spooled.enable(queue_bytes=100_000, writers=4)

    def work():
        with session.attach():
            for _ in range(100):
                sin(100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.step()
    sin()
    session.disable()
    assert spooled.names(0) == [f"Torch.sin.{n}" for n in range(400)]
    assert spooled.names(1) == ["Torch.sin.0"]
    assert spooled.store().step_closed(0, 0).dropped == 0


def test_step_marker_comes_after_its_shards(spooled, slow):
    session = spooled.enable()
    sin()
    session.step()
    sin()
    assert spooled.store().step_closed(0, 0) is None
    slow.set()
    session.disable()
    assert spooled.store().step_closed(0, 0).shards == 1


def test_dead_writer_does_not_keep_the_program(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Store, "publish", lambda self, call: gate.wait(60))
    store = Store.create(tmp_path / "spool", {})
    arena = Arena(1000)

    def start(pull, done, lock):
        view = arena.view(0, arena.size)
        return Writers(store, view, count=1, patience=0, pull=pull, done=done, lock=lock)

    watermark = Watermark(None, False, lambda: 0)
    sink = Sink(0, arena, queue_bytes=1000, max_wait=0.1, watermark=watermark, start=start)
    ledger = sink.ledger(0)
    for index in range(2):
        shard = Shard(("Torch.sin", index, 0, 0, index, "forward"), b"{}", [])
        sink.submit(Record(shard, [sink.reserve(10, ledger)], 10), ledger)
    assert not sink.drain(0.2)
    sink.stop()
    assert (ledger.pending, ledger.dropped) == (0, 2)
    gate.set()


def test_a_spool_that_fills_again_and_again_holds_a_step_up_once(tmp_path):
    usage = [0]
    arena, mark = Arena(1000), Watermark(100_000, False, lambda: usage[0])
    store = Store.create(tmp_path / "spool", {})
    sink = Sink(
        0,
        arena,
        queue_bytes=1000,
        max_wait=0.4,
        watermark=mark,
        start=lambda pull, done, lock: Writers(
            store,
            arena.view(0, arena.size),
            count=1,
            patience=0,
            pull=pull,
            done=done,
            lock=lock,
        ),
    )

    def wait(ledger):
        """Seconds until a call is dropped, with the spool full."""
        usage[0] = 100_000
        mark.refresh()
        begin = time.monotonic()
        with pytest.raises(NoRoom, match="spool full"):
            sink.reserve(10, ledger)
        waited = time.monotonic() - begin
        usage[0] = 0
        mark.refresh()
        sink.free([sink.reserve(10, ledger)])
        return waited

    first, second = sink.ledger(0), sink.ledger(1)
    assert 0.4 <= wait(first) < 2
    assert sum(wait(first) for _ in range(5)) < 0.2
    assert 0.4 <= first.blocked < 0.7
    assert 0.4 <= wait(second) < 2
    sink.stop()


def test_blocks_of_the_arena_never_overlap():
    arena, held, random = Arena(10_000), {}, Random(0)
    for number in range(3000):
        if held and random.random() < 0.5:
            arena.give(held.pop(random.choice(list(held))))
        else:
            size = random.choice([0, 1, 63, 64, 65, 700])
            held[number] = arena.take(size)
            assert held[number].nbytes >= size
        if number % 100 == 0:
            bytes_held = [n for b in held.values() for n in range(b.offset, b.offset + b.nbytes)]
            assert len(bytes_held) == len(set(bytes_held))
    for block in held.values():
        arena.give(block)
    assert arena.take(arena.size) is not None  # one hole again
    assert arena.take(1) is None


def test_watermark_measures_again_after_a_good_part_of_the_room():
    usage = [0]
    mark = Watermark(100 << 20, False, lambda: usage[0])
    assert mark.has_room(50 << 20)
    mark.wrote(30 << 20)
    assert mark.stale
    usage[0] = 90 << 20
    mark.refresh()
    assert not mark.stale
    assert not mark.has_room(20 << 20)
    assert mark.stale
    assert mark.never(200 << 20)


def test_end_in_background_does_not_block_training(spooled, slow):
    spooled.enable(step=[0])
    sin()
    spool.step()  # returns although nothing is written yet
    sin()
    assert spooled.store().rank_closed(0) is None
    slow.set()
    spool.disable()
    assert spooled.store().rank_closed(0).reason == "steps done"
    assert spooled.names() == ["Torch.sin.0"]
