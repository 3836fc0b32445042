"""Small spools for tests of the intake and the workflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spool.call import Call, CallContext, TensorRef
from spool.store import RankCounts, StepCounts, Store


def make_call(
    rank: int = 0,
    step: int = 0,
    order: int = 0,
    api: str = "Torch.add",
    index: int | None = None,
    error: float = 0.0,
    elements: int = 8,
) -> Call:
    """``torch.add(x, y)`` of two fp32 vectors, its result off by `error` where asked."""
    x = np.arange(elements, dtype=np.float32) + order
    y = np.full(elements, 0.5, dtype=np.float32)
    out = x + y
    out[3] += error

    def ref(region: int) -> TensorRef:
        return TensorRef(region, "float32", (elements,), (1,), 0)

    return Call(
        api=api,
        index=order if index is None else index,
        rank=rank,
        step=step,
        order=order,
        direction="forward",
        args=(ref(0), ref(1)),
        kwargs={},
        outputs=ref(2),
        mutated={},
        context=CallContext(module="block.0", stack=("train.py:1 in main",)),
        regions=[x, y, out],
    )


def publish_step(store: Store, rank: int, step: int, calls: int, **options: object) -> StepCounts:
    """Publish a step of `calls` calls and close it."""
    size = sum(
        store.publish(make_call(rank, step, order, **options)).nbytes  # type: ignore[arg-type]
        for order in range(calls)
    )
    counts = StepCounts(shards=calls, bytes=size)
    store.close_step(rank, step, counts)
    return counts


def make_spool(root: Path, ranks: int = 1, steps: int = 1, calls: int = 3) -> Store:
    """A closed spool of `ranks` by `steps` by `calls` calls."""
    store = Store.create(root, {"torch": "2.13.0"})
    for rank in range(ranks):
        counts = {step: publish_step(store, rank, step, calls) for step in range(steps)}
        store.close_rank(rank, RankCounts(counts, "disabled"))
    return store
