"""The journal of a replay job: what survives a torn tail, a bit flip, another job."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from spool.replay.journal import Journal, Progress, decode, encode, recover

IDENTITY = {"manifest": "abc", "settings": {"threads": 1}}
RECORDS = [
    {"start": 0},
    {"start": 0, "header": {"name": "Tensor.add.0"}},
    {"done": 0, "result": {"reason": "", "x": float("inf"), "text": "ü\n"}},
    {"start": 1},
    {"lost": 1, "reason": "Crash: x"},
    {"start": 2},
]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    recover(path, IDENTITY)
    with Journal(path) as file:
        for record in RECORDS:
            file.add(record, 0.0)
    return path


def test_everything_written_is_read(journal: Path) -> None:
    progress = recover(journal, IDENTITY)
    assert progress == Progress(
        headers={0: {"name": "Tensor.add.0"}},
        done={0: RECORDS[2]["result"]},
        lost={1: "Crash: x"},
    )
    assert [progress.settled(number) for number in range(4)] == [True, True, False, False]


def test_a_torn_tail_is_cut_off_at_every_byte(journal: Path) -> None:
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    for length in range(len(lines[0]), len(content)):
        journal.write_bytes(content[:length])
        progress = recover(journal, IDENTITY)
        assert content.startswith(journal.read_bytes())
        assert journal.read_bytes().endswith(b"\n")
        assert (0 in progress.done) == (length >= sum(map(len, lines[:4])))
        with Journal(journal) as file:
            file.add({"done": 9, "result": {}}, 0.0)
        assert 9 in recover(journal, IDENTITY).done


def test_a_torn_first_line_or_no_file_starts_anew(tmp_path: Path, journal: Path) -> None:
    first = journal.read_bytes().splitlines(keepends=True)[0]
    for content in (b"", first[:-1], first[:3], b"\0" * 100, b"garbage\n"):
        journal.write_bytes(content)
        assert recover(journal, IDENTITY) == Progress()
        assert journal.read_bytes() == first
    assert recover(tmp_path / "none", IDENTITY) == Progress()
    assert (tmp_path / "none").read_bytes() == first


def test_the_journal_of_another_job_is_discarded(journal: Path) -> None:
    other = {**IDENTITY, "manifest": "xyz"}
    assert recover(journal, other) == Progress()
    assert recover(journal, other) == Progress()
    assert len(journal.read_bytes().splitlines()) == 1


def test_an_altered_line_ends_the_journal(journal: Path) -> None:
    content = journal.read_bytes()
    journal.write_bytes(content.replace(b'"text"', b'"tixt"'))
    progress = recover(journal, IDENTITY)
    assert progress.done == {}
    assert progress.headers == {0: {"name": "Tensor.add.0"}}


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"00000000 \n", b"zz {}\n", b"{}\n", encode({})[:-1], encode({}) + b"x"],
)
def test_what_is_no_record(line: bytes) -> None:
    assert decode(line) is None


def test_a_record_of_any_depth_is_no_record() -> None:
    text = b"[" * 100_000
    assert decode(b"%08x %s\n" % (zlib.crc32(text), text)) is None
