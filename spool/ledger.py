"""Which shards of failing calls are kept, and the ledger that remembers it.

Two limits hold per rank, and the first calls in execution order win: a number of
shards of one API, and a number of bytes in all. The shards kept are

    those of the first `keep_per_api` failing calls of their API, up to the last call
    at which the weights of all APIs together stay within the bytes; an API's weight
    at a call is the sum of its `keep_per_api` largest failing shards up to there.

Weights never shrink when another failing call becomes known, so a shard that is
dropped early would be dropped at the end too: calls may become known in any order,
nothing above the limit is ever held, and the final set is the same. A shard that is
larger than the limit by itself is left out of the account.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spool.errors import SpoolError
from spool.files import atomic_write, make_dirs
from spool.names import split_name
from spool.records import CallKey
from spool.workdir import MAX_BYTES, WorkDir, read_json, shard_file, whole_number

VERSION = 1


class LedgerError(SpoolError):
    """The record of kept shards is unusable."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A failing call whose shard may be kept.

    Parameters
    ----------
    key : CallKey
        Place in the order of execution, by which candidates are sorted.
    file : str
        The shard's file name.
    nbytes : int
        Its size.
    kept : bool
        False once its shard was given up, which is for good.
    """

    key: CallKey
    file: str = field(compare=False)
    nbytes: int = field(compare=False)
    kept: bool = field(compare=False, default=True)

    @property
    def api(self) -> str:
        """Name without counter."""
        return split_name(self.key.name)[0]


@dataclass(frozen=True, slots=True)
class Ledger:
    """A rank's failing calls, and what became of their shards.

    Parameters
    ----------
    directory : str
        Where kept shards lie, fixed by the first segment that was retired; relative to
        the work directory if it lies in that, so that both may move.
    segments : tuple of int
        Segments that were retired.
    candidates : tuple of Candidate
        Sorted; those that can no longer matter are left out.
    evict : tuple of (int, str)
        Step and file of shards to be deleted from `directory`.
    """

    directory: str = ""
    segments: tuple[int, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    evict: tuple[tuple[int, str], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger; an absent one is empty."""
        if not path.exists():
            return cls()
        data = read_json(path, "ledger of kept shards", _way_out(path))
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}")
            return cls(
                directory=_directory(data["directory"]),
                segments=tuple(whole_number(number) for number in data["segments"]),
                candidates=tuple(_candidate(*item) for item in data["candidates"]),
                evict=tuple((whole_number(step), shard_file(file)) for step, file in data["evict"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{path}: not a usable ledger of kept shards: {error}; {_way_out(path)}"
            ) from None

    def save(self, path: Path) -> None:
        """Write the ledger durably."""
        data = {
            "version": VERSION,
            "directory": self.directory,
            "segments": list(self.segments),
            "candidates": [[list(c.key), c.file, c.nbytes, c.kept] for c in self.candidates],
            "evict": [list(item) for item in self.evict],
        }
        make_dirs(path.parent)
        atomic_write(path, json.dumps(data, separators=(",", ":")).encode() + b"\n")

    @property
    def kept(self) -> dict[tuple[int, str], Candidate]:
        """Candidates whose shards are kept, by step and file."""
        return {(c.key.step, c.file): c for c in self.candidates if c.kept}

    def path(self, work: WorkDir, rank: int, step: int, file: str) -> Path:
        """Where a kept shard lies."""
        return work.root / self.directory / f"rank{rank}" / f"step{step}" / file


def ledger_path(work: WorkDir, rank: int) -> Path:
    """The ledger of a rank's kept shards."""
    return work.root / "failed" / f"rank{rank}" / "ledger.json"


def directory_of(work: WorkDir, failed_dir: str) -> str:
    """What a new ledger says about where kept shards lie.

    Parameters
    ----------
    work : WorkDir
    failed_dir : str
        Absolute, or "" for the work directory's own.
    """
    if not failed_dir:
        return "failed"
    root, directory = work.root.absolute(), Path(failed_dir)
    return str(directory.relative_to(root) if directory.is_relative_to(root) else directory)


def _directory(value: object) -> str:
    if not isinstance(value, str) or ".." in Path(value).parts or "\0" in value:
        raise ValueError(f"{value!r:.80} is not a directory for shards")
    return value


def _candidate(key: list[Any], file: object, nbytes: object, kept: object) -> Candidate:
    step, order, element, name = key
    call = CallKey(whole_number(step), whole_number(order), whole_number(element), name)
    if shard_file(file) != f"{call.order:06d}.{name}.h5":
        raise ValueError(f"{file!r:.80} is not the shard of its call")
    if type(kept) is not bool:
        raise ValueError(f"{kept!r:.80} does not say whether it is kept")
    return Candidate(call, str(file), whole_number(nbytes, MAX_BYTES), kept)


def _way_out(path: Path) -> str:
    """What to do when the ledger at `path` is lost: retiring again rebuilds it."""
    retired = path.parents[2] / "retired" / path.parent.name
    return f"remove it and {retired}, and rerun: kept shards stay"


def kept_shards(work: WorkDir, rank: int) -> dict[tuple[int, str], str]:
    """Paths of a rank's kept shards by step and file name.

    A path inside the work directory is given relative to it.

    Raises
    ------
    SpoolError
        If the ledger is unusable, or is gone though shards were kept.
    """
    ledger = load_ledger(work, rank)
    found = {(step, file): ledger.path(work, rank, step, file) for step, file in ledger.kept}
    return {
        key: str(path.relative_to(work.root) if path.is_relative_to(work.root) else path)
        for key, path in found.items()
        if path.exists()
    }


def load_ledger(work: WorkDir, rank: int) -> Ledger:
    """Read a rank's ledger; it is empty until the first segment is retired.

    Raises
    ------
    SpoolError
        If it is unusable, or is gone though segments were retired by it.
    """
    path = ledger_path(work, rank)
    if not path.exists() and _has_kept(work, rank):
        raise LedgerError(f"{path}: the ledger of kept shards is gone; {_way_out(path)}")
    return Ledger.load(path)


def _has_kept(work: WorkDir, rank: int) -> bool:
    records = (work.retired(rank, number) for number in work.segments(rank))
    there = (read_json(path, "record of retired shards") for path in records if path.exists())
    return any(record.get("retain") != "all" for record in there)


def choose(candidates: Iterable[Candidate], keep_per_api: int, max_bytes: int) -> set[CallKey]:
    """Candidates whose shards are kept, by the module's rule.

    Parameters
    ----------
    candidates : iterable of Candidate
        Sorted.
    keep_per_api, max_bytes : int
    """
    kept: set[CallKey] = set()
    weights: dict[str, _Weight] = {}
    total = 0
    for candidate in candidates:
        if candidate.nbytes > max_bytes:
            continue
        weight = weights.setdefault(candidate.api, _Weight(keep_per_api))
        total += weight.add(candidate.nbytes)
        if total > max_bytes:
            break
        if weight.count <= keep_per_api:
            kept.add(candidate.key)
    return kept


def relevant(
    candidates: Iterable[Candidate], keep_per_api: int, max_bytes: int
) -> Iterator[Candidate]:
    """Candidates that can still matter, whatever becomes known later.

    One behind `keep_per_api` earlier calls of its API that are no smaller neither is
    kept nor adds to the weight.
    """
    weights: dict[str, _Weight] = {}
    for candidate in candidates:
        weight = weights.setdefault(candidate.api, _Weight(keep_per_api))
        if candidate.nbytes > max_bytes:
            continue
        if weight.add(candidate.nbytes) or weight.count <= keep_per_api:
            yield candidate


class _Weight:
    """Sum of an API's largest shards, as they come in the order of execution."""

    def __init__(self, keep: int) -> None:
        self.count = 0
        self._keep = keep
        self._largest: list[int] = []

    def add(self, nbytes: int) -> int:
        """Take a shard in; returns by how much the weight grew."""
        self.count += 1
        if len(self._largest) < self._keep:
            heapq.heappush(self._largest, nbytes)
            return nbytes
        return nbytes - heapq.heappushpop(self._largest, nbytes)
