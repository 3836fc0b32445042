"""Small models that benchmarks train. Needs torch alone, so that any tool can be timed on them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

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

    def median(self, steps: int) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step() for _ in range(steps))
