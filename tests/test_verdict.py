from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rowmaker import TIMESTAMP, Run, call_verdict, quarantined

from spool.errors import SpoolError
from spool.merge import merge_rank
from spool.records import CallVerdict, Outcome
from spool.settings import JudgeSettings
from spool.standards.rows import Route, Status
from spool.tables import RankTables
from spool.verdict import Report, _finding, verdict


def report(
    tmp_path: Path, calls: list[CallVerdict], fail_on: str = "nothing", **end: Any
) -> Report:
    run = Run(tmp_path, [[calls]] if calls else [], **end).write()
    merge_rank(run.work.root, 0, run.results)
    return verdict(run.work.root, run.results, [0], fail_on)


PASS = call_verdict("Tensor.mul.0", 0)


def skipped(order: int) -> CallVerdict:
    return call_verdict(
        "Torch.rand.0", order, Status.SKIP, outcome=Outcome.SKIPPED, message="random"
    )


def test_all_checked(tmp_path: Path) -> None:
    result = report(tmp_path, [PASS, call_verdict("Functional.gelu.0", 1, route=Route.THREE_WAY)])
    assert result.status == 0
    assert result.problems == []
    tables = RankTables(tmp_path / "results", TIMESTAMP, 0)
    assert result.text() == "\n".join(
        [
            "rank 0: captured 2, found 2, compared 2",
            "                  pass  Warning    error",
            "  two-way            1        0        0",
            "  three-way          1        0        0",
            "",
            "no failing call",
            "",
            "tables:",
            *(f"  {path}" for path in tables.all),
        ]
    )


def test_errors_are_findings_unless_asked(tmp_path: Path) -> None:
    calls = [
        PASS,
        call_verdict("Tensor.sub.0", 1, Status.WARNING),
        call_verdict(
            "Functional.gelu.0",
            2,
            Status.ERROR,
            route=Route.THREE_WAY,
            worst_output=0,
            worst_metric="max_rel",
            worst_value=13.25,
            worst_limit=10.0,
            worst_index="(3, 5)",
            module="model.layers.0.mlp",
        ),
        call_verdict("Tensor.add.0", 3, standard_verdict=Status.ERROR),
    ]
    result = report(tmp_path / "a", calls)
    assert result.status == 0
    assert "first failing call: Functional.gelu.0 (rank 0, step 0, order 2): three-way error" in (
        result.text()
    )
    assert "output 0: max_rel 13.25, limit 10 at (3, 5)" in result.text()
    assert "in model.layers.0.mlp, train.py:7 in forward" in result.text()
    assert "two-way calls by their own standard: 1 Warning, 1 error" in result.text()
    assert "shards of calls that did not pass: kept 0, not kept 3" in result.text()
    result = report(tmp_path / "b", calls, fail_on="error")
    assert result.status == 1
    (problem,) = result.problems
    assert problem.startswith("rank 0: 2 calls with errors; see ")


def test_an_error_by_the_standard_alone_is_found(tmp_path: Path) -> None:
    call = call_verdict("Tensor.add.0", 3, standard_verdict=Status.ERROR, message="small ones")
    result = report(tmp_path, [PASS, call], fail_on="error")
    assert result.status == 1
    assert "two-way pass, error by the absolute standard" in result.text()
    assert "  small ones" in result.text()


def test_a_warning_is_shown_if_there_is_no_error(tmp_path: Path) -> None:
    result = report(tmp_path, [PASS, call_verdict("Tensor.sub.0", 1, Status.WARNING)], "error")
    assert result.status == 0
    assert "first failing call: Tensor.sub.0" in result.text()


def test_nothing_compared_fails(tmp_path: Path) -> None:
    skipped = call_verdict(
        "Torch.rand.0", 0, Status.SKIP, outcome=Outcome.SKIPPED, message="random"
    )
    result = report(tmp_path / "skip", [skipped])
    assert result.status == 1
    assert "rank 0: nothing was compared: 1 call found, none with a verdict; see" in result.text()
    assert "no failing call" not in result.text()
    result = report(tmp_path / "empty", [])
    assert result.status == 1
    assert "nothing was compared: 0 calls found" in result.text()
    result = verdict(tmp_path / "skip" / "work", tmp_path / "results", [])
    assert result.status == 1
    assert result.problems == ["nothing was compared: rank_list is empty; name the ranks to check"]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            quarantined("Tensor.add.0", 1, "crc32 differs"),
            "rank 0: 1 shard is unusable and set aside; reasons in ",
        ),
        (
            call_verdict(
                "Torch.inverse.0",
                1,
                Status.SKIP,
                outcome=Outcome.REPLAY_FAILED,
                message="RuntimeError: x",
            ),
            "rank 0: 1 call could not be replayed; reasons in ",
        ),
        (
            call_verdict("Tensor.add.0", 1, Status.SKIP, outcome=Outcome.UNJUDGED, message="route"),
            "rank 0: 1 call measured for another standard than now asked for; names in ",
        ),
    ],
)
def test_what_could_not_be_checked_fails(tmp_path: Path, call: CallVerdict, line: str) -> None:
    result = report(tmp_path, [PASS, call])
    assert result.status == 1
    (problem,) = result.problems
    assert problem.startswith(line)
    assert "\n" not in problem


def test_a_legitimate_skip_does_not_fail(tmp_path: Path) -> None:
    skipped = call_verdict(
        "Torch.rand.0", 1, Status.SKIP, outcome=Outcome.SKIPPED, message="random"
    )
    result = report(tmp_path, [PASS, skipped])
    assert result.status == 0
    assert "skipped 1" in result.text()


def test_an_api_that_is_not_checked_at_all_is_named(tmp_path: Path) -> None:
    """A fault in it would not be seen; one that is skipped now and then is no news."""
    now_and_then = call_verdict("Tensor.mul.1", 5, Status.SKIP, outcome=Outcome.SKIPPED)
    result = report(tmp_path, [PASS, skipped(1), skipped(2), now_and_then])
    assert result.status == 0
    assert result.warnings == ["rank 0: Torch.rand is not checked at all: 2 calls, random"]


def test_missing_shards_fail(tmp_path: Path) -> None:
    closed = {"steps": {"0": {"shards": 3, "dropped": 0, "skipped": {}}}, "reason": "disabled"}
    result = report(tmp_path, [PASS], expected=closed, missing={0: 2})
    assert result.status == 1
    assert "2 shards are missing: captured 3, found 1" in result.text()


def test_an_unclosed_rank_is_warned_about(tmp_path: Path) -> None:
    result = report(tmp_path / "a", [PASS], expected=None, note="silent for 300 s")
    assert result.status == 0
    assert "captured unknown" in result.text()
    assert (
        "warning: rank 0 was never closed (silent for 300 s): whether all its calls were found "
        "is not known" in result.text()
    )


@pytest.mark.parametrize(("dropped", "status"), [(0, 0), (1, 1), (7, 1)])
def test_dropped_calls_could_not_be_checked(tmp_path: Path, dropped: int, status: int) -> None:
    counts = {"shards": 1, "dropped": dropped, "skipped": {}}
    closed = {"steps": {"0": counts}, "reason": "disabled"}
    result = report(tmp_path, [PASS], expected=closed)
    assert result.status == status
    words = "dropped during capture and not checked; the reasons are the not_captured rows of"
    assert [words in line for line in result.problems] == [True] * status


@pytest.mark.parametrize(("reason", "status"), [("disabled", 1), ("closed by hand", 0)])
def test_more_than_was_captured(tmp_path: Path, reason: str, status: int) -> None:
    """`spool close` counts only what lies there; a capture knows what it wrote."""
    # In all there are as many as captured, but they are of other steps.
    closed = {
        "steps": {
            "0": {"shards": 1, "dropped": 0, "skipped": {}},
            "1": {"shards": 1, "dropped": 0, "skipped": {}},
        },
        "reason": reason,
    }
    result = report(tmp_path, [PASS, call_verdict("Tensor.sub.0", 1)], expected=closed)
    assert result.status == status
    if status:
        assert result.problems[0].startswith(
            "rank 0 step 0: 2 shards found, but only 1 captured; shards of another capture"
        )


def test_the_first_failing_call_of_all_ranks(tmp_path: Path) -> None:
    for rank, order in ((0, 9), (1, 4)):
        calls = [call_verdict("Tensor.add.0", order, Status.ERROR, rank=rank)]
        run = Run(tmp_path, [[calls]], rank).write()
        merge_rank(run.work.root, rank, run.results)
    result = verdict(tmp_path / "work", tmp_path / "results", [0, 1])
    assert "first failing call: Tensor.add.0 (rank 1, step 0, order 4)" in result.text()


def test_an_error_comes_before_an_earlier_warning(tmp_path: Path) -> None:
    for rank, status in ((0, Status.WARNING), (1, Status.ERROR)):
        calls = [call_verdict("Tensor.add.0", 5 + rank, status, rank=rank)]
        run = Run(tmp_path, [[calls]], rank).write()
        merge_rank(run.work.root, rank, run.results)
    result = verdict(tmp_path / "work", tmp_path / "results", [0, 1])
    assert "first failing call: Tensor.add.0 (rank 1, step 0, order 6)" in result.text()


def test_tables_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, [[[PASS]]]).write()
    with pytest.raises(SpoolError, match="cannot read the table"):
        verdict(run.work.root, run.results, [0])
    with pytest.raises(SpoolError, match="end of a rank"):
        verdict(run.work.root, run.results, [7])


def test_a_rank_closed_by_hand_is_no_clean_run(tmp_path: Path) -> None:
    """Its trainer was killed: what that had not written nobody counts."""
    by_hand = {"reason": "closed by hand", "steps": {"0": {"shards": 0, "bytes": 0, "dropped": 0}}}
    result = report(tmp_path, [PASS], expected=by_hand)
    assert result.status == 0
    assert result.lines[0] == "rank 0: captured unknown, found 1, compared 1"
    (warning,) = result.warnings
    assert warning.startswith("rank 0 was closed by hand: what its trainer had captured but not")


def test_a_rank_whose_training_was_killed_is_no_clean_run(tmp_path: Path) -> None:
    killed = {"reason": "killed", "steps": {"0": {"shards": 1, "bytes": 9, "dropped": 0}}}
    result = report(tmp_path, [PASS], expected=killed)
    assert result.status == 0
    assert result.lines[0] == "rank 0: captured 1, found 1, compared 1"
    (warning,) = result.warnings
    assert warning.startswith("rank 0: its training process was killed, or ended without a word")


def test_a_name_of_the_white_list_that_no_call_has_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, [[[PASS]]]).write()
    merge_rank(run.work.root, 0, run.results)
    path = run.work.settings("judging")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(JudgeSettings(white_list=("gleu", "__mul__")).to_json()))
    result = verdict(run.work.root, run.results, [0])
    (warning,) = result.warnings
    assert warning.startswith("white_list: no call was found of gleu; names are those of")


def test_the_shard_is_named_as_it_can_be_opened(tmp_path: Path) -> None:
    row = {"shard": "failed/rank0/step0/000001.Torch.sin.0.h5"} | dict.fromkeys(
        ("api", "step", "order", "route", "verdict", "standard_verdict", "standard"), "x"
    )
    row |= dict.fromkeys(("worst_metric", "reason", "module", "location"), "")
    assert _finding(row, 0, Path("work")).endswith(
        "shard work/failed/rank0/step0/000001.Torch.sin.0.h5"
    )
    row["shard"] = "rank0/step0/000001.Torch.sin.0.h5"
    assert _finding(row, 0, Path("work")).endswith("shard rank0/step0/000001.Torch.sin.0.h5")
