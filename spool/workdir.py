"""The checking host's work directory: its paths, and the three records that jobs share.

::

    <work>/run.json                      which run of which spool this directory belongs to
    <work>/intake.lock                   who fills it now
    <work>/settings/*.json               settings, rewritten only when their content changes
    <work>/batches/rank0/000007.json     `Manifest`: a fixed list of shards that one job handles
    <work>/segments/rank0/000002.json    `Segment`: up to eight batches of one rank and step
    <work>/ends/rank0.json               `RankEnd`: the rank is closed and all of it is in manifests
    <work>/measured/rank0/000007.parquet measured rows, written once, never deleted
    <work>/replay/rank0/000007.parquet   the same rows as the workflow's output
    <work>/two_way, three_way, retired/rank0/000002.*    per segment
    <work>/failed/rank0/step0/*.h5       shards kept for reproduction
    <work>/quarantine/rank0/step0/*.h5   unusable shards, each with a .json that says why

Manifests and segments are never changed once written. Nothing here imports
torch, Snakemake or HDF5, because every short job imports it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from spool.errors import SpoolError
from spool.files import atomic_write
from spool.names import split_name

VERSION = 1
MAX_NUMBER = 10**12
MAX_BATCHES_PER_SEGMENT = 8
MAX_BYTES = 1 << 62

_RANK_DIR = re.compile(r"rank(0|[1-9][0-9]{0,11})")
_RECORD_FILE = re.compile(r"([0-9]{6,9})\.json")
_SHARD_FILE = re.compile(r"(?P<order>[0-9]{6,12})\.(?P<name>.+)\.h5")


class WorkDirError(SpoolError):
    """A file of the work directory does not hold what it must."""


@dataclass(frozen=True, slots=True)
class ShardRef:
    """A shard as a manifest names it: file name within its step, and its size in bytes."""

    file: str
    nbytes: int

    @property
    def order(self) -> int:
        """The call's order in its step."""
        return int(self.file.split(".", 1)[0])

    @property
    def name(self) -> str:
        """The call's name, e.g. ``Functional.linear.2``."""
        return self.file.split(".", 1)[1][: -len(".h5")]


@dataclass(frozen=True)
class WorkDir:
    """Paths below one work directory; creates nothing by itself."""

    root: Path

    def batch(self, rank: int, number: int) -> Path:
        """Manifest of a batch."""
        return self._numbered("batches", rank, number, "json")

    def segment(self, rank: int, number: int) -> Path:
        """Record of a segment."""
        return self._numbered("segments", rank, number, "json")

    def end(self, rank: int) -> Path:
        """Record that a rank is complete."""
        return self.root / "ends" / f"rank{_number(rank)}.json"

    def measured(self, rank: int, number: int) -> Path:
        """Measured rows of a batch, written once."""
        return self._numbered("measured", rank, number, "parquet")

    def replay(self, rank: int, number: int) -> Path:
        """Output of rule replay for a batch."""
        return self._numbered("replay", rank, number, "parquet")

    def two_way(self, rank: int, number: int) -> Path:
        """Verdict rows of a segment's two-way calls."""
        return self._numbered("two_way", rank, number, "parquet")

    def three_way(self, rank: int, number: int) -> Path:
        """Verdict rows of a segment's three-way calls."""
        return self._numbered("three_way", rank, number, "parquet")

    def retired(self, rank: int, number: int) -> Path:
        """What became of a segment's shards."""
        return self._numbered("retired", rank, number, "json")

    def failed(self, rank: int, step: int) -> Path:
        """Directory of the shards kept of one step."""
        return self.root / "failed" / f"rank{_number(rank)}" / f"step{_number(step)}"

    def quarantine(self, rank: int, step: int) -> Path:
        """Directory of the unusable shards of one step."""
        return self.root / "quarantine" / f"rank{_number(rank)}" / f"step{_number(step)}"

    def settings(self, name: str) -> Path:
        """A settings file, e.g. ``judging`` or ``measuring``."""
        return self.root / "settings" / f"{name}.json"

    @property
    def run(self) -> Path:
        """Which run this directory belongs to."""
        return self.root / "run.json"

    @property
    def lock(self) -> Path:
        """The intake's lock."""
        return self.root / "intake.lock"

    def ranks(self) -> list[int]:
        """Ranks that have a batch, ascending."""
        directory = self.root / "batches"
        if not directory.is_dir():
            return []
        found = (_RANK_DIR.fullmatch(entry.name) for entry in directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def batches(self, rank: int) -> list[int]:
        """Numbers of a rank's batches, ascending."""
        return self._numbers(self.root / "batches" / f"rank{_number(rank)}")

    def segments(self, rank: int) -> list[int]:
        """Numbers of a rank's segments, ascending."""
        return self._numbers(self.root / "segments" / f"rank{_number(rank)}")

    def _numbered(self, kind: str, rank: int, number: int, suffix: str) -> Path:
        return self.root / kind / f"rank{_number(rank)}" / f"{_number(number):06d}.{suffix}"

    @staticmethod
    def _numbers(directory: Path) -> list[int]:
        if not directory.is_dir():
            return []
        found = (_RECORD_FILE.fullmatch(entry.name) for entry in directory.iterdir())
        return sorted(int(match[1]) for match in found if match)


_R = TypeVar("_R", bound="_Record")


@dataclass(frozen=True)
class _Record:
    """A JSON record with a version; subclasses say how it is checked."""

    KIND: ClassVar[str] = "record"

    def save(self, path: Path) -> bool:
        """Write the record atomically unless `path` already says the same.

        Returns
        -------
        bool
            Whether the file was written: its time only changes with its content.
        """
        return write_if_changed(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        raise NotImplementedError

    @classmethod
    def load(cls: type[_R], path: Path) -> _R:
        """Read and validate a record.

        Raises
        ------
        WorkDirError
            If the file is missing, torn, of another version, or holds values
            that no intake writes.
        """
        data = read_json(path, cls.KIND)
        try:
            if data.get("version") != VERSION:
                raise ValueError(f"version {data.get('version')!r}, this program reads {VERSION}")
            return cls._parse(data)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise WorkDirError(
                f"{path}: not a usable {cls.KIND}: {what}; start again with another work_dir"
            ) from None

    @classmethod
    def _parse(cls: type[_R], data: dict[str, Any]) -> _R:
        raise NotImplementedError


@dataclass(frozen=True)
class Manifest(_Record):
    """A fixed list of shards of one rank and step that one job handles.

    Parameters
    ----------
    spool : str
        Absolute path of the spool directory.
    run_id : str
        The run that wrote the shards.
    shards : tuple of ShardRef
        In call order.
    """

    KIND: ClassVar[str] = "manifest"

    rank: int
    step: int
    batch: int
    spool: str
    run_id: str
    shards: tuple[ShardRef, ...]

    @property
    def step_dir(self) -> Path:
        """The spool's directory that holds the shards."""
        return Path(self.spool) / f"rank{self.rank}" / f"step{self.step}"

    @property
    def nbytes(self) -> int:
        """Size of all shards together."""
        return sum(shard.nbytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON values."""
        return {
            "version": VERSION,
            "rank": self.rank,
            "step": self.step,
            "batch": self.batch,
            "spool": self.spool,
            "run_id": self.run_id,
            "shards": [{"file": shard.file, "bytes": shard.nbytes} for shard in self.shards],
        }

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> Manifest:
        spool = _text(data["spool"])
        if not Path(spool).is_absolute():
            raise ValueError(f"spool {spool!r} is not an absolute path")
        shards = tuple(
            ShardRef(_shard_file(item["file"]), _number(item["bytes"], MAX_BYTES))
            for item in data["shards"]
        )
        if not shards:
            raise ValueError("it names no shard")
        if len({shard.file for shard in shards}) != len(shards):
            raise ValueError("it names a shard twice")
        return cls(
            rank=_number(data["rank"]),
            step=_number(data["step"]),
            batch=_number(data["batch"]),
            spool=spool,
            run_id=_text(data["run_id"]),
            shards=shards,
        )


@dataclass(frozen=True)
class Segment(_Record):
    """Up to eight batches of one rank and step that are judged and retired together."""

    KIND: ClassVar[str] = "segment"

    rank: int
    step: int
    segment: int
    batches: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the segment as plain JSON values."""
        return {
            "version": VERSION,
            "rank": self.rank,
            "step": self.step,
            "segment": self.segment,
            "batches": list(self.batches),
        }

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> Segment:
        batches = tuple(_number(item) for item in data["batches"])
        if not 1 <= len(batches) <= MAX_BATCHES_PER_SEGMENT or list(batches) != sorted(
            set(batches)
        ):
            raise ValueError(f"batches {list(batches)} are not 1 to 8 ascending numbers")
        return cls(
            rank=_number(data["rank"]),
            step=_number(data["step"]),
            segment=_number(data["segment"]),
            batches=batches,
        )


@dataclass(frozen=True)
class RankEnd(_Record):
    """A rank is complete: every shard that will be judged is named by a manifest.

    Parameters
    ----------
    run_id, timestamp : str
        The run and its time stamp ``YYYYmmddHHMMSS``, from the spool's run.json.
    segments : tuple of int
        Numbers of all segments of the rank.
    batches : int
        How many batches they hold.
    found : dict of int to int
        Shards named by manifests, by step.
    expected : dict or None
        The rank's closed.json as it was read; None if the rank was never closed.
    missing : dict of int to int
        Shards that closed.json counts and nobody found, by step.
    note : str
        Why an unclosed rank was taken as ended, or "".
    """

    KIND: ClassVar[str] = "end of a rank"

    rank: int
    run_id: str
    timestamp: str
    segments: tuple[int, ...]
    batches: int
    found: dict[int, int] = field(default_factory=dict)
    expected: dict[str, Any] | None = None
    missing: dict[int, int] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the end as plain JSON values."""
        return {
            "version": VERSION,
            "rank": self.rank,
            "run_id": self.run_id,
            "timestamp": self.timestamp,
            "segments": list(self.segments),
            "batches": self.batches,
            "found": {str(step): count for step, count in sorted(self.found.items())},
            "expected": self.expected,
            "missing": {str(step): count for step, count in sorted(self.missing.items())},
            "note": self.note,
        }

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> RankEnd:
        expected = data["expected"]
        if expected is not None and not isinstance(expected, dict):
            raise ValueError("expected is neither an object nor null")
        timestamp = _text(data["timestamp"])
        if re.fullmatch(r"[0-9]{14}", timestamp) is None:
            raise ValueError(f"timestamp {timestamp!r} is not YYYYmmddHHMMSS")
        return cls(
            rank=_number(data["rank"]),
            run_id=_text(data["run_id"]),
            timestamp=timestamp,
            segments=tuple(_number(item) for item in data["segments"]),
            batches=_number(data["batches"]),
            found=_counts(data["found"]),
            expected=expected,
            missing=_counts(data["missing"]),
            note=_text(data["note"]),
        )


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    WorkDirError
        If the file cannot be read or is not a JSON object.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkDirError(f"{path}: cannot read the {kind}: {error.strerror}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise WorkDirError(f"{path}: not a usable {kind}: no JSON object; remove it and rerun")
    return data


def write_if_changed(path: Path, data: dict[str, Any]) -> bool:
    """Write a JSON object atomically, unless the file already says the same.

    Returns
    -------
    bool
        Whether the file was written.
    """
    content = json.dumps(data, indent=1, sort_keys=False).encode() + b"\n"
    try:
        if path.read_bytes() == content:
            return False
    except OSError:
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content)
    return True


def _number(value: object, limit: int = MAX_NUMBER) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{value!r} is not a whole number from 0")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _counts(value: object) -> dict[int, int]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    return {_number(int(step)): _number(count) for step, count in value.items()}


def _shard_file(value: object) -> str:
    match = _SHARD_FILE.fullmatch(_text(value))
    if match is None:
        raise ValueError(f"{value!r} is not a shard's file name")
    split_name(match["name"])
    return match[0]
