from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rowmaker import (
    header,
    measured,
    output,
    three_way_output,
    two_way_output,
    unmeasured,
)

from spool.errors import SpoolError
from spool.judging import (
    Selection,
    check_segment,
    compare_segment,
    judge_call,
)
from spool.names import canonical_name
from spool.records import CallVerdict, MeasuredRow, Outcome
from spool.settings import JudgeSettings
from spool.standards.measure import measure_three_way, measure_two_way
from spool.standards.rows import Kind, Route, Status
from spool.tables import TableError, read_verdict_info, read_verdicts, write_measured
from spool.workdir import Segment, WorkDir

DEFAULT = JudgeSettings()


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("add", "add"),
        ("__add__", "add"),
        ("__radd__", "add"),
        ("__iadd__", "add_"),
        ("add_", "add_"),
        ("__rsub__", "rsub"),
        ("rsub", "rsub"),
        ("__truediv__", "div"),
        ("__itruediv__", "div_"),
        ("__matmul__", "matmul"),
        ("__and__", "bitwise_and"),
        ("__ror__", "bitwise_or"),
        ("__iand__", "bitwise_and_"),
        ("__invert__", "bitwise_not"),
        ("__getitem__", "__getitem__"),
        ("__eq__", "eq"),
        ("__neg__", "neg"),
        ("rand", "rand"),
        ("Tensor.__add__.3", "add"),
        ("Torch.linalg.inv.0", "linalg.inv"),
        ("Functional.linear", "linear"),
        ("____", "____"),
    ],
)
def test_canonical_name(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


@pytest.mark.parametrize(
    ("white", "black", "name", "inside"),
    [
        ([], [], "Tensor.add.0", True),
        (["add"], [], "Tensor.add.0", True),
        (["add"], [], "Tensor.__add__.0", True),
        (["__add__"], [], "Tensor.add.0", True),
        (["add"], [], "Tensor.add_.0", False),
        (["add"], [], "Functional.linear.0", False),
        ([], ["add"], "Torch.add.7", False),
        ([], ["add"], "Torch.addmm.7", True),
        (["add", "mul"], ["mul"], "Tensor.mul.0", False),
        (["add", "mul"], ["mul"], "Tensor.add.0", True),
        (["mul"], ["__mul__"], "Tensor.mul.0", False),
        (["linalg.inv"], [], "Torch.linalg.inv.0", True),
        (["inv"], [], "Torch.linalg.inv.0", False),
        (["Torch.linalg.inv"], [], "Torch.linalg.inv.0", True),
    ],
)
def test_selection(white: list[str], black: list[str], name: str, inside: bool) -> None:
    assert (name in Selection(white, black)) is inside


def test_a_passing_two_way_call() -> None:
    verdict = judge_call(measured("Tensor.mul.3", 5), DEFAULT)
    assert verdict.status is Status.PASS
    assert verdict.standard_verdict is Status.PASS
    assert verdict.route is Route.TWO_WAY
    assert verdict.standard == "absolute"
    assert verdict.message == ""
    assert verdict.location == "train.py:7 in forward"
    assert not verdict.failed
    (row,) = verdict.rows
    assert row.output == 0
    assert row.cells["Shape"] == "(4,)"
    assert row.cells["余弦相似度"] == 1.0
    assert row.cells["Status"] == "pass"


def test_a_small_error_passes_the_pre_check_and_fails_the_standard() -> None:
    small = two_way_output(
        max_abs=5e-4,
        abs_error_share=1.0,
        normal=0,
        small=4,
        bad=4,
        worst_abs=5e-4,
        worst_abs_index=2,
        worst_abs_bench="0.0",
        worst_abs_device="0.0005",
    )
    verdict = judge_call(measured("Tensor.add.0", outputs=[small]), DEFAULT)
    assert verdict.status is Status.PASS
    assert verdict.standard_verdict is Status.ERROR
    assert verdict.failed
    assert verdict.worst_metric
    assert verdict.worst_value == 1.0
    assert verdict.worst_limit == 0.0
    assert verdict.worst_index == "(2,)"


def test_real_tensors_on_both_routes() -> None:
    device = torch.tensor([1.0, 2.0, 3.0, 4.5])
    bench = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rows = [
        MeasuredRow(header("Tensor.mul.0"), Outcome.MEASURED, "", item)
        for item in measure_two_way("mul", bench, device)
    ]
    verdict = judge_call(rows, DEFAULT)
    assert (verdict.status, verdict.standard_verdict) == (Status.ERROR, Status.ERROR)
    assert verdict.worst_index == "(3,)"
    rows = [
        MeasuredRow(header("Functional.gelu.0"), Outcome.MEASURED, "", item)
        for item in measure_three_way("gelu", device, bench, bench.double())
    ]
    verdict = judge_call(rows, DEFAULT)
    assert verdict.route is Route.THREE_WAY
    assert (verdict.status, verdict.standard_verdict) == (Status.ERROR, Status.ERROR)
    assert verdict.rows[0].cells["比对算法"] == "标杆比对法"
    assert verdict.rows[0].cells["比对结果"] == "error"


def test_the_worst_output_decides() -> None:
    outputs = [two_way_output(0, cosine=0.1, max_abs=1.0), two_way_output(1)]
    verdict = judge_call(measured("Tensor.mul.0", outputs=outputs), DEFAULT)
    assert verdict.status is Status.ERROR
    assert [row.cells["Status"] for row in verdict.rows] == ["error", "pass"]
    assert verdict.worst_output == 0


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.SKIPPED, "no reference for npu_x"),
        (Outcome.REPLAY_FAILED, "RuntimeError: singular"),
    ],
)
@pytest.mark.parametrize("name", ["Tensor.mul.0", "Torch.inverse.0"])
def test_a_call_without_measurement_has_one_skip_row(
    name: str, outcome: Outcome, reason: str
) -> None:
    verdict = judge_call(unmeasured(name, 0, outcome, reason), DEFAULT)
    assert verdict.status is Status.SKIP
    assert verdict.standard_verdict is Status.SKIP
    assert verdict.message == reason
    assert verdict.outcome is outcome
    (row,) = verdict.rows
    assert row.cells["Message"] == reason
    assert row.cells["Status" if verdict.route is Route.TWO_WAY else "比对结果"] == "SKIP"
    assert verdict.failed is (outcome is Outcome.REPLAY_FAILED)


def test_a_quarantined_call_has_no_verdict() -> None:
    verdict = judge_call(unmeasured("Tensor.mul.0", 0, Outcome.QUARANTINED, "crc32"), DEFAULT)
    assert verdict.status is None
    assert verdict.standard_verdict is None
    assert verdict.rows == ()
    assert verdict.message == "crc32"


def test_a_call_without_outputs() -> None:
    rows = [MeasuredRow(header(), Outcome.MEASURED, "", None)]
    verdict = judge_call(rows, DEFAULT)
    assert verdict.status is Status.SKIP
    assert verdict.message == "no output to compare"


def test_a_call_of_the_other_route_is_not_guessed_at() -> None:
    rows = measured("Tensor.mul.0")
    verdict = judge_call(rows, JudgeSettings(standards={"mul": "benchmark"}))
    assert verdict.route is Route.THREE_WAY
    assert verdict.outcome is Outcome.UNJUDGED
    assert verdict.status is Status.SKIP
    assert verdict.failed
    assert verdict.message == (
        "measured for the two-way route; the benchmark standard needs the shard to be replayed"
    )
    rows = measured("Functional.gelu.0", outputs=[three_way_output()], route="three-way")
    verdict = judge_call(rows, JudgeSettings(standards={"gelu": "binary"}))
    assert verdict.outcome is Outcome.UNJUDGED
    # A plain value is judged alike on both routes.
    plain = [output(kind=Kind.PLAIN, equal=True)]
    verdict = judge_call(
        measured("Tensor.mul.0", outputs=plain), JudgeSettings(standards={"mul": "benchmark"})
    )
    assert verdict.status is Status.PASS


def test_a_changed_limit_changes_the_verdict() -> None:
    rows = measured(
        "Functional.gelu.0",
        outputs=[three_way_output(npu={"rmse": 0.9, "max_abs": 0.9}, gpu={"rmse": 0.3})],
        route="three-way",
    )
    assert judge_call(rows, DEFAULT).status is Status.ERROR
    loose = JudgeSettings(standards={"gelu": {"benchmark": {"rmse": 4}}})
    assert judge_call(rows, loose).status is Status.PASS


class Segments:
    """A segment of two batches with calls of every kind, judged under given settings."""

    def __init__(self, root: Path, batches: list[list[MeasuredRow]], step: int = 0) -> None:
        self.work = WorkDir(root / "work")
        self.record = self.work.segment(0, 0)
        Segment(0, step, 0, tuple(range(len(batches)))).save(self.record)
        self.measured = []
        for number, rows in enumerate(batches):
            path = self.work.measured(0, number)
            write_measured(path, rows, {"golden": "cpu"})
            self.measured.append(path)

    def judge(self, settings: JudgeSettings = DEFAULT) -> list[CallVerdict]:
        calls: list[CallVerdict] = []
        for function, path in (
            (check_segment, self.work.two_way(0, 0)),
            (compare_segment, self.work.three_way(0, 0)),
        ):
            function(self.record, self.measured, path, settings)
            calls += read_verdicts(path)
        return sorted(calls, key=lambda call: call.key)

    def counts(self) -> list[tuple[int, int]]:
        infos = map(read_verdict_info, (self.work.two_way(0, 0), self.work.three_way(0, 0)))
        return [(info.calls, info.not_selected) for info in infos]


def batches() -> list[list[MeasuredRow]]:
    return [
        [
            *measured("Tensor.mul.1", 3),
            *measured("Functional.gelu.0", 1, [three_way_output()], route="three-way"),
            *unmeasured("Torch.rand.0", 2, Outcome.SKIPPED, "random"),
        ],
        [
            *measured("Tensor.mul.0", 0, [two_way_output(0), two_way_output(1)]),
            *unmeasured("Tensor.add.0", 4, Outcome.QUARANTINED, "crc32", route="", standard=""),
            *measured("Torch._foreach_add_.1", 5, [three_way_output()], index=1),
            *measured("Torch._foreach_add_.0", 5, [three_way_output()], index=0),
        ],
    ]


def test_every_call_is_in_exactly_one_file_in_order(tmp_path: Path) -> None:
    segments = Segments(tmp_path, batches())
    names = [call.name for call in segments.judge()]
    assert names == [
        "Tensor.mul.0",
        "Functional.gelu.0",
        "Torch.rand.0",
        "Tensor.mul.1",
        "Tensor.add.0",
        "Torch._foreach_add_.0",
        "Torch._foreach_add_.1",
    ]
    assert segments.counts() == [(3, 0), (4, 0)]
    info = read_verdict_info(segments.work.two_way(0, 0))
    assert info.first is not None
    assert info.last is not None
    assert (info.first.name, info.last.name) == ("Tensor.mul.0", "Tensor.add.0")


def test_lists_leave_calls_out_and_count_them(tmp_path: Path) -> None:
    segments = Segments(tmp_path, batches())
    settings = JudgeSettings(white_list=("__mul__", "rand"), black_list=("rand",))
    calls = segments.judge(settings)
    assert [call.name for call in calls] == ["Tensor.mul.0", "Tensor.mul.1"]
    assert segments.counts() == [(2, 1), (0, 4)]


def test_judging_again_gives_the_same_bytes(tmp_path: Path) -> None:
    segments = Segments(tmp_path, batches())
    segments.judge()
    path = segments.work.three_way(0, 0)
    first = path.read_bytes()
    segments.judge(JudgeSettings(black_list=("gelu",)))
    assert path.read_bytes() != first
    segments.judge()
    assert path.read_bytes() == first


def test_rows_of_another_step_are_refused(tmp_path: Path) -> None:
    segments = Segments(tmp_path, batches(), step=1)
    with pytest.raises(TableError, match="holds rank 0 step 0, not those of") as info:
        segments.judge()
    assert "\n" not in str(info.value)


def test_a_call_twice_in_a_batch_is_refused(tmp_path: Path) -> None:
    rows = [
        *measured("Tensor.mul.0", 0),
        *measured("Tensor.mul.1", 1),
        *measured("Tensor.mul.0", 0),
    ]
    with pytest.raises(TableError, match=r"call Tensor\.mul\.0 is in it twice"):
        Segments(tmp_path, [rows]).judge()


def test_a_call_in_two_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"call Tensor\.mul\.0 is in two of its batches"):
        Segments(tmp_path, [measured("Tensor.mul.0"), measured("Tensor.mul.0")]).judge()


def test_missing_rows_are_one_line(tmp_path: Path) -> None:
    segments = Segments(tmp_path, batches())
    segments.measured[1].unlink()
    with pytest.raises(SpoolError, match="cannot read the table"):
        segments.judge()


def test_evidence_survives_the_table(tmp_path: Path) -> None:
    """What a file keeps judges exactly as what was measured."""
    generator = torch.Generator().manual_seed(7)
    rows: list[MeasuredRow] = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int8)):
        bench = (torch.randn(3, 5, generator=generator) * 4).to(dtype)
        device = bench.clone()
        device[0, 0] += 1
        outputs = measure_two_way("mul", bench, device)
        head = header(f"Tensor.mul.{number}", number)
        rows += [MeasuredRow(head, Outcome.MEASURED, "", item) for item in outputs]
    direct = [judge_call([row], DEFAULT) for row in rows]
    read = Segments(tmp_path, [rows]).judge()
    assert [replace(a, rows=()) for a in read] == [replace(b, rows=()) for b in direct]
    for a, b in zip(read, direct, strict=True):
        kept = {name: cell for name, cell in a.rows[0].cells.items() if cell is not None}
        given = {name: cell for name, cell in b.rows[0].cells.items() if cell is not None}
        assert kept == given
