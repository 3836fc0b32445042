"""Writing files so that a reader sees all of one or nothing, even after a crash.

A file is written under a partial name in its own directory, synchronised, and
renamed. The partial name says which process wrote it, so that what a killed
process left behind can be told from what a living one is still writing.

Everything that Spool makes gets its mode here, and every file that others may have put
in place of one of ours is opened here: a link is not followed, a pipe not waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import socket
import stat
import uuid
import zlib
from pathlib import Path
from typing import BinaryIO

from spool.errors import about, ignoring_refusals, is_of_system
from spool.processes import is_running

# Less the umask. Calls hold a training run's data: others than the group get nothing.
FILE_MODE = 0o640
DIRECTORY_MODE = 0o750


_PARTIAL = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<pid>[1-9][0-9]{0,9})-[0-9a-f]{8}\.partial")


class Refused(OSError):
    """What lies there is no file that may be read; `strerror` says what it is."""


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of ours, for ``open(..., opener=opener)`` too; a new one gets `FILE_MODE`."""
    if not flags & os.O_EXCL:
        # What is there already may be a pipe, which is not waited for.
        flags |= os.O_NONBLOCK
    return above_standard(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE))


def occupy_standard() -> None:
    """Put /dev/null where a program has closed its standard input, output or error.

    Their numbers would come again, for a file of ours too, and anybody writes to them.
    """
    for file in range(3):
        try:
            os.fstat(file)
        except OSError as error:
            if not is_of_system(error):
                raise
            os.open(os.devnull, os.O_RDWR)


def above_standard(file: int) -> int:
    """A descriptor behind those of the standard streams, if they were closed since."""
    if file > 2:
        return file
    higher = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(file)
    return higher


def make_dirs(path: Path) -> None:
    """Make a directory, and those above it that are missing, durably, of `DIRECTORY_MODE`.

    Raises
    ------
    OSError
        As the system reports it; `FileExistsError` if a file is there.
    """
    try:
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileNotFoundError:
            if path.parent == path:
                raise
            make_dirs(path.parent)
            # Only once more: /proc does not say why it refuses.
            os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    with ignoring_refusals():  # a directory above that may be entered, but not read
        fsync_dir(path.parent)


def restrict_umask() -> None:
    """Let other programs that make files in this process give them no more than ours have."""
    os.umask(os.umask(0o077) | (0o777 & ~DIRECTORY_MODE))


def open_regular(path: Path) -> int:
    """Open a file that anybody may have put there, to be read.

    Raises
    ------
    Refused
        If it is a symbolic link, a pipe, or anything else that is not a regular file.
    OSError
        If the system cannot open it.
    """
    try:
        file = opener(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(errno.ELOOP, "a symbolic link, not a file", str(path)) from error
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise Refused(error.errno, "not a regular file", str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise Refused(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Read a file that anybody may have put there.

    Parameters
    ----------
    path : Path
    most : int
        The most bytes that are taken in.

    Raises
    ------
    Refused
        If it is not a regular file, or larger.
    OSError
        If the system cannot read it.
    """
    with open(open_regular(path), "rb") as file:
        # Room for as many bytes as are asked for is taken at once.
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise Refused(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read(size)


def is_regular(path: Path) -> bool:
    """Whether a regular file lies there; a link to one is none."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def copy_open(source: int, target: Path) -> None:
    """Copy an open file durably, and close it; `target` is whole or not there.

    Holes stay holes: a file of terabytes may take no room where it lies.

    Raises
    ------
    OSError
        As the system reports it; no partial file is left.
    """
    partial = target.with_name(f".{target.name}.partial")
    with open(source, "rb") as reader:
        # A file that somebody goes on writing has no end.
        size = os.fstat(source).st_size
        try:
            with open(partial, "wb", opener=opener) as writer:
                _copy_bytes(reader, writer, size)
                with about(target):
                    writer.flush()
                    os.fsync(writer.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def _copy_bytes(reader: BinaryIO, writer: BinaryIO, size: int) -> None:
    """Copy up to `size` bytes, but for holes."""
    place = 0
    while place < size:
        place = min(size, _next_data(reader.fileno(), place, size))
        reader.seek(place)
        writer.seek(place)
        data = reader.read(min(size - place, 1 << 20))
        if not data:
            break
        writer.write(data)
        place += len(data)
    writer.truncate(place)


def _next_data(file: int, place: int, size: int) -> int:
    """Where the next bytes from `place` on are that are not a hole; `size` if none are."""
    try:
        return os.lseek(file, place, os.SEEK_DATA)
    except OSError as error:
        # Else the system knows no holes.
        return size if error.errno == errno.ENXIO else place


def delete(path: Path) -> None:
    """Delete a file, a link as such, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def fsync_dir(path: Path) -> None:
    """Make the entries of directory `path` durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with about(path):
            os.fsync(directory)
    finally:
        os.close(directory)


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file `path` by one that holds `data`, all at once.

    Parameters
    ----------
    path : Path
        Its directory must exist.
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
        with ignoring_refusals():
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
        with ignoring_refusals():
            os.unlink(partial)
    fsync_dir(path.parent)
    return True


def write_new(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create `path`, which must not exist, with `data`."""
    file = opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        view = memoryview(data)
        with about(path):
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
