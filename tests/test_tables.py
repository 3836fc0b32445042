from __future__ import annotations

import csv
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rowmaker import (
    call_verdict,
    header,
    measured,
    output,
    quarantined,
    three_way_output,
    two_way_output,
    unmeasured,
    with_nan,
    write_segment,
)

from spool import tables
from spool.errors import SpoolError
from spool.records import CallKey, MeasuredRow, Outcome, OutputVerdict
from spool.standards.rows import RECORD_FIELDS, Kind, Route, Status
from spool.tables import (
    CHECK_DETAILS,
    COMPARE_DETAILS,
    TableError,
    cell_text,
    open_table,
    read_measured,
    read_meta,
    read_table,
    read_verdict_info,
    read_verdicts,
    write_measured,
)


def test_headers_are_the_published_ones() -> None:
    assert ",".join(tables.CHECK_RESULT) == (
        "API name,Forward Test Success,Backward Test Success,Message"
    )
    assert tables.COMPARE_RESULT[0] == "API Name"
    assert ",".join(CHECK_DETAILS) == (
        "API Name,Bench Dtype,DEVICE Dtype,Shape,余弦相似度,最大绝对误差,双百指标,双千指标,"
        "双万指标,二进制一致错误率,误差均衡性,均方根误差,小值域错误占比,相对误差最大值,"
        "相对误差平均值,inf/nan错误率,相对误差错误率,绝对误差错误率,ULP误差最大值,"
        "ULP误差平均值,ULP误差大于阈值占比,Status,Message"
    )
    assert ",".join(COMPARE_DETAILS) == (
        "API Name,小值域错误比值,小值域判定结果,均方根误差比值,均方根误差判定结果,"
        "相对误差最大值比值,相对误差最大值判定结果,相对误差平均值比值,相对误差平均值判定结果,"
        "误差均衡性比值,误差均衡性判定结果,inf/nan错误率,inf/nan判定结果,相对误差错误率,"
        "相对误差判定结果,绝对误差错误率,绝对误差判定结果,二进制一致错误率,"
        "二进制一致错误率判定结果,ULP误差平均值,ULP误差大于阈值占比,ULP误差大于阈值占比比值,"
        "ULP误差判定结果,双千指标,双千指标判定结果,比对结果,比对算法,Message"
    )


def test_detail_columns_know_text_from_numbers() -> None:
    check = dict(tables.detail_columns(Route.TWO_WAY))
    assert check["Shape"] == check["Status"] == "str"
    assert check["余弦相似度"] == "float"
    compare = dict(tables.detail_columns(Route.THREE_WAY))
    assert compare["小值域判定结果"] == compare["比对算法"] == "str"
    assert compare["小值域错误比值"] == "float"
    assert "API Name" not in check


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, " "),
        ("", " "),
        ("  ", " "),
        (0.1, "0.10000000000000"),
        (1.0, "1.00000000000000"),
        (-0.0, "-0.00000000000000"),
        (1e-16, "0.00000000000000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (3, "3"),
        (True, "True"),
        ("pass", "pass"),
        ("(3, 5)", "(3, 5)"),
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("＝1", "'＝1"),
        ("  =1", "'  =1"),
        ("\t=1", "' =1"),
        ("-", "'-"),
        ("-1.5", "-1.5"),
        ("+1e-3", "+1e-3"),
        ("-inf", "-inf"),
        ("two\r\nlines\x00\u2028end", "two lines end"),
        ("lone \ud800", "lone \\ud800"),
    ],
)
def test_cell_text(value: object, text: str) -> None:
    assert cell_text(value) == text  # type: ignore[arg-type]


def test_cell_text_with_significant_digits_keeps_small_limits() -> None:
    assert cell_text(1e-16, 14, significant=True) == "1e-16"
    assert cell_text(2.0**-30, 14, significant=True) == "9.3132257461548e-10"
    assert cell_text(0.125, 2) == "0.12"


@given(st.text())
def test_no_text_becomes_a_formula_or_a_second_line(text: str) -> None:
    cell = cell_text(text)
    assert cell
    assert "\n" not in cell
    assert "\r" not in cell
    if cell.lstrip()[:1] in tuple("=+-@"):
        assert not math.isnan(float(cell)) or cell in ("nan", "+nan", "-nan")
    cell.encode("utf-8")


def test_csv_bytes(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "t.csv"
    with open_table(path, ("a", "b", "说明"), precision=3) as table:
        table.write({"a": 0.5, "说明": 'say "x", then y'})
        table.write({"b": "=x"})
    assert (
        path.read_bytes()
        == ('\ufeffa,b,说明\r\n0.500, ,"say ""x"", then y"\r\n ,\'=x, \r\n').encode()
    )
    assert table.rows == 2
    assert next(read_table(path)) == {"a": "0.500", "b": "", "说明": 'say "x", then y'}


def test_an_interrupted_table_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"old")

    def stop() -> None:
        with open_table(path, ("a",)) as table:
            table.write({"a": 1})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    code = (
        "import os, sys; from pathlib import Path; from spool.tables import open_table\n"
        "with open_table(Path(sys.argv[1]), ('a',)) as table:\n"
        "    os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".t.csv.")
    with open_table(path, ("a",)):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_column_that_is_not_there_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="b"), open_table(tmp_path / "t.csv", ("a",)) as table:
        table.write({"b": 1})
    assert not (tmp_path / "t.csv").exists()


def test_read_table_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read the table"):
        next(read_table(tmp_path / "no.csv"))
    (tmp_path / "empty.csv").write_bytes(b"")
    with pytest.raises(TableError, match="empty"):
        next(read_table(tmp_path / "empty.csv"))


ROWS: list[MeasuredRow] = [
    *measured("Tensor.mul.0", 0, [two_way_output(0, max_abs=0.5), two_way_output(1)]),
    *measured(
        "Functional.softmax.0",
        1,
        [three_way_output(0, npu={"max_rel": float("inf"), "cosine": float("nan")})],
        route="three-way",
        standard="benchmark",
        golden="cpu",
    ),
    *measured("Tensor.item.0", 2, [output(0, kind=Kind.PLAIN, equal=False, message="1 vs 2")]),
    *unmeasured("Torch.rand.0", 3, Outcome.SKIPPED, "random", random=True),
    *unmeasured("Torch.inverse.0", 4, Outcome.REPLAY_FAILED, "RuntimeError: 奇异 \n '=x'"),
    *unmeasured("Torch.add.0", 5, Outcome.QUARANTINED, "crc32 differs", route="", standard=""),
]
ROWS[0] = replace(ROWS[0], inputs='[{"path":"args.0"}]')


def test_measured_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "000001.parquet"
    write_measured(path, iter(ROWS), {"golden": "cpu", "bench_device": "cuda"})
    back = read_measured(path)
    # NaN is not equal to itself: compared by text.
    assert repr(back) == repr(ROWS)
    assert read_meta(path) == {"bench_device": "cuda", "golden": "cpu"}


def test_measured_rows_of_chosen_calls(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    write_measured(path, ROWS, {})
    back = read_measured(path, lambda name: name.startswith("Tensor."))
    assert [row.header.name for row in back] == ["Tensor.mul.0", "Tensor.mul.0", "Tensor.item.0"]
    assert back[1].output == ROWS[1].output
    assert read_measured(path, lambda name: False) == []


def test_no_rows_at_all(tmp_path: Path) -> None:
    write_measured(tmp_path / "m.parquet", [], {})
    assert read_measured(tmp_path / "m.parquet") == []


def test_measured_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    write_measured(one, ROWS, {"a": "1", "b": "2"})
    write_measured(two, list(ROWS), {"b": "2", "a": "1"})
    assert one.read_bytes() == two.read_bytes()


def test_every_field_of_a_measurement_has_a_typed_column(tmp_path: Path) -> None:
    write_measured(tmp_path / "m", ROWS, {})
    schema = pq.read_schema(tmp_path / "m")
    assert {name[2:] for name in schema.names if name.startswith("m_")} == set(RECORD_FIELDS)
    assert schema.field("m_two_way.max_abs").type == pa.float64()
    assert schema.field("m_npu.histogram_rel").type == pa.list_(pa.int64())
    assert schema.field("call_random").type == pa.bool_()
    # Flat: any reader of Parquet can load it.
    assert pq.read_table(tmp_path / "m").num_rows == len(ROWS)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"\x00" * 5000, b"PAR1" + b"\xff" * 64 + b"PAR1"]
)
def test_a_torn_table_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.parquet"
    path.write_bytes(content)
    for read in (read_measured, read_meta, read_verdict_info):
        with pytest.raises(SpoolError, match="remove it and rerun") as info:
            read(path)
        assert "\n" not in str(info.value)
        assert str(path) in str(info.value)


def test_a_truncated_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    write_measured(path, ROWS, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TableError, match="remove it and rerun"):
        read_measured(path)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        read_measured(tmp_path / "no.parquet")


def test_a_table_of_another_kind_or_version(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    write_segment(path, Route.TWO_WAY, [], 0, 0, 0)
    with pytest.raises(TableError, match="holds verdicts rows, not measured rows"):
        read_measured(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TableError, match="not a table of Spool"):
        read_measured(path)
    newer = pa.schema([("a", pa.int64())], {b"spool": b'{"kind": "measured", "version": 99}'})
    pq.write_table(pa.table({"a": [1]}, schema=newer), path)
    with pytest.raises(
        TableError, match="table version 99, this program reads 1; install a newer Spool"
    ):
        read_measured(path)


def test_a_row_of_another_schema_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    write_measured(path, measured(outputs=[replace(two_way_output(), schema=77)]), {})
    with pytest.raises(TableError, match="schema 77"):
        read_measured(path)


CALLS = [
    replace(
        call_verdict("Tensor.mul.0", 0, Status.ERROR, outputs=2),
        rows=(
            OutputVerdict(0, {"余弦相似度": 0.5, "Shape": "(2,)", "Status": "error"}),
            OutputVerdict(1, {"余弦相似度": float("inf"), "Status": "pass"}),
        ),
        standard_verdict=Status.PASS,
        worst_output=1,
        worst_metric="max_abs",
        worst_value=0.25,
        worst_limit=0.001,
        worst_index="(1,)",
        message="no, really",
    ),
    quarantined("Tensor.add.1", 1, "crc32 differs"),
    call_verdict("Tensor.sub.0", 2, Status.SKIP, outcome=Outcome.SKIPPED),
]


def test_verdicts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    write_segment(path, Route.TWO_WAY, CALLS, 3, 4, 5)
    back = list(read_verdicts(path))
    assert [replace(call, rows=()) for call in back] == [replace(call, rows=()) for call in CALLS]
    assert [[row.output for row in call.rows] for call in back] == [[0, 1], [], [0]]
    assert back[0].rows[0].cells["余弦相似度"] == 0.5
    assert back[0].rows[0].cells["双百指标"] is None
    assert back[0].rows[1].cells["余弦相似度"] == float("inf")
    info = read_verdict_info(path)
    assert (info.rank, info.step, info.segment, info.calls) == (3, 4, 5, 3)
    assert info.first == CallKey(0, 0, 0, "Tensor.mul.0")
    assert info.last == CallKey(0, 2, 0, "Tensor.sub.0")
    assert info.route is Route.TWO_WAY


def test_verdicts_without_details(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    write_segment(path, Route.TWO_WAY, CALLS, 0, 0, 0)
    back = list(read_verdicts(path, details=False))
    assert [call.name for call in back] == [call.name for call in CALLS]
    assert back[0].rows[0].cells == {}


def test_a_nan_does_not_tear_a_call_apart(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    write_segment(path, Route.TWO_WAY, [with_nan(call_verdict(outputs=3))], 0, 0, 0)
    (back,) = read_verdicts(path)
    assert len(back.rows) == 3
    assert back.worst_value is not None
    assert math.isnan(back.worst_value)


def test_a_call_across_row_groups_stays_whole(tmp_path: Path, monkeypatch: object) -> None:
    path = tmp_path / "v.parquet"
    many = [call_verdict("Tensor.mul.0", 0, outputs=5000), call_verdict("Tensor.mul.1", 1)]
    write_segment(path, Route.TWO_WAY, many, 0, 0, 0)
    assert pq.ParquetFile(path).num_row_groups == 2
    assert [len(call.rows) for call in read_verdicts(path)] == [5000, 1]


def test_header_key_orders_calls() -> None:
    keys = [
        header("Tensor.mul.0", 1).key,
        header("Tensor.mul.1", 0, step=1).key,
        header("Tensor.mul.2", 0).key,
        header("Tensor.mul.10", 0, index=1).key,
    ]
    assert [key.name for key in sorted(keys)] == [
        "Tensor.mul.2",
        "Tensor.mul.10",
        "Tensor.mul.0",
        "Tensor.mul.1",
    ]


def test_reading_and_writing_tables_needs_no_torch() -> None:
    code = (
        "import sys; import spool.judging, spool.retire, spool.merge, spool.verdict;"
        "print([m for m in ('torch', 'pandas', 'snakemake') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_csv_dialect_is_read_by_the_standard_library(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    hostile = ['"', ",", "\r\n", "a;b", "'", " lead", "trail "]
    with open_table(path, ("x",)) as table:
        for text in hostile:
            table.write({"x": text})
    with path.open(encoding="utf-8-sig", newline="") as handle:
        rows = list(csv.reader(handle))
    assert [row[0] for row in rows[1:]] == ['"', ",", " ", "a;b", "'", " lead", "trail "]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("replay", "not a table of Spool; remove it and rerun"),
        ("measured", "restore it from a copy; without one, remove it and rerun if its shards are"),
    ],
)
def test_the_way_out_of_a_damaged_table(tmp_path: Path, place: str, words: str) -> None:
    """Rows in ``measured`` are made of shards that may be gone."""
    path = tmp_path / place / "rank0" / "000000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TableError, match=words) as info:
        read_measured(path)
    assert "\n" not in str(info.value)


def test_no_changed_bit_becomes_another_row(tmp_path: Path) -> None:
    """Parquet has no checksum of its own: a flipped bit in a page would be another verdict."""
    sound, path = tmp_path / "sound", tmp_path / "m.parquet"
    write_measured(sound, ROWS, {})
    data = bytearray(sound.read_bytes())
    for at in [*range(0, len(data), 37), *range(len(data) - 24, len(data))]:
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(TableError):
            read_measured(path)
        data[at] ^= 1 << at % 8
    path.write_bytes(data)
    assert repr(read_measured(path)) == repr(read_measured(sound))
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(TableError, match="the table does not match its checksum; remove it"):
        read_measured(path)


def test_text_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    """Paths of a training script may hold any bytes; Python shows them as surrogates."""
    path = tmp_path / "m.parquet"
    head = replace(ROWS[0].header, module="a\ud800", stack="/x\udcff.py:1 in f")
    write_measured(path, [replace(ROWS[0], header=head), *ROWS[1:]], {})
    first, *others = read_measured(path)
    assert (first.header.module, first.header.stack) == ("a\\ud800", "/x\\udcff.py:1 in f")
    assert [row.header for row in others] == [row.header for row in ROWS[1:]]
