"""Spools that several end-to-end tests look at, each trained once."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest


@pytest.fixture(scope="session")
def gpt2_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spool of a healthy two-step GPT-2 run; copy it before checking it."""
    root = tmp_path_factory.mktemp("gpt2")
    harness.train(root, "--model", "gpt2", "--out", "on.pt", "--spool-dir", "spool-data")
    return root / "spool-data"


@pytest.fixture(scope="session")
def faulty_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spool of a one-step GPT-2 run whose gelu is faulty."""
    root = tmp_path_factory.mktemp("faulty")
    options = ("--model", "gpt2", "--steps", "1", "--defect", "gelu")
    harness.train(root, *options, "--out", "on.pt", "--spool-dir", "spool-data")
    return root / "spool-data"


@pytest.fixture(scope="session")
def faulty_tables(faulty_spool: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Tables of an undisturbed check of `faulty_spool`."""
    root = tmp_path_factory.mktemp("undisturbed")
    harness.copy_spool(faulty_spool, root)
    harness.workflow(root)
    return harness.tables(root)
