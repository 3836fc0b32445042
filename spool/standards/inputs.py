"""Facts about a call's inputs that explain an error later, without the tensors.

An output that is wrong because its inputs hold NaN, or that sums over many
elements, reads differently from one that is wrong by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from spool.names import base_name
from spool.standards.blocks import blocks
from spool.standards.structure import dtype_name

Fact: TypeAlias = "dict[str, str | int | float | list[int] | None]"
Arguments: TypeAlias = "tuple[Sequence[Any], Mapping[str, Any]]"

_IN_FP64 = (torch.float64, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@torch.no_grad()
def input_facts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Fact]:
    """Describe the tensors among a call's arguments.

    Returns
    -------
    list of dict
        One per tensor, in order, fit for JSON: ``path`` (``args[0]``,
        ``kwargs['weight']``), ``dtype``, ``shape``, ``count``, ``nan``, ``inf``
        and ``zeros`` (elements), and over the finite elements ``max_abs`` and
        ``mean_abs`` (None if there are none). Complex values count as pairs of
        reals; integers have magnitudes as floats.
    """
    roots: list[tuple[str, Any]] = [(f"args[{i}]", value) for i, value in enumerate(args)]
    roots += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    return [
        _describe(path, tensor) for root, value in roots for path, tensor in _tensors(root, value)
    ]


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(f"{path}[{index}]", item)


def _describe(path: str, tensor: torch.Tensor) -> Fact:
    nan = inf = zeros = finite = 0
    largest, total = 0.0, 0.0
    if tensor.numel():
        plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
        plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        wide = torch.float64 if plain.dtype in _IN_FP64 else torch.float32
        for _, (part,) in blocks([plain]):
            size = part.to(wide).abs()
            top = float(size.max())
            if not math.isfinite(top):
                found = int(size.isnan().count_nonzero())
                nan += found
                size = size[size.isfinite()]
                inf += part.numel() - found - size.numel()
                top = float(size.max()) if size.numel() else 0.0
            zeros += size.numel() - int(size.count_nonzero())
            finite += size.numel()
            largest = max(largest, top)
            total += float(size.sum(dtype=torch.float64))
    return {
        "path": path,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "count": nan + inf + finite,
        "nan": nan,
        "inf": inf,
        "zeros": zeros,
        "max_abs": largest if finite else None,
        "mean_abs": total / finite if finite else None,
    }


def reduction_length(api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many elements go into one output element; None if the API does not reduce.

    Parameters
    ----------
    api : str
        Base name or call name.
    args, kwargs : sequence, mapping
        As the call was made. What does not fit the API gives None.
    """
    name = base_name(api)
    rule = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if rule is None:
        return None
    try:
        return rule((args, kwargs))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def _argument(call: Arguments, position: int, *names: str, default: Any = None) -> Any:
    args, kwargs = call
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _last(position: int, *names: str) -> Callable[[Arguments], int]:
    def rule(call: Arguments) -> int:
        return int(_argument(call, position, *names).shape[-1])

    return rule


def _batched(call: Arguments) -> int:
    batch = _argument(call, 1, "batch1")
    return int(batch.shape[0] * batch.shape[-1])


def _bilinear(call: Arguments) -> int:
    weight = _argument(call, 2, "weight")
    return math.prod(weight.shape[1:])


def _convolution(call: Arguments) -> int:
    return math.prod(_argument(call, 1, "weight").shape[1:])


def _transposed(call: Arguments) -> int:
    weight = _argument(call, 1, "weight")
    return int(weight.numel() // weight.shape[1])


def _normalized(call: Arguments) -> int:
    shape = _argument(call, 1, "normalized_shape")
    return math.prod(shape if isinstance(shape, Sequence) else (shape,))


def _batch_norm(call: Arguments) -> int:
    tensor = _argument(call, 0, "input")
    return int(tensor.numel() // tensor.shape[1])


def _over_dims(position: int, *, needs_dim: bool = False) -> Callable[[Arguments], int | None]:
    def rule(call: Arguments) -> int | None:
        shape = _argument(call, 0, "input", "self").shape
        dims = _argument(call, position, "dim", "axis")
        if dims is None or isinstance(dims, bool):
            return None if needs_dim else math.prod(int(size) for size in shape)
        chosen = dims if isinstance(dims, Sequence) else (dims,)
        return math.prod([int(shape[dim]) for dim in chosen or range(len(shape))])

    return rule


_RULES: dict[str, Callable[[Arguments], int | None]] = {
    **dict.fromkeys(("matmul", "__matmul__", "linalg.matmul"), _last(0, "input", "tensor1")),
    **dict.fromkeys(("linear", "mm", "bmm", "mv", "dot", "vdot", "inner"), _last(0, "input")),
    "__rmatmul__": _last(1),
    **dict.fromkeys(("addmm", "addmv", "sspaddmm"), _last(1, "mat1", "mat")),
    "baddbmm": _last(1, "batch1"),
    "addbmm": _batched,
    "bilinear": _bilinear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("batch_norm", "instance_norm"), _batch_norm),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _over_dims(1, needs_dim=True)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), _over_dims(1, needs_dim=True)),
    **dict.fromkeys(("sum", "mean", "prod", "var", "std", "nansum", "nanmean"), _over_dims(1)),
    **dict.fromkeys(("amax", "amin", "var_mean", "std_mean"), _over_dims(1)),
    "norm": _over_dims(2),
}
