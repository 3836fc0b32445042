"""Train a Hugging Face model from a config for a few steps, with or without capture.

Run by the end-to-end tests as a process of its own:

    python train_hf.py --model gpt2 --out state.pt [--spool-dir DIR] [--foreach] [--defect gelu]

It saves losses, gradients of each step and the final parameters, so that runs
can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import spool

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from defects import Defect

VOCABULARY, LENGTH, BATCH = 128, 16, 2


def build(model: str) -> torch.nn.Module:
    """A two-layer model with random weights."""
    if model == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=LENGTH,
                n_embd=32,
                n_layer=2,
                n_head=4,
                activation_function="gelu",
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt2", "llama"), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--spool-dir")
    parser.add_argument("--foreach", action="store_true")
    parser.add_argument("--defect")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    options = parser.parse_args()

    torch.manual_seed(1234 + options.rank)
    torch.set_num_threads(1)
    model = build(options.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=options.foreach)
    losses, gradients = [], []
    defect = Defect(options.defect) if options.defect else contextlib.nullcontext()
    with defect:
        if options.spool_dir:
            spool.enable(spool_dir=options.spool_dir)
        for _ in range(options.steps):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            losses.append(loss.detach().clone())
            if options.spool_dir:
                spool.step()
            event = options.pause
            if event:
                time.sleep(event)
        if options.spool_dir:
            spool.disable()
    if options.defect:
        assert defect.calls > 0, f"{options.model} never called {options.defect}"
    state = {
        "losses": losses,
        "gradients": gradients,
        "parameters": [p.detach().clone() for p in model.parameters()],
    }
    torch.save(state, options.out)


if __name__ == "__main__":
    main()
