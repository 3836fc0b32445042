"""The golden: the same call at raised precision.

fp16 and bf16 are raised to fp32, fp32 to fp64, everything else stays. The floating
dtypes of all tensor arguments decide together: if exactly one of the three occurs,
all its tensors are raised by that rule; if two or more occur, all are raised to fp32.
The golden always runs without autocast, which would lower what was raised.

Memory given as ``out`` takes no part: its dtype need not be what the call gives at
raised precision, so the golden allocates its own result. (A fused operator's ``out``
is raised like the rest: a fused optimizer starts from what is in it.) If no floating tensor
decides the result's dtype, torch's default dtype does, and is raised like a tensor's.

A dtype that is *named* (``dtype=torch.bfloat16``, ``x.to(torch.float16)``) is raised
by the same rule, and at least to what the tensors are raised to: a softmax over bf16
with ``dtype=torch.float32`` has an fp64 golden, else the golden would be no better
than the bench.
"""

from __future__ import annotations

from typing import Any

import torch

from spool.names import base_name, is_fused
from spool.replay.nest import Arguments, map_arguments, tensors
from spool.standards.structure import dtype_class

RAISED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
}
_NOT_RAISED = frozenset({"type_as"})
# The published rule measures these against the bench at fp32.
_NOT_RAISED_FROM_FP32 = frozenset({"conv1d", "conv2d"})
# Arguments of fused optimizers that their kernels take as fp32 only.
_FLOATS = ("grad_scale", "found_inf")


def raise_precision(api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments of the golden; ``out`` stays as it is.

    Parameters
    ----------
    api : str
        Prefixed or base name.
    args, kwargs
        Live arguments that nobody else uses. Tensors that shared memory share it
        afterwards, and strides stay, if all tensors over that memory are of one dtype.

    Returns
    -------
    args, kwargs
    """
    if "out" in kwargs and not is_fused(api):
        inputs = {name: value for name, value in kwargs.items() if name != "out"}
        args, inputs = raise_precision(api, args, inputs)
        return args, inputs | {"out": kwargs["out"]}
    base = base_name(api)
    found = {t.dtype for t in tensors((args, kwargs))} & RAISED.keys()
    if base == "histc" and {t.dtype for t in tensors((args, kwargs))} == {torch.int64}:
        return map_arguments(args, kwargs, lambda leaf: _cast(leaf, torch.float32))
    if base == "view" and any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return args, kwargs  # looks at the bits, which raising would change
    if base in _NOT_RAISED or (base in _NOT_RAISED_FROM_FP32 and found == {torch.float32}):
        return args, kwargs
    target = torch.float32 if len(found) > 1 else RAISED.get(next(iter(found), torch.int64))
    raiser = _Raiser(target, mixed=len(found) > 1)
    for tensor in tensors((args, kwargs)):
        raiser.meet(tensor)
    args, raised = map_arguments(args, kwargs, raiser.leaf)
    if base.startswith("_fused_"):
        raised |= {name: kwargs[name] for name in _FLOATS if name in kwargs}
    return args, raised


def raised_default(
    api: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: torch.dtype
) -> torch.dtype:
    """torch's default dtype for the golden.

    Parameters
    ----------
    api : str
        Prefixed or base name.
    args, kwargs
        As the call had them.
    default : torch.dtype
        As the call found it.
    """
    inputs = {name: value for name, value in kwargs.items() if name != "out"}
    dtypes = {tensor.dtype for tensor in tensors((args, inputs))}
    if any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return default
    if base_name(api) in _NOT_RAISED | {"histc"}:
        return default
    return RAISED.get(default, default)


def like_out(result: Any, out: Any) -> Any:
    """A golden that was allocated, as numbers of the kind that the call's ``out`` holds.

    ``torch.eq(a, b, out=x)`` with floats `x` gives floats, without `x` bools.
    """
    if isinstance(result, torch.Tensor) and isinstance(out, torch.Tensor):
        if _kind(result.dtype) != _kind(out.dtype):
            return result.to(RAISED.get(out.dtype, out.dtype))
        return result
    if not isinstance(result, (list, tuple)) or not isinstance(out, (list, tuple)):
        return result
    if len(result) != len(out):
        return result
    parts = (like_out(part, given) for part, given in zip(result, out, strict=True))
    return tuple(parts) if isinstance(result, tuple) else list(parts)


def _kind(dtype: torch.dtype) -> str:
    return dtype_class(str(dtype).removeprefix("torch."))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) else leaf


class _Raiser:
    """Raises tensors memory by memory, so that aliases stay aliases."""

    def __init__(self, target: torch.dtype | None, mixed: bool) -> None:
        self.target = target
        self.mixed = mixed
        self.dtypes: dict[int, set[torch.dtype]] = {}
        self.memories: dict[int, torch.Tensor] = {}

    def meet(self, tensor: torch.Tensor) -> None:
        self.dtypes.setdefault(tensor.untyped_storage()._cdata, set()).add(tensor.dtype)

    def leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        return self._named(leaf) if isinstance(leaf, torch.dtype) else leaf

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.target is None or tensor.dtype not in RAISED or tensor.dtype == self.target:
            return tensor
        storage = tensor.untyped_storage()
        if len(self.dtypes[storage._cdata]) > 1:
            return tensor.to(self.target)
        memory = self.memories.get(storage._cdata)
        if memory is None:
            count = storage.nbytes() // tensor.element_size()
            memory = tensor.as_strided((count,), (1,), 0).to(self.target)
            self.memories[storage._cdata] = memory
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _named(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in RAISED:
            return dtype
        if self.mixed:
            return torch.float32
        raised = RAISED[dtype]
        return raised if self.target is None else torch.promote_types(raised, self.target)
