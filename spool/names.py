"""Names of calls and APIs: their alphabet, their parts, and which spellings mean the same.

A call's name is *prefix*, dotted path and counter: ``Torch.linalg.inv.0``. Without
prefix and counter it is the *base name*, by which standards and lists select.
"""

from __future__ import annotations

import re

# A name becomes a file name and a table cell, so its alphabet is fixed.
NAME = re.compile(
    r"(?P<api>[A-Za-z][A-Za-z0-9]*(?:\.[A-Za-z_][A-Za-z0-9_]*)+)\.(?P<index>0|[1-9][0-9]{0,11})"
)
MAX_NAME = 200
_SHARD_FILE = re.compile(r"(?P<order>[0-9]{6,12})\.(?P<name>.{1,200})\.h5")
PREFIXES = ("Functional", "Tensor", "Torch", "NPU", "Aten")

# torch reports `a + b` as Tensor.add, but `a - 1` and `a ** 2` under names of their own,
# and other tools wrote the Python operator's name. Names of one row mean each other; the
# first stands for all.
_SPELLINGS = (
    ("add", "__add__", "__radd__"),
    ("add_", "__iadd__"),
    ("sub", "__sub__"),
    ("rsub", "__rsub__"),
    ("sub_", "__isub__"),
    ("mul", "__mul__", "__rmul__"),
    ("mul_", "__imul__"),
    ("div", "__div__", "__truediv__"),
    ("rdiv", "__rdiv__", "__rtruediv__"),
    ("div_", "__idiv__", "__itruediv__"),
    ("floor_divide", "__floordiv__"),
    ("floor_divide_", "__ifloordiv__"),
    ("remainder", "__mod__"),
    ("remainder_", "__imod__"),
    ("pow", "__pow__"),
    ("pow_", "__ipow__"),
    ("matmul", "__matmul__"),
    ("neg", "__neg__"),
    ("positive", "__pos__"),
    ("abs", "__abs__"),
    ("bitwise_not", "__invert__"),
    ("bitwise_and", "__and__", "__rand__"),
    ("bitwise_and_", "__iand__"),
    ("bitwise_or", "__or__", "__ror__"),
    ("bitwise_or_", "__ior__"),
    ("bitwise_xor", "__xor__", "__rxor__"),
    ("bitwise_xor_", "__ixor__"),
    ("bitwise_left_shift", "__lshift__"),
    ("bitwise_right_shift", "__rshift__"),
    ("eq", "__eq__"),
    ("ne", "__ne__"),
    ("lt", "__lt__"),
    ("le", "__le__"),
    ("gt", "__gt__"),
    ("ge", "__ge__"),
)
_FUSED_PREFIX = "NPU."
_ALIASES: dict[str, tuple[str, ...]] = {name: row for row in _SPELLINGS for name in row}


def split_name(name: str) -> tuple[str, int]:
    """Split a call's name into API name and counter.

    Raises
    ------
    ValueError
        If `name` is not made of the fixed alphabet or is too long.
    """
    match = NAME.fullmatch(name) if len(name) <= MAX_NAME else None
    if match is None:
        raise ValueError(f"not a call name: {name[:80]!r}")
    return match["api"], int(match["index"])


def parse_shard_name(file: str) -> tuple[int, str] | None:
    """Return order and call name of a shard's file name, or None if it is not one."""
    match = _SHARD_FILE.fullmatch(file)
    if match is None or f"{int(match['order']):06d}" != match["order"]:
        return None
    try:
        split_name(match["name"])
    except ValueError:
        return None
    return int(match["order"]), match["name"]


def base_name(name: str) -> str:
    """Name without prefix and counter.

    ``Functional.linear.3`` and ``Functional.linear`` give ``linear``,
    ``Torch.linalg.inv.0`` gives ``linalg.inv``; a bare ``linear`` stays.
    """
    parts = name.split(".")
    if len(parts) > 1 and parts[-1].isdigit():
        parts = parts[:-1]
    if len(parts) > 1 and parts[0] in PREFIXES:
        parts = parts[1:]
    return ".".join(parts)


def spellings(base: str) -> tuple[str, ...]:
    """Every spelling that means the same as this base name, itself included."""
    return _ALIASES.get(base, (base,))


def canonical_name(name: str) -> str:
    """The base name by which all spellings of an API are listed: ``__add__`` gives ``add``."""
    return spellings(base_name(name))[0]


def is_fused(api: str) -> bool:
    """Whether a prefixed name is that of an operator of torch_npu."""
    return api.startswith(_FUSED_PREFIX)
