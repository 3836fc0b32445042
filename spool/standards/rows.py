"""What a measurement is, and what judging makes of it: plain data, no torch.

Replay measures outputs once and keeps only these rows; every verdict is a pure
function of them, so a changed limit or list re-judges a run without its tensors.
A row is flat (`OutputMeasurement.to_record`), its fields and their types are
fixed by `RECORD_FIELDS`, and it carries `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args, get_type_hints

SCHEMA_VERSION = 1
HISTOGRAM_BINS = 64
AXIS_BINS = 64
# Lowest octave of each histogram: bin 2 holds [2^low, 2^(low + 1)), bin 62 the last
# full octave. Bin 0 counts equal elements, bin 1 everything below, bin 63 everything
# above and what is not finite.
HISTOGRAM_LOW = {"abs": -44, "rel": -40, "ulp": -24}

Scalar: TypeAlias = "bool | int | float | str | list[int] | list[float] | None"
Row: TypeAlias = "dict[str, str | float | None]"


class Status(str, Enum):
    """A verdict; its text is the word in the tables."""

    PASS = "pass"
    WARNING = "Warning"
    ERROR = "error"
    SKIP = "SKIP"

    def __str__(self) -> str:
        return self.value


class Route(str, Enum):
    """Whether a call is checked against the bench alone or also against a golden."""

    TWO_WAY = "two-way"
    THREE_WAY = "three-way"

    def __str__(self) -> str:
        return self.value


class Standard(str, Enum):
    """The rule by which an API's outputs are judged."""

    ABSOLUTE = "absolute"
    BINARY = "binary"
    THOUSANDTH = "thousandth"
    ULP = "ulp"
    BENCHMARK = "benchmark"
    ACCUMULATIVE = "accumulative"

    def __str__(self) -> str:
        return self.value

    @property
    def route(self) -> Route:
        """The route that calls of this standard take."""
        two_way = (Standard.ABSOLUTE, Standard.BINARY, Standard.THOUSANDTH)
        return Route.TWO_WAY if self in two_way else Route.THREE_WAY


class Kind(str, Enum):
    """What was compared at one place of the outputs, and so which rule judges it."""

    TENSOR = "tensor"
    PLAIN = "plain"
    NONE = "none"
    EMPTY = "empty"
    DROPOUT = "dropout"
    RANDOM = "random"
    STRUCTURE = "structure"
    GOLDEN = "golden"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class PairMeasurement:
    """Error statistics of a device tensor ``d`` against a bench tensor ``b``.

    With ``a = |d - b|`` and ``r = a / (|b| + eps)`` over `count` elements. Elements
    that are the same infinity or NaN on both sides have ``a = r = u = 0``. *Small*
    elements are finite on both sides with ``|b|`` up to the dtype's small value,
    *normal* ones are finite and not small (see `thresholds.Constants`). ``None``
    is a column that the dtype does not have.

    Parameters
    ----------
    bench_dtype, device_dtype : str
        torch's names without prefix.
    count : int
        Elements measured.
    cosine : float or None
        None if `count` is 1 or a side is all zero; NaN if a value is not finite.
    one_side_zero : bool
        Exactly one side is all zero (or below the fp64 epsilon).
    max_abs : float or None
        max a.
    within_hundredth, within_thousandth, within_ten_thousandth : float or None
        Share of elements with r < 0.01, 0.001, 0.0001.
    different : int
        Elements with d != b; `error_rate` is their share.
    above, below : int
        Elements with d > b', d < b' where b' is b cast to d's dtype.
    balance : float or None
        ``|above - below| / count``.
    rmse, small_error_share, max_rel, mean_rel : float or None
        The benchmark standard's columns.
    inf_nan_share, rel_error_share, abs_error_share : float or None
        The absolute standard's columns.
    acc_inf_nan_share, acc_rel_error_share, acc_abs_error_share : float or None
        The same with the accumulative standard's bound and small value 1.
    ulp_max, ulp_mean, ulp_share : float or None
        The ULP standard's columns.
    small, normal : int
        Number of small and of normal elements.
    sum_diff, sum_abs_diff : float or None
        Sums of d - b and of a over elements finite on both sides: signed and
        unsigned bias.
    *_nan, *_posinf, *_neginf : int
        Elements of that kind on each side.
    nonfinite_different : int
        Elements not finite on a side and not the same on the other.
    device_nonfinite : int
        Those of them that are not finite on the device; `device_nonfinite_index`
        is the first one's flat index.
    worst_abs, worst_rel, worst_ulp : float or None
        The largest a, the largest r of normal elements, the largest u; each with
        the element's flat index (row-major) and both values as exact text. For
        integers `worst_abs` is that of the first differing element.
    histogram_abs, histogram_rel, histogram_ulp : list of int or None
        64 octave bins each, see `HISTOGRAM_LOW`.
    bad : int
        Elements beyond the dtype's tolerance: normal with r > rtol, small with
        a > atol, or not finite and different; for integers those that differ.
    axis_bad : list of int
        Bad elements along each axis, ``min(64, size)`` bins per axis, one axis
        after the other; index i of an axis of n > 64 falls into bin i * 64 // n.
    bench_max, device_max : float or None
        Largest magnitude on each side (NaN if one is NaN).
    """

    bench_dtype: str
    device_dtype: str
    count: int
    cosine: float | None = None
    one_side_zero: bool = False
    max_abs: float | None = None
    within_hundredth: float | None = None
    within_thousandth: float | None = None
    within_ten_thousandth: float | None = None
    different: int = 0
    error_rate: float | None = None
    above: int = 0
    below: int = 0
    balance: float | None = None
    rmse: float | None = None
    small_error_share: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    inf_nan_share: float | None = None
    rel_error_share: float | None = None
    abs_error_share: float | None = None
    acc_inf_nan_share: float | None = None
    acc_rel_error_share: float | None = None
    acc_abs_error_share: float | None = None
    ulp_max: float | None = None
    ulp_mean: float | None = None
    ulp_share: float | None = None
    small: int = 0
    normal: int = 0
    sum_diff: float | None = None
    sum_abs_diff: float | None = None
    bench_nan: int = 0
    bench_posinf: int = 0
    bench_neginf: int = 0
    device_nan: int = 0
    device_posinf: int = 0
    device_neginf: int = 0
    nonfinite_different: int = 0
    device_nonfinite: int = 0
    device_nonfinite_index: int | None = None
    worst_abs: float | None = None
    worst_abs_index: int | None = None
    worst_abs_bench: str | None = None
    worst_abs_device: str | None = None
    worst_rel: float | None = None
    worst_rel_index: int | None = None
    worst_rel_bench: str | None = None
    worst_rel_device: str | None = None
    worst_ulp: float | None = None
    worst_ulp_index: int | None = None
    worst_ulp_bench: str | None = None
    worst_ulp_device: str | None = None
    histogram_abs: list[int] | None = None
    histogram_rel: list[int] | None = None
    histogram_ulp: list[int] | None = None
    bad: int = 0
    axis_bad: list[int] | None = None
    bench_max: float | None = None
    device_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutputMeasurement:
    """One compared place of a call's outputs.

    Parameters
    ----------
    index : int
        Position among the outputs, leaf by leaf; the ``i`` of ``output.<i>``.
    path : str
        Where it sits, e.g. ``[0]['w']``; empty for a single output.
    kind : Kind
        Which rule judges it. ``STRUCTURE`` has a `message` and is an error,
        ``GOLDEN`` has one and cannot be judged.
    message : str or None
        What differs in structure or plain value, naming both sides.
    equal : bool or None
        Result of a plain value.
    bench_dtype, device_dtype, golden_dtype : str
        As in the tables: ``torch.float32``, ``<class 'int'>``; empty if none.
    shape : list of int or None
        Of the device's tensor.
    count : int
        Elements of the device's tensor; of a channel dropout, its channels.
    zeros_bench, zeros_device : int or None
        Zero elements, or channels, of a random dropout; the bench is the golden on the
        three-way route.
    identical : bool or None
        Three-way: the device's tensor equals the bench's, value for value.
    left_out : int
        Three-way: elements that are not measured because the bench or the golden
        (in the device's dtype) is not finite there.
    device_nonfinite, device_nonfinite_index : int, int or None
        Three-way: elements not finite on the device, finite in the golden and not
        the same on the bench; the flat index of the first.
    saturated : int
        Three-way: elements finite on the device and not on the bench.
    reduction : int or None
        Elements that went into one output element, where the operator reduces.
    two_way, npu, gpu : PairMeasurement or None
        Device against bench; device against golden; bench against golden.
    schema : int
        Version of this row's fields.
    """

    index: int
    path: str
    kind: Kind
    message: str | None = None
    equal: bool | None = None
    bench_dtype: str = ""
    device_dtype: str = ""
    golden_dtype: str = ""
    shape: list[int] | None = None
    count: int = 0
    zeros_bench: int | None = None
    zeros_device: int | None = None
    identical: bool | None = None
    left_out: int = 0
    device_nonfinite: int = 0
    device_nonfinite_index: int | None = None
    saturated: int = 0
    reduction: int | None = None
    two_way: PairMeasurement | None = None
    npu: PairMeasurement | None = None
    gpu: PairMeasurement | None = None
    schema: int = SCHEMA_VERSION

    def to_record(self) -> dict[str, Scalar]:
        """The row as a flat dict with exactly the keys of `RECORD_FIELDS`."""
        record: dict[str, Scalar] = dict.fromkeys(RECORD_FIELDS)
        for name in _OUTPUT_FIELDS:
            value = getattr(self, name)
            record[name] = value.value if isinstance(value, Enum) else value
        for pair in PAIRS:
            measured = getattr(self, pair)
            if measured is not None:
                for name in _PAIR_FIELDS:
                    record[f"{pair}.{name}"] = getattr(measured, name)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> OutputMeasurement:
        """Rebuild a row from `to_record`'s dict; other keys are ignored.

        Raises
        ------
        ValueError
            If the record's schema version is not this one.
        """
        if record.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"measurement row has schema {record.get('schema')!r}, "
                f"this version reads {SCHEMA_VERSION}: replay the shards again"
            )
        values: dict[str, Any] = {name: _plain(record[name]) for name in _OUTPUT_FIELDS}
        values["kind"] = Kind(values["kind"])
        for pair in PAIRS:
            if record.get(f"{pair}.count") is not None:
                values[pair] = PairMeasurement(
                    **{name: _plain(record[f"{pair}.{name}"]) for name in _PAIR_FIELDS}
                )
        return cls(**values)


@dataclass(frozen=True)
class Worst:
    """The element and metric that decided, or came closest to deciding, a verdict."""

    output: int
    metric: str
    value: float
    limit: float
    index: list[int] | None = None


@dataclass(frozen=True)
class Judged:
    """The verdict of one call.

    Parameters
    ----------
    status : Status
        The published status: pre-check (two-way) or precision compare (three-way).
    standard : Standard
        By which the API is judged.
    standard_verdict : Status or None
        Two-way: the verdict by the API's own standard.
    rows : list of dict
        One per output, keyed by the headers of the details table without the
        name columns; None is a blank cell.
    message : str
        One line; empty if there is nothing to say.
    worst : Worst or None
        The worst metric of the worst output.
    npu_rows, gpu_rows : list of dict
        Three-way: device and bench against the golden, by the headers of the
        checking details.
    """

    status: Status
    standard: Standard
    standard_verdict: Status | None
    rows: list[Row]
    message: str
    worst: Worst | None = None
    npu_rows: list[Row] | None = None
    gpu_rows: list[Row] | None = None


PAIRS = ("two_way", "npu", "gpu")


def _plain(value: Any) -> Any:
    # Columnar readers hand scalars and lists out as numpy's.
    return value.tolist() if hasattr(value, "tolist") else value


def _tag(annotation: Any) -> str:
    if isinstance(annotation, UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not NoneType)
    return _TAGS[annotation]


_TAGS: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Kind: "str",
    list[int]: "ints",
    list[float]: "floats",
}
_OUTPUT_FIELDS = tuple(f.name for f in fields(OutputMeasurement) if f.name not in PAIRS)
_PAIR_FIELDS = tuple(f.name for f in fields(PairMeasurement))


def _record_fields() -> dict[str, str]:
    output_types = get_type_hints(OutputMeasurement)
    pair_types = get_type_hints(PairMeasurement)
    tags = {name: _tag(output_types[name]) for name in _OUTPUT_FIELDS}
    for pair in PAIRS:
        tags |= {f"{pair}.{name}": _tag(pair_types[name]) for name in _PAIR_FIELDS}
    return tags


RECORD_FIELDS: dict[str, str] = _record_fields()
"""Every key of a record and its type: bool, int, float, str, ints or floats."""
