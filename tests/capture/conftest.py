from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spool
from spool import shard
from spool.call import Call
from spool.store import Store


class Spool:
    """A spool directory of a test, and what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = "process"

    def enable(self, **keywords: Any) -> spool.Session:
        keywords.setdefault("writer", self.writer)
        return spool.enable(spool_dir=self.root, **keywords)

    def store(self) -> Store:
        return Store.open(self.root)

    def calls(self, step: int = 0, rank: int = 0) -> list[Call]:
        return [shard.read(entry.path) for entry in self.store().shards(rank, step)]

    def names(self, step: int = 0, rank: int = 0) -> list[str]:
        return [entry.name for entry in self.store().shards(rank, step)]

    def capture(self, body: Callable[[], object], **keywords: Any) -> list[Call]:
        """Run `body` under capture and give back its calls."""
        with self.enable(**keywords):
            body()
        return self.calls()

    def one(self, body: Callable[[], object], **keywords: Any) -> Call:
        """The only call that `body` makes."""
        (call,) = self.capture(body, **keywords)
        return call


@pytest.fixture
def spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    for name in ("SPOOL_CONFIG", "SPOOL_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield Spool(tmp_path / "spool")
    spool.disable()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What the package logged so far."""
    caplog.set_level(logging.INFO, logger="spool")
    return lambda: "\n".join(
        record.getMessage() for record in caplog.records if record.name == "spool"
    )
