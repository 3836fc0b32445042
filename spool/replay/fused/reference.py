"""What a reference of a fused operator is, and what references share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Unsupported(Exception):
    """A reference cannot compute what a call asks for; the text is ``argument=value``."""


Places = tuple[int, ...] | None
Compared = Places | Callable[[Sequence[Any], Mapping[str, Any]], Places]


@dataclass(frozen=True, slots=True)
class Reference:
    """What stands for a fused operator where there is no NPU.

    Parameters
    ----------
    function : callable
        With the operator's signature.
    compared : tuple of int, optional
        Positions of the results that are compared; all by default. Or a function that gives
        them for the positional and named arguments of a call, which it must not compute with.
    """

    function: Callable[..., Any]
    compared: Compared = None

    def chosen(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Those results of a call that are compared."""
        places = self.compared(args, kwargs) if callable(self.compared) else self.compared
        if places is None:
            return result
        return tuple(result[place] for place in places if place < len(result))


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the operators compute with it: fp32, or fp64 if it is that.

    The kernels of the NPU load fp16 and bf16, compute in fp32 and round once.
    """
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for that."""
    return torch.promote_types(dtype, torch.float32)
