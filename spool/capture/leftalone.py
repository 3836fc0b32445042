"""Calls that capture stays out of: what torch only records, and tensors without values."""

from __future__ import annotations

from typing import Any

import torch

from spool.capture.naming import Identity, Kind
from spool.capture.values import Tensors, is_distributed
from spool.names import base_name

COMPILED = "compiled graph"
FUNCTORCH = "functorch"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def in_transform() -> bool:
    """Whether a functorch transform is at work, whose engine runs on wrapped tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tracing() -> str | None:
    """Whether torch is recording operators rather than computing."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit tracing"
    if any(_is_recording(torch.__dict__.get(kind)) for kind in ("cuda", "npu")):
        return "graph capture"
    return None


def _is_recording(device: Any) -> bool:
    """Whether a device's current stream records a graph; older torch_npu cannot."""
    if device is None or not hasattr(device, "is_current_stream_capturing"):
        return False
    return bool(device.is_initialized() and device.is_current_stream_capturing())


def foreign(identity: Identity, found: Tensors) -> str | None:
    """Why a call's tensors are no values that can be stored, None if they may be.

    Parameters
    ----------
    identity : Identity
    found : list of (path, Tensor)
        The tensors among its arguments.
    """
    for _, tensor in found:
        if type(tensor) not in _PLAIN:
            if type(tensor).__name__ == "FakeTensor":
                return "fake tensor"
            if is_distributed(tensor) and not _elementwise(identity):
                return "DTensor"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return FUNCTORCH
        if tensor.is_meta:
            return "meta tensor"
    return None


def _elementwise(identity: Identity) -> bool:
    """Whether a call on DTensors is surely the same call on their local shards.

    In-place and optimizer calls cannot redistribute what they write; others may.
    """
    base = base_name(identity.api)
    return identity.kind is Kind.LIST or (base.endswith("_") and not base.endswith("__"))
