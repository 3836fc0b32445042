"""Train a small model for a few steps, with or without capture; see `models.MODELS`.

Run by the end-to-end tests as a process of its own:

    python train.py --model gpt2 --out state.pt [--spool-dir DIR] [--amp bfloat16]

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
from models import MODELS

import spool

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from defects import defect

KERNELS = ("foreach", "fused")
OPTIMIZERS = ("loop", *KERNELS, "npu")


def in_parallel(model: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
    """The model as this process' part of two."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=2
    )
    if options.parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def local(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, or of this process' part of it."""
    return getattr(value.detach(), "_local_tensor", value.detach()).clone()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--spool-dir")
    parser.add_argument("--receiver", help="port of this host and directory of certificates: P:DIR")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="loop")
    parser.add_argument("--amp", choices=("bfloat16", "float16"))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--clip", type=float, help="clip the gradient's norm")
    parser.add_argument("--defect")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), help="as one of two processes")
    parser.add_argument("--meet", help="file by which the two find each other")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    options = parser.parse_args()

    if options.model == "npu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
        import torch_npu  # noqa: F401

    torch.manual_seed(1234 + options.rank)
    torch.set_num_threads(1)
    model = MODELS[options.model]().train()
    if options.parallel:
        model = in_parallel(model, options)
    if options.optimizer == "npu":
        from npu_models import NpuAdamW

        optimizer: torch.optim.Optimizer = NpuAdamW(model.parameters())
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, **{name: options.optimizer == name for name in KERNELS}
        )
    scaler = torch.amp.GradScaler("cpu", enabled=options.amp == "float16", init_scale=256.0)
    losses, gradients = [], []
    fault = defect(options.defect) if options.defect else contextlib.nullcontext()
    with fault:
        is_captured = options.spool_dir or options.receiver
        if options.spool_dir:
            spool.enable(spool_dir=options.spool_dir)
        elif options.receiver:
            port, _, certificates = options.receiver.partition(":")
            spool.enable(host="localhost", port=int(port), tls_path=certificates)
        for _ in range(options.steps):
            optimizer.zero_grad()
            for _ in range(options.accumulate):
                with torch.autocast(
                    "cpu",
                    dtype=getattr(torch, options.amp or "bfloat16"),
                    enabled=options.amp is not None,
                ):
                    loss = model() / options.accumulate
                scaler.scale(loss).backward()
            gradients.append([local(p.grad) for p in model.parameters() if p.grad is not None])
            if options.clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().clone())
            if is_captured:
                spool.step()
            if options.pause:
                time.sleep(options.pause)
        if is_captured:
            spool.disable()
    if options.defect:
        assert fault.calls > 0, f"{options.model} never called {options.defect}"
    state = {
        "losses": losses,
        "gradients": gradients,
        "parameters": [local(p) for p in model.parameters()],
        "buffers": [b.detach().clone() for b in model.buffers()],
    }
    torch.save(state, options.out)
    if options.parallel:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
