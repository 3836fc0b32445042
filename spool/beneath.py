"""Directories below a spool directory, reached without following a link of anybody.

A spool may be shared with others who may write there. Its own path may lead over links:
who checks named it. Below it a directory is opened from the one before, part by part, and
what is done there is done in the directory that was opened. So a link is refused, and one
that takes a directory's place meanwhile changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from spool.errors import StoreError
from spool.files import read_regular

_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@contextlib.contextmanager
def beneath(root: Path, directory: Path) -> Iterator[Path]:
    """Open a directory of a spool.

    Parameters
    ----------
    root : Path
        The spool directory.
    directory : Path
        `root`, or a path below it.

    Yields
    ------
    Path
        The open directory by its descriptor, to be used within the block only. Errors of
        the system name the directory itself.

    Raises
    ------
    StoreError
        If `directory`, or one between, is a symbolic link or another thing than a directory.
    FileNotFoundError
        If it is not there.
    """
    file = _open(root, directory.relative_to(root).parts)
    # The system's own name of an open file, proc_pid_fd(5). Where there is no /proc links
    # are refused all the same, but not one that comes in between.
    here = Path(f"/proc/self/fd/{file}")
    if not here.exists():
        here = directory
    try:
        yield here
    except OSError as error:
        for name in ("filename", "filename2"):
            value = getattr(error, name)
            if value is not None:
                setattr(error, name, os.fspath(value).replace(str(here), str(directory)))
        raise
    finally:
        os.close(file)


def read_beneath(root: Path, path: Path, most: int) -> bytes:
    """Read a file of a spool, of at most so many bytes.

    Raises
    ------
    StoreError
        If a directory on the way is none.
    Refused
        If it is not a regular file, or larger.
    OSError
        If the system cannot read it.
    """
    with beneath(root, path.parent) as here:
        return read_regular(here / path.name, most)


def refusal(path: Path) -> StoreError:
    """What to raise where something lies in a spool that does not belong there."""
    kind = "something else"
    with contextlib.suppress(OSError):
        kind = _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "a device")
    return StoreError(
        f"{path} is {kind}, which a spool does not have there: find out who put it there, "
        "and remove it"
    )


def _open(root: Path, parts: tuple[str, ...]) -> int:
    path, file = root, os.open(root, _STEP)
    for part in parts:
        path = path / part
        try:
            if part == "..":
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            inner = os.open(part, _STEP | os.O_NOFOLLOW, dir_fd=file)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise refusal(path) from None
            error.filename = str(path)
            raise
        finally:
            os.close(file)
        file = inner
    return file
