"""JSON files of the work directory: read with one line for what is wrong, written on change.

The workflow compares times of files: an output that is older than an input is made
again. So a file's time changes only with its content, and then becomes later than
that of everything made from it, also where the clock was set back meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spool.errors import SpoolError
from spool.files import atomic_write, make_dirs, read_regular

# File systems round times; one that is later by so much is later on all of them.
_LATER_NS = 1_000_000_000
MAX_NUMBER = 10**12
# A manifest of a million shards is smaller.
_MAX_FILE = 256 << 20


class WorkDirError(SpoolError):
    """A file of the work directory does not hold what it must."""


def read_json(path: Path, kind: str, way_out: str = "remove it and rerun") -> dict[str, Any]:
    """Read a JSON object.

    Parameters
    ----------
    path : Path
    kind : str
        What the file is, for the message.
    way_out : str
        What to do when it is damaged.

    Raises
    ------
    WorkDirError
        If the file cannot be read or is not a JSON object.
    """
    try:
        data = json.loads(read_regular(path, _MAX_FILE))
    except OSError as error:
        raise WorkDirError(f"{path}: cannot read the {kind}: {error.strerror}") from None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise WorkDirError(f"{path}: not a usable {kind}: no JSON object; {way_out}")
    return data


def write_if_changed(path: Path, data: dict[str, Any], after: Iterable[Path] = ()) -> bool:
    """Write a JSON object atomically, unless the file already says the same.

    Parameters
    ----------
    path : Path
    data : dict
    after : iterable of Path
        Files that are made from this one and may exist: a changed `path` is given a
        time later than theirs. Looked at only if it changes.

    Returns
    -------
    bool
        Whether the file was written.
    """
    content = json.dumps(data, indent=1, sort_keys=False).encode() + b"\n"
    try:
        if read_regular(path, len(content)) == content:
            return False
    except OSError:
        make_dirs(path.parent)
    atomic_write(path, content)
    newest = max(map(_modified, after), default=0)
    if newest >= path.stat().st_mtime_ns:
        latest = max(time.time_ns(), newest + _LATER_NS)
        os.utime(path, ns=(latest, latest))
    return True


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def whole_number(value: object, limit: int = MAX_NUMBER) -> int:
    """Return `value` if it is an int from 0 and below `limit`; else raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{value!r:.80} is not a whole number from 0")
    return value
