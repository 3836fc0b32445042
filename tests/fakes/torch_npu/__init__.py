"""A stand-in for torch_npu where no NPU is: its fused operators, computed on the CPU.

The operators are registered in torch's dispatcher as torch_npu registers them, with the
same schemas and with backward operators of their own. Their kernels, in `kernels`, are
written apart from the references of Spool, and in another way, so that the two can be
held against each other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import gradients, kernels
from .schemas import SCHEMAS

__version__ = "2.9.0+standin"

_library = torch.library.Library("npu", "FRAGMENT")
_faults: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def _register() -> None:
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        _library.define(schema)
        kernel = getattr(kernels, name.removesuffix(".out"))
        _library.impl(name, _with_fault(name.removesuffix(".out"), kernel), "CPU")
    for name, (backward, context) in gradients.FORMULAS.items():
        torch.library.register_autograd(
            f"npu::{name}", backward, setup_context=context, lib=_library
        )


def _with_fault(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose first result may be made wrong, see `fault`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if name not in _faults:
            return result
        several = isinstance(result, tuple)
        first = result[0] if several else result
        wrong = _faults[name](first)
        if kwargs.keys() & {"var", "out"}:  # memory of the caller's
            first.copy_(wrong)
            return result
        return (wrong, *result[1:]) if several else wrong

    return run


@contextlib.contextmanager
def fault(name: str, wrong: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block an operator gives `wrong` of its first result."""
    _faults[name] = wrong
    try:
        yield
    finally:
        del _faults[name]


def _in_place(name: str) -> Callable[..., Any]:
    """An operator that is called with ``out=(var, m, v)``, which a schema cannot say."""
    operator = getattr(torch.ops.npu, name)

    def call(*args: Any, out: tuple[torch.Tensor, ...], **kwargs: Any) -> Any:
        var, m, v = out
        return operator(*args, **kwargs, var=var, m=m, v=v)

    call.__name__ = name
    return call


_register()
for _name in {schema.partition("(")[0].removesuffix(".out") for schema in SCHEMAS}:
    setattr(sys.modules[__name__], _name, getattr(torch.ops.npu, _name))
npu_apply_adam = _in_place("npu_apply_adam")
npu_apply_adam_w = _in_place("npu_apply_adam_w")
