"""Paths and records of the work directory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from spool.errors import SpoolError
from spool.workdir import Manifest, RankEnd, Segment, ShardRef, WorkDir, write_if_changed

MANIFEST = Manifest(
    rank=0,
    step=3,
    batch=7,
    spool="/nfs/run",
    run_id="abc",
    shards=(
        ShardRef("000017.Functional.linear.2.h5", 123),
        ShardRef("000018.Torch.linalg.inv.0.h5", 4),
    ),
)
END = RankEnd(
    rank=1,
    run_id="abc",
    timestamp="20260102030405",
    segments=(0, 1),
    batches=9,
    found={0: 5, 10: 7},
    expected={"steps": {}, "reason": "disabled"},
    missing={10: 1},
    note="",
)


def test_paths() -> None:
    work = WorkDir(Path("w"))
    assert work.batch(0, 7) == Path("w/batches/rank0/000007.json")
    assert work.segment(3, 2) == Path("w/segments/rank3/000002.json")
    assert work.end(0) == Path("w/ends/rank0.json")
    assert work.measured(0, 7) == Path("w/measured/rank0/000007.parquet")
    assert work.replay(0, 1_234_567) == Path("w/replay/rank0/1234567.parquet")
    assert work.two_way(0, 2) == Path("w/two_way/rank0/000002.parquet")
    assert work.three_way(0, 2) == Path("w/three_way/rank0/000002.parquet")
    assert work.retired(0, 2) == Path("w/retired/rank0/000002.json")
    assert work.failed(0, 4) == Path("w/failed/rank0/step4")
    assert work.quarantine(0, 4) == Path("w/quarantine/rank0/step4")
    assert work.settings("judging") == Path("w/settings/judging.json")


@pytest.mark.parametrize("number", [-1, True, "1", 1.0, None, 10**12])
def test_a_number_is_checked_before_it_becomes_a_path(number: object) -> None:
    with pytest.raises(ValueError):
        WorkDir(Path("w")).batch(0, number)  # type: ignore[arg-type]


def test_numbers_found_ignore_what_is_not_ours(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    assert work.ranks() == []
    assert work.batches(0) == []
    directory = tmp_path / "batches" / "rank0"
    directory.mkdir(parents=True)
    (tmp_path / "batches" / "rank00").mkdir()
    for name in ("000010.json", "000002.json", ".000003.json.partial", "x.json", "000004.txt"):
        (directory / name).touch()
    assert work.batches(0) == [2, 10]
    assert work.ranks() == [0]


@pytest.mark.parametrize("record", [MANIFEST, Segment(0, 3, 2, (7, 8, 11)), END])
def test_a_record_comes_back_as_it_was(
    tmp_path: Path, record: Manifest | Segment | RankEnd
) -> None:
    path = tmp_path.joinpath(*record.place)
    assert record.save(path)
    assert type(record).load(path) == record
    # The time of an unchanged file stays, so that nothing is made again.
    os.utime(path, (1, 1))
    assert not record.save(path)
    assert path.stat().st_mtime == 1


def test_shard_reference() -> None:
    assert [(shard.order, shard.name) for shard in MANIFEST.shards] == [
        (17, "Functional.linear.2"),
        (18, "Torch.linalg.inv.0"),
    ]
    assert MANIFEST.nbytes == 127
    assert MANIFEST.step_dir == Path("/nfs/run/rank0/step3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 0),
        ("version", None),
        ("rank", -1),
        ("rank", "0"),
        ("rank", True),
        ("step", 1.5),
        ("spool", "relative/path"),
        ("spool", 3),
        ("run_id", None),
        ("shards", []),
        ("shards", [{"file": "../../etc/passwd", "bytes": 1}]),
        ("shards", [{"file": "000001./etc/passwd.0.h5", "bytes": 1}]),
        ("shards", [{"file": "000001.Torch.add.0.h5", "bytes": -1}]),
        ("shards", [{"file": "000001.Torch.add.0.h5"}]),
        ("shards", [{"file": "000001.Torch.add.0.h5", "bytes": 1}] * 2),
        ("shards", [3]),
        ("shards", 3),
    ],
)
def test_a_bad_manifest_is_refused_in_one_line(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**MANIFEST.to_json(), key: value}))
    with pytest.raises(SpoolError, match="not a usable manifest") as caught:
        Manifest.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{}", '{"version": 1}'])
def test_a_torn_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    for kind in (Manifest, Segment, RankEnd):
        with pytest.raises(SpoolError, match="not a usable"):
            kind.load(path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match=r"absent\.json: cannot read the segment"):
        Segment.load(tmp_path / "absent.json")


@pytest.mark.parametrize("batches", [(), (2, 1), (1, 1), tuple(range(9))])
def test_a_bad_segment_is_refused(tmp_path: Path, batches: tuple[int, ...]) -> None:
    path = tmp_path / "segment.json"
    replace(Segment(0, 0, 0, (0,)), batches=batches).save(path)
    with pytest.raises(SpoolError, match="1 to 8 ascending"):
        Segment.load(path)


def test_write_if_changed_creates_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert write_if_changed(path, {"x": 1})
    assert not write_if_changed(path, {"x": 1})
    assert write_if_changed(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 2}


def test_a_manifest_without_take_is_of_the_first(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*MANIFEST.place)
    data = replace(MANIFEST, take=3).to_json()
    assert data.pop("take") == 3
    path.parent.mkdir()
    path.write_text(json.dumps(data))
    assert Manifest.load(path) == MANIFEST


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manifest, "restore it from a copy, or start with another work_dir"),
        (Segment, "remove it and rerun"),
        (RankEnd, "remove it and rerun"),
    ],
)
@pytest.mark.parametrize("text", ["{", '{"version": 1}'])
def test_the_way_out_of_a_damaged_record(
    tmp_path: Path, kind: type[Manifest], words: str, text: str
) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(SpoolError, match=words):
        kind.load(path)


@pytest.mark.parametrize("record", [MANIFEST, Segment(0, 3, 2, (7, 8, 11)), END])
def test_a_newer_record_asks_for_a_newer_spool(
    tmp_path: Path, record: Manifest | Segment | RankEnd
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**record.to_json(), "version": 2}))
    with pytest.raises(
        SpoolError, match="of version 2, this program reads 1; install a newer Spool"
    ):
        type(record).load(path)


COUNTS = {"shards": 1, "bytes": 2, "dropped": 0, "skipped": {"x": 3}, "blocked_seconds": 0.5}


@pytest.mark.parametrize(
    "expected",
    [
        {"steps": 5, "reason": ""},
        {"steps": {"0": {**COUNTS, "shards": 1.5}}, "reason": ""},
        {"steps": {"0": {**COUNTS, "shards": 1 << 53}}, "reason": ""},
        {"steps": {"0": {**COUNTS, "skipped": {"x": -1}}}, "reason": ""},
        {"steps": {"0": {**COUNTS, "skipped": [3]}}, "reason": ""},
        {"steps": {"x": COUNTS}, "reason": ""},
        {"steps": {"0": None}, "reason": ""},
        [],
    ],
)
def test_an_end_with_other_counts_is_refused(tmp_path: Path, expected: object) -> None:
    path = tmp_path.joinpath(*END.place)
    replace(END, expected={"steps": {"0": COUNTS}, "reason": ""}).save(path)
    assert RankEnd.load(path).found == END.found
    path.write_text(json.dumps({**END.to_json(), "expected": expected}))
    with pytest.raises(SpoolError, match="not a usable end of a rank: expected is n"):
        RankEnd.load(path)


def test_a_spool_that_is_no_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**MANIFEST.to_json(), "spool": "/nfs/\0"}))
    with pytest.raises(SpoolError, match="is not an absolute path"):
        Manifest.load(path)


@pytest.mark.parametrize(
    "record", [replace(END, missing={10: (1 << 53) - 1}), replace(MANIFEST, take=(1 << 53) - 1)]
)
def test_counts_as_large_as_a_spool_may_have_are_read_back(
    tmp_path: Path, record: Manifest | RankEnd
) -> None:
    path = tmp_path.joinpath(*record.place)
    record.save(path)
    assert type(record).load(path) == record
