"""Where the workflow's own files lie, and how they get into a directory.

In a checkout they are the repository's top level; in an installed package they
are data inside it.
"""

from __future__ import annotations

import shutil
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


def init(target: Path) -> list[Path]:
    """Write Snakefile, rules, scripts, config and profiles into `target`.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    SpoolError
        If one of them is there already: nothing is overwritten.
    """
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
