"""Starts the writer process, so that it is no child that the program could wait for."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

from spool.claim import WRITER
from spool.errors import ignoring_refusals, is_of_system
from spool.files import above_standard
from spool.processes import Process

IN_WRITER = "SPOOL_IN_WRITER"
"""Set in the environment of a writer process: what runs at the start of a Python may enable."""

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
from {{program}} import main
main()
"""


class Descriptor:
    """A descriptor of ours, which is not used when it is another file's by now.

    Programs that become daemons close all descriptors there are; the numbers come again.
    Pipes and files can be told from others, but not what is anonymous, such as an eventfd.
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
        try:
            if _identity(self._file) == self._identity:
                return self._file
        except OSError as error:
            if not is_of_system(error):
                raise
        raise OSError(errno.EBADF, "the program closed a descriptor of capture")

    def close(self) -> None:
        """Close it, if it is ours still and open."""
        with ignoring_refusals():
            os.close(self.number)
        self._identity = (-1, -1, -1)


def _identity(file: int) -> tuple[int, int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_mode


def pipe() -> tuple[Descriptor, Descriptor]:
    """A pipe's ends, to read and to write."""
    ends = [above_standard(file) for file in os.pipe()]
    return Descriptor(ends[0]), Descriptor(ends[1])


def start(memory: int) -> tuple[Process, Descriptor, Descriptor]:
    """Start the process; the pipes that take tasks and that give what became of them.

    Raises
    ------
    OSError
        If the system starts none, or one that ends at once.
    """
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is of another set of processes")
    me = Process.of(os.getpid())
    with contextlib.ExitStack() as here, contextlib.ExitStack() as there:
        tasks_there, tasks = pipe()
        here.callback(tasks.close)
        there.callback(tasks_there.close)
        reports, reports_there = pipe()
        here.callback(reports.close)
        there.callback(reports_there.close)
        os.set_blocking(tasks.number, False)
        os.set_blocking(reports.number, False)
        files = tasks_there.number, reports_there.number
        arguments = [str(number) for number in (me.pid, me.started, *files)]
        first = _launch(WRITER, arguments, (memory, *files))
        process = _child_of(first, reports.number)
        here.pop_all()
    return process, tasks, reports


def start_program(program: str, arguments: list[str]) -> Process:
    """Start another module's ``main``; it gets this process's number and `arguments`.

    Raises
    ------
    OSError
        If the system starts none, or one that ends at once.
    """
    with contextlib.ExitStack() as stack:
        told, tell = pipe()
        stack.callback(told.close)
        stack.callback(tell.close)
        os.set_blocking(told.number, False)
        numbers = [str(os.getpid()), *arguments, str(tell.number)]
        return _child_of(_launch(program, numbers, (tell.number,)), told.number)


def _launch(program: str, arguments: list[str], files: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(program=program), *arguments],
        # Whatever else runs at the start of a Python there may print.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
        env={**os.environ, IN_WRITER: "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _child_of(first: subprocess.Popen[bytes], reports: int) -> Process:
    """The process that the started one leaves behind."""
    try:
        code = first.wait(_START_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"it did not start within {_START_SECONDS:g} s") from None
    finally:
        if first.returncode is None:
            first.kill()
            first.wait()
    try:
        number = os.read(reports, _PID_BYTES)
    except BlockingIOError:
        raise OSError(f"it ended at its start (exit code {code})") from None
    return Process.of(int.from_bytes(number, "little"))
