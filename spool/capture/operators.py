"""A kernel in front of every operator that computes, seen only where its key is included.

torch's dispatcher runs the kernel of the highest key in a thread's state. The key used
here is one of torch's own for modes, which nothing in torch uses; it lies above autograd
and autocast, so that an operator below it runs exactly as without it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import _ops
from torch._ops import OpOverload

from spool.capture.denylist import COLLECTIVES
from spool.capture.exits import raised_by_handler
from spool.capture.naming import Kind, Names

logger = logging.getLogger("spool")

Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_KEY_NAME = "TESTING_ONLY_GenericMode"
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_PRIVATE = "PrivateUse1"  # where the NPU is
# Operators of torch's compilers and of TorchScript: they compute nothing of their own.
_INTERNAL = COLLECTIVES | {"prim", "prims", "profiler", "inductor", "debugprims", "rngprims"}

_handler: Handler | None = None
_is_unable = False
_libraries: dict[str, Any] = {}
_known: set[str] = set()


def register(handler: Handler) -> bool:
    """Put `handler` in front of all operators that there are now and that compute.

    May be called again: then for those that have come since.

    Parameters
    ----------
    handler : callable
        Called in place of an operator, with the operator, a function that runs it, args
        and kwargs. Operators that the operator itself calls do not come to it.

    Returns
    -------
    bool
        False if this torch cannot.
    """
    global _handler, _is_unable
    if _is_unable:
        return False
    try:
        if "_" not in _libraries:
            _library("_").fallback(torch.library.fallthrough_kernel, _KEY_NAME)
            _let_through(_ops)
        for operator in _operators():
            kernel = functools.partial(_kernel, operator)
            _library(operator.namespace).impl(operator, kernel, _KEY_NAME, with_keyset=True)
    except Exception as error:  # whatever an older or newer torch does not have
        if raised_by_handler(error):
            raise
        _is_unable = True
        logger.warning(
            "torch %s does not show the operators inside backward, they are not captured: %s",
            torch.__version__,
            error,
        )
        return False
    _handler = handler
    return True


def included() -> Any:
    """Context in which operators of this thread, and of engines it starts, are seen."""
    return torch._C._IncludeDispatchKeyGuard(_key())


@functools.cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY_NAME)


@functools.cache
def _keys() -> Any:
    return torch._C.DispatchKeySet(_key())


def _let_through(ops: Any) -> None:
    """Let operators that torch dispatches in Python (cond, flex attention) overlook the key."""
    ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_key())
    for operator in ops._higher_order_ops.values():
        operator.fallthrough(_key())


def _library(namespace: str) -> Any:
    if namespace not in _libraries:
        library: Any = torch.library.Library
        _libraries[namespace] = library(namespace, "IMPL")
    return _libraries[namespace]


def _operators() -> Iterator[OpOverload]:
    """Operators that compute and are not composed of others on every device."""
    names = Names()
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if qualified in _known or namespace in _INTERNAL:
            continue
        _known.add(qualified)
        base, _, overload = name.partition(".")
        try:
            operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except (AttributeError, RuntimeError):  # of TorchScript only
            continue
        if names.identify(operator).kind is not Kind.SILENT and _has_kernels(qualified):
            yield operator


def _has_kernels(name: str) -> bool:
    devices = (*_BACKENDS.values(), _PRIVATE)
    return not all(_is_composite(name, device) for device in devices)


def _is_composite(name: str, backend: str) -> bool:
    """Whether torch composes an operator of others on a device."""
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, "CompositeImplicitAutograd")) and not (
        has(name, backend) or has(name, f"Autograd{backend}")
    )


@functools.cache
def _is_composed(operator: Any, device: str) -> bool:
    return _is_composite(operator.name(), _BACKENDS.get(device, _PRIVATE))


def _kernel(operator: OpOverload, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What torch calls in place of an operator, while the key is included."""
    run = functools.partial(_run, operator)
    if _is_apart(operator, args):
        return operator.redispatch(keyset.remove(_key()), *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(_keys()):
        return run(*args, **kwargs) if _handler is None else _handler(operator, run, args, kwargs)


def _is_apart(operator: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the operators inside an operator are to be seen.

    Those on the local shards of a distributed tensor, or what an operator is composed of.
    """
    try:
        tensor = next((item for item in _flat(args) if isinstance(item, torch.Tensor)), None)
        is_apart = type(tensor).__name__ == "DTensor" or _is_composed(operator, _device(tensor))
        return is_apart and not _has_numbers(operator, args)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return False  # then it is one call, whatever is inside


def _run(operator: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as torch would have, had it not come to us.

    As a function of Python it would first ask modes and tensor subclasses for their
    opinion, which happens above the dispatcher and is over.
    """
    if torch._C._has_torch_function(tuple(_flat((*args, *kwargs.values())))):
        with torch._C.DisableTorchFunction():
            return operator(*args, **kwargs)
    return operator(*args, **kwargs)


def _device(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "cpu"
    if type(tensor) is torch.Tensor:
        return tensor.device.type
    try:
        with torch._C.DisableTorchFunction():
            return tensor.device.type
    except Exception:  # a subclass's own code, which the program does not run here
        return "cpu"


def _has_numbers(operator: OpOverload, args: Iterable[Any]) -> bool:
    """Whether a number stands for a tensor, which only the operator itself can take back."""
    arguments = operator._schema.arguments
    return any(
        isinstance(value, (bool, int, float, complex)) and str(argument.type) == "Tensor"
        for argument, value in zip(arguments, args, strict=False)
    )


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
