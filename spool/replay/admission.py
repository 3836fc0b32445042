"""What a call may not ask for, however much memory there is; found out before it runs.

Some kernels trust their callers: they walk several lists, or several tensors, by the
size of the first. And a few bytes can order work that takes for ever: an expanded
argument has any number of elements, a split any number of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spool.errors import BadShard
from spool.names import base_name
from spool.replay.estimate import TooLarge
from spool.replay.nest import Arguments, tensors

MAX_ELEMENTS = 1 << 36
MAX_RESULTS = 10**5

# Arguments of fused optimizers, in order; the first is the parameters.
_FUSED_LISTS = {
    "_fused_adagrad_": ("self", "grads", "state_sums", "state_steps"),
    "_fused_adam_": (
        *("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
    ),
    "_fused_adamw_": (
        *("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
    ),
    "_fused_sgd_": ("self", "grads", "momentum_buffer_list"),
}
# A list that may be empty, and the argument that tells whether it is read.
_OPTIONAL_LISTS = {"max_exp_avg_sqs": "amsgrad", "momentum_buffer_list": "momentum"}

_SPLITS = frozenset(
    {"split", "split_copy", "unsafe_split", "split_with_sizes", "split_with_sizes_copy"}
    | {"unsafe_split_with_sizes"}
)
_CHUNKS = frozenset({"chunk", "unsafe_chunk"})
_SECTIONS = frozenset({"tensor_split", "hsplit", "vsplit", "dsplit"})
_UNBINDS = frozenset({"unbind", "unbind_copy"})
_SIZE_NAMES = ("split_size_or_sections", "split_size", "split_sizes", "chunks", "sections")
_SECTION_NAMES = ("indices_or_sections", "tensor_indices_or_sections")


def check_arguments(api: str, arguments: Arguments) -> None:
    """Refuse arguments that a kernel would read beyond, or not come to the end of.

    Parameters
    ----------
    api : str
        Prefixed or base name.
    arguments : tuple of args and kwargs
        Live; not read, but for the number of parts of a ``tensor_split``.

    Raises
    ------
    BadShard
        If lists that belong together, or their tensors, are of different sizes.
    TooLarge
        If an argument has too many elements, or the call too many results.
    """
    base = base_name(api)
    if base in _FUSED_LISTS:
        _check_fused(base, *arguments)
    elif base.startswith("_foreach_"):
        _check_equal_lengths(base, arguments)
    most = max((tensor.numel() for tensor in tensors(arguments)), default=0)
    if most > MAX_ELEMENTS:
        raise TooLarge(f"an argument has {most} elements, the limit is {MAX_ELEMENTS}")
    results = _results(base, *arguments)
    if results > MAX_RESULTS:
        raise TooLarge(f"it would have {results} results, the limit is {MAX_RESULTS}")


def _check_equal_lengths(base: str, arguments: Arguments) -> None:
    args, kwargs = arguments
    lengths = {
        len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))
    }
    if len(lengths) > 1:
        raise BadShard(f"the lists of {base} are of different lengths")


def _check_fused(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    names = _FUSED_LISTS[base]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    lists = {name: _tensor_list(base, given.get(name)) for name in names}
    params = lists["self"]
    for name, items in lists.items():
        if not items and name in _OPTIONAL_LISTS and not given.get(_OPTIONAL_LISTS[name]):
            continue
        if len(items) != len(params):
            raise BadShard(f"the lists of {base} are of different lengths")
        for param, item in zip(params, items, strict=True):
            _check_state(base, name, param, item)
    for name in ("grad_scale", "found_inf", "lr"):
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise BadShard(f"{name} of {base} is not one number")


def _tensor_list(base: str, value: Any) -> list[torch.Tensor]:
    items = list(value) if isinstance(value, (list, tuple)) else []
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, torch.Tensor) for item in items
    ):
        raise BadShard(f"an argument of {base} is not a list of tensors")
    return items


def _check_state(base: str, name: str, param: torch.Tensor, item: torch.Tensor) -> None:
    if name == "state_steps":
        if item.numel() != 1:
            raise BadShard(f"a step of {base} is not one number")
        return
    if item.shape != param.shape:
        raise BadShard(f"the tensors of one element of {base} are of different shapes")
    # The kernel walks them as flat memory, whatever their strides.
    room = item.untyped_storage().nbytes() // item.element_size() - item.storage_offset()
    if item.numel() > room:
        raise BadShard(f"a tensor of {base} has fewer elements in memory than in its shape")


def _results(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """At least as many results as a call that takes a tensor apart would have."""
    if base not in _SPLITS | _CHUNKS | _SECTIONS | _UNBINDS:
        return 0
    tensor = next(_given_tensors(args, kwargs), None)
    if tensor is None or tensor.dim() == 0:
        return 0
    dim = kwargs.get("dim", _at(args, 1 if base in _UNBINDS else 2, 0))
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        return 0  # the call will say so itself
    size = tensor.shape[dim]
    if base in _UNBINDS:
        return size
    names = (*_SIZE_NAMES, *_SECTION_NAMES)
    parts = next((kwargs[name] for name in names if name in kwargs), _at(args, 1, 1))
    if isinstance(parts, (list, tuple)):
        return len(parts) + 1
    if isinstance(parts, torch.Tensor):
        parts = int(parts) if parts.dim() == 0 else parts.numel() + 1
    if not isinstance(parts, int):
        return 0
    if base in _SECTIONS:
        return parts
    return min(parts, size) if base in _CHUNKS else -(-size // max(parts, 1))


def _given_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    candidates = (*args[:1], kwargs.get("input"), kwargs.get("self"), kwargs.get("tensor"))
    return (item for item in candidates if isinstance(item, torch.Tensor))


def _at(args: Sequence[Any], position: int, default: Any) -> Any:
    return args[position] if position < len(args) else default
