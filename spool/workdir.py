"""The checking host's work directory: its paths. What its records hold is in `spool.workrecords`.

::

    <work>/run.json                      which run of which spool this directory belongs to
    <work>/intake.lock                   who fills it now
    <work>/settings/*.json               settings, rewritten only when their content changes
    <work>/batches/rank0/000007.json     `Manifest`: a fixed list of shards that one job handles
    <work>/segments/rank0/000002.json    `Segment`: up to eight batches of one rank and step
    <work>/ends/rank0.json               `RankEnd`: the rank is closed and all of it is in manifests
    <work>/measured/rank0/000007.parquet measured rows, written once; gone only with a take
    <work>/replay/rank0/000007.parquet   the same rows as the workflow's output
    <work>/two_way, three_way, retired/rank0/000002.*    per segment
    <work>/failed/rank0/step0/*.h5       shards kept for reproduction
    <work>/quarantine/rank0/step0/*.h5   unusable shards, each with a .json that says why

Nothing here imports torch, Snakemake or HDF5, because every short job imports it.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from spool.workfiles import WorkDirError, read_json, whole_number, write_if_changed
from spool.workrecords import (
    MAX_BATCHES_PER_SEGMENT,
    MAX_BYTES,
    Bound,
    Manifest,
    RankEnd,
    Segment,
    ShardRef,
    shard_file,
)

__all__ = [
    "MAX_BATCHES_PER_SEGMENT",
    "MAX_BYTES",
    "Bound",
    "Manifest",
    "RankEnd",
    "Segment",
    "ShardRef",
    "WorkDir",
    "WorkDirError",
    "read_json",
    "shard_file",
    "whole_number",
    "write_if_changed",
]

_RANK_DIR = re.compile(r"rank(0|[1-9][0-9]{0,11})")
_NUMBERED_FILE = re.compile(r"([0-9]{6,9})\.(json|parquet)")


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
        return self.root / "ends" / f"rank{whole_number(rank)}.json"

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

    @property
    def name(self) -> str:
        """What it is called in the spool: ``<host>:<path>``, in characters that can be printed."""
        name = f"{socket.gethostname()}:{self.root.resolve()}"
        return "".join(char if char.isprintable() else "?" for char in name)

    def retired(self, rank: int, number: int) -> Path:
        """What became of a segment's shards."""
        return self._numbered("retired", rank, number, "json")

    def failed(self, rank: int, step: int) -> Path:
        """Directory of the shards kept of one step."""
        return self.root / "failed" / f"rank{whole_number(rank)}" / f"step{whole_number(step)}"

    def quarantine(self, rank: int, step: int) -> Path:
        """Directory of the unusable shards of one step."""
        return self.root / "quarantine" / f"rank{whole_number(rank)}" / f"step{whole_number(step)}"

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
        return self._numbers(self.root / "batches" / f"rank{whole_number(rank)}")

    def segments(self, rank: int) -> list[int]:
        """Numbers of a rank's segments, ascending."""
        return self._numbers(self.root / "segments" / f"rank{whole_number(rank)}")

    def measured_batches(self, rank: int) -> list[int]:
        """Numbers of a rank's batches that have measured rows, ascending."""
        return self._numbers(self.measured(rank, 0).parent, "parquet")

    def replayed_batches(self, rank: int) -> list[int]:
        """Numbers of a rank's batches whose rows were published, ascending."""
        return self._numbers(self.replay(rank, 0).parent, "parquet")

    def _numbered(self, kind: str, rank: int, number: int, suffix: str) -> Path:
        return (
            self.root / kind / f"rank{whole_number(rank)}" / f"{whole_number(number):06d}.{suffix}"
        )

    @staticmethod
    def _numbers(directory: Path, suffix: str = "json") -> list[int]:
        if not directory.is_dir():
            return []
        found = (_NUMBERED_FILE.fullmatch(entry.name) for entry in directory.iterdir())
        return sorted(int(match[1]) for match in found if match and match[2] == suffix)
