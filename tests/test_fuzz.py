"""A fixed number of damaged files of each kind; the soak in ``tests/faults/fuzz.py`` goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults import fuzz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Cases of each kind; some take long to make.
CASES = {"shard-hdf5": 40, "measured-schema": 40, "verdicts-schema": 40}
OTHERS = 120


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_damage_is_refused_or_changes_nothing(name: str, tmp_path: Path) -> None:
    """No other exception and no other contents; hypothesis makes a case that fails small."""

    @settings(
        max_examples=CASES.get(name, OTHERS),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def check(draw: random.Random) -> None:
        fuzz.run_case(name, draw, tmp_path)

    check()


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_damage_takes_no_memory_and_no_process(name: str, tmp_path: Path) -> None:
    """In a child that may take little memory and little time."""
    outcomes, failed = fuzz.run_chunk(fuzz.Chunk(7, name, 0, 25), tmp_path)
    assert failed is None
    assert outcomes.total() == 25


def leak(path: Path) -> None:
    bytearray(fuzz.MAX_BYTES + (64 << 20))


READERS = {
    "another exception": (lambda path: 1 // 0, "ZeroDivisionError"),
    "too slow": (lambda path: time.sleep(60), "took longer than"),
    "too much memory": (leak, "MemoryError"),
    "a crash": (lambda path: os.kill(os.getpid(), signal.SIGKILL), "ended with -9"),
    "other contents": (lambda path: "other", "not what was written"),
}


@pytest.mark.parametrize("what", READERS)
def test_a_fault_is_named_with_the_way_to_make_it_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, words = READERS[what]
    make = fuzz.KINDS["takes"].make
    monkeypatch.setitem(fuzz.KINDS, "takes", fuzz.Kind(make, read, lambda found, path: False))
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 1)
    outcomes, failed = fuzz.run_chunk(fuzz.Chunk(1, "takes", 5, 3), tmp_path)
    assert outcomes == {"fault": 1}
    assert failed is not None
    number, why = failed
    assert number == 5
    assert words in why
    fuzz.tell_fault(1, "takes", failed, tmp_path, tmp_path / "kept")
    assert "--seed 1 --case takes:5" in capsys.readouterr().out
    (kept,) = (tmp_path / "kept").iterdir()
    make(fuzz.generator(1, "takes", 5), tmp_path / "again")
    assert kept.read_bytes() == (tmp_path / "again").read_bytes()
