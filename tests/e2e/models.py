"""Small models of every common kind, with random weights and random data.

`MODELS` maps a name to a builder; calling a built model without arguments draws a batch
from torch's generator and returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, BATCH = 128, 16, 2


class Words(nn.Module):
    """A Hugging Face model with a language head, and token batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class Pictures(nn.Module):
    """A classifier of 3x32x32 pictures."""

    def __init__(self, model: nn.Module, classes: int = 10) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self) -> torch.Tensor:
        out = self.model(torch.randn(BATCH, 3, 32, 32))
        return F.cross_entropy(getattr(out, "logits", out), torch.randint(self.classes, (BATCH,)))


class Recurrent(nn.Module):
    """Embedding, a recurrent layer, a head."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = layer(16, 24, num_layers=2, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        hidden, _ = self.layer(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Residual block of two convolutions with batch norms."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.short(x), inplace=True)


def resnet() -> nn.Module:
    return Pictures(
        nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            Block(8, 8, 1),
            Block(8, 16, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
    )


class ByCheckpoint(nn.Module):
    """A stack of layers whose activations are computed again in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
            for _ in range(3)
        )

    def forward(self) -> torch.Tensor:
        from functools import partial

        from torch.utils.checkpoint import (
            checkpoint,
            create_selective_checkpoint_contexts,
        )

        more: dict[str, Any] = {"use_reentrant": self.how == "reentrant"}
        if self.how == "selective":
            save = [torch.ops.aten.addmm.default]
            more["context_fn"] = partial(create_selective_checkpoint_contexts, save)
        x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
        for layer in self.layers:
            x = layer(x) if self.how == "none" else checkpoint(layer, x, **more)
        return x.square().mean()


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Words(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=LENGTH,
                n_embd=32,
                n_layer=2,
                n_head=4,
                activation_function="gelu",
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    )


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Words(LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=2)))


def _qwen_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Words(
        Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **_SIZES,
                num_key_value_heads=2,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=32,
                output_router_logits=True,
            )
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    # Attention with dropout draws random numbers, so that it could not be compared.
    return Words(BertForMaskedLM(BertConfig(**_SIZES, attention_probs_dropout_prob=0.0)))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return Pictures(ViTForImageClassification(config))


def _npu() -> nn.Module:
    from npu_models import NpuTransformer

    return NpuTransformer()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2-moe": _qwen_moe,
    "bert": _bert,
    "vit": _vit,
    "resnet": resnet,
    "rnn": lambda: Recurrent(nn.RNN),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "plain": lambda: ByCheckpoint("none"),
    "reentrant": lambda: ByCheckpoint("reentrant"),
    "nonreentrant": lambda: ByCheckpoint("nonreentrant"),
    "selective": lambda: ByCheckpoint("selective"),
    "npu": _npu,
}
