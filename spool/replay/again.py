"""Calls that are measured once more, because the references of the configuration changed.

Of the calls of fused operators, those whose shards are still there: a call without a
reference keeps its shard, within the limits, and so does one that its reference refuted.
The others keep the rows they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from spool.files import is_regular
from spool.ledger import Ledger, ledger_path
from spool.names import is_fused
from spool.records import MeasuredRow, Outcome
from spool.workdir import Manifest, WorkDir

REFERENCES = ("fused", "references")
"""Measuring keys that act on calls of fused operators alone."""


def changed(stored: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a batch was measured with other references than now asked for."""
    return any(stored.get(key, wanted[key]) != wanted[key] for key in REFERENCES)


class KeptShards:
    """Where the kept shards of a batch lie.

    Parameters
    ----------
    manifest : Path
        Of the batch, in its work directory.
    record : Manifest
        The same, read.
    """

    def __init__(self, manifest: Path, record: Manifest) -> None:
        self._work = WorkDir(manifest.absolute().parents[2])
        self._record = record
        self._ledger = Ledger.load(ledger_path(self._work, record.rank))

    def path(self, file: str) -> Path:
        """Where a shard lies if it was kept."""
        return self._ledger.path(self._work, self._record.rank, self._record.step, file)

    def has(self, file: str) -> bool:
        """Whether a shard was kept, and lies there."""
        return is_regular(self.path(file))


def numbers_again(
    manifest: Path, record: Manifest, rows: Sequence[MeasuredRow]
) -> tuple[tuple[int, ...], int]:
    """Which shards of a batch are measured once more.

    Returns
    -------
    numbers : tuple of int
        In the manifest: of calls of fused operators, whose shards are there.
    gone : int
        How many more such calls there are, whose shards are not.
    """
    fused = {
        row.header.shard
        for row in rows
        if is_fused(row.header.api) and row.outcome is not Outcome.QUARANTINED
    }
    kept = KeptShards(manifest, record)
    there = {file for file in fused if kept.has(file)}
    if record.step_dir.is_dir():
        with record.opened() as here:
            there |= {file for file in fused - there if is_regular(here / file)}
    numbers = tuple(n for n, shard in enumerate(record.shards) if shard.file in there)
    return numbers, len(fused - there)


def merged(old: Sequence[MeasuredRow], new: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """The rows of a batch with those of some calls replaced.

    A call whose shard cannot be used any more keeps the rows it has.
    """
    fresh = {shard: list(group) for shard, group in groupby(new, _shard)}
    rows: list[MeasuredRow] = []
    for shard, group in groupby(old, _shard):
        found = fresh.get(shard)
        is_usable = found and found[0].outcome is not Outcome.QUARANTINED
        rows += found if found and is_usable else group
    return rows


def _shard(row: MeasuredRow) -> str:
    return row.header.shard
