"""What the conversions between tensors and bytes share."""

from __future__ import annotations

import torch

from spool.dtypes import ITEMSIZE

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)
}
"""torch's dtypes that this torch has, by name without prefix."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Their names without prefix."""

# Integers as wide as an element, for copies that must not interpret it: torch
# has no strided copy for some of its dtypes (uint4, bits8).
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unsupported(Exception):
    """A value cannot be stored; the call that holds it is skipped and counted.

    Parameters
    ----------
    reason : str
        Short and without values, e.g. ``"sparse tensor"`` or the type's name, so
        that equal reasons can be counted together.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of `dtype` without prefix, e.g. ``"bfloat16"``.

    Raises
    ------
    Unsupported
        For quantized dtypes, whose values depend on more than their bytes.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise Unsupported(f"{str(dtype).removeprefix('torch.')} tensor")
    return name


def type_label(kind: type) -> str:
    """Name a type the way a message or a skip reason does."""
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a named tuple or structure sequence, or None for a plain tuple."""
    fields = getattr(kind, "_fields", None)
    if fields is None and hasattr(kind, "n_sequence_fields"):
        fields = getattr(kind, "__match_args__", None)
    if isinstance(fields, tuple) and all(type(name) is str for name in fields):
        return fields
    return None


def carrier(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """`tensor` as integers that a strided copy does not interpret."""
    if tensor.dtype == torch.complex128:
        pairs = torch.view_as_real(tensor).view(torch.int64)
        return pairs, (*shape, 2), (*(2 * step for step in stride), 1)
    return tensor.view(_CARRIERS[tensor.element_size()]), shape, stride
