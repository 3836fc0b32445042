"""Which GPUs there are, and which of them a job may use. No torch: it is asked too often."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spool.errors import ConfigError
from spool.files import make_dirs, opener

_DEVICE = re.compile(r"nvidia[0-9]+")
# Between two rounds over GPUs that are all taken.
_WAIT = 0.5


def visible_gpus(devices: Path = Path("/dev")) -> list[int]:
    """Numbers of the GPUs that torch will see, counted from 0 as torch does.

    ``CUDA_VISIBLE_DEVICES`` narrows and renumbers them, as everywhere.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(1 for entry in devices.iterdir() if _DEVICE.fullmatch(entry.name))
    if chosen is None:
        return list(range(there))
    names = [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return list(range(min(there, len(names))))


def gpus_to_use(bench_device: str, gpus: Sequence[int]) -> list[int]:
    """GPUs for replay jobs; none if they run on the CPU.

    Parameters
    ----------
    bench_device : str
        ``auto``, ``cuda`` or ``cpu``.
    gpus : sequence of int
        The configured ones; empty for all visible.

    Raises
    ------
    ConfigError
        If a configured GPU is not there.
    """
    if bench_device == "cpu":
        return []
    there = visible_gpus()
    absent = [gpu for gpu in gpus if gpu not in there]
    if absent and (there or bench_device == "cuda"):
        raise ConfigError(
            f"config: gpus: {list(gpus)!r} is not allowed; visible are {there or 'none'}"
        )
    return list(gpus) if gpus and there else there


@contextmanager
def claimed_gpu(locks: Path, gpus: Sequence[int]) -> Iterator[int | None]:
    """Hold one GPU that no other job of this work directory holds.

    Parameters
    ----------
    locks : Path
        Directory for the lock files.
    gpus : sequence of int
        To choose from; empty gives None.

    Yields
    ------
    int or None
        The GPU's number. A killed job gives its GPU back with its life.
    """
    if not gpus:
        yield None
        return
    make_dirs(locks)
    host = os.uname().nodename
    while True:
        for gpu in gpus:
            file = opener(locks / f"{host}.{gpu}.lock", os.O_RDWR | os.O_CREAT)
            try:
                if _try_lock(file):
                    yield gpu
                    return
            finally:
                os.close(file)
        time.sleep(_WAIT)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
