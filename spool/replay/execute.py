"""Run one call on the bench device as it ran in training.

The context of the call is restored: its autocast, no gradients, deterministic
algorithms where torch has them, its default dtype, TF32 only where the training device
used its like.
Arguments are fresh copies, so what a call writes is seen by nobody else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from spool.apinames import Function
from spool.call import Call, CallContext
from spool.names import base_name, is_fused
from spool.replay import registry
from spool.replay.golden import like_out
from spool.replay.nest import Arguments, at_path, map_leaves
from spool.tensors import DTYPES, thaw_all

_TENSOR_TYPE = re.compile(r"torch\.(?:[a-z_]+\.)?([A-Z][A-Za-z0-9]*Tensor)")

# Integer index arguments that the kernels of CPU and CUDA take as int64 only, by
# position and keyword; other devices take int32 as well.
_INDICES: dict[str, tuple[int, tuple[str, ...]]] = {
    "cross_entropy": (1, ("target",)),
    "nll_loss": (1, ("target",)),
    "multi_margin_loss": (1, ("target",)),
    "multilabel_margin_loss": (1, ("target",)),
    "one_hot": (0, ("tensor", "input")),
    "gather": (2, ("index",)),
    "scatter": (2, ("index",)),
    "scatter_": (2, ("index",)),
    "scatter_add": (2, ("index",)),
    "scatter_add_": (2, ("index",)),
    "scatter_reduce": (2, ("index",)),
    "scatter_reduce_": (2, ("index",)),
    "index_fill": (2, ("index",)),
    "index_fill_": (2, ("index",)),
    "index_copy": (2, ("index",)),
    "index_copy_": (2, ("index",)),
    "take": (1, ("index",)),
    "put": (1, ("index",)),
    "put_": (1, ("index",)),
    "take_along_dim": (1, ("indices",)),
}
_NARROW = (torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where calls are replayed.

    Parameters
    ----------
    device : torch.device
        The bench device.
    golden : torch.device
        Where the call at raised precision runs.
    allow_tf32 : bool
        Whether TF32 may be used for a call whose training device used its like.
    """

    device: torch.device
    golden: torch.device
    allow_tf32: bool = False


def thaw_arguments(call: Call, device: torch.device) -> Arguments:
    """Fresh live arguments of a call on a device, with aliases and strides as they were.

    Whatever names a device (a ``torch.device``, ``device="npu:0"``, the string given to
    ``Tensor.to`` or ``Tensor.type``) is rewritten to `device`.
    """
    args, kwargs = thaw_all([call.args, call.kwargs], call.regions, device)
    base = base_name(call.api)
    if isinstance(kwargs.get("device"), (str, int)):
        kwargs["device"] = device
    if base == "to":
        args = tuple(device if isinstance(item, str) else item for item in args)
    elif base == "type":
        args = tuple(_local_type(item) if isinstance(item, str) else item for item in args)
    return widen_indices(base, args, kwargs)


def _local_type(name: str) -> str:
    """``torch.npu.FloatTensor`` as the type of the same numbers on the host."""
    match = _TENSOR_TYPE.fullmatch(name)
    return f"torch.{match[1]}" if match else name


def widen_indices(base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert the index arguments that only other devices take as narrow integers."""
    if base not in _INDICES:
        return args, kwargs
    position, names = _INDICES[base]
    args = tuple(_widen(a) if number == position else a for number, a in enumerate(args))
    return args, {key: _widen(v) if key in names else v for key, v in kwargs.items()}


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.to(torch.int64)
    return value


def run(
    call: Call,
    function: Function,
    arguments: Arguments,
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    default: torch.dtype,
    allow_tf32: bool = False,
    allocate: bool = False,
) -> Any:
    """Call a function and return what is compared.

    Parameters
    ----------
    call : Call
        For the paths of what it wrote.
    function : callable
        From `spool.replay.resolve`.
    arguments : tuple of args and kwargs
        May be written.
    device : torch.device
        Where they are.
    autocast : torch.dtype or None
        Enabled with this dtype, or explicitly off.
    default : torch.dtype
        torch's default dtype during the call.
    allow_tf32 : bool
    allocate : bool
        The result is the call's own, not the memory given as ``out``.

    Returns
    -------
    object
        The result, followed by the arguments that the call wrote and did not
        return, as `compared` arranges them.

    Raises
    ------
    Exception
        Whatever the function raises.
    """
    args, kwargs = arguments
    fused = is_fused(call.api)
    # A fused optimizer's `out` holds what it starts from.
    out = kwargs.get("out") if allocate and not fused else None
    if out is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if isinstance(function, OpOverload):  # its own form takes nothing but `out`
            function = function.overloadpacket
    # No fused kernel asks autocast, but a reference is made of operators that do.
    with restored(device, None if fused else autocast, default, allow_tf32):
        result = function(*args, **kwargs)
        if device.type == "cuda":
            # A kernel's failure must be this call's, not the next one's.
            torch.cuda.synchronize(device)
    if out is not None:
        result = like_out(result, out)
        kwargs["out"] = result
        if call.outputs is None:  # such a call returns nothing where it is given memory
            result = None
    return compared(chosen(call, result), [at_path(args, kwargs, path) for path in call.mutated])


def chosen(call: Call, result: Any) -> Any:
    """Those results of a call that are compared: of some fused operators not all are."""
    reference = registry.find(base_name(call.api)) if is_fused(call.api) else None
    return result if reference is None else reference.chosen(result, call.args, call.kwargs)


def compared(result: Any, written: Sequence[Any]) -> Any:
    """Arrange a call's result and what it wrote for comparison.

    Without written arguments that is the result as it is; with them and a result of
    None (``x[...] = v``) it is what was written; otherwise a list of result and written.
    """
    if not written:
        return result
    if result is None:
        return written[0] if len(written) == 1 else list(written)
    return [result, *written]


@contextlib.contextmanager
def restored(
    device: torch.device, autocast: torch.dtype | None, default: torch.dtype, allow_tf32: bool
) -> Iterator[None]:
    """The state under which a call is replayed; everything is put back afterwards."""
    with (
        torch.no_grad(),
        torch.autocast(
            device.type, dtype=autocast, enabled=autocast is not None, cache_enabled=False
        ),
        _tf32(allow_tf32) if device.type == "cuda" else contextlib.nullcontext(),
        default_dtype(default),
    ):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _tf32(allow: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allow
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def autocast_dtype(context: CallContext) -> torch.dtype | None:
    """The dtype that autocast used where the call ran, None where it was off."""
    kind = context.device.partition(":")[0]
    return DTYPES.get(context.autocast.get(kind, ""))


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor of a nesting to a device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(value, move)
