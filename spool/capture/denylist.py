"""Functions that are not captured although replay could run them: data, with reasons.

What torch does not declare overridable, what reaches outside of a call and what
has no value (shape queries, printing, ``item``, ``requires_grad_``) has no API
name in the first place, see `spool.apinames`; property getters and setters and
the entries of the autograd engine (``backward``, ``autograd.grad``) are never calls.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

UNWRITTEN = "allocates memory that was never written: no value to compare"
AUTOGRAD = "bookkeeping of autograd: the bytes do not change"
MOVE = "moves bytes between devices: nothing is computed"
COPY = "copies: nothing is computed"
CONSTANT = "fills memory with constants, from no tensor's values"

DENIED: dict[str, str] = {
    "empty_like": UNWRITTEN,
    "new_empty": UNWRITTEN,
    "new_empty_strided": UNWRITTEN,
    "empty": UNWRITTEN,
    "empty_strided": UNWRITTEN,
    "empty_permuted": UNWRITTEN,
    "detach": AUTOGRAD,
    "detach_": AUTOGRAD,
    "alias": AUTOGRAD,
    "cpu": MOVE,
    "npu": MOVE,
}
"""Base name to reason."""

# Inside the autograd engine, where every operator is seen.
DENIED_OPERATORS: dict[str, str] = {
    "clone": COPY,
    "copy_": COPY,
    "_chunk_cat": COPY,
    "_copy_from": COPY,
    "_copy_from_and_resize": COPY,
    "zero_": CONSTANT,
    "_reshape_alias": AUTOGRAD,
    "_unsafe_view": AUTOGRAD,
    "_linalg_check_errors": "checks, computes nothing",
    "_fused_sdp_choice": "chooses a kernel, computes nothing",
    "lift": AUTOGRAD,
    "lift_fresh": AUTOGRAD,
    "set_": AUTOGRAD,
    "resize_": UNWRITTEN,
    "_local_scalar_dense": "reads a number for the program",
    "item": "reads a number for the program",
    "is_same_size": "compares shapes",
    "record_stream": "bookkeeping of the allocator",
    "_assert_async": "checks, computes nothing",
    "_assert_scalar": "checks, computes nothing",
    "_assert_tensor_metadata": "checks, computes nothing",
}
"""Name of an ATen operator to reason."""


def is_silent(operator: OpOverload) -> bool:
    """Whether an ATen operator computes nothing from a tensor's values.

    Listed in `DENIED_OPERATORS`; or by what torch declares of it: it draws random
    numbers, makes a tensor from none, or returns a view.
    """
    name = operator._schema.name.removeprefix("aten::")
    if name in DENIED_OPERATORS or torch.Tag.nondeterministic_seeded in operator.tags:
        return True
    arguments, returns = operator._schema.arguments, operator._schema.returns
    if name.startswith(("new_", "zeros_", "ones_", "full_")):
        return True
    takes_tensor = any("Tensor" in str(a.type) and not a.is_out for a in arguments)
    return not takes_tensor or any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


_CASTS = "float double half bfloat16 int long short char byte bool cfloat cdouble chalf"
CONVERSIONS = frozenset({"to", "_to_copy", "type", "type_as", "contiguous", *_CASTS.split()})
"""Base names of calls that compute only when they convert.

A cast to another dtype and a change of memory format are numerical work and are
captured, arguments and all. A call that returns its own input did nothing, and
one that only changed the device moved bytes: both are left out.
"""

COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor", "fsdp"})
"""Operator namespaces of torch.distributed."""
