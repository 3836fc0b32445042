"""Faults that sit below capture, as a wrong kernel would.

A defect is entered *before* ``spool.enable()``, so capture sees the healthy
function's name and arguments and the wrong numbers that came back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def gelu_fast(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Approximate gelu by a scaled sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def silu_half_precision(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Evaluate silu with a bf16 exponential."""
    return x / (1 + torch.exp(-x.bfloat16()).to(x.dtype))


def layer_norm_wrong_eps(
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Use 1e-2 where the caller asked for a smaller epsilon."""
    return torch.layer_norm(x, normalized_shape, weight, bias, 1e-2)


def linear_bf16_accumulate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply and accumulate in bf16, return the caller's dtype."""
    y = torch.matmul(x.bfloat16(), weight.t().bfloat16()).to(x.dtype)
    return y if bias is None else y + bias


def tanh_dropped_tail(x: torch.Tensor) -> torch.Tensor:
    """Leave the last two elements of the flattened output at zero."""
    y = torch.tanh(x).clone()
    y.view(-1)[-2:] = 0
    return y


DEFECTS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "gelu": (F.gelu, gelu_fast),
    "silu": (F.silu, silu_half_precision),
    "layer_norm": (F.layer_norm, layer_norm_wrong_eps),
    "linear": (F.linear, linear_bf16_accumulate),
    "tanh": (torch.tanh, tanh_dropped_tail),
}


def gelu_backward_without_density(
    grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor:
    """Forget the second term of gelu's derivative."""
    return grad * 0.5 * (1 + torch.erf(x * 0.5**0.5))


# Operators of the autograd engine, and their faulty kernels.
KERNELS: dict[str, Callable[..., torch.Tensor]] = {"gelu_backward": gelu_backward_without_density}


def defect(name: str) -> Defect | KernelDefect:
    """The defect of that name: a key of `DEFECTS` or of `KERNELS`."""
    return KernelDefect(name) if name in KERNELS else Defect(name)


class KernelDefect:
    """Replaces an operator's CPU kernel while entered.

    Parameters
    ----------
    name : str
        Key of `KERNELS`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def __enter__(self) -> KernelDefect:
        def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return KERNELS[self.name](*args, **kwargs)

        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl(self.name, kernel, "CPU")
        return self

    def __exit__(self, *error: object) -> None:
        self.library._destroy()


class Defect(TorchFunctionMode):
    """Replaces one function's result while entered.

    Parameters
    ----------
    name : str
        Key of `DEFECTS`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.healthy, self.faulty = DEFECTS[name]
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.healthy:
            self.calls += 1
            return self.faulty(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
