"""The numbers: constants inside a measurement, and limits by which rows are judged.

A `Constants` value takes part in measuring, so changing one needs the tensors
again. A limit only takes part in judging; a user may change it per API.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from spool.errors import ConfigError
from spool.names import base_name
from spool.standards.rows import Standard


@dataclass(frozen=True, slots=True)
class Constants:
    """What the published standards fix per dtype of the device's output.

    Parameters
    ----------
    small : float
        Largest magnitude that counts as a small value.
    atol_abs, atol_bench : float
        Absolute tolerance of small values, absolute and benchmark standard.
    rtol : float
        Relative tolerance of normal values.
    acc_bound, acc_balance : float
        Accumulative standard: bound of a single error, limit of the balance.
    ratio_floor : float
        Least denominator of a ratio against the bench.
    ulp_min_exponent, ulp_mantissa : int
        Least exponent and mantissa bits of the dtype.
    ulp_limit : float
        An element with more ULPs of error counts into the ULP share.
    """

    small: float
    atol_abs: float
    atol_bench: float
    rtol: float
    acc_bound: float
    acc_balance: float
    ratio_floor: float
    ulp_min_exponent: int
    ulp_mantissa: int
    ulp_limit: float


FLOAT16 = Constants(2**-10, 2**-16, 1e-16, 2**-10, 2**-8, 2**-20, 2**-11, -14, 10, 1.0)
BFLOAT16 = Constants(2**-10, 1e-16, 1e-16, 2**-8, 2**-7, 2**-7, 2**-8, -126, 7, 1.0)
FLOAT32 = Constants(2**-20, 2**-30, 2**-30, 2**-20, 2**-11, 2**-14, 2**-14, -126, 23, 32.0)

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
HALVES = ("float16", "bfloat16", *FLOAT8)
"""Dtypes whose pre-check status goes by the hundredth and thousandth shares."""
STANDARD_DTYPES = (*HALVES, "float32")
"""Dtypes that the standards judge; other floating dtypes have a status only."""
UNJUDGED_DTYPES = ("float64", "complex32", "complex64", "complex128")

ACC_SMALL = 1.0
ZERO_MAX = 2.220446049250313e-16
"""A side whose largest magnitude is not above this counts as all zero in the cosine."""
BFLOAT16_EPS = 2**-8
BFLOAT16_MAX = 3.3895313892515355e38

COSINE_LIMIT = 0.99
MAX_ABS_LIMIT = 0.001
HUNDREDTH_LIMIT = 0.99
THOUSANDTH_LIMIT = 0.999
TEN_THOUSANDTH_LIMIT = 0.9999
DROPOUT_MIN_COUNT = 100
DROPOUT_LIMIT = 0.1

_BY_DTYPE = {"bfloat16": BFLOAT16, "float16": FLOAT16, **dict.fromkeys(FLOAT8, FLOAT16)}


def constants_of(dtype: str) -> Constants:
    """Constants for a device dtype given by torch's name without prefix."""
    return _BY_DTYPE.get(dtype, FLOAT32)


@dataclass(frozen=True, slots=True)
class AbsoluteLimits:
    """Shares that must not be exceeded."""

    inf_nan_share: float = 0.0
    rel_error_share: float = 0.0
    abs_error_share: float = 0.0


@dataclass(frozen=True, slots=True)
class BinaryLimits:
    """Share of differing elements that must not be exceeded."""

    error_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class ThousandthLimits:
    """Share of elements within a thousandth that must be reached."""

    within_thousandth: float = THOUSANDTH_LIMIT


@dataclass(frozen=True, slots=True)
class BenchmarkLimits:
    """Ratios of device error over bench error that must not be exceeded.

    The balance has a ratio and a limit to read it by, and is not judged.
    """

    small_error_share: float = 2.0
    rmse: float = 2.0
    max_rel: float = 10.0
    mean_rel: float = 2.0
    balance: float = 2.0


@dataclass(frozen=True, slots=True)
class UlpLimits:
    """Values to stay below; one of them is enough for a pass.

    ``half_*`` hold for fp16 and bf16, ``single_*`` for fp32.
    """

    half_share: float = 0.001
    half_ratio: float = 1.0
    single_mean: float = 64.0
    single_share: float = 0.05
    single_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class AccumulativeLimits:
    """Shares and balance that must not be exceeded.

    A `balance` of None means the dtype's own limit (`Constants.acc_balance`).
    """

    inf_nan_share: float = 0.0
    rel_error_share: float = 0.0
    abs_error_share: float = 0.0
    balance: float | None = None


Limits: TypeAlias = (
    "AbsoluteLimits | BinaryLimits | ThousandthLimits | BenchmarkLimits | UlpLimits"
    " | AccumulativeLimits"
)
Overrides: TypeAlias = "Mapping[str, str | Mapping[str, Mapping[str, float] | None]]"

DEFAULTS: dict[Standard, Limits] = {
    Standard.ABSOLUTE: AbsoluteLimits(),
    Standard.BINARY: BinaryLimits(),
    Standard.THOUSANDTH: ThousandthLimits(),
    Standard.BENCHMARK: BenchmarkLimits(),
    Standard.ULP: UlpLimits(),
    Standard.ACCUMULATIVE: AccumulativeLimits(),
}


def limits_of(api: str, standard: Standard, overrides: Overrides | None = None) -> Any:
    """Limits by which outputs of `api` (a base name) are judged.

    Returns the limits dataclass of `standard`, with the values that a user set
    for this API in place.
    """
    default: Any = DEFAULTS[standard]
    chosen = (overrides or {}).get(api)
    if chosen is None or isinstance(chosen, str):
        return default
    return replace(default, **(chosen.get(standard.value) or {}))


def validate_overrides(overrides: object) -> None:
    """Check a user's ``standards`` mapping before anything uses it.

    Each key is an API's base name; each value a standard's name, or a mapping of
    one standard's name to the limits to change::

        my_op: absolute
        softmax: {benchmark: {mean_rel: 3}}

    Raises
    ------
    ConfigError
        With the key and what may stand there.
    """
    if overrides is None:
        return
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"standards: {overrides!r} is not a mapping of API names to standards")
    for api, chosen in overrides.items():
        where = f"standards.{api}"
        if not isinstance(api, str) or not api:
            raise ConfigError(f"standards: {api!r} is not an API name; write for example linear")
        if base_name(api) != api:
            raise ConfigError(f"{where}: name the API alone; write {base_name(api)}")
        if isinstance(chosen, str):
            _standard(where, chosen)
        elif isinstance(chosen, Mapping) and len(chosen) == 1:
            ((name, changes),) = chosen.items()
            _validate_limits(f"{where}.{name}", _standard(where, name), changes)
        else:
            raise ConfigError(
                f"{where}: {chosen!r} is neither a standard nor one standard with limits; "
                "write for example absolute, or {benchmark: {mean_rel: 3}}"
            )


def _standard(where: str, name: object) -> Standard:
    try:
        return Standard(name)
    except ValueError:
        known = ", ".join(item.value for item in Standard)
        raise ConfigError(f"{where}: unknown standard {name!r}; use one of {known}") from None


def _validate_limits(where: str, standard: Standard, changes: object) -> None:
    if changes is None:
        return
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where}: {changes!r} is not a mapping of limits to numbers")
    known = [field.name for field in fields(DEFAULTS[standard])]
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown limit {name!r}; use one of {', '.join(known)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{where}.{name}: {value!r} is not a finite number of at least 0")
