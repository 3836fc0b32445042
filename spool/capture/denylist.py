"""Functions that are not captured although replay could run them: data, with reasons.

What torch does not declare overridable, what reaches outside of a call and what
has no value (shape queries, printing, ``item``, ``requires_grad_``) has no API
name in the first place, see `spool.apinames`; property getters and setters and
the entries of the autograd engine (``backward``, ``autograd.grad``) are never calls.
"""

from __future__ import annotations

UNWRITTEN = "allocates memory that was never written: no value to compare"
AUTOGRAD = "bookkeeping of autograd: the bytes do not change"
MOVE = "moves bytes between devices: nothing is computed"

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

_CASTS = "float double half bfloat16 int long short char byte bool cfloat cdouble chalf"
CONVERSIONS = frozenset({"to", "type", "type_as", "contiguous", *_CASTS.split()})
"""Base names of calls that compute only when they convert.

A cast to another dtype and a change of memory format are numerical work and are
captured, arguments and all. A call that returns its own input did nothing, and
one that only changed the device moved bytes: both are left out.
"""

COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor", "fsdp"})
"""Operator namespaces of torch.distributed."""
