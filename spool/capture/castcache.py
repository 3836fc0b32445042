"""Weights that autocast cast before they changed.

Within a region autocast casts each weight once and goes on with that, whatever becomes of
the weight. A call that was given a newer one computes with an older one, which no shard
can show: it is left alone, or a healthy operator would be called wrong.
"""

from __future__ import annotations

import weakref

import torch

from spool.capture.naming import Identity
from spool.capture.values import Tensors
from spool.names import base_name

CHANGED = "weight changed within an autocast region"

# Functions whose weights autocast casts to the lower precision, by base name.
_CASTING = frozenset(
    (
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "chain_matmul"),
        *("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "einsum", "gru", "gru_cell", "linear"),
        *("lstm", "lstm_cell", "matmul", "__matmul__", "__rmatmul__", "mm", "multi_dot"),
        *("multi_head_attention_forward", "mv", "prelu", "rnn_relu", "rnn_relu_cell"),
        *("rnn_tanh", "rnn_tanh_cell", "scaled_dot_product_attention"),
    )
)


class CastCache:
    """Which weights were cast in the current region, and at which version."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def is_stale(self, identity: Identity, found: Tensors) -> bool:
        """Whether a call uses the cast of a weight that has changed since.

        Parameters
        ----------
        identity : Identity
        found : list of (path, Tensor)
            The tensors among its arguments.
        """
        if not torch._C._is_any_autocast_enabled():
            # A part with autocast off does not end the region around it.
            if self._versions and not _nesting():
                self._versions.clear()
            return False
        if base_name(identity.api) not in _CASTING or not torch.is_autocast_cache_enabled():
            return False
        changed = [self._is_changed(tensor) for _, tensor in found if _is_cached(tensor)]
        return True in changed

    def _is_changed(self, tensor: torch.Tensor) -> bool:
        known = self._versions.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._versions[id(tensor)] = weakref.ref(tensor), tensor._version
            return False
        return tensor._version != known[1]


def _nesting() -> int:
    """How many regions the thread is in; looking changes nothing."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _is_cached(tensor: torch.Tensor) -> bool:
    """Whether torch keeps the cast of a tensor: one that a model learns, in float32."""
    return (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and not tensor.is_inference()
    )
