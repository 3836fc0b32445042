"""A second reading of the measurement's definitions: dense numpy, one line per column.

Nothing here is streamed, shared or clever, so that it can be compared with the
definitions by eye. It is slow and holds everything in memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

CONSTANTS = {  # small, atol_abs, atol_bench, rtol, accumulative bound
    "float16": (2**-10, 2**-16, 1e-16, 2**-10, 2**-8),
    "bfloat16": (2**-10, 1e-16, 1e-16, 2**-8, 2**-7),
    "float32": (2**-20, 2**-30, 2**-30, 2**-20, 2**-11),
}
ULP = {"float16": (-14, 10, 1), "bfloat16": (-126, 7, 1), "float32": (-126, 23, 32)}


def share(mask: Any, of: Any) -> float:
    return float((mask & of).sum() / of.sum()) if of.any() else 0.0


def columns(bench: torch.Tensor, device: torch.Tensor) -> dict[str, Any]:
    """Columns of a pair of fp16, bf16, fp32 or fp64 tensors by their field names."""
    name = str(device.dtype).removeprefix("torch.")
    wide = torch.float64 if torch.float64 in (bench.dtype, device.dtype) else torch.float32
    b, d = bench.to(wide).numpy().ravel(), device.to(wide).numpy().ravel()
    casts = name in ("float16", "float32")
    cast = bench.to(device.dtype).to(wide).numpy().ravel() if casts else b
    n = b.size
    small, atol_abs, atol_bench, rtol, bound = CONSTANTS.get(name, CONSTANTS["float32"])
    eps = 2**-8 if name == "bfloat16" else torch.finfo(bench.dtype).eps
    eps = b.dtype.type(eps)
    with np.errstate(all="ignore"):
        same = (b == d) | (np.isnan(b) & np.isnan(d))
        finite = np.isfinite(b) & np.isfinite(d)
        a = np.where(same, 0, np.abs(d - b))
        r = np.where(same, 0, a / (np.abs(b) + eps))
        is_small = finite & (np.abs(b) <= small)
        normal = finite & ~is_small
        out: dict[str, Any] = {
            "count": n,
            "max_abs": float(a.max()),
            "within_hundredth": float((r < 0.01).mean()),
            "within_thousandth": float((r < 0.001).mean()),
            "within_ten_thousandth": float((r < 0.0001).mean()),
            "different": int((~same).sum()),
            "above": int((d > cast).sum()),
            "below": int((d < cast).sum()),
            "small": int(is_small.sum()),
            "normal": int(normal.sum()),
            "device_nonfinite": int((~np.isfinite(d) & ~same).sum()),
            "bench_nan": int(np.isnan(b).sum()),
            "device_posinf": int((d == np.inf).sum()),
            "cosine": cosine(b, d),
        }
        bad = (normal & (r > rtol)) | (is_small & (a > atol_abs)) | (~finite & ~same)
        out["bad"] = int(bad.sum())
        if name not in CONSTANTS:
            return out
        square = (a[normal].astype(np.float64) ** 2).sum() / n
        square *= n / (n - (n - normal.sum()) + 0.0001) + 0.0001
        largest = 3.3895313892515355e38 if name == "bfloat16" else torch.finfo(device.dtype).max
        odd = ~np.isfinite(d) | ~np.isfinite(cast)
        clip_d, clip_b = (np.clip(x, -largest, largest).astype(b.dtype) for x in (d, cast))
        clip_r = np.abs(clip_d - clip_b) / (np.abs(b) + eps)
        both_nan = np.isnan(d) & np.isnan(cast)
        acc_small = finite & (np.abs(b) <= 1)
        acc_normal = finite & ~acc_small
        out |= {
            "error_rate": float((~same).mean()),
            "balance": abs(int((d > cast).sum()) - int((d < cast).sum())) / n,
            "rmse": math.sqrt(square),
            "small_error_share": share(a > atol_bench, is_small),
            "max_rel": float(r[normal].max()) if normal.any() else 0.0,
            "mean_rel": float(r[normal].astype(np.float64).mean()) if normal.any() else 0.0,
            "inf_nan_share": share(~(clip_r <= rtol) & ~both_nan, odd),
            "rel_error_share": share(r > rtol, normal),
            "abs_error_share": share(a > atol_abs, is_small),
            "acc_inf_nan_share": share(~(clip_r <= bound) & ~both_nan, odd),
            "acc_rel_error_share": share(r > bound, acc_normal),
            "acc_abs_error_share": share(a > bound, acc_small),
        }
        e_min, mantissa, limit = ULP[name]
        exponent = np.maximum(np.frexp(np.abs(b).astype(np.float64))[1] - 1, e_min)
        exponent = np.where(b == 0, 0, exponent)
        exponent = np.where(finite, exponent, 0)
        u = np.abs(d.astype(np.float64) - b.astype(np.float64))
        u = np.where(same, 0, np.ldexp(u, mantissa - exponent))
        out |= {
            "ulp_max": float(u.max()),
            "ulp_mean": float(u.mean()),
            "ulp_share": float((u > limit).mean()),
        }
    return out


def cosine(b: Any, d: Any) -> float | None:
    b, d = b.astype(np.float64), d.astype(np.float64)
    tops = np.abs(b).max(), np.abs(d).max()
    zero = [top <= np.finfo(np.float64).eps for top in tops]
    if b.size == 1 or any(zero):
        return None
    b, d = b / tops[0], d / tops[1]
    value = (b * d).sum() / (np.sqrt((b * b).sum()) * np.sqrt((d * d).sum()))
    return float(np.clip(value, -1, 1))


def axis_bad(marked: Any, shape: tuple[int, ...]) -> list[int]:
    """Marked elements per axis in 64 bins."""
    grid = marked.reshape(shape)
    counts = []
    for axis, size in enumerate(shape):
        bins = np.zeros(min(64, size), dtype=int)
        for index in range(size):
            at = index if size <= 64 else index * 64 // size
            bins[at] += int(np.take(grid, index, axis=axis).sum())
        counts += bins.tolist()
    return counts
