from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rowmaker import Run, call_verdict, quarantined

from spool import retire
from spool.errors import SpoolError, StoreError
from spool.ledger import (
    Candidate,
    Ledger,
    LedgerError,
    choose,
    directory_of,
    kept_shards,
    ledger_path,
    relevant,
)
from spool.records import CallKey, CallVerdict, Outcome
from spool.retire import RetireError
from spool.settings import RetireSettings
from spool.standards.rows import Route, Status
from spool.tables import VerdictInfo, detail_columns, write_verdicts
from spool.workdir import Bound, Segment, WorkDir, read_json

FAILED = RetireSettings()


def retire_number(run: Run, number: int, settings: RetireSettings = FAILED, ranks: int = 1) -> None:
    work = run.work
    retire.retire_segment(
        work.segment(run.rank, number),
        work.two_way(run.rank, number),
        work.three_way(run.rank, number),
        work.retired(run.rank, number),
        settings,
        ranks,
    )


def mixed(order: int, **changes: Any) -> list[CallVerdict]:
    """One call of every kind, from `order` on."""
    warning, error, skip, ok = Status.WARNING, Status.ERROR, Status.SKIP, Status.PASS
    three = Route.THREE_WAY
    calls = [
        call_verdict(f"Tensor.mul.{order}", order, ok),
        call_verdict(f"Tensor.add.{order}", order + 1, error),
        call_verdict(f"Tensor.sub.{order}", order + 2, warning),
        call_verdict(f"Tensor.div.{order}", order + 3, ok, standard_verdict=error),
        call_verdict(f"Torch.rand.{order}", order + 4, skip, outcome=Outcome.SKIPPED),
        call_verdict(f"Torch.inverse.{order}", order + 5, skip, outcome=Outcome.REPLAY_FAILED),
        call_verdict(f"Functional.gelu.{order}", order + 6, error, route=three),
        call_verdict(f"Functional.silu.{order}", order + 7, ok, route=three),
        call_verdict(f"Torch.eye.{order}", order + 8, skip),
    ]
    return [replace(call, **changes) for call in calls]


KEPT = [
    "000001.Tensor.add.0.h5",
    "000002.Tensor.sub.0.h5",
    "000003.Tensor.div.0.h5",
    "000005.Torch.inverse.0.h5",
    "000006.Functional.gelu.0.h5",
]


def names(run: Run) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in run.kept()]


def test_only_failing_shards_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    before = {name: run.shard(0, name).read_bytes() for name in KEPT}
    retire_number(run, 0)
    assert run.in_spool() == []
    assert run.kept() == {f"rank0/step0/{name}": data for name, data in before.items()}
    record = read_json(run.work.retired(0, 0), "record")
    assert record == {
        "version": 1,
        "rank": 0,
        "step": 0,
        "segment": 0,
        "retain": "failed",
        "shards": 9,
        "failing": 5,
        "quarantined": 0,
    }
    assert kept_shards(run.work, 0)[0, KEPT[0]] == f"failed/rank0/step0/{KEPT[0]}"


def test_retain_all_leaves_everything(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    retire_number(run, 0, RetireSettings(retain="all"))
    assert len(run.in_spool()) == 9
    assert run.kept() == {}
    assert read_json(run.work.retired(0, 0), "record")["retain"] == "all"


def test_retain_none_deletes_everything(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    retire_number(run, 0, RetireSettings(retain="none"))
    assert run.in_spool() == []
    assert run.kept() == {}


def test_retain_none_deletes_what_was_kept_before(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)], [mixed(10)]]).write()
    for settings in (FAILED, RetireSettings(retain="none")):
        for number in (0, 1):
            retire_number(run, number, settings)
    assert run.kept() == {}
    assert kept_shards(run.work, 0) == {}
    # Nothing comes back, and nothing is claimed to.
    for number in (0, 1):
        retire_number(run, number)
    assert kept_shards(run.work, 0) == {}


def test_retain_all_after_shards_were_retired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, [[mixed(0)], [mixed(10)]]).write()
    retire_number(run, 0)
    kept, shards = run.kept(), kept_shards(run.work, 0)
    for number in (0, 1):
        retire_number(run, number, RetireSettings(retain="all"))
    assert capsys.readouterr().err == (
        "rank 0: segment 0 was retired before retain=all; its shards stay as they are\n"
    )
    records = [read_json(run.work.retired(0, number), "record") for number in (0, 1)]
    assert [record["retain"] for record in records] == ["earlier", "all"]
    assert run.kept() == kept
    assert kept_shards(run.work, 0) == shards
    assert len(run.in_spool()) == 9


def test_a_directory_for_failed_shards(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)], [mixed(10)]]).write()
    elsewhere = tmp_path / "errors"
    retire_number(run, 0, RetireSettings(failed_dir=str(elsewhere)))
    assert (elsewhere / "rank0" / "step0" / KEPT[0]).is_file()
    # Another directory in the middle of a run would scatter one run's shards.
    retire_number(run, 1, RetireSettings(failed_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()
    assert kept_shards(run.work, 0)[0, KEPT[0]] == str(elsewhere / "rank0" / "step0" / KEPT[0])
    assert len(kept_shards(run.work, 0)) == 10


def test_quarantined_shards_are_left_alone(tmp_path: Path) -> None:
    calls = [quarantined("Tensor.add.0", 0, "crc32"), call_verdict("Tensor.mul.0", 1)]
    run = Run(tmp_path, [[calls]]).write()
    retire_number(run, 0)
    assert run.in_spool() == ["rank0/step0/000000.Tensor.add.0.h5"]


def test_the_first_of_an_api_are_kept(tmp_path: Path) -> None:
    calls = [call_verdict(f"Tensor.add.{n}", n, Status.ERROR) for n in range(6)]
    calls.append(call_verdict("Tensor.sub.0", 9, Status.ERROR))
    run = Run(tmp_path, [[calls]]).write()
    retire_number(run, 0, RetireSettings(keep_per_api=2))
    assert names(run) == [
        "000000.Tensor.add.0.h5",
        "000001.Tensor.add.1.h5",
        "000009.Tensor.sub.0.h5",
    ]


def test_bytes_are_limited_and_shared_by_ranks(tmp_path: Path) -> None:
    calls = [call_verdict(f"Tensor.add.{n}", n, Status.ERROR, nbytes=100) for n in range(6)]
    run = Run(tmp_path, [[calls]]).write()
    retire_number(run, 0, RetireSettings(max_failed_bytes=799), ranks=2)
    assert names(run) == [f"00000{n}.Tensor.add.{n}.h5" for n in range(3)]


def test_nothing_above_the_limit_is_kept_and_it_hides_nothing(tmp_path: Path) -> None:
    calls = [
        call_verdict("Tensor.add.0", 0, Status.ERROR, nbytes=1000),
        call_verdict("Tensor.add.1", 1, Status.ERROR, nbytes=10),
    ]
    run = Run(tmp_path, [[calls]]).write()
    retire_number(run, 0, RetireSettings(max_failed_bytes=500))
    assert names(run) == ["000001.Tensor.add.1.h5"]
    assert run.in_spool() == []


def candidates(items: list[tuple[int, int, int]]) -> list[Candidate]:
    """From (order, api, bytes)."""
    return sorted(
        Candidate(CallKey(0, order, 0, name), f"{order:06d}.{name}.h5", nbytes)
        for order, name, nbytes in (
            (order, f"Tensor.op{'abcd'[api]}.{order}", nbytes) for order, api, nbytes in items
        )
    )


ITEMS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(0, 9)),
    max_size=30,
    unique_by=lambda item: item[0],
)


@given(ITEMS, st.integers(0, 4), st.integers(0, 40), st.randoms())
def test_what_is_kept_does_not_depend_on_the_order_of_arrival(
    items: list[tuple[int, int, int]], keep: int, most: int, rng: random.Random
) -> None:
    everything = candidates(items)
    final = choose(everything, keep, most)
    arrival = list(everything)
    rng.shuffle(arrival)
    known: list[Candidate] = []
    held: set[CallKey] = set()
    while arrival:
        count = rng.randint(1, len(arrival))
        fresh, arrival = arrival[:count], arrival[count:]
        decided = sorted([*known, *fresh])
        kept = choose(decided, keep, most)
        held = {c.key for c in decided if c.key in kept and (c in fresh or c.key in held)}
        assert sum(c.nbytes for c in everything if c.key in held) <= most
        # Only what the ledger remembers is there the next time.
        known = list(relevant(decided, keep, most))
    assert held == final


@given(ITEMS, st.integers(1, 4), st.integers(0, 40))
def test_what_is_kept_is_first_in_order_and_within_the_limits(
    items: list[tuple[int, int, int]], keep: int, most: int
) -> None:
    everything = candidates(items)
    final = choose(everything, keep, most)
    for api in {c.api for c in everything}:
        fitting = [c.key for c in everything if c.api == api and c.nbytes <= most]
        mine = [key for key in fitting if key in final]
        assert mine == fitting[: len(mine)]
        assert len(mine) <= keep
    if sum(c.nbytes for c in everything) <= most:
        by_api: dict[str, int] = {}
        for c in everything:
            by_api[c.api] = by_api.get(c.api, 0) + 1
        assert len(final) == sum(min(keep, count) for count in by_api.values())


@hypothesis_settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(4)))
def test_segments_may_be_retired_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    limits = RetireSettings(keep_per_api=3, max_failed_bytes=900)
    runs = []
    for numbers in (range(4), order):
        root = tmp_path_factory.mktemp("run")
        segments = [[mixed(10 * n, nbytes=60 + 7 * n)] for n in range(4)]
        run = Run(root, segments).write()
        for number in numbers:
            retire_number(run, number, limits)
            assert sum(map(len, run.kept().values())) <= 900
        runs.append(run)
    assert runs[0].kept() == runs[1].kept()
    assert runs[1].in_spool() == []
    assert len(runs[0].kept()) >= 9


def other_file_system(self: Path, target: Path) -> Path:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


class Killed(BaseException):
    """As if the process had been killed here."""


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the `count`-th change of a file be the last."""
    left = count

    def guarded(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return change(*args, **kwargs)

        return call

    monkeypatch.setattr(Path, "unlink", guarded(Path.unlink))
    monkeypatch.setattr(Path, "rename", guarded(Path.rename))
    monkeypatch.setattr(Path, "replace", guarded(Path.replace))
    monkeypatch.setattr(os, "replace", guarded(os.replace))


@pytest.mark.parametrize("across", [False, True])
def test_a_kill_anywhere_is_repaired_by_running_again(tmp_path: Path, across: bool) -> None:
    limits = RetireSettings(keep_per_api=1)

    def build(name: str) -> Run:
        # The second segment comes first in order, so that the first one's shards are evicted.
        run = Run(tmp_path / name, [[mixed(20)[:4]], [mixed(0)[:4]]]).write()
        retire_number(run, 0, limits)
        return run

    undisturbed = build("whole")
    retire_number(undisturbed, 1, limits)
    expected = undisturbed.kept()
    assert len(expected) == 3
    for count in range(100):
        run = build(f"{count}")
        killed = False
        with pytest.MonkeyPatch.context() as patch:
            if across:
                patch.setattr(Path, "rename", other_file_system)
            with pytest.MonkeyPatch.context() as inner:
                stop_at(inner, count)
                try:
                    retire_number(run, 1, limits)
                except Killed:
                    killed = True
            everywhere = {path.rsplit("/", 1)[1] for path in (*run.kept(), *run.in_spool())}
            assert {path.rsplit("/", 1)[1] for path in expected} <= everywhere
            retire_number(run, 1, limits)
        assert run.kept() == expected
        assert run.in_spool() == []
        assert list(run.work.failed(0, 0).glob(".*")) == []
        if not killed:
            break
    assert 10 <= count < 99


def test_copy_across_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", other_file_system)
    run = Run(tmp_path, [[mixed(0)]]).write()
    before = {f"rank0/step0/{name}": run.shard(0, name).read_bytes() for name in KEPT}
    retire_number(run, 0)
    assert run.kept() == before
    assert run.in_spool() == []


OTHER = Path("/dev/shm")


@pytest.mark.skipif(not os.access(OTHER, os.W_OK), reason=f"{OTHER} is not there to be written")
def test_a_real_other_file_system(tmp_path: Path) -> None:
    if OTHER.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip(f"{tmp_path} and {OTHER} are one file system")
    run = Run(tmp_path, [[mixed(0)]]).write()
    with tempfile.TemporaryDirectory(dir=OTHER) as directory:
        retire_number(run, 0, RetireSettings(failed_dir=directory))
        assert run.in_spool() == []
        kept = kept_shards(run.work, 0)
        assert sorted(file for _, file in kept) == KEPT
        assert all(Path(path).stat().st_size == 100 for path in kept.values())


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(tmp_path, [[mixed(0)]]).write()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(
            RetireError, match=r"cannot keep the shard in .*: No space left on device; make room"
        ) as info:
            retire_number(run, 0)
    assert "\n" not in str(info.value)
    assert len(run.in_spool()) == 9
    assert not run.work.retired(0, 0).exists()
    retire_number(run, 0)
    assert names(run) == KEPT


def test_a_spool_that_may_only_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    run = Run(tmp_path, [[mixed(0)]]).write()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        patch.setattr(Path, "unlink", lambda p, **kw: refuse(p) if p.suffix == ".h5" else None)
        with pytest.raises(
            RetireError, match=r"cannot delete the shard: Read-only file system; .*set retain=all"
        ):
            retire_number(run, 0)
    assert len(run.in_spool()) == 9
    # What failed was copied out all the same.
    assert names(run) == KEPT
    retire_number(run, 0, RetireSettings(retain="all"))


def test_running_again_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    retire_number(run, 0)
    kept, record = run.kept(), run.work.retired(0, 0)
    ledger = ledger_path(run.work, 0).read_bytes()
    stamp = record.stat().st_mtime_ns
    retire_number(run, 0)
    assert run.kept() == kept
    assert ledger_path(run.work, 0).read_bytes() == ledger
    assert record.stat().st_mtime_ns == stamp


def test_judging_again_neither_deletes_nor_revives(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    retire_number(run, 0)
    kept = run.kept()
    passing = [replace(call, status=Status.PASS, standard_verdict=Status.PASS) for call in mixed(0)]
    run.segments = [[passing]]
    run._verdicts(0, 0, passing)
    shutil.rmtree(run.spool)
    retire_number(run, 0)
    assert run.kept() == kept
    failing = [replace(call, status=Status.ERROR) for call in mixed(0)]
    run._verdicts(0, 0, failing)
    retire_number(run, 0)
    assert run.kept() == kept
    assert len(kept_shards(run.work, 0)) == 5
    # Back to the first verdicts: as if nothing had been.
    run._verdicts(0, 0, mixed(0))
    retire_number(run, 0)
    assert run.kept() == kept


def test_a_spool_that_is_not_mounted_is_not_an_empty_one(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    run.spool.rename(tmp_path / "away")
    with pytest.raises(RetireError, match="mount the spool and rerun"):
        retire_number(run, 0)
    assert not run.work.retired(0, 0).exists()
    (tmp_path / "away").rename(run.spool)
    retire_number(run, 0)
    assert names(run) == KEPT


def test_a_shard_without_verdict_is_not_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    run._verdicts(0, 0, mixed(0)[:-1])
    with pytest.raises(RetireError, match="9 shards and 8 verdicts; nothing was deleted"):
        retire_number(run, 0)
    assert len(run.in_spool()) == 9


def test_a_verdict_of_another_shard_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    run._verdicts(0, 0, [*mixed(0)[:-1], call_verdict("Tensor.mul.77", 77)])
    with pytest.raises(RetireError, match="is no shard of segment 0"):
        retire_number(run, 0)
    assert len(run.in_spool()) == 9


def test_a_segment_of_another_step_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    replace(Segment.load(run.work.segment(0, 0)), step=3).save(run.work.segment(0, 0))
    with pytest.raises(
        RetireError, match="of step 0, but its segment 0 is of step 3; nothing was deleted; remove"
    ):
        retire_number(run, 0)
    assert len(run.in_spool()) == 9


def test_verdicts_of_another_segment_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)], [mixed(10)]]).write()
    shutil.copy(run.work.two_way(0, 1), run.work.two_way(0, 0))
    with pytest.raises(RetireError, match="verdicts of rank 0 segment 1"):
        retire_number(run, 0)


def test_calls_left_out_by_name_do_not_keep_shards(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    calls = [call for call in mixed(0) if call.route is Route.TWO_WAY]
    for route, chosen, left in ((Route.TWO_WAY, calls[1:2], 6), (Route.THREE_WAY, [], 2)):
        path = run.work.two_way(0, 0) if route is Route.TWO_WAY else run.work.three_way(0, 0)
        info = VerdictInfo(route, 0, 0, 0, len(chosen), left, None, None)
        write_verdicts(path, chosen, detail_columns(route), info)
    retire_number(run, 0)
    assert names(run) == ["000001.Tensor.add.0.h5"]
    assert run.in_spool() == []


def test_a_broken_ledger_is_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    path = ledger_path(run.work, 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"version": 1, "directory": "x"}))
    with pytest.raises(LedgerError, match=r"remove it and .*retired/rank0, and rerun") as info:
        retire_number(run, 0)
    assert "\n" not in str(info.value)
    assert len(run.in_spool()) == 9


def test_the_ledger_stays_small(tmp_path: Path) -> None:
    many = candidates([(n, 0, 5) for n in range(1000)])
    assert len(list(relevant(many, 20, 10**6))) == 20
    ledger = Ledger("d", (1,), tuple(many[:2]), ((0, many[2].file),))
    ledger.save(tmp_path / "x" / "ledger.json")
    assert Ledger.load(tmp_path / "x" / "ledger.json") == ledger


def test_ranks_have_their_own_shards(tmp_path: Path) -> None:
    runs = [Run(tmp_path, [[mixed(0, rank=rank)]], rank).write() for rank in (0, 1)]
    for run in runs:
        retire_number(run, 0, RetireSettings(keep_per_api=1))
    assert len(runs[0].kept()) == 10
    assert len(kept_shards(runs[0].work, 1)) == 5


def test_segments_of_a_rank_retired_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(10 * n)] for n in range(4)]).write()
    code = (
        "import sys; from pathlib import Path; from spool.retire import retire_segment;"
        "from spool.settings import RetireSettings; from spool.workdir import WorkDir;"
        "w = WorkDir(Path(sys.argv[1])); n = int(sys.argv[2]);"
        "retire_segment(w.segment(0, n), w.two_way(0, n), w.three_way(0, n), w.retired(0, n),"
        " RetireSettings(keep_per_api=2))"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, str(run.work.root), str(n)]) for n in range(4)
    ]
    assert [job.wait() for job in jobs] == [0] * 4
    assert len(run.kept()) == 10
    assert run.in_spool() == []


def bind(run: Run, run_id: str = "run", takes: str = "{}") -> None:
    """Give the spool a record of its run, and takes."""
    record = {"format": 1, "run_id": run_id, "created": 1.0, "timestamp": "20260102030405"}
    (run.spool / "run.json").write_text(json.dumps({**record, "versions": {}}))
    (run.spool / "rank0.takes.json").write_text(takes)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("run_id", "takes", "words"),
    [
        ("run", '{"0": 1}', "rank 0 step 0 was captured anew"),
        ("other", "{}", "another run began there, and nothing of it is touched"),
    ],
)
def test_other_shards_of_the_same_names_are_not_touched(
    tmp_path: Path, again: bool, run_id: str, takes: str, words: str
) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    if again:
        # Judged and retired once; then captured anew under the same names.
        retire_number(run, 0)
        run.write()
    bind(run, run_id, takes)
    before = run.in_spool()
    with pytest.raises(StoreError, match=words) as caught:
        retire_number(run, 0)
    assert "\n" not in str(caught.value)
    assert run.in_spool() == before
    bind(run, "run", '{"1": 4}')
    retire_number(run, 0)
    assert run.in_spool() == []


def test_a_spool_that_moved_is_retired_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    run.spool.rename(tmp_path / "moved")
    Bound("run", str(tmp_path / "moved")).save(run.work.run)
    retire_number(run, 0)
    assert list((tmp_path / "moved").rglob("*.h5")) == []
    assert names(run) == KEPT


@pytest.mark.parametrize("garbage", [False, True])
def test_a_lost_ledger_is_made_again_from_what_is_kept(tmp_path: Path, garbage: bool) -> None:
    limits = RetireSettings(keep_per_api=1)
    run = Run(tmp_path, [[mixed(10)], [mixed(0)]]).write()
    for number in (0, 1):
        retire_number(run, number, limits)
    kept, shards = run.kept(), kept_shards(run.work, 0)
    assert len(kept) == 5
    path = ledger_path(run.work, 0)
    path.write_text("garbage")
    if garbage:
        with pytest.raises(SpoolError, match="not a usable ledger") as caught:
            kept_shards(run.work, 0)
        words = str(caught.value)
        path.unlink()
    else:
        path.unlink()
        with pytest.raises(SpoolError, match="the ledger of kept shards is gone") as caught:
            kept_shards(run.work, 0)
        words = str(caught.value)
    retired = run.work.retired(0, 0).parent
    assert f"remove it and {retired}, and rerun" in words
    # One segment alone would leave the others' shards out of the account.
    run.work.retired(0, 0).unlink()
    with pytest.raises(LedgerError, match="gone"):
        retire_number(run, 0, limits)
    shutil.rmtree(retired)
    for number in (0, 1):
        retire_number(run, number, limits)
    assert run.kept() == kept
    assert kept_shards(run.work, 0) == shards


@pytest.mark.parametrize("inside", ["", "failed", "kept/here"])
def test_a_work_directory_may_move(tmp_path: Path, inside: str) -> None:
    run = Run(tmp_path, [[mixed(0)]]).write()
    directory = str(run.work.root.absolute() / inside) if inside else ""
    retire_number(run, 0, RetireSettings(failed_dir=directory))
    before = kept_shards(run.work, 0)
    assert before[0, KEPT[0]] == f"{inside or 'failed'}/rank0/step0/{KEPT[0]}"
    run.work.root.rename(tmp_path / "moved")
    assert kept_shards(WorkDir(tmp_path / "moved"), 0) == before


def test_a_failed_dir_elsewhere_is_absolute(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work")
    assert directory_of(work, str(tmp_path / "work2")) == str(tmp_path / "work2")
