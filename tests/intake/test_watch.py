"""Hints: which observer, and what it reports."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spools import make_call

from spool.intake import watch as watching
from spool.intake.watch import Watch, file_system
from spool.store import StepCounts, Store

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:40 / /nfs rw,relatime shared:5 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /nfs/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /twice rw - ext4 /dev/sdc rw
33 22 0:43 / /twice rw - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/a", "ext4"),
        ("/nfs", "nfs4"),
        ("/nfs/run7/rank0", "nfs4"),
        ("/nfsx", "ext4"),
        ("/nfs/local disk/run", "xfs"),
        ("/twice/run", "fuse.sshfs"),
    ],
)
def test_file_system_of_a_path(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(Path(path), mounts) == kind


def test_an_unknown_file_system_is_polled(tmp_path: Path) -> None:
    assert file_system(Path("/"), tmp_path / "absent") == ""
    assert "" not in watching.LOCAL
    assert "nfs4" not in watching.LOCAL
    assert file_system(tmp_path) != ""


@pytest.fixture(params=["local", "polling"])
def watch(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watch]:
    kind = "ext4" if request.param == "local" else "nfs4"
    monkeypatch.setattr(watching, "file_system", lambda path: kind)
    Store.create(tmp_path / "spool", {})
    watch = Watch(tmp_path / "spool", threading.Event(), 0.1)
    assert watch.is_polling == (request.param == "polling")
    yield watch
    watch.stop()


def wait_for(watch: Watch, key: tuple[int, int], names: set[str]) -> bool:
    """Whether hints name all of `names`, or the directory as a whole, before long."""
    got: set[str] = set()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        hints, _ = watch.take()
        if key in hints:
            got |= names if hints[key] is None else hints[key] or set()
        if names <= got:
            return True
        time.sleep(0.05)
    return False


def test_published_shards_are_hinted(watch: Watch, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "spool")
    names = {store.publish(make_call(order=order)).path.name for order in range(3)}
    # A directory that is new to the observer may be hinted as a whole.
    assert wait_for(watch, (0, 0), set())
    time.sleep(0.5)
    watch.take()
    names = {store.publish(make_call(order=order)).path.name for order in range(3, 6)}
    assert wait_for(watch, (0, 0), names)
    store.close_step(0, 0, StepCounts(6, 1))


def test_foreign_names_do_not_end_the_observer(watch: Watch, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "spool")
    store.publish(make_call())
    assert wait_for(watch, (0, 0), set())
    for name in (b"\xff.h5", b"a\nb.h5", b"x" * 250, b"step\xe9"):
        directory = os.fsencode(tmp_path / "spool" / "rank0" / "step0")
        os.close(os.open(directory + b"/" + name, os.O_CREAT))
        os.mkdir(os.fsencode(tmp_path / "spool" / "rank0") + b"/" + name)
    time.sleep(0.5)
    names = {store.publish(make_call(order=1)).path.name}
    assert wait_for(watch, (0, 0), names)
    assert watch._observer.is_alive()


def test_an_observer_that_dies_is_replaced(
    watch: Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch.stop()
    _, is_due = watch.take()
    assert is_due
    assert capsys.readouterr().err == "spool: the file observer ended; polling instead\n"
    assert watch.is_polling
    Store.open(tmp_path / "spool").publish(make_call())
    assert wait_for(watch, (0, 0), set())


def test_too_many_hints_ask_for_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "file_system", lambda path: "ext4")
    monkeypatch.setattr(watching, "MAX_HINTS", 3)
    (tmp_path / "rank0" / "step0").mkdir(parents=True)
    watch = Watch(tmp_path, threading.Event(), 0.1)
    try:
        for order in range(8):
            (tmp_path / "rank0" / "step0" / f"{order:06d}.Torch.add.{order}.h5").touch()
        deadline = time.monotonic() + 30
        is_due = False
        while not is_due and time.monotonic() < deadline:
            _, is_due = watch.take()
            time.sleep(0.05)
            for order in range(8):
                path = tmp_path / "rank0" / "step0" / f"{order:06d}.Torch.add.{order}.h5"
                os.replace(path, path.with_suffix(".tmp"))
                os.replace(path.with_suffix(".tmp"), path)
        assert is_due
    finally:
        watch.stop()
