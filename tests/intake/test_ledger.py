"""When batches and segments are cut, and what a restart knows."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from spool.intake.ledger import RankLedger
from spool.settings import BatchLimits
from spool.workdir import Manifest, Segment, ShardRef, WorkDir


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shards(first: int, count: int, nbytes: int = 10) -> list[ShardRef]:
    return [
        ShardRef(f"{order:06d}.Torch.add.{order}.h5", nbytes)
        for order in range(first, first + count)
    ]


def make(work: Path, clock: Time | None = None, **limits: float) -> RankLedger:
    options = {"calls": 4, "nbytes": 1000, "seconds": 20.0, **limits}
    return RankLedger(
        WorkDir(work), 0, Path("/spool"), "run", BatchLimits(**options), clock or Time()
    )  # type: ignore[arg-type]


def batch(ledger: RankLedger, number: int) -> list[int]:
    manifest = Manifest.load(ledger.work.batch(0, number))
    return [shard.order for shard in manifest.shards]


def test_a_batch_is_cut_at_its_number_of_calls_in_order(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    assert ledger.add(0, reversed(shards(0, 10))) == 10
    assert ledger.cut(0) == [0, 1]
    assert [batch(ledger, number) for number in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ledger.cut(0) == []
    assert ledger.cut(0, everything=True) == [2]
    assert batch(ledger, 2) == [8, 9]
    assert ledger.sizes == {0: (0, 4), 1: (0, 4), 2: (0, 2)}


def test_a_batch_is_cut_at_its_bytes(tmp_path: Path) -> None:
    ledger = make(tmp_path, nbytes=25)
    ledger.add(0, shards(0, 3))
    assert ledger.cut(0) == [0]
    assert batch(ledger, 0) == [0, 1]
    # One that is larger than a batch may be is a batch of its own.
    ledger.add(0, [ShardRef("000003.Torch.add.3.h5", 99)])
    assert ledger.cut(0, everything=True) == [1, 2]
    assert (batch(ledger, 1), batch(ledger, 2)) == ([2], [3])


def test_a_batch_is_cut_after_its_seconds(tmp_path: Path) -> None:
    clock = Time()
    ledger = make(tmp_path, clock)
    ledger.add(0, shards(0, 1))
    clock.now += 19
    ledger.add(0, shards(1, 1))
    assert ledger.cut(0) == []
    clock.now += 1
    assert ledger.cut(0) == [0]
    assert batch(ledger, 0) == [0, 1]
    ledger.add(0, shards(2, 1))
    assert ledger.cut(0) == []


def test_a_shard_seen_twice_is_taken_once(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    assert ledger.add(0, shards(0, 3)) == 3
    assert ledger.add(0, shards(0, 5)) == 2
    ledger.cut(0, everything=True)
    assert ledger.add(0, shards(0, 5)) == 0


def test_steps_do_not_share_batches_or_segments(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    for step in (0, 1):
        ledger.add(step, shards(0, 2))
        assert ledger.cut(step, everything=True) == [step]
        assert ledger.close_segments(step, everything=True) == [step]
    assert Segment.load(ledger.work.segment(0, 1)) == Segment(0, 1, 1, (1,))


def test_segments_hold_eight_batches_or_what_waited_long(tmp_path: Path) -> None:
    clock = Time()
    ledger = make(tmp_path, clock, calls=1)
    ledger.add(0, shards(0, 19))
    ledger.cut(0)
    assert ledger.close_segments(0) == [0, 1]
    assert Segment.load(ledger.work.segment(0, 1)).batches == tuple(range(8, 16))
    assert ledger.close_segments(0) == []
    clock.now += 60
    assert ledger.close_segments(0) == [2]
    assert Segment.load(ledger.work.segment(0, 2)).batches == (16, 17, 18)


def test_a_restart_goes_on_with_what_no_manifest_names(tmp_path: Path) -> None:
    ledger = make(tmp_path, calls=1)
    ledger.add(0, shards(0, 10))
    ledger.cut(0)
    ledger.close_segments(0)
    again = make(tmp_path, calls=1)
    assert again.restore() == (list(range(10)), [0])
    assert again.add(0, shards(0, 12)) == 2
    assert again.cut(0) == [10, 11]
    assert batch(again, 10) == [10]
    # Batches that no segment names yet come first.
    assert again.close_segments(0, everything=True) == [1]
    assert Segment.load(again.work.segment(0, 1)).batches == (8, 9, 10, 11)


def test_a_finished_step_holds_no_names(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    ledger.add(0, shards(0, 4))
    ledger.cut(0)
    ledger.finish(0)
    step = ledger.step(0)
    assert (step.is_done, step.known, step.pending, step.named) == (True, None, {}, 4)


@settings(max_examples=60, deadline=None)
@given(
    bursts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=12),
            st.floats(0, 30),
            st.booleans(),
            st.booleans(),
        ),
        max_size=8,
    ),
    calls=st.integers(1, 5),
)
def test_every_shard_is_in_exactly_one_batch(
    tmp_path_factory: object,
    bursts: list[tuple[list[int], float, bool, bool]],
    calls: int,
) -> None:
    """Whatever arrives, in whatever order and with whatever restarts in between."""
    work = tmp_path_factory.mktemp("work")  # type: ignore[attr-defined]
    clock = Time()
    ledger = make(work, clock, calls=calls)
    seen: set[int] = set()
    for orders, seconds, everything, restart in bursts:
        seen.update(orders)
        # A listing shows all that was ever published.
        ledger.add(0, [shard for order in seen for shard in shards(order, 1)])
        clock.now += seconds
        ledger.cut(0, everything=everything)
        ledger.close_segments(0, everything=everything)
        if restart:
            ledger = make(work, clock, calls=calls)
            ledger.restore()
    ledger.add(0, [shard for order in seen for shard in shards(order, 1)])
    ledger.cut(0, everything=True)
    ledger.close_segments(0, everything=True)
    named = [order for number in ledger.work.batches(0) for order in batch(ledger, number)]
    assert sorted(named) == sorted(seen)
    segments = [Segment.load(ledger.work.segment(0, n)) for n in ledger.work.segments(0)]
    grouped = [number for segment in segments for number in segment.batches]
    assert sorted(grouped) == ledger.work.batches(0)
    assert all(len(batch(ledger, number)) <= calls for number in ledger.work.batches(0))
