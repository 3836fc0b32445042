"""Measuring outputs: values in, rows out.

Everything that a verdict can ask for is measured here, once, while the tensors
are at hand; `two_way` and `three_way` judge the rows. Tensors are read in blocks
(`blocks`), so memory is bounded by a block whatever their size or strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from spool.names import base_name
from spool.standards.accumulate import FloatPair
from spool.standards.blocks import Block, blocks
from spool.standards.exact import ExactPair
from spool.standards.rows import Kind, OutputMeasurement
from spool.standards.select import channel_axes, dropout_kind
from spool.standards.structure import (
    Leaf,
    dtype_class,
    dtype_name,
    equal_plain,
    shown,
    walk_pair,
    walk_triple,
)
from spool.standards.zeros import ZeroCounter


@torch.no_grad()
def measure_two_way(
    api: str,
    bench: Any,
    device: Any,
    *,
    dropout: bool | None = None,
    reduction: int | None = None,
    block: int | None = None,
) -> list[OutputMeasurement]:
    """Measure a call's device outputs against its bench outputs.

    Parameters
    ----------
    api : str
        Base name or call name.
    bench, device : object
        Tensors of any device, dtype and strides, plain values, or any nesting.
    dropout : bool, optional
        Whether the call really drew random zeros (p > 0, training); by default
        every call of a dropout is taken for one.
    reduction : int, optional
        Elements that went into one output element, kept in the rows.
    block : int, optional
        Most elements to look at together.

    Returns
    -------
    list of OutputMeasurement
        One per place of the outputs, in the bench's order.
    """
    leaves = walk_pair(device, bench)
    return _measure_all(api, leaves, _two_way_leaf, dropout, reduction, block)


@torch.no_grad()
def measure_three_way(
    api: str,
    device: Any,
    bench: Any,
    golden: Any,
    *,
    dropout: bool | None = None,
    reduction: int | None = None,
    block: int | None = None,
) -> list[OutputMeasurement]:
    """Measure device and bench outputs of a call against its golden outputs.

    Elements where the bench or the golden (in the device's dtype) is not finite are
    left out on both sides; those where only the device is not finite are counted.
    For the parameters see `measure_two_way`.
    """
    leaves = walk_triple(device, bench, golden)
    return _measure_all(api, leaves, _three_way_leaf, dropout, reduction, block)


@dataclass(frozen=True)
class _Place:
    """A leaf with what is known before its values are read."""

    leaf: Leaf
    block: int | None
    common: dict[str, Any]

    def row(self, kind: Kind, **values: Any) -> OutputMeasurement:
        return OutputMeasurement(kind=kind, **{**self.common, **values})


Measure: TypeAlias = Callable[[_Place], OutputMeasurement]


def _measure_all(
    api: str,
    leaves: Iterator[Leaf],
    measure: Measure,
    dropout: bool | None,
    reduction: int | None,
    block: int | None,
) -> list[OutputMeasurement]:
    random = None if dropout is False else dropout_kind(base_name(api))
    rows: list[OutputMeasurement] = []
    for index, leaf in enumerate(leaves):
        place = _Place(leaf, block, _common(index, leaf, reduction))
        is_tensor = isinstance(leaf.bench, torch.Tensor)
        if random is None or not is_tensor or leaf.problem or leaf.golden_problem:
            rows.append(_measure_leaf(place, measure))
        elif random is Kind.DROPOUT and leaf.bench.numel():
            rows.append(_dropout_leaf(place, base_name(api)))
            random = Kind.RANDOM  # a mask and whatever follows the first tensor
        else:
            rows.append(place.row(Kind.RANDOM if leaf.bench.numel() else Kind.EMPTY))
    return rows


def _common(index: int, leaf: Leaf, reduction: int | None) -> dict[str, Any]:
    common: dict[str, Any] = {
        "index": index,
        "path": leaf.path,
        "bench_dtype": _type_name(leaf.bench),
        "device_dtype": _type_name(leaf.device),
        "golden_dtype": _type_name(leaf.golden),
        "reduction": reduction,
    }
    if isinstance(leaf.device, torch.Tensor):
        common["shape"] = list(leaf.device.shape)
        common["count"] = leaf.device.numel()
    return common


def _type_name(value: Any) -> str:
    if value is None:
        return ""
    return str(value.dtype) if isinstance(value, torch.Tensor) else str(type(value))


def _measure_leaf(place: _Place, measure: Measure) -> OutputMeasurement:
    """Judge what needs no tensor arithmetic, and measure the rest."""
    leaf = place.leaf
    if leaf.problem is not None:
        return place.row(Kind.STRUCTURE, message=leaf.problem)
    if leaf.golden_problem is not None:
        return place.row(Kind.GOLDEN, message=leaf.golden_problem)
    if leaf.bench is None:
        return place.row(Kind.NONE)
    if isinstance(leaf.bench, torch.Tensor):
        if leaf.bench.numel() == 0:
            return place.row(Kind.EMPTY)
        return measure(place)
    # Raised precision may change a plain number; agreeing with either side is right.
    references = [("bench", leaf.bench)]
    if place.common["golden_dtype"]:
        references.append(("golden", leaf.golden))
    equal = any(equal_plain(leaf.device, value) for _, value in references)
    texts = ", ".join(f"{name} {shown(value)}" for name, value in references)
    message = None if equal else f"values differ: device {shown(leaf.device)}, {texts}"
    return place.row(Kind.PLAIN, equal=equal, message=message)


def _dropout_leaf(place: _Place, name: str) -> OutputMeasurement:
    reference = place.leaf.bench if place.leaf.golden is None else place.leaf.golden
    shape = place.leaf.device.shape
    channels = math.prod(shape[: channel_axes(name, len(shape))])
    device, bench = (ZeroCounter(channels, shape.numel()) for _ in range(2))
    for block, parts in blocks([place.leaf.device, reference], place.block):
        device.add(block.start, parts[0])
        bench.add(block.start, parts[1])
    return place.row(
        Kind.DROPOUT, count=channels, zeros_bench=bench.zeros(), zeros_device=device.zeros()
    )


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of reals, everything else as it is."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj())


def _two_way_leaf(place: _Place) -> OutputMeasurement:
    device, bench = _strided(place.leaf.device), _strided(place.leaf.bench)
    pair: FloatPair | ExactPair
    if _is_exact(device):
        pair = ExactPair(bench.dtype, device.dtype, device.shape)
    else:
        pair = _float_pair(place.leaf.bench, place.leaf.device, bench, device)
    for block, (d, b) in blocks([device, bench], place.block):
        pair.add(block, b, d)
    return place.row(Kind.TENSOR, two_way=pair.finish())


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a plain layout and real values."""
    return _reals(tensor if tensor.layout is torch.strided else tensor.to_dense())


def _is_exact(tensor: torch.Tensor) -> bool:
    return dtype_class(dtype_name(tensor.dtype)) not in ("float", "complex")


def _float_pair(
    bench: torch.Tensor, device: torch.Tensor, bench_reals: torch.Tensor, reals: torch.Tensor
) -> FloatPair:
    names = (dtype_name(bench.dtype), dtype_name(device.dtype)) if device.is_complex() else None
    return FloatPair(bench_reals.dtype, reals.dtype, reals.shape, names)


def _three_way_leaf(place: _Place) -> OutputMeasurement:
    tensors = [_strided(v) for v in (place.leaf.device, place.leaf.bench, place.leaf.golden)]
    device, bench, golden = tensors
    if _is_exact(device):
        npu = ExactPair(golden.dtype, device.dtype, device.shape)
        gpu = ExactPair(golden.dtype, bench.dtype, device.shape)
        for block, (d, b, g) in blocks(tensors, place.block):
            npu.add(block, g, d)
            gpu.add(block, g, b)
        return place.row(Kind.TENSOR, npu=npu.finish(), gpu=gpu.finish())
    triple = _FloatTriple(place.leaf, device, bench, golden)
    for block, (d, b, g) in blocks(tensors, place.block):
        triple.add(block, d, b, g)
    return place.row(Kind.TENSOR, **triple.finish())


class _FloatTriple:
    """Device and bench against golden, over the elements that can be compared."""

    def __init__(
        self, leaf: Leaf, device: torch.Tensor, bench: torch.Tensor, golden: torch.Tensor
    ) -> None:
        self._npu = _float_pair(leaf.golden, leaf.device, golden, device)
        self._gpu = _float_pair(leaf.golden, leaf.bench, golden, bench)
        self._facts: dict[str, Any] = {
            "identical": True,
            "left_out": 0,
            "device_nonfinite": 0,
            "device_nonfinite_index": None,
            "saturated": 0,
        }

    def add(
        self, block: Block, device: torch.Tensor, bench: torch.Tensor, golden: torch.Tensor
    ) -> None:
        """Measure a block of all three."""
        kind = self._npu.kind
        wide_bench, wide_golden = bench.to(kind.wide), golden.to(kind.wide)
        wide_device = device.to(kind.wide)
        equal = torch.equal(wide_device, wide_bench)
        kept = None
        largest = float(wide_golden.abs().max())
        if not (largest <= kind.largest and _finite(wide_bench) and _finite(wide_device)):
            equal, kept = self._not_finite(block, device, wide_device, wide_bench, golden)
        self._facts["identical"] &= equal
        stats = self._npu.add(block, golden, device, kept)
        if equal and stats is not None and device.dtype is bench.dtype:
            if kept is not None:
                golden, bench = golden[kept], bench[kept]
            self._gpu.merge(block, golden, bench, stats, kept)
        else:
            self._gpu.add(block, golden, bench, kept)

    def _not_finite(
        self,
        block: Block,
        device: torch.Tensor,
        wide_device: torch.Tensor,
        wide_bench: torch.Tensor,
        golden: torch.Tensor,
    ) -> tuple[bool, torch.Tensor | None]:
        """Count what is not finite; return whether device is bench, and what to measure."""
        same = (wide_device == wide_bench) | (wide_device.isnan() & wide_bench.isnan())
        device_finite, bench_finite = wide_device.isfinite(), wide_bench.isfinite()
        alone = ~device_finite & golden.to(self._npu.kind.wide).isfinite() & ~same
        found = int(alone.count_nonzero())
        if found and not self._facts["device_nonfinite"]:
            at = int(alone.to(torch.uint8).argmax())
            self._facts["device_nonfinite_index"] = block.start + at
        kept = bench_finite & golden.to(device.dtype).to(self._npu.kind.wide).isfinite()
        left_out = kept.numel() - int(kept.count_nonzero())
        self._facts["device_nonfinite"] += found
        self._facts["saturated"] += int((device_finite & ~bench_finite).count_nonzero())
        self._facts["left_out"] += left_out
        return bool(same.all()), kept if left_out else None

    def finish(self) -> dict[str, Any]:
        """Fields of the output's row."""
        return {**self._facts, "npu": self._npu.finish(), "gpu": self._gpu.finish()}


def _finite(values: torch.Tensor) -> bool:
    # The sum of squares may overflow; the largest magnitude tells NaN and inf alike.
    return bool(values.abs().max() < float("inf"))
