"""What a replay job has done so far, so that a crash costs one call and a kill none.

A text file of records, one a line: crc32 of the JSON, a space, the JSON. The first
record is the job's identity; a journal of another job is discarded. Then, of one
writer at a time:

``{"start": 3}``, ``{"start": 3, "header": {...}}``
    The worker is about to read shard 3 of the manifest, to replay it.
``{"done": 3, "result": {...}}``
    It has, and this came out.
``{"lost": 3, "reason": text}``
    The supervisor saw the worker die or hang in shard 3.

A shard with ``start`` and nothing else was cut short by the end of the whole job and
is replayed again. A torn tail, after a power cut, is cut off.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from spool.errors import about
from spool.files import open_regular, opener


@dataclass
class Progress:
    """What a journal says about a job's shards, by their number in the manifest.

    Parameters
    ----------
    headers : dict of int to dict
        Of shards that were read.
    done : dict of int to dict
        Results of shards that were replayed.
    lost : dict of int to str
        Shards in which a worker died or hung, with the reason.
    """

    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def settled(self, number: int) -> bool:
        """Whether nothing is left to do for a shard."""
        return number in self.done or number in self.lost

    def take(self, record: dict[str, Any]) -> None:
        """Add one record."""
        if "header" in record:
            self.headers[record["start"]] = record["header"]
        elif "done" in record:
            self.done[record["done"]] = record["result"]
        elif "lost" in record:
            self.lost[record["lost"]] = record["reason"]


class Journal:
    """An open journal; records reach the file, not only this process, before `add` returns.

    Parameters
    ----------
    path : Path
        Created if it does not exist.
    durable : float
        Records are forced to the disk at most this many seconds apart: a lost tail
        costs repeated work, never a wrong row.
    """

    def __init__(self, path: Path, durable: float = 1.0) -> None:
        self._path = path
        self._file = opener(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._durable = durable
        self._synced = 0.0

    def add(self, record: dict[str, Any], now: float) -> None:
        """Append a record; `now` is a monotonic clock's reading in seconds."""
        line = encode(record)
        with about(self._path):
            while line:
                line = line[os.write(self._file, line) :]
            if now - self._synced >= self._durable:
                os.fsync(self._file)
                self._synced = now

    def close(self) -> None:
        """Force the records to the disk and close the file."""
        with about(self._path):
            os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def encode(record: dict[str, Any]) -> bytes:
    """One line of a journal."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None if the line is not whole."""
    digits, space, text = line.partition(b" ")
    try:
        if not space or not line.endswith(b"\n") or int(digits, 16) != zlib.crc32(text[:-1]):
            return None
        record = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def recover(path: Path, identity: dict[str, Any]) -> Progress:
    """Read a journal, and make it ready for more records.

    Parameters
    ----------
    path : Path
        Need not exist.
    identity : dict
        What this job is. A journal that begins otherwise is discarded whole.

    Returns
    -------
    Progress
        Empty if there was nothing to resume.
    """
    progress = Progress()
    whole = 0
    try:
        with open(open_regular(path), "rb") as file:
            for number, line in enumerate(file):
                record = decode(line)
                if record is None or not (
                    _is_sound(record) if number else record == {"identity": identity}
                ):
                    break
                whole += len(line)
                progress.take(record)
    except FileNotFoundError:
        pass
    if not whole:
        with open(path, "wb", opener=opener) as file:
            file.write(encode({"identity": identity}))
        return progress
    os.truncate(path, whole)
    return progress


def _is_sound(record: dict[str, Any]) -> bool:
    """Whether a record is one that a job writes."""
    return any(
        record.keys() == kinds.keys()
        and all(type(record[name]) is kind for name, kind in kinds.items())
        for kinds in _RECORDS
    )


_RECORDS: tuple[dict[str, type], ...] = (
    {"start": int},
    {"start": int, "header": dict},
    {"done": int, "result": dict},
    {"lost": int, "reason": str},
)
