"""``npu_confusion_transpose``: a transposition and a reshape in one, in either order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def npu_confusion_transpose(
    self: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """``x.permute(perm).reshape(shape)``, or ``x.reshape(shape).permute(perm)``.

    Parameters
    ----------
    self : Tensor
        Of any dtype.
    perm : sequence of int
    shape : sequence of int
        What is reshaped to.
    transpose_first : bool

    Returns
    -------
    Tensor
        Contiguous.
    """
    if transpose_first:
        moved = self.permute(tuple(perm)).reshape(tuple(shape))
    else:
        moved = self.reshape(tuple(shape)).permute(tuple(perm))
    return moved.clone(memory_format=torch.contiguous_format)


def npu_confusion_transpose_backward(
    grad: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """The gradient of `npu_confusion_transpose`: both steps undone, in the other order.

    Parameters
    ----------
    grad : Tensor
        Of the result's shape.
    perm : sequence of int
        As in forward.
    shape : sequence of int
        Of the forward's *input*, as autograd hands it over.
    transpose_first : bool
        As in forward.

    Returns
    -------
    Tensor, of shape `shape`
        Contiguous.
    """
    inverse = sorted(range(len(perm)), key=lambda axis: perm[axis] % max(len(perm), 1))
    if transpose_first:
        permuted = [shape[axis] for axis in perm]
        moved = grad.reshape(permuted).permute(inverse)
    else:
        moved = grad.permute(inverse).reshape(tuple(shape))
    return moved.clone(memory_format=torch.contiguous_format)
