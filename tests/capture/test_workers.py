"""Workers of a DataLoader are inert, and the trainer's rank closes with the right counts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import spool
from spool.store import Store

if TYPE_CHECKING:
    from conftest import Spool

ITEMS, BATCH, WORKERS, PATIENCE = 8, 2, 2, 120
STEPS = ITEMS // BATCH
CALLS = ["Tensor.mul.0", "Tensor.sum.0", "Aten.mul.0", "Aten.sum.0"]
Sample = dict[str, torch.Tensor]


def sample(index: int) -> Sample:
    """Calls of functions that the trainer does not call; in spawned workers backward, too.

    A forked worker may not run the engine where its parent's has threads already.
    """
    x = torch.full((4,), float(index), requires_grad=True)
    y = torch.tan(x).asinh()
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        torch.autograd.grad(y.sum(), x)
    modes = len(_get_current_function_mode_stack())
    return {"x": y.detach(), "modes": torch.tensor(modes), "pid": torch.tensor(os.getpid())}


class Data(Dataset[Sample]):
    """Whose workers even end steps and captures."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Sample:
        found = sample(index)
        spool.step()
        spool.disable()
        return found


class Stream(IterableDataset[Sample]):
    """The same, each worker giving a part."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        assert worker is not None
        yield from map(sample, range(worker.id, ITEMS, worker.num_workers))


class Killed(Data):
    def __getitem__(self, index: int) -> Sample:
        os.kill(os.getpid(), signal.SIGTERM)
        return sample(index)


class EndsByItself(Data):
    def __getitem__(self, index: int) -> Sample:
        raise SystemExit(3)


def loader(data: Any, **more: Any) -> DataLoader[Sample]:
    return DataLoader(data, BATCH, num_workers=WORKERS, timeout=PATIENCE, **more)


def epoch(batches: DataLoader[Sample], weight: torch.Tensor) -> tuple[list[float], set[int]]:
    """Train a step on each batch; values of the samples, and the processes they came from."""
    values: list[float] = []
    workers: set[int] = set()
    for batch in batches:
        (batch["x"] * weight).sum().backward()
        values += [row[0] for row in batch["x"].tolist()]
        workers.update(batch["pid"].tolist())
        assert batch["modes"].tolist() == [0] * BATCH
        spool.step()
    return values, workers


def agrees(spooled: Spool, steps: int, calls: list[str] = CALLS) -> None:
    """Each step holds the trainer's calls of one batch, and the counts say so."""
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert closed.reason == "disabled"
    assert sorted(closed.steps) == list(range(steps))
    for step, counts in closed.steps.items():
        names = spooled.names(step)
        assert (counts.shards, counts.dropped, counts.skipped) == (len(names), 0, {})
        # The loader draws the seed of an epoch's workers.
        found = [name for name in names if not name.startswith("Tensor.random_.")]
        assert found == [*calls, *(["Aten.add_.0"] if step else [])]
    assert spooled.store().ranks() == [0]
    beat = spooled.store().read_heartbeat(0)
    assert beat is not None
    assert beat.pid == os.getpid()
    assert not list(spooled.root.rglob("*.partial"))


@pytest.mark.parametrize(
    ("start", "persistent", "epochs"),
    [("fork", False, 2), ("fork", True, 2), ("spawn", False, 1), ("spawn", True, 2)],
)
def test_workers_are_inert(spooled: Spool, start: str, persistent: bool, epochs: int) -> None:
    expected = [float(sample(index)["x"][0]) for index in range(ITEMS)]
    weight, alone = (torch.ones(4, requires_grad=True) for _ in range(2))
    batches = loader(Data(), multiprocessing_context=start, persistent_workers=persistent)
    workers: set[int] = set()
    with spooled.enable():
        for _ in range(epochs):
            values, found = epoch(batches, weight)
            assert values == expected
            workers |= found
    assert os.getpid() not in workers
    assert len(workers) == (WORKERS if persistent else WORKERS * epochs)
    agrees(spooled, STEPS * epochs)
    for _ in range(epochs):
        for index in range(0, ITEMS, BATCH):
            x = torch.stack([sample(index + n)["x"] for n in range(BATCH)])
            (x * alone).sum().backward()
    assert weight.grad is not None
    assert alone.grad is not None
    assert torch.equal(weight.grad, alone.grad)


def test_workers_from_before_the_capture_live_on(spooled: Spool) -> None:
    batches = loader(Data(), multiprocessing_context="fork", persistent_workers=True)
    weight = torch.ones(4, requires_grad=True)
    _, before = epoch(batches, weight)
    weight.grad = None
    with spooled.enable():
        _, workers = epoch(batches, weight)
    _, after = epoch(batches, weight)
    assert before == workers == after
    agrees(spooled, STEPS)


def test_a_stream_is_not_captured_either(spooled: Spool) -> None:
    weight = torch.ones(4, requires_grad=True)
    with spooled.enable():
        values, _ = epoch(loader(Stream(), multiprocessing_context="fork"), weight)
    assert len(values) == ITEMS
    agrees(spooled, STEPS)


def failure(data: Data, weight: torch.Tensor) -> str:
    try:
        epoch(loader(data, multiprocessing_context="fork"), weight)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("data", [Killed, EndsByItself])
def test_a_worker_that_dies_leaves_the_rank_open(spooled: Spool, data: type[Data]) -> None:
    weight = torch.ones(4, requires_grad=True)
    with spooled.enable():
        assert "DataLoader worker" in failure(data(), weight)
        assert spooled.store().rank_closed(0) is None
        for index in range(2):
            (torch.full((4,), float(index)) * weight).sum().backward()
            spool.step()
    agrees(spooled, 2, CALLS[:3])


SCRIPT = """
import torch, spool
from torch.utils.data import DataLoader

spool.enable(spool_dir={root!r})

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tan(torch.ones(1))

if __name__ == "__main__":
    for batch in DataLoader(Data(), 2, num_workers=1, multiprocessing_context="spawn"):
        torch.sin(batch)
        spool.step()
"""


def test_a_script_that_a_spawned_worker_imports_again(tmp_path: Path) -> None:
    """What stands above ``if __name__ == "__main__"`` runs in a spawned worker too."""
    script, root = tmp_path / "train.py", tmp_path / "spool-data"
    script.write_text(SCRIPT.format(root=str(root)))
    environment = {k: v for k, v in os.environ.items() if k != "RANK" and "SPOOL" not in k}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    store = Store.open(root)
    for step in range(2):
        names = [entry.name for entry in store.shards(0, step)]
        assert [n for n in names if "random_" not in n] == ["Torch.sin.0"]
