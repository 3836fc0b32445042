"""Under torch.distributed (gloo): DDP, collectives, DTensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spool import shard
from spool.store import Store

DDP = """
import os, sys
import torch, torch.distributed as dist
import spool
from torch.nn.parallel import DistributedDataParallel
rank, root, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def train(on):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    if on:
        spool.enable(spool_dir=root)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        total = torch.ones(1) * rank
        dist.all_reduce(total)
        assert total.item() == 1.0
        optimizer.step()
        optimizer.zero_grad()
        if on:
            spool.step()
    if on:
        spool.disable()
    return [p.detach() for p in model.parameters()]

plain, captured = train(False), train(True)
assert all(torch.equal(a, b) for a, b in zip(plain, captured))
dist.destroy_process_group()
"""

DTENSOR = """
import sys
import torch, torch.distributed as dist
import spool
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard, Replicate
rank, root, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
a = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
b = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
with spool.enable(spool_dir=root) as session:
    a.mul_(b)
    torch._foreach_add_([a], [b])
    torch.add(a, b)
    session.step()
assert a.full_tensor().tolist() == [1.0, 2.0, 3.0, 4.0]
dist.destroy_process_group()
"""


def run_ranks(script: str, tmp_path: Path) -> Store:
    root = tmp_path / "spool"
    arguments = [str(root), str(tmp_path / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert not [error for error in errors if "Traceback" in error]
    return Store.open(root)


def test_ddp(tmp_path):
    store = run_ranks(DDP, tmp_path)
    assert store.ranks() == [0, 1]
    for rank in store.ranks():
        closed = store.rank_closed(rank)
        assert {step: counts.dropped for step, counts in closed.steps.items()} == {0: 0, 1: 0}
        names = [entry.name for entry in store.shards(rank, 1)]
        assert "Functional.linear.0" in names
        assert not [name for name in names if "reduce" in name]
    weights = []
    for rank in store.ranks():
        entry = next(e for e in store.shards(rank, 1) if e.name == "Functional.linear.0")
        call = shard.read(entry.path)
        weights.append(call.regions[call.args[1].region].tolist())
    assert weights[0] == weights[1]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo rendezvous by file")
def test_dtensor(tmp_path):
    store = run_ranks(DTENSOR, tmp_path)
    for rank in store.ranks():
        calls = {entry.name: shard.read(entry.path) for entry in store.shards(rank, 0)}
        assert set(calls) == {"Tensor.mul_.0", "Torch._foreach_add_.0"}
        mul = calls["Tensor.mul_.0"]
        mine = [0.0, 1.0] if rank == 0 else [2.0, 3.0]
        assert mul.regions[mul.args[0].region].tolist() == mine
        add = calls["Torch._foreach_add_.0"]
        result = add.mutated.get("args.0.0") or add.outputs[0]
        assert add.regions[result.region].tolist() == [value + 1 for value in mine]
        assert store.step_closed(rank, 0).skipped == {"DTensor": 1}
