"""The records of a work directory that jobs share; manifests and segments never change.

Each is a JSON file that is checked when it is read: its numbers and names become paths.
Nothing here imports torch, Snakemake or HDF5, because every short job imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from spool.beneath import beneath
from spool.errors import StoreError
from spool.markers import rank_counts, require_take
from spool.names import parse_shard_name
from spool.workfiles import WorkDirError, read_json, whole_number, write_if_changed

VERSION = 1
MAX_BATCHES_PER_SEGMENT = 8
# Of a file, as the system counts.
MAX_BYTES = 1 << 63


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


_R = TypeVar("_R", bound="_Record")


@dataclass(frozen=True)
class _Record:
    """A JSON record with a version; subclasses say how it is checked."""

    KIND: ClassVar[str] = "record"
    # What to do when the file is damaged; the workflow writes most of them anew.
    WAY_OUT: ClassVar[str] = "remove it and rerun"

    def save(self, path: Path, after: Iterable[Path] = ()) -> bool:
        """Write the record atomically unless `path` already says the same.

        Parameters
        ----------
        path : Path
        after : iterable of Path
            What is made from it, see `write_if_changed`.

        Returns
        -------
        bool
            Whether the file was written: its time only changes with its content.
        """
        return write_if_changed(path, self.to_json(), after)

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
        data = read_json(path, cls.KIND, cls.WAY_OUT)
        version = data.get("version")
        if type(version) is int and version > VERSION:
            raise WorkDirError(
                f"{path}: {cls.KIND} of version {version}, this program reads {VERSION}; "
                "install a newer Spool"
            )
        try:
            if version != VERSION:
                raise ValueError(f"version {version!r}, this program reads {VERSION}")
            record = cls._parse(data)
            if (path.parent.name, path.name) != record.place:
                raise ValueError(f"it belongs to {'/'.join(record.place)}")
            return record
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise WorkDirError(f"{path}: not a usable {cls.KIND}: {what}; {cls.WAY_OUT}") from None

    @property
    def place(self) -> tuple[str, str]:
        """Names of the record's directory and file, by what it holds."""
        raise NotImplementedError

    @classmethod
    def _parse(cls: type[_R], data: dict[str, Any]) -> _R:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Bound:
    """Which run a work directory belongs to, and the absolute path of its spool now."""

    run_id: str
    spool: str

    def save(self, path: Path) -> None:
        """Write it, unless `path` already says the same."""
        write_if_changed(path, {"run_id": self.run_id, "spool": self.spool})

    @classmethod
    def load(cls, path: Path) -> Bound | None:
        """Read it; None if no run was bound yet.

        Raises
        ------
        WorkDirError
            If the file is not usable.
        """
        if not path.exists():
            return None
        data = read_json(path, "record of a run")
        try:
            return cls(_text(data["run_id"]), _directory(data["spool"]))
        except (KeyError, ValueError):
            # Manifests name the run too, so nothing is lost with the file.
            raise WorkDirError(
                f"{path}: not a usable record of a run: remove it and rerun"
            ) from None


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
    take : int
        How often the step had been deleted before these shards were captured.
    """

    KIND: ClassVar[str] = "manifest"
    WAY_OUT: ClassVar[str] = (
        "restore it from a copy, or start with another work_dir on a spool that is whole: "
        "which shards its results are of is not written elsewhere"
    )

    rank: int
    step: int
    batch: int
    spool: str
    run_id: str
    shards: tuple[ShardRef, ...]
    take: int = 0

    @classmethod
    def find(cls, path: Path) -> Manifest:
        """Read a manifest of a work directory, with the path that the spool has now.

        The spool may have moved, or be mounted elsewhere, since the manifest was written.

        Raises
        ------
        WorkDirError
            As `load`, and if the work directory's record of its run is unusable, or that of
            another run.
        """
        manifest = cls.load(path)
        run = Bound.load(path.absolute().parents[2] / "run.json")
        if run is None:
            return manifest
        if run.run_id != manifest.run_id:
            raise WorkDirError(
                f"{path}: not a usable {cls.KIND}: it is of another run than the work directory; "
                f"{cls.WAY_OUT}"
            )
        return replace(manifest, spool=run.spool)

    def opened(self) -> AbstractContextManager[Path]:
        """Open the spool's directory that holds the shards, see `spool.beneath.beneath`."""
        return beneath(Path(self.spool), self.step_dir)

    @property
    def place(self) -> tuple[str, str]:
        """Names of the record's directory and file, by what it holds."""
        return f"rank{self.rank}", f"{self.batch:06d}.json"

    def require_take(self) -> None:
        """Make sure that the spool still holds these shards, not others of the same names.

        Raises
        ------
        StoreError
            If the step was captured anew, or the directory is of another run now.
        """
        require_take(Path(self.spool), self.run_id, self.rank, self.step, self.take)

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
            "take": self.take,
            "shards": [{"file": shard.file, "bytes": shard.nbytes} for shard in self.shards],
        }

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> Manifest:
        shards = tuple(
            ShardRef(shard_file(item["file"]), whole_number(item["bytes"], MAX_BYTES))
            for item in data["shards"]
        )
        if not shards:
            raise ValueError("it names no shard")
        if len({shard.file for shard in shards}) != len(shards):
            raise ValueError("it names a shard twice")
        return cls(
            rank=whole_number(data["rank"]),
            step=whole_number(data["step"]),
            batch=whole_number(data["batch"]),
            spool=_directory(data["spool"]),
            run_id=_text(data["run_id"]),
            shards=shards,
            take=whole_number(data.get("take", 0), MAX_BYTES),
        )


@dataclass(frozen=True)
class Segment(_Record):
    """Up to eight batches of one rank and step that are judged and retired together."""

    KIND: ClassVar[str] = "segment"

    rank: int
    step: int
    segment: int
    batches: tuple[int, ...]

    @property
    def place(self) -> tuple[str, str]:
        """Names of the record's directory and file, by what it holds."""
        return f"rank{self.rank}", f"{self.segment:06d}.json"

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
        batches = tuple(whole_number(item) for item in data["batches"])
        if not 1 <= len(batches) <= MAX_BATCHES_PER_SEGMENT or list(batches) != sorted(
            set(batches)
        ):
            raise ValueError("its batches are not 1 to 8 ascending numbers")
        return cls(
            rank=whole_number(data["rank"]),
            step=whole_number(data["step"]),
            segment=whole_number(data["segment"]),
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
    retired_by : str
        Whose check took missing shards away, see `spool.markers.Retired`; or "".
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
    retired_by: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Names of the record's directory and file, by what it holds."""
        return "ends", f"rank{self.rank}.json"

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
            "retired_by": self.retired_by,
        }

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> RankEnd:
        expected = data["expected"]
        if expected is not None:
            if not isinstance(expected, dict):
                raise ValueError("expected is neither an object nor null")
            try:
                rank_counts(expected, Path("expected"))
            except StoreError:
                raise ValueError("expected is not what a rank is closed with") from None
        timestamp = _text(data["timestamp"])
        if re.fullmatch(r"[0-9]{14}", timestamp) is None:
            raise ValueError(f"timestamp {timestamp!r:.80} is not YYYYmmddHHMMSS")
        return cls(
            rank=whole_number(data["rank"]),
            run_id=_text(data["run_id"]),
            timestamp=timestamp,
            segments=tuple(whole_number(item) for item in data["segments"]),
            batches=whole_number(data["batches"]),
            found=_counts(data["found"]),
            expected=expected,
            missing=_counts(data["missing"]),
            note=_text(data["note"]),
            retired_by=_text(data.get("retired_by", "")),
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is not a string")
    return value


def _directory(value: object) -> str:
    path = _text(value)
    if not Path(path).is_absolute() or "\0" in path:
        raise ValueError(f"spool {path!r:.80} is not an absolute path")
    return path


def _counts(value: object) -> dict[int, int]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    return {whole_number(int(step)): whole_number(n, MAX_BYTES) for step, n in value.items()}


def shard_file(value: object) -> str:
    """Return `value` if it is a shard's file name; else raise ValueError."""
    if parse_shard_name(_text(value)) is None:
        raise ValueError(f"{value!r:.80} is not a shard's file name")
    return str(value)
