"""``npu_apply_adam`` and ``npu_apply_adam_w``: one step of an optimizer on one parameter.

Both write their results into what they are given as ``out=(var, m, v)``, or by the names
of the operator's schema, ``var=``, ``m=`` and ``v=``. Scalars are numbers, or tensors of
one element.
"""

from __future__ import annotations

from typing import Any

import torch

from spool.replay.fused.reference import widen

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scalar = Any


def npu_apply_adam(
    beta1_power: Scalar,
    beta2_power: Scalar,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    epsilon: Scalar,
    grad: torch.Tensor,
    use_locking: bool | None = None,
    use_nesterov: bool | None = None,
    *,
    out: State | None = None,
    var: torch.Tensor | None = None,
    m: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> State:
    """A step of Adam (Kingma, Ba, 2015), with both corrections in the rate.

    ``m ← β₁ m + (1 - β₁) g``, ``v ← β₂ v + (1 - β₂) g²`` and
    ``var ← var - lr · sqrt(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (sqrt(v) + ε)``;
    with Nesterov's momentum ``β₁ m + (1 - β₁) g`` takes the place of m there.

    Parameters
    ----------
    beta1_power, beta2_power : float
        β₁ᵗ and β₂ᵗ of *this* step.
    lr, beta1, beta2, epsilon : float
    grad : Tensor
    use_locking : bool, optional
        Changes no number.
    use_nesterov : bool, optional
    out : tuple of Tensor (var, m, v), optional
        Of the shape of `grad`; hold what the step starts from, and then its results.
    var, m, v : Tensor, optional
        The same by name.

    Returns
    -------
    var, m, v : Tensor
        Those that were given. Computed in fp32 or better, each rounded once.

    Raises
    ------
    ValueError
        If they are not given.
    """
    state = _state("npu_apply_adam", out, var, m, v)
    x, mean, square = map(widen, state)
    g = widen(grad)
    mean = beta1 * mean + (1 - beta1) * g
    square = beta2 * square + (1 - beta2) * g * g
    rate = lr * _root(1 - beta2_power) / (1 - beta1_power)
    direction = beta1 * mean + (1 - beta1) * g if use_nesterov else mean
    x = x - rate * direction / (torch.sqrt(square) + epsilon)
    return _written(state, (x, mean, square))


def npu_apply_adam_w(
    beta1_power: Scalar,
    beta2_power: Scalar,
    lr: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    epsilon: Scalar,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    out: State | None = None,
    var: torch.Tensor | None = None,
    m: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> State:
    """A step of AdamW (Loshchilov, Hutter, 2019), with or without AMSGrad (Reddi et al., 2018).

    ``m ← β₁ m + (1 - β₁) g``, ``v ← β₂ v + (1 - β₂) g²``, ``s = v``, with AMSGrad
    ``s = s_max ← max(s_max, v)``, and
    ``var ← var · (1 - lr · λ) - lr · m / (1 - β₁ᵗ) / (sqrt(s / (1 - β₂ᵗ)) + ε)``.

    Parameters
    ----------
    beta1_power, beta2_power : float
        β₁ and β₂ to the power of the step *before*: the operator multiplies once more.
    lr, weight_decay, beta1, beta2, epsilon : float
    grad : Tensor
    max_grad_norm : Tensor, optional
        With `amsgrad`, s_max; is written.
    amsgrad : bool, optional
    maximize : bool, optional
        The gradient with its sign changed.
    out : tuple of Tensor (var, m, v), optional
    var, m, v : Tensor, optional
        As for `npu_apply_adam`.

    Returns
    -------
    var, m, v : Tensor
        Those that were given. Computed in fp32 or better, each rounded once.

    Raises
    ------
    ValueError
        If they are not given, or `max_grad_norm` is missing with `amsgrad`.
    """
    state = _state("npu_apply_adam_w", out, var, m, v)
    x, mean, square = map(widen, state)
    g = -widen(grad) if maximize else widen(grad)
    mean = beta1 * mean + (1 - beta1) * g
    square = beta2 * square + (1 - beta2) * g * g
    second = square
    if amsgrad:
        if max_grad_norm is None:
            raise ValueError("npu_apply_adam_w: amsgrad needs max_grad_norm")
        second = torch.maximum(widen(max_grad_norm), square)
        max_grad_norm.copy_(second)
    bias1, bias2 = 1 - beta1_power * beta1, 1 - beta2_power * beta2
    x = x * (1 - lr * weight_decay) - lr * (mean / bias1) / (torch.sqrt(second / bias2) + epsilon)
    return _written(state, (x, mean, square))


def _state(
    name: str,
    out: State | None,
    var: torch.Tensor | None,
    m: torch.Tensor | None,
    v: torch.Tensor | None,
) -> State:
    if out is not None:
        var, m, v = out
    if var is None or m is None or v is None:
        raise ValueError(f"{name}: out must be (var, m, v)")
    return var, m, v


def _root(value: Scalar) -> Scalar:
    return torch.sqrt(value) if isinstance(value, torch.Tensor) else value**0.5


def _written(state: State, results: tuple[torch.Tensor, ...]) -> State:
    for item, result in zip(state, results, strict=True):
        item.copy_(result)
    return state
