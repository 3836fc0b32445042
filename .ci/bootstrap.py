"""Make the virtual environment that ``make demo``, ``make test`` and ``make check`` use.

    python3 .ci/bootstrap.py VENV EXTRA

creates VENV if it is not there, puts a torch into it, and installs this checkout
with the named extra. A torch that the calling interpreter can already import is
reused; otherwise the version of constraints.txt is installed, as a CPU build
where one can be had. Standard library only: it runs on a bare Python.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(venv: Path, extra: str) -> None:
    """Create and fill the environment, or leave it alone if it is up to date."""
    stamp = venv / f".installed-{extra}"
    sources = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    if stamp.exists() and all(stamp.stat().st_mtime >= s.stat().st_mtime for s in sources):
        return
    python = venv / "bin" / "python"
    if not python.exists():
        create(venv)
    if not importable(python, "torch"):
        install_torch(python)
    print(f"installing Spool [{extra}] into {venv} ...", flush=True)
    pip(python, "install", "-q", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{extra}]")
    stamp.touch()


def create(venv: Path) -> None:
    """Create the environment; it sees the interpreter's packages if these hold a torch."""
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        stop(
            f"python3 is {found}, but checking needs Python 3.11 or newer "
            f"(Snakemake 9 does); name one: make PYTHON=python3.11 ..."
        )
    if importlib.util.find_spec("ensurepip") is None:
        stop(
            "this Python has no venv module; install it "
            "(Debian and Ubuntu: apt-get install python3-venv) and run the same command again"
        )
    share = importable(Path(sys.executable), "torch")
    print(f"creating {venv}" + (" (with this Python's own torch)" if share else ""), flush=True)
    options = ["--system-site-packages"] if share else []
    run(sys.executable, "-m", "venv", *options, str(venv))


def install_torch(python: Path) -> None:
    """Install the pinned torch, as a CPU build if the index offers one."""
    pin = next(
        line.strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    where: list[str] = []
    if not small(python, pin, where):
        where = ["--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10"]
        if not small(python, pin, where):
            where = []
            print(
                f"no CPU build of {pin} can be reached: the CUDA build follows, "
                "a download of several gigabytes",
                flush=True,
            )
    print(f"installing {pin} ...", flush=True)
    pip(python, "install", "-q", *where, pin)


def small(python: Path, pin: str, where: list[str]) -> bool:
    """Tell whether `pin` from `where` resolves without NVIDIA's packages."""
    answer = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--dry-run", "--report", "-", *where, pin],
        capture_output=True,
        text=True,
    )
    if answer.returncode != 0:
        return False
    names = [item["metadata"]["name"].lower() for item in json.loads(answer.stdout)["install"]]
    return not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names)


def importable(python: Path, module: str) -> bool:
    """Tell whether `python` can import `module`."""
    command = [str(python), "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip of that environment."""
    run(str(python), "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    """Run a command and stop with its name if it fails."""
    if subprocess.run(command).returncode != 0:
        stop(f"failed: {' '.join(command)} (its own message is above)")


def stop(why: str) -> None:
    """End with one line on stderr."""
    sys.exit(f"bootstrap: {why}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        stop("usage: python3 .ci/bootstrap.py VENV EXTRA")
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
