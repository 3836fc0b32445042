"""What only a device shows: engine threads of its own, graphs that it records, copies from it.

Where no device is, a stand-in that torch takes for an NPU shows the first two: its tensors
have no memory, so that what is computed is on the CPU, but the engine runs it in the
device's thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spool import shard
from spool.store import Store

if TYPE_CHECKING:
    from conftest import Spool

STAND_IN = """
import sys, threading
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

class Npu:
    recording = False
    def is_initialized(self): return True
    def is_available(self): return True
    def current_device(self): return 0
    def device_count(self): return 1
    def manual_seed_all(self, seed): pass
    def _is_in_bad_fork(self): return False
    def is_current_stream_capturing(self): return self.recording

npu = Npu()
_setup_privateuseone_for_python_backend("npu", backend_module=npu)

def on_device(x):
    return torch._C._acc.create_empty_tensor(tuple(x.shape), x.dtype)

class ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return on_device(x)

    @staticmethod
    def backward(ctx, gradient):
        assert threading.current_thread() is not threading.main_thread()
        (x,) = ctx.saved_tensors
        return torch.exp(x) * 3

class FromDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros(tuple(x.shape))

    @staticmethod
    def backward(ctx, gradient):
        assert threading.current_thread() is threading.main_thread()
        return on_device(gradient)

def loss(x):
    return FromDevice.apply(ToDevice.apply(torch.sin(x))).sum()

import spool
x = torch.full((3,), 0.5, requires_grad=True)
"""


def run(root: Path, body: str) -> str:
    code = STAND_IN + textwrap.dedent(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPOOL_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_the_engine_runs_in_a_devices_thread_is_captured(tmp_path):
    run(
        tmp_path / "spool",
        """
        loss(x).backward()
        plain, x.grad = x.grad, None
        with spool.enable(spool_dir=sys.argv[1]):
            loss(x).backward()
        assert torch.equal(x.grad, plain)
        """,
    )
    calls = [shard.read(entry.path) for entry in Store.open(tmp_path / "spool").shards(0, 0)]
    names = [call.name for call in calls if call.name.startswith("Aten.")]
    assert names == ["Aten.exp.0", "Aten.mul.0", "Aten.cos.0", "Aten.mul.1"]
    (exp,) = (call for call in calls if call.name == "Aten.exp.0")
    assert exp.regions[0].tolist() == torch.full((3,), 0.5).sin().tolist()
    assert exp.regions[1].tolist() == torch.full((3,), 0.5).sin().exp().tolist()


def test_the_recording_of_a_graph_is_left_alone_and_counted(tmp_path):
    said = run(
        tmp_path / "spool",
        """
        with spool.enable(spool_dir=sys.argv[1]):
            torch.sin(x)
            npu.recording = True
            torch.cos(x)
            loss(x).backward()
            npu.recording = False
            torch.tan(x)
        """,
    )
    names = [entry.name for entry in Store.open(tmp_path / "spool").shards(0, 0)]
    assert names == ["Torch.sin.0", "Torch.tan.0"]
    assert "graph capture 4" in said


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses = []
    for _ in range(3):
        x = torch.randn(32, 64).to(device)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@needs_gpu
def test_training_on_a_gpu_is_bit_identical_and_its_values_are_those_at_call_time(
    spooled: Spool,
) -> None:
    plain = train("cuda")
    with spooled.enable():
        captured = train("cuda")
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    counts = spooled.store().rank_closed(0).steps[0]
    assert counts.dropped == 0
    assert counts.shards == len(spooled.names()) > 100
    assert any(name.startswith("Aten.") for name in spooled.names())


@needs_gpu
def test_values_on_a_gpu_are_those_before_the_call_changed_them(spooled: Spool) -> None:
    x = torch.full((1 << 20,), 1.0, device="cuda")

    def body() -> None:
        for _ in range(50):
            x.add_(1.0)

    calls = spooled.capture(body)
    for number, call in enumerate(calls):
        before, after = (set(region.tolist()) for region in call.regions[:2])
        assert (before, after) == ({number + 1.0}, {number + 2.0})


@needs_gpu
def test_a_cuda_graph_is_left_alone_and_counted(spooled: Spool) -> None:
    x = torch.ones(8, device="cuda")
    torch.sin(x)
    graph: Any = torch.cuda.CUDAGraph()
    with spooled.enable():
        with torch.cuda.graph(graph):
            y = torch.sin(x)
        graph.replay()
        torch.cos(y)
    assert spooled.names() == ["Torch.cos.0"]
    assert spooled.store().rank_closed(0).steps[0].skipped["graph capture"] == 1
