"""Capture does not change training: losses, gradients and weights stay bit-identical."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spool


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(b, n, w)), 0.1, self.training)
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + F.dropout(self.down(hidden), 0.1, self.training)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(16, 2), Layer(16, 2)])
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(options, steps=2, end_step=lambda: None):
    """Losses, gradient norms, gradients and weights of a short training."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    seen = []
    for _ in range(steps):
        ids = torch.randint(0, 32, (4, 8))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        seen.append(loss.detach().clone())
        seen.extend(p.grad.clone() for p in model.parameters())
        optimizer.step()
        end_step()
    seen.extend(p.detach().clone() for p in model.parameters())
    seen.append(torch.rand(4))  # the generator is where it would have been
    return seen


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"foreach": True, "amsgrad": True}],
    ids=["foreach", "loop", "fused", "amsgrad"],
)
def test_bit_identical(spooled, options):
    plain = train(options)
    with spooled.enable():
        captured = train(options, end_step=spool.step)
    assert len(plain) == len(captured)
    for a, b in zip(plain, captured, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dim() else a.equal(b)
    counts = spooled.store().rank_closed(0).steps
    assert counts[0].dropped == counts[1].dropped == 0
    assert counts[0].skipped == {}
    assert counts[0].shards == len(spooled.names(0)) > 100
    assert "Functional.scaled_dot_product_attention.1" in spooled.names(0)


def test_gradient_accumulation_and_recomputation(spooled):
    from torch.utils.checkpoint import checkpoint

    def run():
        torch.manual_seed(1)
        layer = Layer(16, 2)
        for _ in range(3):
            checkpoint(layer, torch.randn(2, 4, 16), use_reentrant=False).sum().backward()
        return [p.grad for p in layer.parameters()]

    plain = run()
    with spooled.enable():
        captured = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    assert [n for n in spooled.names() if "gelu." in n] == [
        f"Functional.gelu.{i}" for i in range(3)
    ]


def test_memory_of_results_is_not_kept(spooled):
    import gc
    import weakref

    gone = []
    with spooled.enable() as session:
        x = torch.ones(1000)
        y = torch.sin(x)
        gone += [weakref.ref(x), weakref.ref(y)]
        del x, y
        session.step()
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
