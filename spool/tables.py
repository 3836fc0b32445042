"""Every table that Spool writes: column names, and how a cell becomes text.

The four published tables have the field's own headers, so that scripts that read them
need no change; what Spool adds comes as last columns (`OURS`). Conventions:

* UTF-8 with a byte order mark, lines end with CR LF (RFC 4180, and what the field's
  own files have), cells quoted only where they must be.
* A float has `precision` decimals, in `SUMMARY` and `COVERAGE` as many significant
  digits instead (limits such as 1e-16 would vanish). NaN and infinities are ``nan``,
  ``inf``, ``-inf``.
* A cell without content is one space.
* A cell that a spreadsheet would run as a formula is led by an apostrophe, and control
  characters in a message become spaces, so that one row is one line.
* A result row has its status in the column of the call's direction; the other column is
  blank, which in the field's files says that there was nothing of the kind to test.

`SUMMARY` has a row for every call, also for one whose shard was unusable and which has no
verdict. Its ``verdict`` is the route's published status, ``standard_verdict`` that of the
API's own standard (the same on the three-way route); ``value`` against ``limit`` is the
metric that decided or came closest to it. ``shard`` is relative to the work directory,
or to the spool where all shards are retained; blank when it is gone.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from spool.errors import about
from spool.files import fsync_dir, is_abandoned, make_dirs, opener, partial_path
from spool.parquet import TableError as TableError
from spool.parquet import VerdictInfo as VerdictInfo
from spool.parquet import read_measured as read_measured
from spool.parquet import read_meta as read_meta
from spool.parquet import read_verdict_info as read_verdict_info
from spool.parquet import read_verdicts as read_verdicts
from spool.parquet import write_measured as write_measured
from spool.parquet import write_verdicts as write_verdicts
from spool.records import CallHeader as CallHeader
from spool.records import CallKey as CallKey
from spool.records import CallVerdict as CallVerdict
from spool.records import Cell as Cell
from spool.records import MeasuredRow as MeasuredRow
from spool.records import Outcome as Outcome
from spool.records import OutputVerdict as OutputVerdict
from spool.standards import columns as col
from spool.standards.rows import Route

BLANK = " "
PRECISION = 14
OURS = ("Step", "Order")

CHECK_RESULT = ("API name", "Forward Test Success", "Backward Test Success", "Message")
COMPARE_RESULT = ("API Name", "Forward Test Success", "Backward Test Success", "Message")

CHECK_DETAILS = ("API Name", *col.CHECK_HEADERS)
COMPARE_DETAILS = ("API Name", *col.COMPARE_HEADERS)

SUMMARY = (
    "api",
    "step",
    "order",
    "direction",
    "route",
    "standard",
    "verdict",
    "reason",
    "worst_output",
    "worst_metric",
    "value",
    "limit",
    "worst_index",
    "shard",
    "standard_verdict",
    "module",
    "location",
)

COVERAGE = ("what", "reason", "step", "calls")

_TEXT_COLUMNS = frozenset(
    (
        col.BENCH_DTYPE,
        col.DEVICE_DTYPE,
        col.SHAPE,
        col.STATUS,
        col.COMPARE_RESULT,
        col.ALGORITHM,
        col.MESSAGE,
    )
)


def detail_columns(route: Route) -> tuple[tuple[str, str], ...]:
    """Cells of a route's details table: CSV header and type, ``str`` or ``float``.

    The name, which is made of the call's, is left out.
    """
    headers = CHECK_DETAILS if route is Route.TWO_WAY else COMPARE_DETAILS
    return tuple(
        (header, "str" if header in _TEXT_COLUMNS or header.endswith("判定结果") else "float")
        for header in headers[1:]
    )


@dataclass(frozen=True, slots=True)
class RankTables:
    """Paths of one rank's tables in the results directory.

    Parameters
    ----------
    directory : Path
    timestamp : str
        The run's creation time ``YYYYmmddHHMMSS``; the same in every rerun.
    rank : int
    """

    directory: Path
    timestamp: str
    rank: int

    def _path(self, stem: str) -> Path:
        return self.directory / f"{stem}_{self.timestamp}_rank{self.rank}.csv"

    @property
    def check_result(self) -> Path:
        """One row per two-way call."""
        return self._path("accuracy_checking_result")

    @property
    def check_details(self) -> Path:
        """One row per output of a two-way call."""
        return self._path("accuracy_checking_details")

    @property
    def compare_result(self) -> Path:
        """One row per three-way call."""
        return self._path("api_precision_compare_result")

    @property
    def compare_details(self) -> Path:
        """One row per output of a three-way call."""
        return self._path("api_precision_compare_details")

    @property
    def summary(self) -> Path:
        """One row per call."""
        return self._path("summary")

    @property
    def coverage(self) -> Path:
        """Counts of calls by what became of them."""
        return self._path("coverage")

    @property
    def all(self) -> tuple[Path, ...]:
        """Every path, in the order in which they are shown."""
        return (
            self.check_result,
            self.check_details,
            self.compare_result,
            self.compare_details,
            self.summary,
            self.coverage,
        )


# Full-width forms count too: spreadsheets take them for their ASCII twins.
_FORMULA = re.compile(r"[=+\-@%＝＋－＠％]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan", re.ASCII)


def cell_text(value: Cell | bool, precision: int = PRECISION, significant: bool = False) -> str:
    """Text of one cell.

    Parameters
    ----------
    value : str, float, int, bool or None
    precision : int
        Decimals of a float.
    significant : bool
        Take `precision` as significant digits instead.
    """
    if value is None:
        return BLANK
    if isinstance(value, float):
        return f"{value:.{precision}{'g' if significant else 'f'}}"
    if not isinstance(value, str):
        return str(value)
    text = _CONTROL.sub(" ", value)
    # A surrogate cannot be written as UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if not text.strip():
        return BLANK
    if _FORMULA.match(text.lstrip()) and _NUMBER.fullmatch(text) is None:
        return "'" + text
    return text


class CsvTable:
    """A CSV file being written, row by row.

    Parameters
    ----------
    handle : text file
        Opened by `open_table`.
    columns : sequence of str
        The header, written at once.
    precision : int
    significant : bool
        See `cell_text`.
    """

    def __init__(
        self, handle: TextIO, columns: Sequence[str], precision: int, significant: bool
    ) -> None:
        self._writer = csv.writer(handle)
        self._columns = tuple(columns)
        self._known = frozenset(columns)
        self._precision = precision
        self._significant = significant
        self.rows = 0
        self._writer.writerow(self._columns)

    def write(self, cells: dict[str, Any]) -> None:
        """Write one row; a column that `cells` does not name is blank.

        Raises
        ------
        KeyError
            If `cells` names a column that the table does not have.
        """
        unknown = cells.keys() - self._known
        if unknown:
            raise KeyError(f"no column {sorted(unknown)}")
        self._writer.writerow(
            [
                cell_text(cells.get(name), self._precision, self._significant)
                for name in self._columns
            ]
        )
        self.rows += 1


@contextmanager
def open_table(
    path: Path, columns: Sequence[str], precision: int = PRECISION, significant: bool = False
) -> Iterator[CsvTable]:
    """Write a CSV file that appears whole or not at all.

    The rows go to a partial file beside `path`, which is synced and then put in place
    of `path` when the block ends without an exception, and removed otherwise. What a
    killed writer left of the same table is removed too.
    """
    make_dirs(path.parent)
    for left in path.parent.glob(f".{path.name}.*.partial"):
        if is_abandoned(left.name):
            left.unlink(missing_ok=True)
    partial = partial_path(path)
    try:
        with open(partial, "w", encoding="utf-8-sig", newline="", opener=opener) as handle:
            yield CsvTable(handle, columns, precision, significant)
            with about(path):
                handle.flush()
                os.fsync(handle.fileno())
        partial.replace(path)
        fsync_dir(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table as written, by header; a blank is the empty string.

    Raises
    ------
    TableError
        If the file is not there or has no header.
    """
    try:
        handle = path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TableError(f"{path}: cannot read the table: {error.strerror}; rerun merge") from None
    with handle:
        reader = csv.reader(handle)
        header = next(reader, None)
        if header is None:
            raise TableError(f"{path}: the table is empty; remove it and rerun")
        for row in reader:
            yield {name: cell.strip() for name, cell in zip(header, row, strict=True)}
