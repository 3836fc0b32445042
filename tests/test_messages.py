"""Messages of rare moments, each made to be said; see docs/troubleshooting.md."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from shardmaker import make_call
from spools import make_spool

from spool import _shard_read, demo, shard, workflow
from spool.cli import main
from spool.errors import BadShard, SpoolError, StoreError
from spool.intake import watch as watching
from spool.msprobe import run_ut_settings
from spool.settings import load_schema, load_settings
from spool.store import Store

ROOT = Path(__file__).parents[1]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"cannot make the spool .*: its file system has no hard"):
        Store.create(tmp_path / "spool", {})


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent does not exist: check the path or the mount"):
        Store.open(tmp_path / "absent")


def test_keys_of_msprobe_for_the_checking_host_without_a_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "run_ut", "run_ut": {"is_online": True}}))
    assert run_ut_settings(path)[1] == ("run_ut.is_online",)
    load_settings({"msprobe": str(path)}, load_schema(ROOT / "config" / "schema.yaml"))
    assert capsys.readouterr().err == f"spool: {path}: no meaning here: run_ut.is_online\n"


def test_an_installation_without_a_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "__file__", str(tmp_path / "spool" / "workflow.py"))
    with pytest.raises(SpoolError, match=r"no Snakefile in .*; install again: pip install"):
        workflow.workflow_dir()


def test_a_python_without_the_packages_of_the_checking_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpoolError, match="checking needs snakemake, which this Python lacks: pip"):
        workflow.require_checker()


def test_a_host_without_file_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "inotify instance limit reached")

    monkeypatch.setattr(watching, "file_system", lambda path: "ext4")
    monkeypatch.setattr("watchdog.observers.inotify.InotifyObserver.start", refuse)
    make_spool(tmp_path / "spool")
    watch = watching.Watch(tmp_path / "spool", threading.Event(), 0.1)
    watch.stop()
    assert watch.is_polling
    said = capsys.readouterr().err
    assert said.startswith("spool: no file events (")
    assert "inotify instance limit reached" in said
    assert said.endswith("); polling instead\n")


def test_a_demo_does_not_replace_what_is_no_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert main(["demo", "--dir", str(tmp_path / "mine")]) == 2
    assert "is not empty and not an earlier demo; name another place" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_demo_whose_workflow_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "workflow_command", lambda cores: ["sh", "-c", "exit 3"])
    monkeypatch.setattr(demo, "train", lambda directory: None)
    with pytest.raises(SpoolError, match="the workflow ended with exit status 3; its output is in"):
        demo.main(tmp_path / "demo", 1)


def test_a_shard_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "000000.Torch.add.0.h5"
    shard.write(make_call(), path)
    shutil.copy(path, tmp_path / "whole.h5")
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: 0)
    with pytest.raises(BadShard, match="the file ends too early"):
        _shard_read.read(path)
