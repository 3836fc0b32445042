"""Fused operators of a device against their references, on small calls: a table of verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spool.errors import ConfigError
from spool.replay.fused.reference import Reference
from spool.replay.golden import raise_precision
from spool.replay.nest import map_arguments, map_leaves
from spool.replay.registry import find
from spool.replay.selfcases import DTYPES, Case, cases
from spool.standards import compare

Operators = Callable[[str], Callable[..., Any] | None]


@dataclass(frozen=True)
class Row:
    """What became of one call.

    Parameters
    ----------
    operator, what, dtype : str
    verdict : str
        ``pass``, ``warning``, ``error``, ``SKIP``; ``failed`` if it raised, ``absent`` if the
        device has no such operator.
    message : str
    """

    operator: str
    what: str
    dtype: str
    verdict: str
    message: str

    @property
    def is_bad(self) -> bool:
        """Whether the operator, or its reference, is wrong."""
        return self.verdict in ("error", "failed")


def operators_of(device: str) -> Operators:
    """How to find the operators of a device.

    Parameters
    ----------
    device : str
        ``npu``: those of torch_npu. ``cpu``, ``cuda``: the references themselves.

    Raises
    ------
    ConfigError
        If there is no such device here.
    """
    if device == "npu":
        try:
            import torch_npu  # noqa: F401
        except Exception as error:  # what it loads may be missing in any way
            raise ConfigError(
                f"torch_npu cannot be imported here ({type(error).__name__}: {error}); "
                "run this on the training host, or with --device cpu or cuda"
            ) from error
        return lambda name: getattr(torch.ops.npu, name, None)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU on this host; use --device cpu")
    return lambda name: _reference(name).function


def selftest(device: str, operators: Operators) -> Iterator[Row]:
    """Run every case on a device and on the CPU, and compare as a three-way call is.

    Parameters
    ----------
    device : str
    operators : callable
        Gives the device's operator by name, or None.
    """
    for dtype in DTYPES:
        for case in cases(dtype):
            verdict, message = _verdict(case, torch.device(device), operators(case.operator))
            yield Row(case.operator, case.what, str(dtype)[6:], verdict, message)


def _verdict(
    case: Case, device: torch.device, operator: Callable[..., Any] | None
) -> tuple[str, str]:
    if operator is None:
        return "absent", "not in this torch_npu"
    try:
        there = _run(case, operator, device, raised=False)
    except Exception as error:
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())[:200]
    function = _reference(case.operator).function
    host = torch.device("cpu")
    bench, golden = (_run(case, function, host, raised=raised) for raised in (False, True))
    judged = compare(f"NPU.{case.operator}", there, bench, golden)
    return str(judged.status), judged.message


def _run(case: Case, function: Callable[..., Any], device: torch.device, *, raised: bool) -> Any:
    def copied(leaf: Any) -> Any:
        return leaf.clone().to(device) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = map_arguments(case.args, case.kwargs, copied)
    if raised:
        args, kwargs = raise_precision(f"NPU.{case.operator}", args, kwargs)
    with torch.no_grad():
        result = function(*args, **kwargs)
    result = _reference(case.operator).chosen(result, case.args, case.kwargs)
    return map_leaves(result, lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)


def _reference(name: str) -> Reference:
    found = find(name)
    assert found is not None, name
    return found
