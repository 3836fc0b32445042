"""The receiver's side of one rank: what comes is published exactly once.

A shard is written beside its place, noted in a journal, and moved to its place; all three
are durable before it is acknowledged. So a shard that is sent again is known: it is there;
or it is noted and still beside its place, and is moved now; or it is noted and gone, since
it was checked and retired meanwhile. A step's journal goes when the step is closed::

    <spool>/.received/rank0/session.json    whose capture this is, and what was there before
    <spool>/.received/rank0/step3.names     a line per shard: its name, and that of the file
                                            it was written to
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool import shard
from spool.claim import already_there, claim
from spool.errors import BadShard, StoreError
from spool.files import atomic_write, fsync_dir, make_dirs, opener, partial_path
from spool.markers import Heartbeat, StepCounts, rank_counts
from spool.markers import check as check_marker
from spool.names import parse_shard_name
from spool.store import Store

JOURNALS = ".received"
_SESSION = re.compile("[0-9a-f]{32}")


class Refused(StoreError):
    """What came is not taken, now or ever."""


@dataclass(frozen=True)
class Arrived:
    """A shard that lies beside its place.

    Parameters
    ----------
    step : int
    file : str
        Its name.
    partial : str
        Of the file that it was written to.
    nbytes : int
    """

    step: int
    file: str
    partial: str
    nbytes: int = 0


class Inbox:
    """What one rank sends.

    Parameters
    ----------
    store : Store
    rank : int
    limits : Limits
        Of a shard.
    """

    def __init__(self, store: Store, rank: int, limits: shard.Limits) -> None:
        self._store = store
        self._rank = rank
        self._limits = limits
        self._directory = store.root / JOURNALS / f"rank{rank}"
        self._names: dict[int, set[str]] = {}
        self._sizes: dict[int, int] = {}  # of journals, up to their last whole line
        self._begun: dict[str, Path] = {}  # files beside their places that no journal notes

    # The capture.

    def begin(self, session: str, resume: bool, patience: float) -> dict[str, Any]:
        """Take up a capture, or go on with the one that is there.

        Parameters
        ----------
        session : str
            Of this capture alone: 32 hex digits.
        resume : bool
            Whether a new capture goes on with an earlier one.
        patience : float
            As in `spool.claim`.

        Returns
        -------
        dict
            Counts of the closed steps that were there when the capture began, by step.

        Raises
        ------
        StoreError
            If another capture of the rank is in the way.
        """
        if not _SESSION.fullmatch(session):
            raise Refused(f"{session!r:.40} names no capture")
        known = self._session()
        if known.get("session") != session:
            if known and not resume and self._store.rank_dir(self._rank).is_dir():
                raise already_there(self._store, self._rank)  # though nothing of it came yet
            kept = claim(self._store, self._rank, resume, patience)
            self._forget()
            known = {
                "session": session,
                "kept": {str(step): _plain(counts) for step, counts in sorted(kept.items())},
            }
            make_dirs(self._store.rank_dir(self._rank))
            make_dirs(self._directory.parent)
            make_dirs(self._directory)
            atomic_write(self._directory / "session.json", json.dumps(known).encode() + b"\n")
        self._recover()
        return dict(known["kept"])

    def _session(self) -> dict[str, Any]:
        try:
            known = json.loads((self._directory / "session.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        is_known = isinstance(known, dict) and isinstance(known.get("kept"), dict)
        return known if is_known else {}

    def _forget(self) -> None:
        for path in self._directory.glob("*"):
            path.unlink()

    def _recover(self) -> None:
        """Finish what a receiver that was killed had begun."""
        self._names, self._sizes = {}, {}
        for path in self._directory.glob("step*.names"):
            step = int(path.stem.removeprefix("step"))
            data = path.read_bytes()
            self._sizes[step] = data.rfind(b"\n") + 1
            known = [Arrived(step, *entry) for entry in _entries(data[: self._sizes[step]])]
            self._move(known)
            self._names[step] = {item.file for item in known}
        self._store.remove_partials(self._rank)

    # Shards.

    def place(self, step: int, file: str) -> Path | None:
        """Where a shard is to be written; None if it came before.

        Raises
        ------
        Refused
            If no shard can have this name.
        """
        parsed = parse_shard_name(file)
        if parsed is None:
            raise Refused(f"{file!r:.200} is no name of a shard")
        path = self._store.shard_path(self._rank, step, *parsed)
        if path.name != file:
            raise Refused(f"{file!r:.200} is no name of a shard")
        if file in self._names.get(step, ()) or self._is_closed(step):
            return None
        make_dirs(path.parent.parent)
        make_dirs(path.parent)
        partial = partial_path(path)
        self._begun[partial.name] = partial
        return partial

    def check(self, step: int, file: str, partial: Path) -> Arrived:
        """Look whether what was written is the shard that it is said to be.

        Raises
        ------
        Refused
            If it is not; the file is deleted.
        """
        try:
            call = shard.read(partial, self._limits)
            if (call.rank, call.step, (call.order, call.name)) != (
                self._rank,
                step,
                parse_shard_name(file),
            ):
                raise BadShard("holds another call than its name says")
        except (BadShard, MemoryError) as error:
            self.discard(partial)
            raise Refused(f"step {step} {file}: {error}") from None
        return Arrived(step, file, partial.name, partial.stat().st_size)

    def discard(self, *partials: Path) -> None:
        """Delete what was begun and comes to nothing; without any, all of it."""
        for partial in partials or tuple(self._begun.values()):
            if self._begun.pop(partial.name, None) is not None:
                with contextlib.suppress(OSError):
                    partial.unlink()

    def commit(self, items: Sequence[Arrived]) -> None:
        """Publish shards, durably; they may be acknowledged then.

        Raises
        ------
        OSError
            As the system reports it; all of them may be sent again.
        """
        try:
            self._commit(items)
        except OSError:
            for item in items:  # but for what a journal notes
                self.discard(self._store.step_dir(self._rank, item.step) / item.partial)
            raise

    def _commit(self, items: Sequence[Arrived]) -> None:
        new = [item for item in items if item.file not in self._names.get(item.step, ())]
        files = {(item.step, item.file): item for item in new}
        for item in items:
            if files.get((item.step, item.file)) is not item:  # it came twice on one connection
                self.discard(self._store.step_dir(self._rank, item.step) / item.partial)
        new = list(files.values())
        for item in new:
            _fsync(self._store.step_dir(self._rank, item.step) / item.partial)
        for step in sorted({item.step for item in new}):
            of_step = [item for item in new if item.step == step]
            self._note(step, of_step)
            self._move(of_step)
            self._names.setdefault(step, set()).update(item.file for item in of_step)

    def _note(self, step: int, items: Sequence[Arrived]) -> None:
        path = self._directory / f"step{step}.names"
        is_new = not path.exists()
        lines = "".join(f"{item.file} {item.partial}\n" for item in items).encode()
        file = opener(path, os.O_WRONLY | os.O_CREAT)
        try:
            # What a full disk cut short is written over.
            begin = self._sizes.get(step, 0)
            os.ftruncate(file, begin)
            os.lseek(file, begin, os.SEEK_SET)
            view = memoryview(lines)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
        if is_new:
            fsync_dir(self._directory)
        self._sizes[step] = begin + len(lines)
        for item in items:
            self._begun.pop(item.partial, None)

    def _move(self, items: Sequence[Arrived]) -> None:
        """Move noted shards to their places; what is not beside its place has been moved."""
        for item in items:
            directory = self._store.step_dir(self._rank, item.step)
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory / item.partial, directory / item.file)
        for step in {item.step for item in items}:
            with contextlib.suppress(FileNotFoundError):
                fsync_dir(self._store.step_dir(self._rank, step))

    # Markers.

    def close_step(self, step: int, text: bytes) -> None:
        """Mark a step as complete, after its shards are durable."""
        if not self._is_closed(step):
            path = self._store.step_dir(self._rank, step) / "closed.json"
            self._store.close_step(self._rank, step, check_marker(StepCounts, _object(text), path))
        self._names.pop(step, None)
        self._sizes.pop(step, None)
        (self._directory / f"step{step}.names").unlink(missing_ok=True)

    def close_rank(self, text: bytes) -> None:
        """Mark the rank as complete, after its steps."""
        if self._store.rank_closed(self._rank) is None:
            path = self._store.rank_dir(self._rank) / "closed.json"
            self._store.close_rank(self._rank, rank_counts(_object(text), path))

    def beat(self, text: bytes) -> None:
        """Leave the training process's sign of life."""
        path = self._store.rank_dir(self._rank) / "heartbeat.json"
        self._store.heartbeat(self._rank, check_marker(Heartbeat, _object(text), path))

    def _is_closed(self, step: int) -> bool:
        return self._store.step_closed(self._rank, step) is not None


def _plain(counts: Any) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


def _object(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise Refused("a marker that is no JSON object")
    return record


def _entries(data: bytes) -> list[tuple[str, str]]:
    """The lines of a journal."""
    entries = []
    for line in data.decode("ascii", "replace").splitlines():
        file, _, partial = line.partition(" ")
        if parse_shard_name(file) is not None and partial.startswith(f".{file}."):
            entries.append((file, partial))
    return entries


def _fsync(path: Path) -> None:
    file = opener(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
