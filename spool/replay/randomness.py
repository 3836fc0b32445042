"""Which calls draw random numbers, decided from the API and its arguments.

A call that draws random numbers cannot be compared element by element. Dropout has
a rule of its own (share of zeros); everything else that is random is skipped, as is
a call that returns memory nobody wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from spool.names import base_name


class Determinism(str, Enum):
    """How the result of a call hangs on its arguments."""

    ORDINARY = "ordinary"
    DROPOUT = "dropout"
    RANDOM = "random"
    UNINITIALISED = "uninitialised"

    def __str__(self) -> str:
        return self.value


REASONS = {
    Determinism.RANDOM: "draws random numbers",
    Determinism.UNINITIALISED: "returns memory that was never written",
}


@dataclass(frozen=True, slots=True)
class _Argument:
    """Where an argument is: position, names it goes by, default when absent."""

    position: int
    names: tuple[str, ...]
    default: Any

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for name in self.names:
            if name in kwargs:
                return kwargs[name]
        return args[self.position] if self.position < len(args) else self.default


_P = _Argument(1, ("p",), 0.5)
_TRAIN = _Argument(2, ("training", "train"), True)
_EVAL = _Argument(2, ("training", "train"), False)

# Dropout that zeroes elements or channels, and dropout that writes no zeros.
_ZEROING = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"}
    | {"feature_dropout", "feature_dropout_", "native_dropout"}
)
_ALPHA = frozenset(
    {"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"}
)
# Random unless the caller brings the random numbers.
_GIVEN_SAMPLES = {
    "fractional_max_pool2d": _Argument(5, ("_random_samples",), None),
    "fractional_max_pool2d_with_indices": _Argument(5, ("_random_samples",), None),
    "fractional_max_pool3d": _Argument(5, ("_random_samples",), None),
    "fractional_max_pool3d_with_indices": _Argument(5, ("_random_samples",), None),
    "lobpcg": _Argument(3, ("X",), None),
}
_RRELU = {
    "rrelu": _Argument(3, ("training",), False),
    "rrelu_": _Argument(3, ("training",), False),
    "rrelu_with_noise": _Argument(4, ("training",), False),
    "rrelu_with_noise_": _Argument(4, ("training",), False),
}
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# Dropout inside a fused attention, by the share that is kept.
_KEEPING = {
    "npu_fusion_attention": _Argument(9, ("keep_prob",), 1.0),
    "npu_fusion_attention_grad": _Argument(1000, ("keep_prob",), 1.0),
}
# Random inside, in Python or without torch's tag.
_ALWAYS = frozenset({"gumbel_softmax", "pca_lowrank", "svd_lowrank", "_fused_dropout"})
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def determinism(api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Determinism:
    """Whether a call's result can be compared, and by which rule.

    Parameters
    ----------
    api : str
        Prefixed API name without counter.
    args, kwargs
        The live arguments.
    """
    base = base_name(api)
    if base in _UNINITIALISED:
        return Determinism.UNINITIALISED
    if base in _ZEROING:
        p, training = _P.of(args, kwargs), _TRAIN.of(args, kwargs)
        # native_dropout takes train=None for "in training".
        on = _positive(p) and (training is None or bool(training))
        return Determinism.DROPOUT if on else Determinism.ORDINARY
    return Determinism.RANDOM if _is_random(base, args, kwargs) else Determinism.ORDINARY


def _is_random(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if base in _ALPHA:
        return _positive(_P.of(args, kwargs)) and bool(_EVAL.of(args, kwargs))
    if base in _GIVEN_SAMPLES:
        return _GIVEN_SAMPLES[base].of(args, kwargs) is None
    if base in _RRELU:
        return bool(_RRELU[base].of(args, kwargs))
    if base in _RECURRENT:
        return _recurrent_dropout(base, args, kwargs)
    if base == "multi_head_attention_forward":
        p = _Argument(10, ("dropout_p",), 0.0).of(args, kwargs)
        return _positive(p) and bool(_Argument(13, ("training",), True).of(args, kwargs))
    if base in _ALWAYS:
        return True
    if base in _KEEPING:
        keep = _KEEPING[base].of(args, kwargs)
        return isinstance(keep, (int, float)) and keep < 1
    positions = _dropout_positions(base)
    if positions:
        return any(_positive(_Argument(p, ("dropout_p",), 0.0).of(args, kwargs)) for p in positions)
    return _tagged_random(base)


def _positive(p: Any) -> bool:
    return isinstance(p, (int, float)) and p > 0


def _recurrent_dropout(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Dropout between the layers: (input, hx, params, has_biases, num_layers, dropout, train, ...).

    The form for packed sequences has one more tensor, the batch sizes, in second place.
    """
    packed = 1 if base == "lstm" else 2
    shift = int(len(args) > packed and isinstance(args[packed], torch.Tensor))
    layers, p, train = (
        _Argument(position + shift, (name,), 0).of(args, kwargs)
        for position, name in ((4, "num_layers"), (5, "dropout"), (6, "train"))
    )
    return _positive(p) and bool(train) and isinstance(layers, int) and layers > 1


@functools.cache
def _dropout_positions(base: str) -> tuple[int, ...]:
    """Positions of ``dropout_p`` in the overloads of an operator, attention above all."""
    return tuple(
        sorted(
            {
                position
                for schema in _schemas(base)
                for position, argument in enumerate(schema.arguments)
                if argument.name == "dropout_p"
            }
        )
    )


@functools.cache
def _tagged_random(base: str) -> bool:
    """Whether torch marks an operator of this name as drawing from a random generator."""
    if not _schemas(base):
        return False
    packet = getattr(torch.ops.aten, base)
    # A name may have TorchScript overloads, which carry no tags.
    return any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


@functools.cache
def _schemas(base: str) -> tuple[Any, ...]:
    if not base.isidentifier():
        return ()
    return tuple(torch._C._jit_get_schemas_for_operator(f"aten::{base}"))
