"""The small JSON files of a spool directory: what a run, a step and a rank say.

Whoever reads one may meet a file of another program or version, or of somebody who means
harm, so types and ranges are checked, and an error names file and member.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spool.beneath import read_beneath, refusal
from spool.errors import StoreError
from spool.files import Refused, atomic_write

FORMAT_VERSION = 1
RETIRED = "retired.json"

# A marker is small; one that is not is not ours.
_MAX_MARKER = 16 << 20
_NUMBER = re.compile("0|[1-9][0-9]{0,11}")
# No number that Spool writes is larger, and whoever adds some up stays within 64 bits.
_MAX_VALUE = 1 << 53
_MAX_TEXT = 4096
# What would act on a terminal or make two lines of one, or cannot be printed.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class MarkerError(StoreError):
    """A marker does not say what Spool writes."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What ``run.json`` says.

    Parameters
    ----------
    format : int
        Version of the spool directory's format.
    run_id : str
        Random; tells two runs apart that used the same directory.
    created : float
        Seconds since the epoch.
    timestamp : str
        ``YYYYmmddHHMMSS`` in local time, fixed once: it is in names of result files.
    versions : dict of str to str
        Of the programs that wrote the run, e.g. ``{"torch": "2.1.0"}``.
    """

    format: int
    run_id: str
    created: float
    timestamp: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What was captured in one step of one rank.

    Parameters
    ----------
    shards, bytes : int
        What a reader must find.
    dropped : int
        Calls lost for lack of room or by failure.
    skipped : dict of str to int
        Calls left alone, by reason.
    blocked_seconds : float
        How long training waited for the spool.
    """

    shards: int
    bytes: int
    dropped: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    blocked_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankCounts:
    """What was captured in one rank, and why capture ended there."""

    steps: dict[int, StepCounts]
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of life of a rank.

    Parameters
    ----------
    time : float
        Seconds since the epoch, by the training host's clock.
    pid, host : int, str
    step : int
        The open step.
    captured, bytes : int
        Shards and their bytes so far.
    blocked : bool
        Whether training waits for room in the spool.
    writer : int
        The process that writes, if it is another; 0 if none is.
    """

    time: float
    pid: int
    host: str
    step: int
    captured: int
    bytes: int
    blocked: bool = False
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Retired:
    """Whose check has deleted shards of a step, or moved them away.

    Parameters
    ----------
    by : str
        ``<host>:<work directory>`` of the first one.
    """

    by: str


def new_run(versions: dict[str, str]) -> RunInfo:
    """Describe a run that starts now."""
    now = time.time()
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
    return RunInfo(FORMAT_VERSION, uuid.uuid4().hex, now, stamp, dict(versions))


def to_json(marker: RunInfo | StepCounts | RankCounts | Heartbeat | Retired) -> bytes:
    """Return the text of a marker."""
    record = asdict(marker)
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def load_run(path: Path) -> RunInfo | None:
    """Read ``run.json``, or None if there is none; a newer format is an error."""
    record = _load(path.parent, path)
    return None if record is None else run_info(record, path)


Marker = TypeVar("Marker", StepCounts, Heartbeat, Retired)


def load(kind: type[Marker], root: Path, path: Path) -> Marker | None:
    """Read a marker of one kind, which lies below `root`, or None if there is none.

    Raises
    ------
    StoreError
        If it cannot be read or is not what `to_json` writes.
    """
    record = _load(root, path)
    return None if record is None else check(kind, record, path)


def load_rank(root: Path, path: Path) -> RankCounts | None:
    """Read the marker of a complete rank, or None if there is none."""
    record = _load(root, path)
    return None if record is None else rank_counts(record, path)


def rank_counts(record: dict[str, Any], path: Path) -> RankCounts:
    """Check what a rank was closed with, as it stands in the file `path`.

    Raises
    ------
    StoreError
        If it is not what `to_json` writes.
    """
    steps, reason = record.get("steps"), record.get("reason")
    if type(steps) is not dict or not _fits(reason, "str"):
        raise _malformed(path)
    counts = {}
    for number, item in steps.items():
        if not _NUMBER.fullmatch(number) or type(item) is not dict:
            raise _malformed(path, "steps")
        counts[int(number)] = _make(StepCounts, item, path)
    return RankCounts(counts, str(reason))


def check(kind: type[Marker], record: dict[str, Any], path: Path) -> Marker:
    """Check a marker of one kind, as it stands in the file `path`.

    Raises
    ------
    StoreError
        If it is not what `to_json` writes.
    """
    marker: Marker = _make(kind, record, path)
    return marker


def run_info(record: dict[str, Any], path: Path) -> RunInfo:
    """Check what is said of a run, as it stands in the file `path`.

    Raises
    ------
    StoreError
        If it is not what `to_json` writes, or of a newer format.
    """
    version = record.get("format")
    if type(version) is int and version > FORMAT_VERSION:
        raise StoreError(
            f"{path.parent} is of spool format {version}, but this Spool reads "
            f"{FORMAT_VERSION}: update Spool"
        )
    run: RunInfo = _make(RunInfo, record, path)
    if not re.fullmatch("[0-9]{14}", run.timestamp):
        raise _malformed(path, "timestamp")
    return run


def takes_path(root: Path, rank: int) -> Path:
    """Where a rank's takes are: beside its directory, which may be deleted as a whole."""
    return root / f"rank{rank}.takes.json"


def takes_to_json(takes: dict[int, int]) -> bytes:
    """Return the text of a rank's takes."""
    record = {str(step): count for step, count in sorted(takes.items())}
    return (json.dumps(record) + "\n").encode()


def load_takes(root: Path, rank: int) -> dict[int, int]:
    """Read how often each step of a rank was deleted; nothing is there if none was."""
    path, takes = takes_path(root, rank), {}
    for step, count in (_load(root, path) or {}).items():
        if not _NUMBER.fullmatch(step) or not _fits(count, "int"):
            raise _malformed(path, step)
        takes[int(step)] = count
    return takes


def require_take(root: Path, run_id: str, rank: int, step: int, take: int) -> None:
    """Make sure that a spool still holds the shards that somebody knows by their names.

    A step that is deleted and captured anew, or another run in the same directory, has
    shards of the same names. A spool that is not there is not asked.

    Raises
    ------
    StoreError
        If the shards there are of another run, or of another take of the step.
    """
    run = load_run(root / "run.json")
    if run is not None and run.run_id != run_id:
        raise StoreError(
            f"{root}: another run began there, and nothing of it is touched; "
            "check it with another work_dir"
        )
    if root.is_dir() and load_takes(root, rank).get(step, 0) != take:
        raise captured_anew(root, rank, step)


def captured_anew(root: Path, rank: int, step: int) -> StoreError:
    """What to raise where results of two takes of a step would mix."""
    return StoreError(
        f"{root}: rank {rank} step {step} was captured anew after this work directory had begun "
        "with it; run the same command again: it drops what was checked of that step before"
    )


def note_retired(step_dir: Path, by: str) -> None:
    """Leave word of who took shards of a step away; the first one's stays."""
    if not os.path.lexists(step_dir / RETIRED):
        atomic_write(step_dir / RETIRED, to_json(Retired(by)))


def _load(root: Path, path: Path) -> dict[str, Any] | None:
    """Read a marker, or None if there is none."""
    try:
        data = read_beneath(root, path, _MAX_MARKER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Refused as error:
        # Waiting would not mend it: no cause that looks like trouble with the mount.
        raise (_malformed(path) if error.errno == errno.EFBIG else refusal(path)) from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    if type(record) is not dict:
        raise _malformed(path)
    return record


_LATER = frozenset(("writer",))

_TYPES: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "dict[str, int]": dict,
    "dict[str, str]": dict,
}


def _make(kind: Any, record: dict[str, Any], path: Path) -> Any:
    """Make a marker's dataclass of its record; unknown members are left out.

    Members that came after the first version have defaults and may be absent.
    """
    values = {}
    for name, item in kind.__dataclass_fields__.items():
        if name in _LATER and name not in record:
            continue
        value = record.get(name)
        if not _fits(value, item.type):
            raise _malformed(path, name)
        values[name] = value
    return kind(**values)


def _fits(value: Any, kind: str) -> bool:
    if not isinstance(value, _TYPES[kind]) or (type(value) is bool and kind != "bool"):
        return False
    if kind == "int":
        return bool(0 <= value < _MAX_VALUE)
    if kind == "float":
        return bool(-_MAX_VALUE < value < _MAX_VALUE)
    if kind == "str":
        return len(value) <= _MAX_TEXT and not _CONTROL.search(value)
    if kind.startswith("dict"):
        return all(_fits(key, "str") and _fits(item, kind[10:-1]) for key, item in value.items())
    return True


def _malformed(path: Path, name: str = "") -> MarkerError:
    where = f"{path}, member {name!r:.80}," if name else str(path)
    return MarkerError(f"{where} is not what Spool writes: restore the file or clear the spool")
