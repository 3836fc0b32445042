"""Writing files so that a reader sees all of one or nothing, even after a crash.

A file is written under a partial name in its own directory, synchronised, and
renamed. The partial name says which process wrote it, so that what a killed
process left behind can be told from what a living one is still writing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import uuid
import zlib
from pathlib import Path

from spool.processes import is_running

_PARTIAL = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<pid>[1-9][0-9]{0,9})-[0-9a-f]{8}\.partial")


def fsync_dir(path: Path) -> None:
    """Make the entries of directory `path` durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file `path` by one that holds `data`, all at once.

    Parameters
    ----------
    path : Path
        Its directory must exist. Mode 0640 less the umask.
    data : bytes
    durable : bool
        Whether file and directory are synchronised (default), so that the file is
        also there after the machine stops.

    Raises
    ------
    OSError
        As the system reports it; no partial file is left.
    """
    partial = partial_path(path)
    try:
        write_new(partial, data, durable=durable)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    if durable:
        fsync_dir(path.parent)


def exclusive_write(path: Path, data: bytes) -> bool:
    """Create the file `path` with `data`, durably, unless it exists.

    Returns
    -------
    bool
        Whether this call created it. Of several callers at once exactly one does,
        and none sees a file that is not whole.
    """
    partial = partial_path(path)
    try:
        write_new(partial, data)
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)
    fsync_dir(path.parent)
    return True


def write_new(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create `path`, which must not exist, with `data`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o640)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def partial_path(path: Path) -> Path:
    """Return a fresh name beside `path` for the file while it is written."""
    token = uuid.uuid4().hex[:8]
    return path.with_name(f".{path.name}.{_host_id()}-{os.getpid()}-{token}.partial")


def is_partial(name: str) -> bool:
    """Whether a file name is one that `partial_path` makes."""
    return _PARTIAL.fullmatch(name) is not None


def is_abandoned(name: str) -> bool | None:
    """Whether the process that wrote the partial file `name` is gone.

    Returns
    -------
    bool or None
        None if it ran on another host, or before this one was started again.
    """
    match = _PARTIAL.fullmatch(name)
    if match is None or match["host"] != _host_id():
        return None
    return not is_running(int(match["pid"]))


@functools.cache
def _host_id() -> str:
    """Names the set of processes in which a pid means one process: 8 hex digits.

    Containers share host names and restart with the same pids, hence the boot and
    the pid namespace.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return f"{zlib.crc32('|'.join(parts).encode()):08x}"
