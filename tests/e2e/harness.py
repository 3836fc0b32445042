"""What the end-to-end tests share: training processes, workflow runs, tables."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
TABLES = (
    "accuracy_checking_result",
    "accuracy_checking_details",
    "api_precision_compare_result",
    "api_precision_compare_details",
)


def environment() -> dict[str, str]:
    """Environment of the processes: quiet, single-threaded kernels, no network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def train(cwd: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the training script in `cwd` to its end."""
    done = subprocess.run(
        [sys.executable, str(TRAIN), *options],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def python(cwd: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines in a fresh interpreter; they must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def command(*arguments: str, cores: int = 2, **config: object) -> list[str]:
    """The workflow's command line: ``snakemake --cores N ... --config key=value``."""
    line = [sys.executable, "-m", "snakemake", "-s", str(REPO / "Snakefile")]
    line += ["--cores", str(cores), *arguments]
    if config:
        line += ["--config", *(f"{key}={value}" for key, value in config.items())]
    return line


def workflow(
    cwd: Path, *arguments: str, cores: int = 2, check: bool = True, **config: object
) -> subprocess.CompletedProcess[str]:
    """Run the workflow in `cwd` to its end."""
    config.setdefault("rank_list", "[0]")
    done = subprocess.run(
        command(*arguments, cores=cores, **config),
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    if check:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def tables(cwd: Path) -> dict[str, bytes]:
    """Bytes of every table in ``results``, by name without the run's time stamp."""
    return {
        re.sub(r"_\d{14}_", "_", path.name): path.read_bytes()
        for path in sorted((cwd / "results").glob("*.csv"))
    }


def rows(cwd: Path, table: str, rank: int = 0) -> list[dict[str, str]]:
    """Rows of one table of one rank."""
    (path,) = (cwd / "results").glob(f"{table}_*_rank{rank}.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def copy_spool(source: Path, cwd: Path) -> Path:
    """Give `cwd` its own copy of a spool, since checking consumes shards."""
    target = cwd / "spool-data"
    shutil.copytree(source, target)
    return target


def copy_run(source: Path, target: Path) -> Path:
    """A run of one's own, with the times and hard links that Snakemake and Spool look at."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    return target


def api_of(name: str) -> str:
    """``Functional.gelu`` of ``Functional.gelu.3`` or of a detail row's name."""
    match = re.match(r"(.+?)\.\d+(\.(forward|backward)\..*)?$", name)
    assert match, name
    return match[1]


def shards(spool: Path) -> list[Path]:
    """Every published shard of a spool."""
    return sorted(spool.glob("rank*/step*/[0-9]*.h5"))
