"""From trees and regions back to live values."""

from __future__ import annotations

import functools
import keyword
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spool._torch import DTYPES, Unsupported, carrier, field_names
from spool.call import NamedTuple, Region, Size, Slice, TensorRef, TorchValue, Tree, packing
from spool.dtypes import CONSTANTS, ITEMSIZE

# Tables, so that no attribute is ever looked up by a name that a shard gives.
_CONSTANTS: dict[str, dict[str, Any]] = {
    kind: {name: getattr(torch, name) for name in names if hasattr(torch, name)}
    for kind, names in CONSTANTS.items()
}
_RETURN_TYPES: dict[str, Any] = {
    name: kind for name, kind in vars(torch.return_types).items() if isinstance(kind, type)
}


def thaw(tree: Tree, regions: Sequence[Region], device: torch.device | str | None = None) -> Any:
    """Make a live value of `tree`; see `thaw_all`."""
    return thaw_all([tree], regions, device)[0]


def thaw_all(
    trees: Sequence[Tree], regions: Sequence[Region], device: torch.device | str | None = None
) -> list[Any]:
    """Make live values of several trees over one set of fresh storages.

    Parameters
    ----------
    trees : sequence of tree
        Refs to one region share one storage, across all trees of this call.
    regions : sequence of numpy.ndarray
        Copied, never aliased: a replay may write its arguments.
    device : torch.device or str, optional
        Where tensors go (default: the CPU), and what a ``torch.device`` value in
        the trees becomes (default: itself). ``"meta"`` allocates nothing.

    Returns
    -------
    list of object
        One per tree. No tensor requires grad. A named tuple comes back as
        ``torch.return_types`` structure if it was one, else as a generated class
        of the same name and fields.
    """
    thawing = _Thaw(regions, None if device is None else torch.device(device))
    return [thawing.value(tree) for tree in trees]


class _Thaw:
    def __init__(self, regions: Sequence[Region], device: torch.device | None) -> None:
        self.regions = regions
        self.device = device
        self.target = device or torch.device("cpu")
        self.storages: dict[int, torch.Tensor] = {}

    def value(self, tree: Tree) -> Any:
        kind = type(tree)
        if kind is TensorRef:
            return self._tensor(tree)
        if kind is tuple:
            return tuple([self.value(item) for item in tree])
        if kind is list:
            return [self.value(item) for item in tree]
        if kind is dict:
            return {key: self.value(item) for key, item in tree.items()}
        if kind is Slice:
            return slice(self.value(tree.start), self.value(tree.stop), self.value(tree.step))
        if kind is NamedTuple:
            return _named(tree.type, tree.fields, [self.value(item) for item in tree.values])
        if kind is Size:
            return torch.Size(tree.dims)
        if kind is TorchValue:
            return self._torch_value(tree)
        return tree

    def _torch_value(self, value: TorchValue) -> Any:
        if value.kind == "device":
            return self.device if self.device is not None else torch.device(value.name)
        known = _CONSTANTS.get(value.kind, {})
        if value.name not in known:
            raise Unsupported(f"{value.kind} {value.name} is unknown to torch {torch.__version__}")
        return known[value.name]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        dtype = DTYPES.get(ref.dtype)
        if dtype is None:
            raise Unsupported(f"dtype {ref.dtype} is unknown to torch {torch.__version__}")
        memory = self.storages.get(ref.region)
        if memory is None:
            memory = self._unpack(ref, dtype) if ref.packed else self._load(ref.region)
            self.storages[ref.region] = memory
        tensor = torch.empty(0, dtype=dtype, device=self.target)
        offset = 0 if ref.packed else ref.offset
        return tensor.set_(memory.untyped_storage(), offset, ref.shape, ref.stride)

    def _load(self, number: int) -> torch.Tensor:
        region = self.regions[number].view(np.uint8)
        memory = torch.empty(region.size, dtype=torch.uint8, device=self.target)
        if region.size and self.target.type != "meta":
            memory.copy_(_as_tensor(region))
        return memory

    def _unpack(self, ref: TensorRef, dtype: torch.dtype) -> torch.Tensor:
        size = ref.extent * ITEMSIZE[ref.dtype]
        memory = torch.zeros(size, dtype=torch.uint8, device=self.target)
        if self.target.type == "meta":
            return memory
        block, dense = packing(ref.shape, ref.stride)
        source = _as_tensor(self.regions[ref.region].view(np.uint8)).view(dtype)
        raw, shape, stride = carrier(source, block, dense)
        _, _, spread = carrier(source, block, ref.stride)
        target = memory.view(raw.dtype).as_strided(shape, spread, 0)
        target.copy_(raw.as_strided(shape, stride, 0))
        return memory


def _as_tensor(region: npt.NDArray[Any]) -> torch.Tensor:
    if not region.flags.writeable:
        # torch has no read-only tensors and would warn; this one is only read.
        region = region.copy()
    return torch.from_numpy(region)


def _named(label: str, fields: tuple[str, ...], values: list[Any]) -> Any:
    module, _, name = label.rpartition(".")
    known = _RETURN_TYPES.get(name) if module == "torch.return_types" else None
    if known is not None and field_names(known) == fields:
        return known(values)
    return _named_class(name, fields)(*values)


@functools.lru_cache(maxsize=256)
def _named_class(name: str, fields: tuple[str, ...]) -> Any:
    if not name.isidentifier() or keyword.iskeyword(name):
        name = "NamedTuple"
    return namedtuple(name, fields, rename=True)
