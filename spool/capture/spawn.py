"""Starts the writer process, so that it is no child that the program could wait for."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

from spool.processes import Process

WRITER = "spool.capture.writer_process"
"""Part of the command line of a writer process."""

_START_SECONDS = 60.0
_PID_BYTES = 4

# A child's child: a program that waits for its children does not wait for the writer.
# Not by -m, which would look into the current directory first.
_PROGRAM = f"""
import os, sys
if pid := os.fork():
    os.write(int(sys.argv[-1]), pid.to_bytes({_PID_BYTES}, "little"))
    os._exit(0)
sys.path[:] = [{str(Path(__file__).parents[2])!r}, *filter(None, sys.path)]
from {WRITER} import main
main()
"""


class Descriptor:
    """A descriptor of ours, which is not used when it is another file's by now.

    Programs that become daemons close all descriptors there are; the numbers come again.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._identity = _identity(file)

    @property
    def number(self) -> int:
        """The descriptor.

        Raises
        ------
        OSError
            If the program has closed it.
        """
        with contextlib.suppress(OSError):
            if _identity(self._file) == self._identity:
                return self._file
        raise OSError(errno.EBADF, "the program closed a descriptor of capture")

    def close(self) -> None:
        """Close it, if it is ours still and open."""
        with contextlib.suppress(OSError):
            os.close(self.number)
        self._identity = (-1, -1, -1)


def _identity(file: int) -> tuple[int, int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_mode


def start(memory: int) -> tuple[Process, Descriptor, Descriptor]:
    """Start the process; the pipes that take tasks and that give what became of them."""
    me = Process.of(os.getpid())
    tasks_there, tasks = os.pipe()
    reports, reports_there = os.pipe()
    try:
        arguments = [me.pid, me.started, tasks_there, reports_there]
        first = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, arguments)],
            # Whatever else runs at the start of a Python there may print.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(memory, tasks_there, reports_there),
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        process = _child_of(first, reports)
    except BaseException:
        os.close(tasks)
        os.close(reports)
        raise
    finally:
        os.close(tasks_there)
        os.close(reports_there)
    os.set_blocking(tasks, False)
    return process, Descriptor(tasks), Descriptor(reports)


def _child_of(first: subprocess.Popen[bytes], reports: int) -> Process:
    """The process that the started one leaves behind."""
    try:
        code = first.wait(_START_SECONDS)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
        raise OSError(f"it did not start within {_START_SECONDS:g} s") from None
    os.set_blocking(reports, False)
    try:
        number = os.read(reports, _PID_BYTES)
    except BlockingIOError:
        raise OSError(f"it ended at its start (exit code {code})") from None
    return Process.of(int.from_bytes(number, "little"))
