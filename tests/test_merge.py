from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rowmaker import (
    TIMESTAMP,
    Run,
    call_verdict,
    measured,
    output,
    quarantined,
    three_way_output,
    two_way_output,
    unmeasured,
    whole,
    write_segment,
)

from spool import merge
from spool.coverage import Count, Coverage, read_totals
from spool.judging import check_segment, compare_segment
from spool.merge import MergeError, merge_rank, ordered_calls
from spool.records import CallVerdict, MeasuredRow, Outcome, OutputVerdict
from spool.retire import retire_segment
from spool.settings import JudgeSettings, RetireSettings
from spool.standards.rows import Kind, Route, Status
from spool.tables import RankTables, TableError, read_table, read_verdict_info, write_measured
from spool.workdir import Manifest, RankEnd, Segment, ShardRef, WorkDir

THREE = Route.THREE_WAY


def small_run(root: Path) -> Run:
    mul = call_verdict(
        "Tensor.mul.0",
        0,
        Status.ERROR,
        message="output 0: cosine 0.5",
        worst_output=0,
        worst_metric="cosine",
        worst_value=0.5,
        worst_limit=0.99,
        worst_index="(1, 2)",
        rows=(
            OutputVerdict(
                0,
                {
                    "Bench Dtype": "torch.float32",
                    "DEVICE Dtype": "torch.float32",
                    "Shape": "(2, 3)",
                    "余弦相似度": 0.5,
                    "最大绝对误差": float("nan"),
                    "相对误差最大值": float("inf"),
                    "Status": "error",
                    "Message": "=bad, \n really",
                },
            ),
        ),
    )
    gelu = call_verdict(
        "Functional.gelu.0",
        1,
        direction="backward",
        route=THREE,
        worst_output=0,
        worst_metric="rmse",
        worst_value=1e-16,
        worst_limit=2.0,
        rows=(
            OutputVerdict(
                0, {"小值域错误比值": 0.25, "比对结果": "pass", "比对算法": "标杆比对法"}
            ),
        ),
    )
    bad = quarantined("Tensor.add.0", 2, "crc32 differs", module="", location="")
    failed = call_verdict(
        "Torch.inverse.0",
        0,
        Status.SKIP,
        step=1,
        route=THREE,
        outcome=Outcome.REPLAY_FAILED,
        message="RuntimeError: singular",
        rows=(
            OutputVerdict(
                0, {"比对结果": "SKIP", "比对算法": "标杆比对法", "Message": "RuntimeError"}
            ),
        ),
    )
    return Run(root, [[[mul, gelu], [bad]], [[failed]]]).write()


def retire_all(run: Run, settings: RetireSettings | None = None) -> None:
    work = run.work
    for number in range(len(run.segments)):
        retire_segment(
            work.segment(run.rank, number),
            work.two_way(run.rank, number),
            work.three_way(run.rank, number),
            work.retired(run.rank, number),
            settings or RetireSettings(),
        )


def text(path: Path) -> list[str]:
    content = path.read_bytes().decode("utf-8")
    assert content.startswith("\ufeff")
    assert content.endswith("\r\n")
    return content[1:].split("\r\n")[:-1]


def test_the_bytes_of_a_small_run(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    retire_all(run)
    tables = merge_rank(run.work.root, 0, run.results)
    assert sorted(p.name for p in run.results.iterdir()) == [
        f"accuracy_checking_details_{TIMESTAMP}_rank0.csv",
        f"accuracy_checking_result_{TIMESTAMP}_rank0.csv",
        f"api_precision_compare_details_{TIMESTAMP}_rank0.csv",
        f"api_precision_compare_result_{TIMESTAMP}_rank0.csv",
        f"coverage_{TIMESTAMP}_rank0.csv",
        f"summary_{TIMESTAMP}_rank0.csv",
    ]
    assert text(tables.check_result) == [
        "API name,Forward Test Success,Backward Test Success,Message,Step,Order",
        "Tensor.mul.0,error, ,output 0: cosine 0.5,0,0",
    ]
    details = text(tables.check_details)
    assert details[0].endswith(",Status,Message,Step,Order")
    assert details[1:] == [
        'Tensor.mul.0.forward.output.0,torch.float32,torch.float32,"(2, 3)",0.50000000000000,nan'
        ', , , , , , , ,inf, , , , , , , ,error,"\'=bad,   really",0,0'
    ]
    assert text(tables.compare_result) == [
        "API Name,Forward Test Success,Backward Test Success,Message,Step,Order",
        "Functional.gelu.0, ,pass, ,0,1",
        "Torch.inverse.0,SKIP, ,RuntimeError: singular,1,0",
    ]
    compare = text(tables.compare_details)
    assert compare[1] == (
        "Functional.gelu.0.backward.output.0,0.25000000000000"
        + ", " * 23
        + ",pass,标杆比对法, ,0,1"
    )
    assert compare[2] == (
        "Torch.inverse.0.forward.output.0" + ", " * 24 + ",SKIP,标杆比对法,RuntimeError,1,0"
    )
    assert text(tables.summary) == [
        "api,step,order,direction,route,standard,verdict,reason,worst_output,worst_metric,value,"
        "limit,worst_index,shard,standard_verdict,module,location",
        "Tensor.mul.0,0,0,forward,two-way,absolute,error,output 0: cosine 0.5,0,cosine,0.5,0.99,"
        '"(1, 2)",failed/rank0/step0/000000.Tensor.mul.0.h5,error,model.fc,train.py:7 in forward',
        "Functional.gelu.0,0,1,backward,three-way,benchmark,pass, ,0,rmse,1e-16,2, , ,pass,"
        "model.fc,train.py:7 in forward",
        "Tensor.add.0,0,2,forward,two-way,absolute, ,quarantined: crc32 differs, , , , , ,"
        "quarantine/rank0/step0/000002.Tensor.add.0.h5, , , ",
        "Torch.inverse.0,1,0,forward,three-way,benchmark,SKIP,RuntimeError: singular, , , , , ,"
        "failed/rank0/step1/000000.Torch.inverse.0.h5,SKIP,model.fc,train.py:7 in forward",
    ]
    assert text(tables.coverage) == [
        "what,reason,step,calls",
        "captured, , ,4",
        "found, , ,4",
        "missing, , ,0",
        "replayed, , ,2",
        "compared, , ,2",
        "pass,three-way, ,1",
        "error,two-way, ,1",
        "standard_error, , ,1",
        "replay_failed,RuntimeError, ,1",
        "quarantined,crc32 differs, ,1",
        "kept, , ,2",
        "captured, ,0,3",
        "found, ,0,3",
        "replayed, ,0,2",
        "compared, ,0,2",
        "pass,three-way,0,1",
        "error,two-way,0,1",
        "standard_error, ,0,1",
        "quarantined,crc32 differs,0,1",
        "kept, ,0,1",
        "captured, ,1,1",
        "found, ,1,1",
        "replay_failed,RuntimeError,1,1",
        "kept, ,1,1",
    ]


def test_precision_is_the_number_of_decimals(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    tables = merge_rank(run.work.root, 0, run.results, precision=3)
    assert ",0.500,nan," in text(tables.check_details)[1]


def test_merging_again_gives_the_same_bytes(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    first = {p.name: p.read_bytes() for p in merge_rank(run.work.root, 0, run.results).all}
    second = {p.name: p.read_bytes() for p in merge_rank(run.work.root, 0, run.results).all}
    assert first == second
    assert not list(run.results.glob(".*"))


def test_where_shards_lie(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    tables = merge_rank(run.work.root, 0, run.results)
    assert [row["shard"] for row in read_table(tables.summary)] == [
        "",
        "",
        "quarantine/rank0/step0/000002.Tensor.add.0.h5",
        "",
    ]
    retire_all(run, RetireSettings(retain="all"))
    tables = merge_rank(run.work.root, 0, run.results)
    assert [row["shard"] for row in read_table(tables.summary)] == [
        "rank0/step0/000000.Tensor.mul.0.h5",
        "rank0/step0/000001.Functional.gelu.0.h5",
        "quarantine/rank0/step0/000002.Tensor.add.0.h5",
        "rank0/step1/000000.Torch.inverse.0.h5",
    ]
    assert read_totals(tables.coverage)["kept", ""] == 2


def test_where_shards_lie_if_retain_was_changed_meanwhile(tmp_path: Path) -> None:
    calls = [
        call_verdict(f"Tensor.mul.{n}", n, Status.ERROR if n % 2 else Status.PASS) for n in range(4)
    ]
    run = Run(tmp_path, [[calls[:2]], [calls[2:]]]).write()
    work = run.work
    first = (work.segment(0, 0), work.two_way(0, 0), work.three_way(0, 0), work.retired(0, 0))
    retire_segment(*first, RetireSettings())
    retire_all(run, RetireSettings(retain="all"))
    tables = merge_rank(work.root, 0, run.results)
    assert [row["shard"] for row in read_table(tables.summary)] == [
        "",
        "failed/rank0/step0/000001.Tensor.mul.1.h5",
        "rank0/step0/000002.Tensor.mul.2.h5",
        "rank0/step0/000003.Tensor.mul.3.h5",
    ]
    assert read_totals(tables.coverage)["kept", ""] == 2


def test_failing_shards_that_were_not_kept_are_counted(tmp_path: Path) -> None:
    calls = [call_verdict(f"Tensor.mul.{n}", n, Status.ERROR) for n in range(5)]
    run = Run(tmp_path, [[calls]]).write()
    retire_all(run, RetireSettings(keep_per_api=2))
    totals = read_totals(merge_rank(run.work.root, 0, run.results).coverage)
    assert (totals["kept", ""], totals["not_kept", ""]) == (2, 3)


def test_dropped_and_uncaptured_calls_are_counted(tmp_path: Path) -> None:
    closed = {
        "steps": {
            "0": {"shards": 1, "bytes": 1, "dropped": 2, "skipped": {"sparse": 3, "meta": 4}},
            "5": {"shards": 0, "bytes": 0, "dropped": 0, "skipped": {"sparse": 1}},
        },
        "reason": "disabled",
    }
    run = Run(tmp_path, [[[call_verdict()]]], expected=closed).write()
    totals = read_totals(merge_rank(run.work.root, 0, run.results).coverage)
    assert totals["dropped", ""] == 2
    assert totals["not_captured", "sparse"] == 4
    assert totals["not_captured", "meta"] == 4


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    closed = {"steps": {"0": {"shards": 3, "bytes": 1, "dropped": 0, "skipped": {}}}}
    run = Run(tmp_path, [[[call_verdict()]]], expected=closed, missing={0: 2}).write()
    totals = read_totals(merge_rank(run.work.root, 0, run.results).coverage)
    assert (totals["captured", ""], totals["found", ""], totals["missing", ""]) == (3, 1, 2)


def test_an_empty_rank_has_empty_tables(tmp_path: Path) -> None:
    run = Run(tmp_path, []).write()
    tables = merge_rank(run.work.root, 0, run.results)
    assert all(len(text(path)) == 1 for path in tables.all[:5])
    assert read_totals(tables.coverage)["compared", ""] == 0


def test_tables_that_lost_a_call_are_refused(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    write_segment(run.work.three_way(0, 0), THREE, [], 0, 0, 0)
    with pytest.raises(
        MergeError,
        match=r"rank 0 step 0: its batches have 3 shards.*2 calls; remove the tables of rank 0",
    ):
        merge_rank(run.work.root, 0, run.results)
    assert not [p for p in run.results.iterdir() if p.suffix == ".csv"]


def test_a_call_in_two_segments_is_refused(tmp_path: Path) -> None:
    calls = [call_verdict("Tensor.mul.0", 0), call_verdict("Tensor.mul.1", 1)]
    run = Run(tmp_path, [[calls], [calls[1:]]]).write()
    with pytest.raises(TableError, match=r"Tensor\.mul\.1 of step 0 is in two"):
        merge_rank(run.work.root, 0, run.results)


def test_only_overlapping_files_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = []
    for number in range(20):
        path = tmp_path / f"{number}.parquet"
        calls = [call_verdict(f"Tensor.mul.{n}", n) for n in range(number * 5, number * 5 + 5)]
        write_segment(path, Route.TWO_WAY, calls, 0, 0, number)
        infos.append((read_verdict_info(path), path))
    random.Random(1).shuffle(infos)
    active = most = 0
    read = merge.read_verdicts

    def watched(path: Path) -> Iterator[CallVerdict]:
        nonlocal active, most
        active += 1
        most = max(most, active)
        yield from read(path)
        active -= 1

    monkeypatch.setattr(merge, "read_verdicts", watched)
    assert [call.order for call in ordered_calls(infos)] == list(range(100))
    assert most == 1


def everything() -> list[list[MeasuredRow]]:
    """Calls of two steps: both routes, every outcome, elements that share an order."""
    calls: list[list[MeasuredRow]] = []
    for step in (0, 3):
        bad = two_way_output(1, cosine=0.2, max_abs=0.7, rel_error_share=0.5, bad=2)
        wrong = three_way_output(npu={"rmse": 0.5, "max_abs": 0.5}, gpu={"rmse": 0.1})
        where: dict[str, Any] = {"step": step}
        three: dict[str, Any] = {"step": step, "route": "three-way", "golden": "cpu"}
        calls += [
            measured("Tensor.mul.0", 0, [two_way_output(0), bad], **where),
            measured("Functional.gelu.0", 1, [three_way_output()], **three),
            measured("Functional.gelu.1", 2, [wrong], **three),
            measured("Torch._foreach_sin_.0", 3, [three_way_output()], index=0, **three),
            measured("Torch._foreach_sin_.1", 3, [wrong], index=1, **three),
            measured("Torch._foreach_sin_.2", 3, [three_way_output()], index=2, **three),
            unmeasured("Torch.rand.0", 4, Outcome.SKIPPED, "random", **three),
            unmeasured("NPU.npu_x.0", 5, Outcome.SKIPPED, "no reference for npu_x", **three),
            unmeasured("Torch.inverse.0", 6, Outcome.REPLAY_FAILED, "RuntimeError: no", **three),
            unmeasured("Tensor.add.0", 7, Outcome.QUARANTINED, "crc32 differs", **where),
            measured(
                "Tensor.eq.0", 8, [output(kind=Kind.PLAIN, equal=False, message="1, 2")], **where
            ),
            measured("Tensor.mul.1", 9, **where),
        ]
    return calls


def whole_run(
    root: Path, calls: list[list[MeasuredRow]], cuts: list[list[int]], order: list[int]
) -> dict[str, bytes]:
    """Judge, retire and merge `calls`, cut into segments of batches, in some order.

    `cuts` has for each segment the sizes of its batches; a batch never spans steps.
    """
    work = WorkDir(root / "work")
    segments: list[tuple[int, list[Path]]] = []
    rest = {step: [c for c in calls if c[0].header.step == step] for step in (0, 3)}
    batch = 0
    for step in (0, 3):
        left = rest[step]
        for sizes in cuts:
            if not left:
                break
            paths: list[Path] = []
            for size in sizes:
                group, left = left[:size], left[size:]
                if not group:
                    break
                heads = [rows[0].header for rows in group]
                shards = tuple(ShardRef(head.shard, head.nbytes) for head in heads)
                Manifest(0, step, batch, str(root / "spool"), "run", shards).save(
                    work.batch(0, batch)
                )
                for head in heads:
                    path = root / "spool" / "rank0" / f"step{step}" / head.shard
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"x" * head.nbytes)
                write_measured(work.measured(0, batch), [r for rows in group for r in rows], {})
                paths.append(work.measured(0, batch))
                batch += 1
            number = len(segments)
            numbers = tuple(int(path.stem) for path in paths)
            Segment(0, step, number, numbers).save(work.segment(0, number))
            segments.append((number, paths))
        assert not left
    for place in sorted(range(len(segments)), key=lambda n: order[n % len(order)]):
        number, paths = segments[place]
        judge = JudgeSettings()
        check_segment(work.segment(0, number), paths, work.two_way(0, number), judge)
        compare_segment(work.segment(0, number), paths, work.three_way(0, number), judge)
        retire_segment(
            work.segment(0, number),
            work.two_way(0, number),
            work.three_way(0, number),
            work.retired(0, number),
            RetireSettings(keep_per_api=1),
        )
    found = {0: len(rest[0]), 3: len(rest[3])}
    closed = whole({"steps": {str(step): {"shards": n} for step, n in found.items()}})
    numbers = tuple(number for number, _ in segments)
    RankEnd(0, "run", TIMESTAMP, numbers, batch, found, closed).save(work.end(0))
    tables = merge_rank(work.root, 0, root / "results")
    return {path.name: path.read_bytes() for path in tables.all}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return whole_run(tmp_path_factory.mktemp("whole"), everything(), [[100]], [0])


@hypothesis_settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    order=st.permutations(range(8)),
    seed=st.integers(0, 5),
)
def test_tables_do_not_depend_on_how_calls_were_cut(
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: dict[str, bytes],
    cuts: list[list[int]],
    order: list[int],
    seed: int,
) -> None:
    calls = everything()
    # Also late shards, which the intake puts into a later batch.
    random.Random(seed).shuffle(calls)
    tables = whole_run(tmp_path_factory.mktemp("cut"), calls, [*cuts, [100]], order)
    assert tables == undisturbed


def test_the_whole_run_has_what_it_should(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    tables = RankTables(tmp_path, TIMESTAMP, 0)
    for name, data in undisturbed.items():
        (tmp_path / name).write_bytes(data)
    summary = list(read_table(tables.summary))
    assert len(summary) == 24
    assert [row["api"] for row in summary[:12]] == [
        "Tensor.mul.0",
        "Functional.gelu.0",
        "Functional.gelu.1",
        "Torch._foreach_sin_.0",
        "Torch._foreach_sin_.1",
        "Torch._foreach_sin_.2",
        "Torch.rand.0",
        "NPU.npu_x.0",
        "Torch.inverse.0",
        "Tensor.add.0",
        "Tensor.eq.0",
        "Tensor.mul.1",
    ]
    kept = {row["shard"].rsplit("/", 1)[-1] for row in summary if row["shard"].startswith("failed")}
    assert kept == {
        "000000.Tensor.mul.0.h5",
        "000002.Functional.gelu.1.h5",
        "000003.Torch._foreach_sin_.1.h5",
        "000005.NPU.npu_x.0.h5",
        "000006.Torch.inverse.0.h5",
        "000008.Tensor.eq.0.h5",
    }
    # What cannot be checked for want of a reference is named first.
    assert next(read_table(tables.coverage)) == {
        "what": "skipped",
        "reason": "no reference for npu_x",
        "step": "",
        "calls": "2",
    }
    totals = read_totals(tables.coverage)
    assert (totals["captured", ""], totals["found", ""]) == (24, 24)
    assert totals["skipped", "random"] == 2
    # Each call with a verdict has one row in one result table.
    check = [row["API name"] for row in read_table(tables.check_result)]
    compare = [row["API Name"] for row in read_table(tables.compare_result)]
    assert len(check) + len(compare) == 22
    assert not set(check) & set(compare)
    details = [row["API Name"] for row in read_table(tables.check_details)]
    assert details[:2] == ["Tensor.mul.0.forward.output.0", "Tensor.mul.0.forward.output.1"]


def test_reasons_are_bounded() -> None:
    coverage = Coverage()
    for number in range(150):
        call = call_verdict(
            "Torch.x.0", number, Status.SKIP, outcome=Outcome.SKIPPED, message=f"why {number:03d}"
        )
        coverage.add_verdict(call, kept=False)
    rows = [row for row in coverage.rows() if row.what == "skipped" and row.step is None]
    assert len(rows) == 101
    assert Count("skipped", "other reasons", None, 50) in rows
    assert Count("skipped", "why 099", None, 1) in rows


def test_a_skip_without_words_has_a_reason() -> None:
    coverage = Coverage()
    coverage.add_verdict(replace(call_verdict(status=Status.SKIP), message=""), kept=False)
    assert Count("skipped", "nothing to compare", None, 1) in list(coverage.rows())


def test_a_foreign_coverage_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("a,b\r\n1,2\r\n")
    with pytest.raises(TableError, match="not a coverage table"):
        read_totals(path)
