"""One intake per work directory: a lock that survives SIGKILL without help.

The lock is ``flock`` on ``<work>/intake.lock``, which the kernel drops with its
owner. Between hosts of a network file system flock may not reach, so the file
also names the owner: host, boot id, pid and the pid's start time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from spool.errors import SpoolError, about, ignoring_refusals
from spool.files import make_dirs, opener
from spool.processes import Process, start_ticks

_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class LockError(SpoolError):
    """The work directory belongs to another workflow."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock. `started` is the process's start in clock ticks since boot."""

    host: str
    boot: str
    pid: int
    started: int
    since: float

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), pid, start_ticks(pid), time.time())

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read an owner; None if the file is empty or was torn by a crash."""
        try:
            data = json.loads(text)
            return cls(
                host=str(data["host"]),
                boot=str(data["boot"]),
                pid=int(data["pid"]),
                started=int(data["started"]),
                since=float(data["since"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it ran on this host: under this boot, or under an earlier one of it."""
        return self.boot == _boot_id() or self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the very process still runs on this host."""
        if self.boot != _boot_id():
            return False
        return self.started != 0 and Process(self.pid, self.started).is_alive()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class WorkLock:
    """The right to fill one work directory, as a context manager.

    Parameters
    ----------
    path : Path
        The lock file; its directory is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, from a dead owner of this host too.

        Raises
        ------
        LockError
            If a living process holds it, or one of another host, of which
            nothing can be known from here.
        """
        make_dirs(self.path.parent)
        file = opener(self.path, os.O_RDWR | os.O_CREAT)
        try:
            locked = _flock(file)
            owner = Owner.parse(_read(file))
            self._refuse(owner, locked)
            if owner is not None:
                print(f"spool: {self.path}: {owner} is gone; taking over", file=sys.stderr)
            with about(self.path):
                _write(file, json.dumps(asdict(Owner.me())))
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with ignoring_refusals():  # then it is that of an owner who is gone
            _write(file, "")
        os.close(file)

    def force(self) -> Owner | None:
        """Take the lock from an owner on another host, and give it back.

        Returns
        -------
        Owner or None
            Who held it.

        Raises
        ------
        LockError
            If the owner lives on this host.
        """
        if not self.path.exists():
            return None
        file = opener(self.path, os.O_RDWR)
        try:
            locked = _flock(file)
            owner = Owner.parse(_read(file))
            if locked is False or (owner is not None and owner.is_alive):
                raise LockError(
                    f"{self.path}: {owner or 'a process'} is running; end it instead of unlocking"
                )
            _write(file, "")
            return owner
        finally:
            os.close(file)

    def _refuse(self, owner: Owner | None, locked: bool | None) -> None:
        work = self.path.parent
        if owner is not None and not owner.is_here:
            raise LockError(
                f"{self.path}: held by {owner}; if it no longer runs there: spool unlock {work}"
            )
        # Without a working flock the start time of the pid decides.
        if locked is False or (locked is None and owner is not None and owner.is_alive):
            holder = f"process {owner.pid}" if owner else "another process"
            raise LockError(
                f"{self.path}: {holder} already fills {work}; end it, or use another work_dir"
            )

    def __enter__(self) -> WorkLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _flock(file: int) -> bool | None:
    """True: locked; False: somebody else has it; None: this file system cannot say."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read(file: int) -> str:
    return os.pread(file, 4096, 0).decode("utf-8", "replace")


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
    os.fsync(file)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
