"""What a shard costs, beside `torch.save` and a plain write of the same bytes.

Usage: ``python benchmarks/shard.py [directory]``. Each line is one size of tensor
data; times are medians, in microseconds, with fsync wherever a file is written.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spool import shard
from spool.call import Call, CallContext
from spool.tensors import freeze

SIZES = (64, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)


def make_call(nbytes: int) -> tuple[list[torch.Tensor], Call]:
    """Return three tensors of `nbytes` in all and a call that holds them."""
    tensors = [torch.randn(max(1, nbytes // 12)) for _ in range(3)]
    trees, regions = freeze([tuple(tensors[:2]), tensors[2]])
    context = CallContext(module="model.layers.0.mlp", stack=("train.py:10 in step",) * 3)
    identity = ("Functional.linear", 0, 0, 0, 0, "forward")
    return tensors, Call(*identity, trees[0], {}, trees[1], {}, context, regions)


def median(functions: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Run all functions in turn, so that the machine's moods hit them alike."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(times):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(values) for name, values in taken.items()}


def write_durably(path: Path, data: list[memoryview]) -> None:
    """Write buffers to a file and synchronise it."""
    with open(path, "wb", buffering=0) as file:
        for part in data:
            file.write(part)
        os.fsync(file.fileno())


def save(tensors: list[torch.Tensor], path: Path) -> None:
    """`torch.save` to a file, synchronised."""
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def write_shard(call: Call, path: Path) -> None:
    """Write a shard in place of the last one."""
    path.unlink(missing_ok=True)
    shard.write(call, path)


def one_size(nbytes: int, directory: Path) -> None:
    """Print the line of one size."""
    tensors, call = make_call(nbytes)
    path, times = directory / "shard", max(5, min(300, (1 << 28) // max(nbytes, 1)))
    buffers = [region.data for region in call.regions]
    memory = median(
        {"encode": lambda: shard.encode(call), "save": lambda: torch.save(tensors, io.BytesIO())},
        times,
    )
    disk = median(
        {
            "write": lambda: write_shard(call, path),
            "save": lambda: save(tensors, directory / "saved"),
            "plain": lambda: write_durably(directory / "plain", buffers),
            "read": lambda: shard.read(path),
        },
        times,
    )
    print(
        f"{call.nbytes:>10} B  overhead {len(shard.encode(call)) - call.nbytes:>5} B"
        f" | memory: encode {memory['encode']:>9.0f},"
        f" {memory['encode'] / memory['save']:.2f} x save"
        f" | file: write {disk['write']:>9.0f}, {disk['write'] / disk['save']:.2f} x save,"
        f" {disk['write'] / disk['plain']:.2f} x plain | read {disk['read']:>9.0f}"
    )


def longest_stall(function: Callable[[], object]) -> float:
    """Milliseconds for which a second thread was kept from running."""
    worst, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not stop.wait(0.0005):
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    function()
    stop.set()
    thread.join()
    return 1e3 * worst


def main() -> None:
    """Print all lines."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        directory = Path(name)
        for size in SIZES:
            one_size(size, directory)
        _, call = make_call(400 << 20)
        idle = longest_stall(lambda: time.sleep(1))
        stall = longest_stall(lambda: write_shard(call, directory / "large"))
        print(
            f"400 MiB written: another thread stalled {stall:.1f} ms at most (idle: {idle:.1f} ms)"
        )


if __name__ == "__main__":
    main()
