"""A transformer, and a step of everything else, written with torch_npu's fused operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, BATCH, HEADS, WIDTH = 64, 12, 2, 4, 32


def npu() -> Any:
    """torch_npu, or what stands in for it."""
    import sys

    return sys.modules.get("torch_npu") or sys.modules["fakes.torch_npu"]


class NpuBlock(nn.Module):
    """Attention and a gated part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y, _ = npu().npu_rms_norm(x, self.norms[0], epsilon=1e-5)
        query, key, value = self.qkv(y).unflatten(-1, (3 * HEADS, -1)).chunk(3, 2)
        query = npu().npu_rotary_mul(query, cos, sin)
        key = npu().npu_rotary_mul(key, cos, sin)
        mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        attention = npu().npu_fusion_attention(
            *(query, key, value, HEADS, "BSND"),
            atten_mask=mask,
            scale=query.shape[-1] ** -0.5,
            sparse_mode=2,
        )
        x = x + self.out(attention[0].flatten(2))
        y = npu().npu_rms_norm(x, self.norms[1], 1e-5)[0]
        return x + self.down(npu().npu_swiglu(self.up(y), dim=-1))


class NpuTransformer(nn.Module):
    """Two blocks between an embedding and a head; called without arguments it gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([NpuBlock(), NpuBlock()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.linspace(0, 2, WIDTH // HEADS // 2)
        cos, sin = (f(angles).repeat(1, 2)[None, :, None] for f in (torch.cos, torch.sin))
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class NpuAdamW(torch.optim.Optimizer):
    """AdamW by the fused operator, one parameter after the other."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
                    state["powers"] = [1.0, 1.0]
                npu().npu_apply_adam_w(
                    *(*state["powers"], group["lr"], 0.01, 0.9, 0.999, 1e-8, param.grad),
                    *(None, False, False),
                    out=(param, state["m"], state["v"]),
                )
                state["powers"] = [state["powers"][0] * 0.9, state["powers"][1] * 0.999]


def everything() -> list[torch.Tensor]:
    """One training step that calls every fused operator, those with backward in backward too.

    Returns
    -------
    list of Tensor
        Results and gradients.
    """
    torch.manual_seed(4)
    ops = npu()
    x = torch.randn(2, 4, 8, requires_grad=True)
    weight = torch.randn(16, 8, requires_grad=True)
    gamma = torch.rand(8, requires_grad=True)
    cos, sin = torch.randn(2, 1, 4, 8)
    y = ops.npu_rms_norm(x, gamma)[0]
    y = ops.npu_rotary_mul(y, cos, sin, "interleave")
    y = ops.npu_linear(y, weight)
    y = ops.npu_swiglu(y)
    y = ops.npu_mish(y) + ops.npu_fast_gelu(y) + ops.fast_gelu(-y)
    y = ops.npu_confusion_transpose(y, [1, 0, 2], [4, 2, 4, 2], True)
    # (B, N, S, D)
    key, value = y.flip(0) * 2, y.flip(2, 3)
    attention = ops.npu_fusion_attention(y, key, value, 2, "BNSD", scale=0.7)
    y = attention[0]
    scores = y @ y.mT
    mask = torch.rand(4, 1, 4, 4) > 0.7
    chances = ops.npu_scaled_masked_softmax(scores, mask, 1.5, False)
    loss = (chances @ y).square().mean()
    loss.backward()
    found = [loss, x.grad, weight.grad, gamma.grad]
    with torch.no_grad():
        found.append(ops.npu_layer_norm_eval(x, [8], gamma, gamma * 0.1, 1e-3))
        found += ops.npu_group_norm_silu(x, gamma[:4], gamma[4:], 2)
        found += ops.npu_moe_gating_top_k_softmax(weight, k=2)
        found.append(ops.npu_sort_v2(x, 1, True))
        m, v = torch.zeros(16, 8), torch.zeros(16, 8)
        more = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8, weight.grad, False, False)
        found += ops.npu_apply_adam(*more, out=(weight, m, v))
        more = (0.9, 0.999, 1e-3, 0.01, 0.9, 0.999, 1e-8, weight.grad, None, False, False)
        found += ops.npu_apply_adam_w(*more, out=(weight, m, v))
    return [tensor.detach().clone() for tensor in found]
