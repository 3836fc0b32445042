"""The training script of the demo: a small transformer with a faulty gelu.

The fault sits below capture, as a wrong kernel would: Spool sees ``F.gelu`` with
its arguments and with the wrong numbers that came back.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import spool

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 256, 64, 4, 2, 32, 4, 2


class FaultyKernel(TorchFunctionMode):
    """Computes gelu by the crude ``x sigmoid(1.702 x)``, as a hasty kernel might."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gelu:
            return args[0] * torch.sigmoid(1.702 * args[0])
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, n, WIDTH))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Transformer(nn.Module):
    """A decoder of `LAYERS` blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main(spool_dir: str) -> None:
    """Train `STEPS` steps under capture."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with FaultyKernel():
        spool.enable(spool_dir=spool_dir)
        for step in range(STEPS):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            print(f"   step {step}: loss {loss.item():.4f}", flush=True)
            spool.step()
        spool.disable()


if __name__ == "__main__":
    main(sys.argv[1])
