"""Builds `iofault.c` and says by the environment which file operation of whom fails, and how."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("iofault.c")

KILL = "kill"
KILL_ALL = "kill-all"
EVERY = "open,write,fsync,rename,unlink,link,mkdir,read"
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EROFS", "ESTALE", "EDQUOT")}


class NoCompilerError(RuntimeError):
    """There is no C compiler."""


def build(directory: Path) -> Path:
    """The library, built in a directory once.

    Raises
    ------
    NoCompilerError
        If there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompilerError("no C compiler (cc) here to build tests/faults/iofault.c")
    library = directory / "iofault.so"
    if not library.exists():
        options = ["-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run([compiler, *options], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """A fault at one file operation of one kind of process.

    Parameters
    ----------
    role : str
        Words of the process's command line.
    at : int
        Which of its operations, from 1; those in all that follow too, if not `once`.
    action : str
        "kill", "kill-all" (its process group too), or the name of an error number.
    ops : str
        Kinds of operations that count, separated by commas.
    path : str
        Shell pattern of the files that count; empty for every file.
    once : bool
    without : str
        Words that must not be in the command line.
    """

    role: str
    at: int
    action: str
    ops: str = EVERY
    path: str = ""
    once: bool = True
    without: str = ""


def environment(
    library: Path,
    under: list[Path],
    fault: Fault | None = None,
    *,
    fired: Path | None = None,
    log: Path | None = None,
) -> dict[str, str]:
    """Environment of a process tree that meets a fault, or only logs its operations.

    Parameters
    ----------
    library : Path
        From `build`.
    under : list of Path
        Directories whose operations count.
    fault : Fault, optional
    fired : Path, optional
        File that says what it hit, once it has fired.
    log : Path, optional
        File to which operations are appended.
    """
    found = {"LD_PRELOAD": str(library), "IOFAULT_UNDER": ":".join(map(str, under))}
    if log is not None:
        found["IOFAULT_LOG"], found["IOFAULT_OPS"] = str(log), EVERY
    if fault is not None:
        found["IOFAULT_ROLE"], found["IOFAULT_NOT"] = fault.role, fault.without
        found["IOFAULT_OPS"], found["IOFAULT_PATH"] = fault.ops, fault.path
        found["IOFAULT_AT"] = str(fault.at)
        found["IOFAULT_DO"] = str(ERRORS.get(fault.action, fault.action))
        if fault.once:
            found["IOFAULT_ONCE"] = str(fired)
    return {**os.environ, **found}
