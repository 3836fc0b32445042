"""Measured rows and verdict rows as Parquet files.

Every file is flat, sorted as it is given, of one fixed schema, written whole and
atomically, and the same rows give the same bytes. Its metadata hold one JSON object
under the key ``spool``: what kind of rows, the schema's version, and facts about the
file as a whole. In front of the footer are 12 bytes that Parquet does not know:
``spoolcrc`` and the `zlib.crc32` of all bytes but these 12, so that no changed bit
becomes another verdict.

Measured file: one row per output of a call. Columns ``call_*`` repeat the call's
header, ``outcome``, ``reason``, ``inputs`` are the row's own, ``has_output`` says
whether there is a measurement, ``m_*`` are the fields of `OutputMeasurement`.

Verdict file: one row per row of the details table, a quarantined call having one row
with ``output`` -1 and blank cells. Columns without prefix repeat the call's verdict;
``d_*`` are the cells of the details table.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spool.errors import SpoolError
from spool.files import atomic_write, make_dirs, read_regular
from spool.records import (
    CallHeader,
    CallKey,
    CallVerdict,
    Cell,
    MeasuredRow,
    Outcome,
    OutputVerdict,
)
from spool.standards.rows import RECORD_FIELDS, OutputMeasurement, Route, Status

VERSION = 1
ROW_GROUP = 4096
# Most bytes of a file that is read; a segment's rows are far fewer.
MAX_TABLE = 8 << 30
_KEY = b"spool"
_SEAL = b"spoolcrc"
# What reading raises where a file is not as this program writes it.
_FOREIGN = (
    *(pa.ArrowException, AttributeError, KeyError, OSError, OverflowError),
    *(RecursionError, TypeError, ValueError),
)
_OPTIONS = {"row_group_size": ROW_GROUP, "compression": "zstd", "write_statistics": False}

_TYPES: dict[str, Any] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "ints": pa.list_(pa.int64()),
    "floats": pa.list_(pa.float64()),
}


class TableError(SpoolError):
    """A table of the work directory is torn, foreign, or of another version."""


def write_measured(path: Path, rows: Iterable[MeasuredRow], meta: dict[str, str]) -> None:
    """Write the measured rows of a batch, durably and in one move.

    Parameters
    ----------
    path : Path
        Replaced if it exists.
    rows : iterable of MeasuredRow
        In call order; the rows of a call together, by output.
    meta : dict of str to str
        Facts about all rows: under what they were measured.
    """
    rows = list(rows)
    columns: dict[str, list[Any]] = {}
    headers = [row.header for row in rows]
    for name, _ in _header_columns():
        columns[f"call_{name}"] = [getattr(header, name) for header in headers]
    columns["outcome"] = [row.outcome.value for row in rows]
    columns["reason"] = [row.reason for row in rows]
    columns["inputs"] = [row.inputs for row in rows]
    columns["has_output"] = [row.output is not None for row in rows]
    records = [None if row.output is None else row.output.to_record() for row in rows]
    for name in RECORD_FIELDS:
        columns[f"m_{name}"] = [None if r is None else r.get(name) for r in records]
    _write(path, columns, _measured_schema(), "measured", {"meta": dict(sorted(meta.items()))})


def read_measured(path: Path, select: Callable[[str], bool] | None = None) -> list[MeasuredRow]:
    """Read what `write_measured` wrote.

    Parameters
    ----------
    path : Path
    select : callable, optional
        Of a call's name: whether its rows are wanted. All are by default.

    Raises
    ------
    TableError
        If the file is missing, torn, of another kind or version.
    """
    file, _ = _open(path, "measured")
    with _usable(path):
        table = file.read()
        if select is not None:
            names = _column(table, "call_name")
            table = table.filter(pa.array(map(cache(select), names), pa.bool_()))
        return list(_measured_rows(table))


def _measured_rows(table: Any) -> Iterator[MeasuredRow]:
    headers = _rows(table, [f"call_{name}" for name, _ in _header_columns()])
    own = _rows(table, ["outcome", "reason", "inputs", "has_output"])
    names = list(RECORD_FIELDS)
    records = _rows(table, [f"m_{name}" for name in names])
    for header, (outcome, reason, inputs, has_output), values in zip(
        headers, own, records, strict=True
    ):
        output = None
        if has_output:
            output = OutputMeasurement.from_record(dict(zip(names, values, strict=True)))
        yield MeasuredRow(CallHeader(*header), Outcome(outcome), reason, output, inputs)


def read_meta(path: Path) -> dict[str, str]:
    """Return the facts given to `write_measured`, without reading the rows."""
    _, info = _open(path, "measured")
    with _usable(path):
        return {str(key): str(value) for key, value in info["meta"].items()}


@dataclass(frozen=True, slots=True)
class VerdictInfo:
    """Facts about a verdict file as a whole.

    Parameters
    ----------
    route : Route
        The route whose calls it holds.
    rank, step, segment : int
        The segment it was made of.
    calls : int
        Calls it holds.
    not_selected : int
        Calls of the route that the name lists leave out.
    first, last : CallKey or None
        Keys of its first and last call.
    """

    route: Route
    rank: int
    step: int
    segment: int
    calls: int
    not_selected: int
    first: CallKey | None
    last: CallKey | None


def write_verdicts(
    path: Path,
    calls: Sequence[CallVerdict],
    details: Sequence[tuple[str, str]],
    info: VerdictInfo,
) -> None:
    """Write a segment's verdicts of one route.

    Parameters
    ----------
    path : Path
        Replaced if it exists.
    calls : sequence of CallVerdict
        Sorted by `CallVerdict.key`.
    details : sequence of (str, str)
        CSV header and type (``str`` or ``float``) of the details table's cells.
    info : VerdictInfo
    """
    pairs: list[tuple[CallVerdict, OutputVerdict]] = [
        (call, row) for call in calls for row in (call.rows or (OutputVerdict(-1, {}),))
    ]
    columns: dict[str, list[Any]] = {
        name: [_plain(getattr(call, name)) for call, _ in pairs] for name, _ in _CALL_COLUMNS
    }
    columns["output"] = [row.output for _, row in pairs]
    for header, kind in details:
        convert = _CONVERT[kind]
        columns[f"d_{header}"] = [
            None if (cell := row.cells.get(header)) is None else convert(cell) for _, row in pairs
        ]
    facts = dict(zip((f.name for f in fields(info)), astuple(info), strict=True))
    facts["route"] = info.route.value
    _write(path, columns, _verdict_schema(tuple(details)), "verdicts", {"info": facts})


def read_verdict_info(path: Path) -> VerdictInfo:
    """Return the facts about a verdict file, without reading its rows."""
    _, meta = _open(path, "verdicts")
    with _usable(path):
        facts = dict(meta["info"])
        for name in ("first", "last"):
            facts[name] = None if facts[name] is None else _call_key(*facts[name])
        for name in ("rank", "step", "segment", "calls", "not_selected"):
            _require(type(facts[name]) is int and facts[name] >= 0, name)
        return VerdictInfo(**{**facts, "route": Route(facts["route"])})


def read_verdicts(path: Path, details: bool = True) -> Iterator[CallVerdict]:
    """Yield a verdict file's calls in order, holding one row group at a time.

    Parameters
    ----------
    path : Path
    details : bool
        False leaves the cells of the details table out, which is faster.

    Raises
    ------
    TableError
        If the file is missing, torn, of another kind or of a newer version.
    """
    file, _ = _open(path, "verdicts")
    with _usable(path):
        for _, group in groupby(_verdict_rows(file, details), key=lambda row: row[0]):
            rows = list(group)
            yield _call_verdict(rows[0][1], tuple(row for _, _, row in rows if row.output >= 0))


_VerdictRow = tuple[CallKey, tuple[Any, ...], OutputVerdict]


def _verdict_rows(file: Any, details: bool) -> Iterator[_VerdictRow]:
    names = [name for name, _ in _CALL_COLUMNS]
    wanted = [name for name in file.schema_arrow.names if details and name.startswith("d_")]
    headers = [name[2:] for name in wanted]
    places = [names.index(name) for name in ("step", "order", "index", "name")]
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        heads = _rows(table, names)
        cells = _rows(table, wanted) if wanted else repeat((), table.num_rows)
        for head, output, values in zip(heads, _column(table, "output"), cells, strict=True):
            key = _call_key(*(head[place] for place in places))
            yield key, head, OutputVerdict(output, dict(zip(headers, values, strict=True)))


def _call_verdict(head: tuple[Any, ...], rows: tuple[OutputVerdict, ...]) -> CallVerdict:
    values = dict(zip((name for name, _ in _CALL_COLUMNS), head, strict=True))
    for name, enum in _ENUMS.items():
        values[name] = None if values[name] is None else enum(values[name])
    return CallVerdict(**values, rows=rows)


_CALL_COLUMNS: tuple[tuple[str, Any], ...] = tuple(
    (name, _TYPES[kind])
    for name, kind in (
        ("rank", "int"),
        ("step", "int"),
        ("order", "int"),
        ("index", "int"),
        ("name", "str"),
        ("direction", "str"),
        ("module", "str"),
        ("location", "str"),
        ("shard", "str"),
        ("nbytes", "int"),
        ("route", "str"),
        ("standard", "str"),
        ("outcome", "str"),
        ("status", "str"),
        ("standard_verdict", "str"),
        ("message", "str"),
        ("worst_output", "int"),
        ("worst_metric", "str"),
        ("worst_value", "float"),
        ("worst_limit", "float"),
        ("worst_index", "str"),
    )
)

_ENUMS: dict[str, Callable[[Any], Any]] = {
    "route": Route,
    "outcome": Outcome,
    "status": Status,
    "standard_verdict": Status,
}

_CONVERT: dict[str, Callable[[Cell], Any]] = {"str": str, "float": float}  # type: ignore[dict-item]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, (Route, Outcome, Status)) else value


@cache
def _header_columns() -> tuple[tuple[str, Any], ...]:
    kinds = {"int": pa.int64(), "str": pa.string(), "bool": pa.bool_()}
    return tuple((field.name, kinds[str(field.type)]) for field in fields(CallHeader))


@cache
def _measured_schema() -> Any:
    columns = [(f"call_{name}", kind) for name, kind in _header_columns()]
    columns += [("outcome", pa.string()), ("reason", pa.string()), ("inputs", pa.string())]
    columns += [("has_output", pa.bool_())]
    columns += [(f"m_{name}", _TYPES[kind]) for name, kind in RECORD_FIELDS.items()]
    return pa.schema(columns)


@cache
def _verdict_schema(details: tuple[tuple[str, str], ...]) -> Any:
    columns = [*_CALL_COLUMNS, ("output", pa.int64())]
    columns += [(f"d_{header}", _TYPES[kind]) for header, kind in details]
    return pa.schema(columns)


def _write(
    path: Path, columns: dict[str, list[Any]], schema: Any, kind: str, info: dict[str, Any]
) -> None:
    text = json.dumps({"kind": kind, "version": VERSION, **info})
    schema = schema.with_metadata({_KEY: text.encode()})
    try:
        table = pa.table(columns, schema=schema)
    except UnicodeEncodeError:
        table = pa.table({name: _encodable(cells) for name, cells in columns.items()}, schema)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **_OPTIONS)
    make_dirs(path.parent)
    atomic_write(path, _sealed(sink.getvalue().to_pybytes()))


def _encodable(cells: list[Any]) -> list[Any]:
    """The cells, with escapes for what a path holds that is not UTF-8."""
    return [
        cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell
        for cell in cells
    ]


def _footer(data: bytes) -> int:
    """Where the footer of a Parquet file begins: its length is in front of the last magic."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _sealed(data: bytes) -> bytes:
    """Put a checksum in front of the footer, where no reader of Parquet looks."""
    place = _footer(data)
    pages, footer = data[:place], data[place:]
    return b"".join((pages, _SEAL, _checksum(pages, footer), footer))


def _is_sealed(data: bytes) -> bool | None:
    """Whether the checksum matches; None if there is none."""
    place = _footer(data)
    if place < 12 or data[place - 12 : place - 4] != _SEAL:
        return None
    return data[place - 4 : place] == _checksum(data[: place - 12], data[place:])


def _checksum(pages: bytes, footer: bytes) -> bytes:
    return zlib.crc32(footer, zlib.crc32(pages)).to_bytes(4, "little")


def _open(path: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    try:
        # Read whole: a file on a network mount may be replaced while it is open.
        data = read_regular(path, MAX_TABLE)
    except OSError as error:
        raise TableError(
            f"{path}: cannot read the table: {error.strerror}; {_way_out(path)}"
        ) from None
    is_sealed = _is_sealed(data)
    if is_sealed is False:
        raise TableError(f"{path}: the table does not match its checksum; {_way_out(path)}")
    try:
        file = pq.ParquetFile(pa.py_buffer(data))
        info: dict[str, Any] = json.loads((file.schema_arrow.metadata or {})[_KEY])
        found, version = info["kind"], int(info["version"])
        _require(found in ("measured", "verdicts"), "kind")
    except _FOREIGN:
        raise TableError(f"{path}: not a table of Spool; {_way_out(path)}") from None
    if found != kind:
        raise TableError(f"{path}: holds {found} rows, not {kind} rows; {_way_out(path)}")
    if version > VERSION:
        raise TableError(
            f"{path}: table version {version}, this program reads {VERSION}; install a newer Spool"
        )
    with _usable(path):
        _require(is_sealed is not None, "its checksum")
        _check_columns(file.schema_arrow, kind)
    return file, info


def _check_columns(schema: Any, kind: str) -> None:
    """Make sure that the columns that every version has are there, and all of their types."""
    for field in _measured_schema() if kind == "measured" else _verdict_schema(()):
        if field.name in schema.names:
            _require(schema.field(field.name).type == field.type, field.name)
        else:
            _require(field.name.startswith("m_"), field.name)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Make one line of whatever a table's contents, which anybody may have written, bring about."""
    try:
        yield
    except _FOREIGN as error:
        why = " ".join(str(error).split())
        raise TableError(f"{path}: not a table of Spool: {why:.200}; {_way_out(path)}") from None


def _require(is_sound: bool, what: str) -> None:
    if not is_sound:
        raise ValueError(f"{what} is not what it must be")


def _call_key(step: Any, order: Any, element: Any, name: Any) -> CallKey:
    _require(all(type(number) is int for number in (step, order, element)), "a call's place")
    _require(type(name) is str, "a call's name")
    return CallKey(step, order, element, name)


def _way_out(path: Path) -> str:
    if path.parent.parent.name != "measured":
        return "remove it and rerun"
    return (
        "restore it from a copy; without one, remove it and rerun if its shards are still in the "
        "spool, else start with another work_dir on a fresh capture"
    )


def _rows(table: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(_column(table, name) for name in names), strict=True)


def _column(table: Any, name: str) -> list[Any]:
    if name not in table.schema.names:
        # A field that this version added; older rows do not know it.
        return [None] * table.num_rows
    column = table.column(name)
    if column.null_count == len(column):
        return [None] * len(column)
    values: list[Any] = column.to_pylist()
    return values
