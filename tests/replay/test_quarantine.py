"""Setting refused shards aside, when what lies there is not a file, or on another disk."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.files import copy_open, open_regular
from spool.replay import batch

SHM = Path("/dev/shm")


@pytest.fixture(params=["one file system", "two file systems"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where a shard goes to; its source is in `tmp_path`."""
    if request.param == "one file system":
        (tmp_path / "quarantine").mkdir()
        yield tmp_path / "quarantine" / "shard.h5"
        return
    if not SHM.is_dir() or os.stat(SHM).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        yield Path(directory) / "shard.h5"


def test_a_file_is_moved(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "shard.h5"
    content = os.urandom(3_000_000)
    source.write_bytes(content)
    batch._move(source, target)
    assert target.read_bytes() == content
    assert not source.exists()
    assert [path.name for path in target.parent.iterdir()] == ["shard.h5"]
    batch._move(source, target)  # moved already
    assert target.read_bytes() == content


@pytest.mark.parametrize("what", ["link", "endless link", "dangling link", "pipe", "socket"])
def test_what_is_no_file_is_not_read(tmp_path: Path, target: Path, what: str) -> None:
    source, secret = tmp_path / "shard.h5", tmp_path / "secret"
    secret.write_text("secret")
    if what == "pipe":
        os.mkfifo(source)
    elif what == "socket":
        here = os.getcwd()
        os.chdir(tmp_path)  # a socket's path is short
        try:
            socket.socket(socket.AF_UNIX).bind(source.name)
        finally:
            os.chdir(here)
    else:
        links = {"link": secret, "endless link": "/dev/zero", "dangling link": "/nowhere"}
        source.symlink_to(links[what])
    batch._move(source, target)
    assert not os.path.lexists(source)
    assert list(target.parent.iterdir()) == []
    assert secret.read_text() == "secret"


def test_a_directory_is_put_out_of_the_way(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "shard.h5"
    for attempt in range(2):  # a second one stays, and stops nobody
        source.mkdir()
        (source / f"inside{attempt}").write_text("x")
        batch._move(source, target)
        assert list(target.parent.iterdir()) == []
    assert (tmp_path / ".shard.h5.refused" / "inside0").exists()
    assert (source / "inside1").exists()


def test_a_file_that_cannot_be_copied_leaves_nothing_half(tmp_path: Path) -> None:
    if not SHM.is_dir() or os.stat(SHM).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system")
    source = tmp_path / "shard.h5"
    source.write_bytes(b"x" * 100)
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        target = Path(directory) / "shard.h5"
        target.mkdir()  # so that the last step fails
        with pytest.raises(OSError, match=r"shard\.h5"):
            batch._move(source, target)
        assert [path.name for path in Path(directory).iterdir()] == ["shard.h5"]
    assert source.exists()


def test_a_copy_ends_at_the_size_that_the_file_had(tmp_path: Path) -> None:
    # A file of /proc has more bytes than its size says.
    copy_open(os.open("/proc/self/status", os.O_RDONLY), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b""


def test_what_became_a_link_meanwhile_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("secret")
    os.mkfifo(pipe)
    for source in (link, pipe, tmp_path / "gone"):
        assert not batch._copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_holes_stay_holes(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no room where it lies, nor where it is copied to."""
    source, target = tmp_path / "shard.h5", tmp_path / "out"
    size = 1 << 40
    with source.open("wb") as file:
        file.write(b"head" * 1000)
        file.seek(size // 2)
        file.write(b"middle" * 100_000)
        file.truncate(size)
    if source.stat().st_blocks * 512 > 100 << 20:
        pytest.skip("a file system without holes")
    copy_open(open_regular(source), target)
    assert target.stat().st_size == size
    assert target.stat().st_blocks * 512 < 100 << 20
    with target.open("rb") as file:
        assert file.read(4000) == b"head" * 1000
        file.seek(size // 2)
        assert file.read(600_001) == b"middle" * 100_000 + b"\0"
