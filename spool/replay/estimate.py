"""How much memory a call would take, found out before it runs.

A few bytes of arguments can order terabytes (``x.repeat(10**6, 10**6)``). The call is
run on the meta device first, where nothing is allocated or computed, and every
operator inside it is watched. What torch cannot size there hangs on the data and is
bounded by a rule of its own.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spool.apinames import Function
from spool.call import Call, TensorRef, leaves
from spool.dtypes import ITEMSIZE
from spool.names import base_name
from spool.replay.nest import Arguments, map_arguments, tensors

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class TooLarge(Exception):
    """A call would need more memory than there is."""


def format_bytes(count: float) -> str:
    """``1.5 GB``, in decimal units."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has: the GPU's, or this machine's or container's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def limit_process(limit: int) -> None:
    """Let allocations beyond `limit` bytes fail instead of waking the kernel's killer.

    Only for a process without CUDA, whose driver maps far more than it uses.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def check_stored(call: Call, limit: int) -> None:
    """Refuse a call whose tensors would be too large to make or to compare.

    A few bytes in a shard may stand for a tensor of any size: expanded axes have
    stride 0, and the gaps of a strided tensor are not stored.

    Raises
    ------
    TooLarge
        Naming the size and the limit.
    """
    extents: dict[int, int] = {}
    outputs = 0
    for number, tree in enumerate((call.args, call.kwargs, call.outputs, call.mutated)):
        for _, leaf in leaves(tree):
            if isinstance(leaf, TensorRef):
                size = ITEMSIZE[leaf.dtype]
                end = (leaf.extent + (0 if leaf.packed else leaf.offset)) * size
                extents[leaf.region] = max(extents.get(leaf.region, 0), end)
                if number >= 2:
                    outputs += math.prod(leaf.shape) * size
    _refuse_above(limit, sum(extents.values()), "arguments and outputs")
    _refuse_above(limit, outputs, "outputs")


def check_call(api: str, function: Function, arguments: Arguments, limit: int) -> None:
    """Refuse a call that would allocate more than there is.

    Raises
    ------
    TooLarge
        Naming the size and the limit.
    """
    needed = estimate(api, function, arguments, limit)
    if needed is not None:
        _refuse_above(limit, needed, "its result")


def _refuse_above(limit: int, needed: int, what: str) -> None:
    if needed > limit:
        raise TooLarge(
            f"{what} would take {format_bytes(needed)}, the limit is {format_bytes(limit)}"
        )


def estimate(api: str, function: Function, arguments: Arguments, limit: int) -> int | None:
    """Bytes of a call's result, or of the largest tensor made on the way, whichever is more.

    Parameters
    ----------
    api : str
        Prefixed or base name.
    function : callable
    arguments : tuple of args and kwargs
        Live; neither written nor read, except for the few operators whose result
        size hangs on values.
    limit : int
        Bytes at which watching ends.

    Returns
    -------
    int or None
        None if it cannot be told; such a call is left to the limits of its process.
    """
    args, kwargs = arguments
    base = base_name(api)
    if base in _BOUNDED:
        bound = _WIDEST * math.prod(max(t.numel(), 1) for t in tensors((args, kwargs)))
        if bound <= limit:
            return bound
    rule = _DATA_DEPENDENT.get(base)
    if rule is not None:
        try:
            return rule(args, kwargs)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return None
    meta_args, meta_kwargs = map_arguments(args, kwargs, _to_meta)
    watch = _Watch(limit)
    try:
        with torch.no_grad(), watch:
            result = function(*meta_args, **meta_kwargs)
    except TooLarge:
        return watch.largest
    except Exception:
        # Not sizable on meta, or a call that will fail for real, too.
        return watch.largest if watch.largest > limit else None
    return max(watch.largest, sum(_nbytes(tensor) for tensor in tensors(result)))


# Operators that make no tensor of more elements than the product of their arguments'
# sizes, which settles most small calls without running anything.
_BOUNDED = frozenset(
    {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "pow", "__pow__"}
    | {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "embedding", "softmax", "log_softmax"}
    | {"relu", "gelu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "layer_norm"}
    | {"rms_norm", "dropout", "sum", "mean", "cos", "sin", "transpose", "permute", "to", "float"}
    | {"contiguous", "clone", "detach", "masked_fill", "where", "maximum", "minimum"}
)
_WIDEST = 16  # bytes of a complex128


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest memory that any operator returns; ends the call above the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        if self.largest > self.limit:
            raise TooLarge
        return result


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return leaf


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of all elements, expanded axes counted in full: comparing visits each."""
    return tensor.numel() * tensor.element_size()


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, other: Any
) -> Any:
    return kwargs[name] if name in kwargs else args[at] if at < len(args) else other


def _largest_value(tensor: torch.Tensor) -> int:
    return int(tensor.max()) if tensor.numel() else 0


def _bincount(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = _argument(args, kwargs, 0, "input", None)
    least = _argument(args, kwargs, 2, "minlength", 0)
    return 8 * int(max(_largest_value(values) + 1, least))


def _one_hot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = _argument(args, kwargs, 0, "tensor", None)
    classes = _argument(args, kwargs, 1, "num_classes", -1)
    return 8 * int(values.numel() * (classes if classes >= 0 else _largest_value(values) + 1))


def _repeat_interleave(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = args[0]
    repeats = _argument(args, kwargs, 1, "repeats", values)
    dim = _argument(args, kwargs, 2, "dim", None)
    size = int(_nbytes(values))
    if isinstance(repeats, int):
        return size * repeats
    total = sum(repeats.flatten().tolist())
    if repeats is values:
        return int(8 * total)
    if repeats.numel() == 1:
        return int(size * total)
    rows = values.numel() if dim is None else values.shape[dim]
    return int(size // max(rows, 1) * total)


def _nonzero(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = _argument(args, kwargs, 0, "input", None)
    return int(8 * values.numel() * max(values.dim(), 1))


def _unique(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = _argument(args, kwargs, 0, "input", None)
    return int(_nbytes(values) + 16 * values.numel())


def _masked_select(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    values = _argument(args, kwargs, 0, "input", None)
    mask = _argument(args, kwargs, 1, "mask", None)
    shape = torch.broadcast_shapes(values.shape, mask.shape)  # type: ignore[no-untyped-call]
    return int(math.prod(shape) * values.element_size())


_DATA_DEPENDENT: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], int]] = {
    "bincount": _bincount,
    "one_hot": _one_hot,
    "repeat_interleave": _repeat_interleave,
    "nonzero": _nonzero,
    "argwhere": _nonzero,
    "unique": _unique,
    "unique_consecutive": _unique,
    "_unique": _unique,
    "_unique2": _unique,
    "masked_select": _masked_select,
}
