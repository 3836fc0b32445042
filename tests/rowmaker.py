"""Rows and small work directories for the tests of the tables, judging, retire and merge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spool.markers import StepCounts
from spool.names import split_name
from spool.records import CallHeader, CallVerdict, MeasuredRow, Outcome, OutputVerdict
from spool.standards.rows import (
    Kind,
    OutputMeasurement,
    PairMeasurement,
    Route,
    Standard,
    Status,
)
from spool.tables import VerdictInfo, detail_columns, write_verdicts
from spool.workdir import Manifest, RankEnd, Segment, ShardRef, WorkDir

TIMESTAMP = "20260102030405"


def header(name: str = "Tensor.mul.0", order: int = 0, **changes: Any) -> CallHeader:
    api, _ = split_name(name)
    values: dict[str, Any] = {
        "rank": 0,
        "step": 0,
        "order": order,
        "index": 0,
        "name": name,
        "api": api,
        "direction": "forward",
        "route": "two-way",
        "standard": "absolute",
        "module": "model.layers.0",
        "stack": "train.py:7 in forward\ntrain.py:20 in main",
        "shard": f"{order:06d}.{name}.h5",
        "nbytes": 100,
        "device": "npu:0",
        "bench_device": "cpu",
        "golden": "",
        "random": False,
    }
    return CallHeader(**{**values, **changes})


def pair(**changes: Any) -> PairMeasurement:
    """A pair of equal fp32 tensors of four elements."""
    values: dict[str, Any] = {
        "bench_dtype": "float32",
        "device_dtype": "float32",
        "count": 4,
        "cosine": 1.0,
        "max_abs": 0.0,
        "within_hundredth": 1.0,
        "within_thousandth": 1.0,
        "within_ten_thousandth": 1.0,
        "error_rate": 0.0,
        "balance": 0.0,
        "rmse": 0.0,
        "small_error_share": 0.0,
        "max_rel": 0.0,
        "mean_rel": 0.0,
        "inf_nan_share": 0.0,
        "rel_error_share": 0.0,
        "abs_error_share": 0.0,
        "acc_inf_nan_share": 0.0,
        "acc_rel_error_share": 0.0,
        "acc_abs_error_share": 0.0,
        "ulp_max": 0.0,
        "ulp_mean": 0.0,
        "ulp_share": 0.0,
        "normal": 4,
        "sum_diff": 0.0,
        "sum_abs_diff": 0.0,
        "histogram_abs": [4] + [0] * 63,
        "histogram_rel": [4] + [0] * 63,
        "histogram_ulp": [4] + [0] * 63,
        "axis_bad": [0, 0, 0, 0],
    }
    return PairMeasurement(**{**values, **changes})


def output(index: int = 0, **changes: Any) -> OutputMeasurement:
    values: dict[str, Any] = {
        "index": index,
        "path": "",
        "kind": Kind.TENSOR,
        "bench_dtype": "torch.float32",
        "device_dtype": "torch.float32",
        "shape": [4],
        "count": 4,
    }
    return OutputMeasurement(**{**values, **changes})


def two_way_output(index: int = 0, **pair_changes: Any) -> OutputMeasurement:
    return output(index, two_way=pair(**pair_changes))


def three_way_output(
    index: int = 0, npu: dict[str, Any] | None = None, gpu: dict[str, Any] | None = None
) -> OutputMeasurement:
    return output(
        index,
        golden_dtype="torch.float64",
        identical=not npu,
        npu=pair(**(npu or {})),
        gpu=pair(**(gpu or {})),
    )


def measured(
    name: str = "Tensor.mul.0", order: int = 0, outputs: Sequence[OutputMeasurement] = (), **kw: Any
) -> list[MeasuredRow]:
    head = header(name, order, **kw)
    given = outputs or (two_way_output(),)
    return [MeasuredRow(head, Outcome.MEASURED, "", item) for item in given]


def unmeasured(
    name: str, order: int, outcome: Outcome, reason: str, **kw: Any
) -> list[MeasuredRow]:
    return [MeasuredRow(header(name, order, **kw), outcome, reason, None)]


def call_verdict(
    name: str = "Tensor.mul.0",
    order: int = 0,
    status: Status | None = Status.PASS,
    *,
    route: Route = Route.TWO_WAY,
    outputs: int = 1,
    **changes: Any,
) -> CallVerdict:
    column = "Status" if route is Route.TWO_WAY else "比对结果"
    standard = Standard.ABSOLUTE if route is Route.TWO_WAY else Standard.BENCHMARK
    values: dict[str, Any] = {
        "rank": 0,
        "step": 0,
        "order": order,
        "index": 0,
        "name": name,
        "direction": "forward",
        "module": "model.fc",
        "location": "train.py:7 in forward",
        "shard": f"{order:06d}.{name}.h5",
        "nbytes": 100,
        "route": route,
        "standard": standard.value,
        "outcome": Outcome.MEASURED,
        "status": status,
        "standard_verdict": status,
        "message": "",
        "rows": tuple(
            OutputVerdict(place, {column: None if status is None else status.value})
            for place in range(outputs)
        ),
    }
    return CallVerdict(**{**values, **changes})


def quarantined(name: str, order: int, reason: str, **changes: Any) -> CallVerdict:
    return call_verdict(
        name, order, None, outcome=Outcome.QUARANTINED, message=reason, rows=(), **changes
    )


class Run:
    """A spool and a work directory whose verdicts are given instead of judged.

    Parameters
    ----------
    root : Path
    segments : list of list of list of CallVerdict
        By segment, then by batch.
    """

    def __init__(
        self, root: Path, segments: list[list[list[CallVerdict]]], rank: int = 0, **end: Any
    ) -> None:
        self.rank = rank
        self.spool = root / "spool"
        self.work = WorkDir(root / "work")
        self.results = root / "results"
        self.segments = segments
        self.end = end

    def write(self, not_selected: int = 0) -> Run:
        batch = 0
        for number, batches in enumerate(self.segments):
            calls = [call for group in batches for call in group]
            step = calls[0].step
            numbers = tuple(range(batch, batch + len(batches)))
            for group in batches:
                self._manifest(batch, step, group)
                batch += 1
            Segment(self.rank, step, number, numbers).save(self.work.segment(self.rank, number))
            self._verdicts(number, step, calls)
        self._end(batch)
        return self

    def _manifest(self, batch: int, step: int, calls: Iterable[CallVerdict]) -> None:
        shards = []
        for call in calls:
            path = self.shard(step, call.shard)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(call.name.encode().ljust(call.nbytes, b"."))
            shards.append(ShardRef(call.shard, call.nbytes))
        manifest = Manifest(self.rank, step, batch, str(self.spool), "run", tuple(shards))
        manifest.save(self.work.batch(self.rank, batch))

    def _verdicts(self, number: int, step: int, calls: list[CallVerdict]) -> None:
        for route, path in (
            (Route.TWO_WAY, self.work.two_way(self.rank, number)),
            (Route.THREE_WAY, self.work.three_way(self.rank, number)),
        ):
            chosen = sorted((c for c in calls if c.route is route), key=lambda c: c.key)
            write_segment(path, route, chosen, self.rank, step, number)

    def _end(self, batches: int) -> None:
        found: dict[int, int] = {}
        for group in self.segments:
            for call in (call for calls in group for call in calls):
                found[call.step] = found.get(call.step, 0) + 1
        closed = {
            "steps": {
                str(step): {"shards": count, "bytes": 1, "dropped": 0, "skipped": {}}
                for step, count in found.items()
            },
            "reason": "disabled",
        }
        values: dict[str, Any] = {
            "rank": self.rank,
            "run_id": "run",
            "timestamp": TIMESTAMP,
            "segments": tuple(range(len(self.segments))),
            "batches": batches,
            "found": found,
            "expected": closed,
            "missing": {},
        }
        values.update(self.end)
        if values["expected"] is not None:
            values["expected"] = whole(values["expected"])
        RankEnd(**values).save(self.work.end(self.rank))

    def shard(self, step: int, file: str) -> Path:
        return self.spool / f"rank{self.rank}" / f"step{step}" / file

    def in_spool(self) -> list[str]:
        return sorted(str(p.relative_to(self.spool)) for p in self.spool.rglob("*.h5"))

    def kept(self) -> dict[str, bytes]:
        root = self.work.root / "failed"
        return {
            str(p.relative_to(root)): p.read_bytes()
            for p in sorted(root.rglob("*"))
            if p.is_file() and not p.name.startswith((".", "ledger"))
        }


def write_segment(
    path: Path, route: Route, calls: Sequence[CallVerdict], rank: int, step: int, number: int
) -> None:
    info = VerdictInfo(
        route=route,
        rank=rank,
        step=step,
        segment=number,
        calls=len(calls),
        not_selected=0,
        first=calls[0].key if calls else None,
        last=calls[-1].key if calls else None,
    )
    write_verdicts(path, calls, detail_columns(route), info)


def with_nan(call: CallVerdict) -> CallVerdict:
    return replace(call, worst_value=float("nan"), worst_metric="max_abs", worst_output=0)


def whole(closed: dict[str, Any]) -> dict[str, Any]:
    """What a rank was closed with, and every member that is not given."""
    steps = {
        step: {**asdict(StepCounts(0, 0)), **counts} for step, counts in closed["steps"].items()
    }
    return {"reason": "disabled", **closed, "steps": steps}
