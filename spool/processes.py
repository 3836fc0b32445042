"""Processes of this machine: whether one still runs, or its number is another's by now."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process by its number and its start, in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has a number now.

        Raises
        ------
        ProcessLookupError
            If none has.
        """
        status = _Status.of(pid)
        if status is None:
            raise ProcessLookupError(f"/proc shows no process {pid}")
        return cls(pid, status.started)

    def is_alive(self) -> bool:
        """Whether it runs; not so if it has ended and nobody has asked how."""
        status = _Status.of(self.pid)
        return status is not None and not status.has_ended and status.started == self.started

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        if self.is_alive():
            # Of another user, perhaps, since this process is another's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process with this number runs here."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    status = _Status.of(pid)
    return status is None or not status.has_ended


def runs_on(host: str, pid: int) -> bool:
    """Whether a process, named by host and number, runs here."""
    return host == socket.gethostname() and is_running(pid)


def start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if there is none."""
    status = _Status.of(pid)
    return 0 if status is None else status.started


@dataclass(frozen=True)
class _Status:
    """What /proc/<pid>/stat tells of a process (proc_pid_stat(5))."""

    state: str
    threads: int
    started: int

    @classmethod
    def of(cls, pid: int) -> _Status | None:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The command's name may hold spaces and brackets; the fields come after its last ')'.
        fields = text.rpartition(")")[2].split()
        return cls(fields[0], int(fields[17]), int(fields[19]))

    @property
    def has_ended(self) -> bool:
        """A first thread that has ended is a zombie while others still run."""
        return self.state in "ZX" and self.threads <= 1
