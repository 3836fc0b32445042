"""What capture costs a training step, on three small models.

Per model and kind of writer: the step without Spool; with Spool enabled and no step
selected; with calls captured and thrown away (``null``: everything but writing); the first
captured step with a sink that takes all of it (``burst``); and twenty captured steps with
the drain counted (``sustained``). Times are of this machine; compare columns of one run.

    python benchmarks/capture.py [--steps 20] [--models transformer gpt resnet]
                                 [--writers process threads] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import spool
from spool.capture.sink import Sink
from spool.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))


class Transformer(nn.Module):
    """0.54 M parameters, the size at which the peer was measured."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 128)
        self.causal = causal
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                128, 4, 512, dropout=0.0, batch_first=True, norm_first=causal
            )
            for _ in range(2)
        )
        self.head = nn.Linear(128, 512)

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(512, (8, 64))
        mask = nn.Transformer.generate_square_subsequent_mask(64) if self.causal else None
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=self.causal)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def resnet() -> nn.Module:
    """A residual network of two blocks."""
    from models import resnet

    return resnet()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: Transformer(causal=False),
    "gpt": lambda: Transformer(causal=True),
    "resnet": resnet,
}


class Training:
    """A model with its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def step(self) -> float:
        """Train a step; its seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def median_step(training: Training, steps: int) -> float:
    """Median seconds of a step."""
    return statistics.median(training.step() for _ in range(steps))


def measure(name: str, writer: str, steps: int, where: str | None) -> str:
    """One row of the table."""
    training = Training(name)
    median_step(training, 5)
    off = median_step(training, steps)
    with tempfile.TemporaryDirectory(prefix="spool-bench-", dir=where) as directory:
        with spool.enable(spool_dir=f"{directory}/idle", step=[10**6]):
            idle = median_step(training, steps)
        submit = Sink.submit
        Sink.submit = lambda self, record, ledger: self.free(record.blocks)  # type: ignore[method-assign]
        with spool.enable(spool_dir=f"{directory}/null", writer=writer):
            null = median_step(training, max(3, steps // 4))
        Sink.submit = submit  # type: ignore[method-assign]
        session = spool.enable(spool_dir=f"{directory}/real", writer=writer)
        time.sleep(1)  # a process is up as soon as somebody trains in earnest
        burst = training.step()
        session.step()
        begin = time.perf_counter()
        for _ in range(steps):
            training.step()
            session.step()
        spool.disable()
        sustained = (time.perf_counter() - begin) / (steps + 1)
        counts = Store.open(Path(directory) / "real").step_closed(0, 1)
    assert counts is not None
    assert counts.dropped == 0
    return (
        f"{name:12}{writer:8}{off * 1e3:8.1f}{idle / off:8.2f}x{null / off:8.1f}x"
        f"{burst / off:8.1f}x{sustained / off:10.1f}x{counts.shards:8}{counts.bytes / 1e6:8.1f}"
        f"{counts.shards / sustained:10.0f}{(null - off) / counts.shards * 1e6:10.0f}"
    )


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    kinds = ("process", "threads")
    parser.add_argument("--writers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--directory", help="where spools go, default that of temporary files")
    arguments = parser.parse_args()
    logging.getLogger("spool").setLevel(logging.ERROR)
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(
        f"{'model':12}{'writer':8}{'off ms':>8}{'idle':>9}{'null':>9}{'burst':>9}{'sustained':>11}"
        f"{'calls':>8}{'MB':>8}{'shards/s':>10}{'us/call':>10}"
    )
    for name in arguments.models:
        for writer in arguments.writers:
            row = measure(name, writer, arguments.steps, arguments.directory)
            print(row, flush=True)


if __name__ == "__main__":
    main()
