"""Where the workflow's own files lie, and how they get into a directory.

In a checkout they are the repository's top level; in an installed package they
are data inside it.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

from spool.errors import SpoolError

PARTS = ("Snakefile", "rules", "scripts", "config", "profiles")


def workflow_dir() -> Path:
    """Directory that holds the Snakefile.

    Raises
    ------
    SpoolError
        If the installation carries no workflow.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_workflow", package.parent):
        if (candidate / "Snakefile").is_file() and (candidate / "rules").is_dir():
            return candidate
    raise SpoolError(
        f"no Snakefile in {package / '_workflow'}; install again: "
        'pip install "precision-spool[check]"'
    )


def require_checker() -> None:
    """Make sure that this Python can run the workflow.

    Raises
    ------
    SpoolError
        If it is too old, or a package of the checking host is missing.
    """
    # Also said where the training host's Python is new enough: it may be 3.10.
    if sys.version_info < (3, 11):
        raise SpoolError(
            f"checking needs Python 3.11 or newer, because Snakemake 9 does; this is "
            f"{platform.python_version()}: install on another one"
        )
    for package, command in (
        ("snakemake", 'pip install "precision-spool[check]"'),
        ("torch", "pip install torch, or use the Python that has yours"),
    ):
        if importlib.util.find_spec(package) is None:
            raise SpoolError(f"checking needs {package}, which this Python lacks: {command}")


def init(target: Path) -> list[Path]:
    """Write Snakefile, rules, scripts, config and profiles into `target`.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    SpoolError
        If one of them is there already: nothing is overwritten. If this Python cannot
        run the workflow.
    """
    require_checker()
    source = workflow_dir()
    there = [part for part in PARTS if (target / part).exists()]
    if there:
        raise SpoolError(
            f"{target / there[0]} exists and would be overwritten; name an empty directory: "
            "spool init DIR"
        )
    target.mkdir(parents=True, exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, ignore=ignore)
        else:
            shutil.copy2(source / part, target / part)
    return [target / part for part in PARTS]
