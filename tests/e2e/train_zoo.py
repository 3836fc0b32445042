"""Train a small model for a few steps, with or without capture; see `zoo.MODELS`.

Run by the end-to-end tests as a process of its own:

    python train_zoo.py --model gpt2 --out state.pt [--spool-dir DIR] [--amp bfloat16]

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
from zoo import MODELS

import spool

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from defects import Defect


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--spool-dir")
    parser.add_argument("--optimizer", choices=("loop", "foreach", "fused"), default="loop")
    parser.add_argument("--amp", choices=("bfloat16", "float16"))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--clip", type=float, help="clip the gradient's norm")
    parser.add_argument("--defect")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    options = parser.parse_args()

    torch.manual_seed(1234 + options.rank)
    torch.set_num_threads(1)
    model = MODELS[options.model]().train()
    kernels = {"foreach": options.optimizer == "foreach"}
    if options.optimizer == "fused":
        kernels = {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kernels)
    scaler = torch.amp.GradScaler("cpu", enabled=options.amp == "float16", init_scale=256.0)
    losses, gradients = [], []
    defect = Defect(options.defect) if options.defect else contextlib.nullcontext()
    with defect:
        if options.spool_dir:
            spool.enable(spool_dir=options.spool_dir)
        for _ in range(options.steps):
            optimizer.zero_grad()
            for _ in range(options.accumulate):
                with torch.autocast(
                    "cpu",
                    dtype=getattr(torch, options.amp or "bfloat16"),
                    enabled=options.amp is not None,
                ):
                    loss = model.loss() / options.accumulate
                scaler.scale(loss).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            if options.clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().clone())
            if options.spool_dir:
                spool.step()
            if options.pause:
                time.sleep(options.pause)
        if options.spool_dir:
            spool.disable()
    if options.defect:
        assert defect.calls > 0, f"{options.model} never called {options.defect}"
    state = {
        "losses": losses,
        "gradients": gradients,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.detach().clone() for b in model.buffers()],
    }
    torch.save(state, options.out)


if __name__ == "__main__":
    main()
