"""Questions asked after the shards are gone: the right rows, no loss."""

from __future__ import annotations

import re
from pathlib import Path

import harness
import pytest

# On one worker, so that what they share is made once.
pytestmark = pytest.mark.xdist_group("faulty")


@pytest.fixture(scope="module")
def finished(
    faulty_spool: Path,
    faulty_tables: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A directory whose run is checked and whose passing shards are retired."""
    root = tmp_path_factory.mktemp("finished") / "run"
    root.mkdir()
    spool = harness.copy_spool(faulty_spool, root)
    before = len(harness.shards(spool))
    harness.workflow(root)
    assert harness.tables(root) == faulty_tables
    failed = list((root / "work/failed").rglob("*.h5"))
    assert harness.shards(spool) == [], "passing shards are retired"
    assert 0 < len(failed) < before
    return root


@pytest.fixture
def checked(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, for one test."""
    return harness.copy_run(finished, tmp_path / "run")


def jobs(output: str, rule: str) -> int:
    """How many jobs of `rule` a run started."""
    return len(re.findall(rf"^\s*(?:local)?rule {rule}:", output, flags=re.MULTILINE))


def test_same_command_again_does_nothing(checked: Path, faulty_tables: dict[str, bytes]) -> None:
    done = harness.workflow(checked)
    assert jobs(done.stderr + done.stdout, "replay") == 0
    assert jobs(done.stderr + done.stdout, "merge") == 0
    assert harness.tables(checked) == faulty_tables


def test_white_list(checked: Path, faulty_tables: dict[str, bytes]) -> None:
    done = harness.workflow(checked, white_list="[gelu]")
    assert jobs(done.stderr + done.stdout, "replay") == 0
    for table, key in (
        ("api_precision_compare_result", "API Name"),
        ("api_precision_compare_details", "API Name"),
    ):
        names = {harness.api_of(row[key]) for row in harness.rows(checked, table)}
        assert names == {"Functional.gelu"}
    assert harness.rows(checked, "accuracy_checking_result") == []
    harness.workflow(checked)
    assert harness.tables(checked) == faulty_tables


def test_judging_limit(checked: Path, faulty_tables: dict[str, bytes]) -> None:
    """A limit that no ratio exceeds turns gelu's errors into passes, without a shard."""
    limits = "{small_error_share: 1e30, rmse: 1e30, max_rel: 1e30, mean_rel: 1e30}"
    loose = f"{{gelu: {{benchmark: {limits}}}}}"
    done = harness.workflow(checked, standards=loose)
    assert jobs(done.stderr + done.stdout, "replay") == 0
    summary = harness.rows(checked, "summary")
    gelu = [r for r in summary if harness.api_of(r["api"]) == "Functional.gelu"]
    assert gelu
    assert {r["verdict"] for r in gelu} == {"pass"}
    assert [r for r in summary if r["verdict"] == "error"] == []
    harness.workflow(checked)
    assert harness.tables(checked) == faulty_tables


@pytest.mark.parametrize(
    "victim",
    [
        "results/api_precision_compare_result_*.csv",
        "work/three_way/rank0/*.parquet",
        "work/two_way/rank0/*.parquet",
        "work/replay/rank0/*.parquet",
    ],
)
def test_delete_one_output(victim: str, checked: Path, faulty_tables: dict[str, bytes]) -> None:
    path = sorted(checked.glob(victim))[0]
    path.unlink()
    harness.workflow(checked)
    assert path.exists()
    assert harness.tables(checked) == faulty_tables


def test_measuring_key_on_retired_batches(checked: Path, faulty_tables: dict[str, bytes]) -> None:
    """Rows of a retired batch stay, and one line says so."""
    done = harness.workflow(checked, golden="bench")
    assert "was measured under golden=cpu; it keeps that" in done.stdout + done.stderr
    assert harness.tables(checked) == faulty_tables
