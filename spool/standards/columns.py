"""Headers of the two details tables, after their leading ``API Name`` column."""

from __future__ import annotations

from typing import Any

from spool.standards.rows import PairMeasurement, Row, Standard

BENCH_DTYPE = "Bench Dtype"
DEVICE_DTYPE = "DEVICE Dtype"
SHAPE = "Shape"
COSINE = "余弦相似度"
MAX_ABS = "最大绝对误差"
HUNDREDTH = "双百指标"
THOUSANDTH = "双千指标"
TEN_THOUSANDTH = "双万指标"
ERROR_RATE = "二进制一致错误率"
BALANCE = "误差均衡性"
RMSE = "均方根误差"
SMALL_ERROR = "小值域错误占比"
MAX_REL = "相对误差最大值"
MEAN_REL = "相对误差平均值"
INF_NAN = "inf/nan错误率"
REL_ERROR = "相对误差错误率"
ABS_ERROR = "绝对误差错误率"
ULP_MAX = "ULP误差最大值"
ULP_MEAN = "ULP误差平均值"
ULP_SHARE = "ULP误差大于阈值占比"
STATUS = "Status"
MESSAGE = "Message"

CHECK_HEADERS = (
    *(BENCH_DTYPE, DEVICE_DTYPE, SHAPE, COSINE, MAX_ABS, HUNDREDTH, THOUSANDTH, TEN_THOUSANDTH),
    *(ERROR_RATE, BALANCE, RMSE, SMALL_ERROR, MAX_REL, MEAN_REL, INF_NAN, REL_ERROR, ABS_ERROR),
    *(ULP_MAX, ULP_MEAN, ULP_SHARE, STATUS, MESSAGE),
)

SMALL_RATIO, SMALL_RESULT = "小值域错误比值", "小值域判定结果"
RMSE_RATIO, RMSE_RESULT = "均方根误差比值", "均方根误差判定结果"
MAX_REL_RATIO, MAX_REL_RESULT = "相对误差最大值比值", "相对误差最大值判定结果"
MEAN_REL_RATIO, MEAN_REL_RESULT = "相对误差平均值比值", "相对误差平均值判定结果"
BALANCE_RATIO, BALANCE_RESULT = "误差均衡性比值", "误差均衡性判定结果"
INF_NAN_RESULT = "inf/nan判定结果"
REL_ERROR_RESULT = "相对误差判定结果"
ABS_ERROR_RESULT = "绝对误差判定结果"
ERROR_RATE_RESULT = "二进制一致错误率判定结果"
ULP_SHARE_RATIO, ULP_RESULT = "ULP误差大于阈值占比比值", "ULP误差判定结果"
THOUSANDTH_RESULT = "双千指标判定结果"
COMPARE_RESULT = "比对结果"
ALGORITHM = "比对算法"

COMPARE_HEADERS = (
    *(SMALL_RATIO, SMALL_RESULT, RMSE_RATIO, RMSE_RESULT, MAX_REL_RATIO, MAX_REL_RESULT),
    *(MEAN_REL_RATIO, MEAN_REL_RESULT, BALANCE_RATIO, BALANCE_RESULT, INF_NAN, INF_NAN_RESULT),
    *(REL_ERROR, REL_ERROR_RESULT, ABS_ERROR, ABS_ERROR_RESULT, ERROR_RATE, ERROR_RATE_RESULT),
    *(ULP_MEAN, ULP_SHARE, ULP_SHARE_RATIO, ULP_RESULT, THOUSANDTH, THOUSANDTH_RESULT),
    *(COMPARE_RESULT, ALGORITHM, MESSAGE),
)

ALGORITHMS = {
    Standard.BENCHMARK: "标杆比对法",
    Standard.ULP: "ULP误差比对法",
    Standard.BINARY: "二进制一致法",
    Standard.ABSOLUTE: "绝对阈值法",
    Standard.THOUSANDTH: "双千指标法",
    Standard.ACCUMULATIVE: "累积误差比对法",
}

_FIELDS = {
    Standard.ABSOLUTE: {
        INF_NAN: "inf_nan_share",
        REL_ERROR: "rel_error_share",
        ABS_ERROR: "abs_error_share",
    },
    Standard.BINARY: {ERROR_RATE: "error_rate"},
    Standard.THOUSANDTH: {THOUSANDTH: "within_thousandth"},
    Standard.BENCHMARK: {
        BALANCE: "balance",
        RMSE: "rmse",
        SMALL_ERROR: "small_error_share",
        MAX_REL: "max_rel",
        MEAN_REL: "mean_rel",
    },
    Standard.ULP: {ULP_MAX: "ulp_max", ULP_MEAN: "ulp_mean", ULP_SHARE: "ulp_share"},
    Standard.ACCUMULATIVE: {
        BALANCE: "balance",
        INF_NAN: "acc_inf_nan_share",
        REL_ERROR: "acc_rel_error_share",
        ABS_ERROR: "acc_abs_error_share",
    },
}


def standard_columns(pair: PairMeasurement, standard: Standard) -> dict[str, Any]:
    """The columns that a standard fills in the checking details."""
    return {header: getattr(pair, name) for header, name in _FIELDS[standard].items()}


def check_row(
    bench_dtype: str, device_dtype: str, shape: list[int] | None, columns: dict[str, Any]
) -> Row:
    """A complete checking-details row; what is not given is blank."""
    row: Row = dict.fromkeys(CHECK_HEADERS)
    row[BENCH_DTYPE] = bench_dtype or None
    row[DEVICE_DTYPE] = device_dtype or None
    row[SHAPE] = None if shape is None else str(tuple(shape))
    row |= columns
    return row
