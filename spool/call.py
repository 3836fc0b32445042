"""One captured API call, as plain data.

Nothing here knows torch: a `Call` holds numpy byte regions and trees of plain
values, so a shard can be written by a process without torch and read by rules
that never import it. `spool.tensors` converts between trees and live objects.

A *tree* is a plain value, one of the leaf classes below, or a nesting of
``list``, ``tuple``, ``dict``, `NamedTuple` and `Slice` over trees. Plain values
are ``None``, ``bool``, ``int`` (any width), ``float`` (inf and NaN included),
``complex``, ``str`` and ``Ellipsis``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Tree = Any
Region = npt.NDArray[Any]

# What one call may hold. The converter refuses more, so that no shard is written
# that a reader would refuse.
MAX_DEPTH = 32
MAX_NODES = 200_000
MAX_DIMS = 64
MAX_TEXT = 1 << 20
MAX_INT_BITS = 1 << 18


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of one of the call's regions.

    Parameters
    ----------
    region : int
        Index into `Call.regions`.
    dtype : str
        torch's name of the dtype without prefix, e.g. ``"bfloat16"``.
    shape, stride : tuple of int
        In elements, as torch reports them (stride 0 for expanded axes).
    offset : int
        In elements of `dtype`, from the region's first byte.
    device : str
        Where it lived in training, e.g. ``"npu:0"``.
    requires_grad : bool
        As it was when the call was made.
    packed : bool
        The region holds only the elements, densely and in the order of `shape`
        (axes of stride 0 once), because the strided extent is mostly gaps, for
        example one column of a large matrix. `stride` is still the original one.
    """

    region: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str = "cpu"
    requires_grad: bool = False
    packed: bool = False

    @property
    def extent(self) -> int:
        """Elements from the first to the last one touched; 0 if there are none."""
        return extent(self.shape, self.stride)

    @property
    def stored(self) -> int:
        """Elements that the region must hold from `offset` on."""
        return extent(*packing(self.shape, self.stride)) if self.packed else self.extent


@dataclass(frozen=True, slots=True)
class TorchValue:
    """A torch constant, by kind and name.

    `kind` is one of ``dtype``, ``device``, ``layout``, ``memory_format``; `name`
    is torch's own name of it without prefix (``"float32"``, ``"npu:0"``,
    ``"strided"``, ``"channels_last"``).
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A ``torch.Size``."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A ``slice`` whose parts are trees (None, ints or 0-d tensors)."""

    start: Tree
    stop: Tree
    step: Tree


@dataclass(frozen=True, slots=True)
class NamedTuple:
    """A named tuple or ``torch.return_types`` structure; `type` is only a label."""

    type: str
    fields: tuple[str, ...]
    values: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class CallContext:
    """The settings under which the call ran, and where in the program it was.

    Parameters
    ----------
    autocast : dict of str to str
        Device type to dtype name, for each device type with autocast enabled.
    default_dtype : str
        Dtype of results that no floating tensor decides (``torch.set_default_dtype``).
    module : str
        Dotted path of the innermost ``torch.nn.Module`` around the call, or "".
    stack : tuple of str
        ``file:line in function`` of the first frames outside torch and Spool,
        innermost first.
    forward : str
        Name of the forward call whose gradient an operator of the autograd engine
        computes, if known, else "".
    """

    autocast: dict[str, str] = field(default_factory=dict)
    grad_enabled: bool = True
    inference_mode: bool = False
    deterministic: bool = False
    allow_tf32: bool = False
    default_dtype: str = "float32"
    device: str = "cpu"
    torch_version: str = ""
    torch_npu_version: str = ""
    module: str = ""
    stack: tuple[str, ...] = ()
    forward: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One captured API call: identity, arguments, results, context, and the bytes.

    Parameters
    ----------
    api : str
        Prefixed API name without counter: ``Functional.linear``,
        ``Torch.linalg.inv``, ``Tensor.add``, ``NPU.npu_rms_norm``.
    index : int
        How many uses of `api` came before in this rank and step.
    rank, step, order : int
        `order` counts calls of the step as they were made; the elements of one
        list-of-tensors call share it.
    direction : str
        ``forward``, or ``backward`` for operators that the autograd engine ran.
    args : tuple of trees; kwargs : dict of str to tree
        As they were *before* the call.
    outputs : tree
        The return value, as it was after the call.
    mutated : dict of str to TensorRef
        Arguments that the call wrote and did not return, by path
        (``"args.0"``, ``"kwargs.out.1"``), as they were *after* the call.
    context : CallContext
    regions : list of numpy.ndarray
        One-dimensional. The bytes that the `TensorRef` leaves look into; inputs
        and outputs never share one, because they are of different times.
    overload : str
        Which overload of an ATen operator, e.g. ``Tensor`` or ``default``; "" for
        every other API.
    """

    api: str
    index: int
    rank: int
    step: int
    order: int
    direction: str
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    outputs: Tree
    mutated: dict[str, TensorRef]
    context: CallContext
    regions: list[Region]
    overload: str = ""

    @property
    def name(self) -> str:
        """The call's name: `api` and counter, e.g. ``Functional.linear.2``."""
        return f"{self.api}.{self.index}"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that the call holds."""
        return sum(region.nbytes for region in self.regions)


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last one that a strided view touches."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return last + 1


def packing(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the dense block that a packed `TensorRef` looks into.

    Axes of stride 0 repeat one element, so the block holds it once: their size
    becomes 1.
    """
    block = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    dense: list[int] = []
    step = 1
    for size in reversed(block):
        dense.append(step)
        step *= size
    return block, tuple(reversed(dense))


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield every leaf of a tree with its dotted path, in order.

    A leaf is whatever is not a nesting: plain values, `TensorRef`, `TorchValue`
    and `Size`. Items are named by position or key, the parts of a slice by
    ``start``, ``stop`` and ``step``, those of a named tuple by field; the path of
    a bare leaf is `path` itself.
    """
    items: Iterator[tuple[object, Tree]]
    if isinstance(tree, (list, tuple)):
        items = iter(enumerate(tree))
    elif isinstance(tree, dict):
        items = iter(tree.items())
    elif isinstance(tree, NamedTuple):
        items = zip(tree.fields, tree.values, strict=True)
    elif isinstance(tree, Slice):
        items = iter((("start", tree.start), ("stop", tree.stop), ("step", tree.step)))
    else:
        yield path, tree
        return
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key))
