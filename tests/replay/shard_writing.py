"""Writes shards as a training run would, without capture: for tests of replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spool.call import Call, CallContext
from spool.shard import encode
from spool.tensors import freeze
from spool.workdir import Manifest, ShardRef, WorkDir


def record(
    api: str,
    function: Callable[..., Any],
    *args: Any,
    index: int = 0,
    order: int = 0,
    step: int = 0,
    rank: int = 0,
    context: CallContext | None = None,
    writes: Sequence[str] = (),
    outcome: Any = None,
    **kwargs: Any,
) -> Call:
    """Run `function` and make the call that capture would.

    Parameters
    ----------
    writes : paths of arguments that it writes and does not return
    outcome : stored instead of the function's result, if given
    """
    trees, regions = freeze([args, kwargs])
    result = function(*args, **kwargs)
    written = [_at(args, kwargs, path) for path in writes]
    if outcome is not None:
        result = outcome
    outputs, more = freeze([result, *written], first_region=len(regions))
    return Call(
        api=api,
        index=index,
        rank=rank,
        step=step,
        order=order,
        direction="forward",
        args=trees[0],
        kwargs=trees[1],
        outputs=outputs[0],
        mutated=dict(zip(writes, outputs[1:], strict=True)),
        context=context or CallContext(),
        regions=regions + more,
    )


def _at(args: Any, kwargs: Any, path: str) -> Any:
    root, *parts = path.split(".")
    value = args if root == "args" else kwargs
    for part in parts:
        value = value[int(part) if part.isdigit() else part]
    return value


def spool_calls(root: Path, calls: Sequence[Call], batch: int = 0) -> Path:
    """Write calls of one rank and step as shards with a manifest; returns the manifest."""
    rank, step = calls[0].rank, calls[0].step
    directory = root / "spool" / f"rank{rank}" / f"step{step}"
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    for call in calls:
        path = directory / f"{call.order:06d}.{call.name}.h5"
        path.write_bytes(encode(call))
        shards.append(ShardRef(path.name, path.stat().st_size))
    manifest = Manifest(rank, step, batch, str(root / "spool"), "run", tuple(shards))
    path = WorkDir(root / "work").batch(rank, batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest.to_json()))
    return path
