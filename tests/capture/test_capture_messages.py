"""What capture says to its user, each message made to be said; see docs/troubleshooting.md."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

import spool
from spool.capture import sink as sink_module
from spool.errors import ConfigError, StoreError
from spool.store import Store


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written by this user; name another"):
        spool.enable(spool_dir=tmp_path / "spool")


def test_a_directory_above_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="absent does not exist; create or mount it"):
        spool.enable(spool_dir=tmp_path / "absent" / "spool")


def test_a_spool_of_a_newer_format(tmp_path):
    root = Store.create(tmp_path / "spool", {}).root
    path = root / "run.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StoreError, match="is of spool format 2, but this Spool reads 1: update"):
        spool.enable(spool_dir=root)


def test_keys_of_msprobe_without_a_meaning(spooled, said, tmp_path):
    (tmp_path / "config.json").write_text('{"task": "tensor", "level": "L1", "async_dump": true}')
    with spooled.enable(config=tmp_path / "config.json"):
        pass
    assert "keys without a meaning here are ignored: async_dump" in said()


def test_a_step_without_a_capture(said, monkeypatch):
    monkeypatch.setattr("spool.capture.session._said_without", False)
    spool.step()
    spool.step()
    assert said().splitlines() == ["spool.step() without an active capture does nothing"]


def test_the_last_configured_step(spooled, said):
    with spooled.enable(step=[0]) as session:
        session.step()
    assert "rank 0: the last configured step is captured, capture ends" in said()


def test_training_that_waits_for_room(spooled, said, monkeypatch):
    monkeypatch.setattr(sink_module, "_PATIENT_SECONDS", 0.2)
    with spooled.enable(max_spool_bytes=100_000, max_wait=1) as session:
        for _ in range(30):
            torch.ones(2000) + 1
        session.step()
    assert "spool full: training waits for room, at most 1 s; see whether the workflow" in said()


def test_a_spawned_child_that_imports_the_program_again(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import logging, multiprocessing, spool\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        f"spool.enable(spool_dir={str(tmp_path / 'data')!r})\n"
        "def work(): pass\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start(); child.join(); spool.disable()\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    said = "a spawned child imports the program again: nothing is captured there"
    assert done.stderr.count(said) == 1


def test_a_fault_of_ours_ends_capture(spooled, said, monkeypatch):
    session = spooled.enable()
    monkeypatch.setattr(session._live, "_wants_step", lambda: 1 / 0)
    session.step()
    assert "capture failed and ends here, training goes on" in said()


def test_a_fault_of_ours_in_a_call(spooled, said, monkeypatch):
    with spooled.enable() as session:
        monkeypatch.setattr(session._live.recorder, "_take", lambda *_: 1 / 0)
        torch.ones(2) + 1
        torch.ones(2) + 1
        monkeypatch.undo()
    words = "the call is lost, training goes on (later failures are only counted)"
    assert said().count(words) == 1


def test_a_step_and_a_rank_that_cannot_be_closed(spooled, said, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "closed.json")

    monkeypatch.setattr(Store, "close_step", refuse)
    monkeypatch.setattr(Store, "close_rank", refuse)
    with spooled.enable(writer="threads") as session:
        torch.ones(2) + 1
        session.step()
    assert "step 0 could not be closed: " in said()
    assert "rank 0 could not be closed: " in said()
    assert said().count("Input/output error") == 2


def test_a_shard_of_another_writer(spooled, said):
    with spooled.enable(writer="threads") as session:
        torch.ones(2) + 1
        step = spooled.root / "rank0" / "step0"
        step.mkdir(parents=True, exist_ok=True)
        name = f"{1:06}.Tensor.mul.0.h5"
        (step / name).touch()
        torch.ones(2) * 2
        session.step()
    assert f"{name} exists already: two writers share rank 0" in said()
