from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spool.standards.rows import (
    PAIRS,
    RECORD_FIELDS,
    SCHEMA_VERSION,
    Kind,
    OutputMeasurement,
    PairMeasurement,
    Route,
    Standard,
    Status,
)

TYPES = {"bool": bool, "int": int, "float": float, "str": str, "ints": list}


def full_pair() -> PairMeasurement:
    values = {}
    for field in dataclasses.fields(PairMeasurement):
        tag = RECORD_FIELDS[f"npu.{field.name}"]
        values[field.name] = {
            "bool": True,
            "int": 7,
            "float": 0.5,
            "str": "x",
            "ints": [1, 2],
        }[tag]
    return PairMeasurement(**values)


def test_record_has_fixed_fields_and_types() -> None:
    pair = full_pair()
    row = OutputMeasurement(index=1, path="[0]", kind=Kind.TENSOR, npu=pair, gpu=pair, shape=[2])
    record = row.to_record()
    assert list(record) == list(RECORD_FIELDS)
    for name, value in record.items():
        assert value is None or type(value) is TYPES[RECORD_FIELDS[name]], name


@pytest.mark.parametrize("pairs", [(), ("two_way",), ("npu", "gpu"), PAIRS])
def test_record_round_trip(pairs: tuple[str, ...]) -> None:
    row = OutputMeasurement(
        index=0,
        path="",
        kind=Kind.TENSOR,
        message="m",
        shape=[2, 3],
        identical=False,
        **dict.fromkeys(pairs, full_pair()),  # type: ignore[arg-type]
    )
    assert OutputMeasurement.from_record(row.to_record()) == row


def test_record_out_of_a_columnar_reader() -> None:
    row = OutputMeasurement(index=0, path="", kind=Kind.TENSOR, shape=[2], two_way=full_pair())
    record = row.to_record()
    record["shape"] = np.array([2], dtype=np.int64)  # type: ignore[assignment]
    record["two_way.count"] = np.int64(7)  # type: ignore[assignment]
    record["step"] = 3
    again = OutputMeasurement.from_record(record)
    assert again == row
    assert type(again.shape) is list


def test_other_schema_is_refused() -> None:
    record = OutputMeasurement(index=0, path="", kind=Kind.NONE).to_record()
    record["schema"] = SCHEMA_VERSION + 1
    with pytest.raises(ValueError, match="replay the shards again"):
        OutputMeasurement.from_record(record)


def test_words() -> None:
    assert [str(status) for status in Status] == ["pass", "Warning", "error", "SKIP"]
    assert [str(route) for route in Route] == ["two-way", "three-way"]
    assert f"{Standard.ULP}" == "ulp"
    assert Standard.ACCUMULATIVE.route is Route.THREE_WAY
