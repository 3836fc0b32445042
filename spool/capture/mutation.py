"""Which arguments a call writes: known before it runs, completed after.

Version counters alone do not tell (fused optimizers and running statistics
change tensors without moving them, inference tensors have none), so names,
operator schemas and a table of known writers say beforehand what may be written;
counters add what nobody listed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from spool.capture.naming import Identity
from spool.capture.values import Tensors, tensors
from spool.names import base_name


@dataclass(frozen=True)
class _Argument:
    name: str
    position: int

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
        """Path and value of the argument, if the call gives it."""
        if self.position < len(args):
            return f"args.{self.position}", args[self.position]
        if self.name in kwargs:
            return f"kwargs.{self.name}", kwargs[self.name]
        return None


@dataclass(frozen=True)
class _Writes:
    """Arguments that a function writes, if the argument `when` is true (None: always)."""

    written: tuple[_Argument, ...]
    when: _Argument | None = None

    def apply(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call writes them."""
        if self.when is None:
            return True
        found = self.when.of(args, kwargs)
        return found is not None and found[1] is not None and found[1] is not False


def _stats(first: int, when: str | None = "training") -> _Writes:
    written = (_Argument("running_mean", first), _Argument("running_var", first + 1))
    return _Writes(written, _Argument(when, 5) if when else None)


# Functions that write arguments although neither name, schema nor counter tells.
_TABLE: dict[str, _Writes] = {
    "Functional.batch_norm": _stats(1),
    "Functional.instance_norm": _stats(1, "use_input_stats"),
    "Functional.embedding": _Writes((_Argument("weight", 1),), _Argument("max_norm", 3)),
    "Functional.embedding_bag": _Writes((_Argument("weight", 1),), _Argument("max_norm", 3)),
}
_OPERATORS: dict[str, _Writes] = {
    "batch_norm": _stats(3),
    "instance_norm": _stats(3, "use_input_stats"),
    "native_batch_norm": _stats(3),
    "cudnn_batch_norm": _stats(3),
    "miopen_batch_norm": _stats(3),
    "batch_norm_gather_stats": _stats(3, None),
    "batch_norm_gather_stats_with_counts": _stats(3, None),
    "batch_norm_update_stats": _stats(1, None),
    "fused_moving_avg_obs_fake_quant": _Writes(
        (
            _Argument("running_min", 3),
            _Argument("running_max", 4),
            _Argument("scale", 5),
            _Argument("zero_point", 6),
        )
    ),
}
# What fused operators write besides: with amsgrad, the maximum so far.
_FUSED = {"npu_apply_adam_w": (_Argument("max_grad_norm", 8),)}
_TABLE |= {f"{prefix}.{op}": w for op, w in _OPERATORS.items() for prefix in ("Torch", "Aten")}

_NEVER = 1_000  # the position of an argument that is given by name only
_SELF = _Writes((_Argument("self", 0),))
_OUT = "out"


@functools.cache
def _writes(api: str) -> _Writes | None:
    """What an API writes, by table, operator schema or name."""
    if api in _TABLE:
        return _TABLE[api]
    base = base_name(api)
    if api.startswith("NPU."):
        schemas = torch._C._jit_get_schemas_for_operator(f"npu::{base}")
        return _declared(schemas, outputs=True, more=_FUSED.get(base, ()))
    if base.startswith(("_foreach_", "_fused_")):
        return _schema_writes(f"aten::{base}")
    if base == "__setitem__" or (base.endswith("_") and not base.endswith("__")):
        return _SELF
    return None


@functools.cache
def _overload_writes(overload: OpOverload) -> _Writes | None:
    return _declared([overload._schema], outputs=True)


def _schema_writes(operator: str) -> _Writes | None:
    # An output is named, never positional, and found under its own name.
    return _declared(torch._C._jit_get_schemas_for_operator(operator), outputs=False)


def _declared(
    schemas: Iterable[Any], *, outputs: bool, more: Iterable[_Argument] = ()
) -> _Writes | None:
    """What operator schemas say is written."""
    found = set(more) | {
        _Argument(argument.name, _NEVER if argument.kwarg_only else position)
        for schema in schemas
        for position, argument in enumerate(schema.arguments)
        if argument.is_write and (outputs or not argument.is_out)
    }
    return _Writes(tuple(sorted(found, key=lambda a: a.position))) if found else None


@dataclass(frozen=True)
class Watch:
    """Tensors that a call may write, looked at before it runs.

    Parameters
    ----------
    expected : dict of str to Tensor
        By path: written for certain.
    versions : list of (path, Tensor, int)
        Version counters of all tensor arguments that have one.
    """

    expected: dict[str, torch.Tensor]
    versions: list[tuple[str, torch.Tensor, int]]

    def written(self, result: object) -> dict[str, torch.Tensor]:
        """Tensors that the call wrote and did not return, by path.

        Parameters
        ----------
        result : object
            The call's return value.
        """
        changed = dict(self.expected)
        for path, tensor, version in self.versions:
            if tensor._version != version:
                changed.setdefault(path, tensor)
        if not changed:
            return {}
        returned = {id(tensor) for _, tensor in tensors(result, "")}
        return {path: tensor for path, tensor in changed.items() if id(tensor) not in returned}


def watch(
    identity: Identity, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Tensors
) -> Watch:
    """Look at a call's arguments before it runs.

    Parameters
    ----------
    identity : Identity
        Its schema, if it has one, else its name tells what is written.
    args, kwargs
        Live arguments.
    found : list of (path, Tensor)
        The tensors among them.
    """
    expected: dict[str, torch.Tensor] = {}
    rule = _writes(identity.api)
    if rule is None and identity.overload is not None:
        rule = _overload_writes(identity.overload)
    if rule is not None and rule.apply(args, kwargs):
        for argument in rule.written:
            given = argument.of(args, kwargs)
            if given is not None:
                expected.update(tensors(given[1], given[0]))
    if kwargs.get(_OUT) is not None:
        expected.update(tensors(kwargs[_OUT], f"kwargs.{_OUT}"))
    # Inference tensors have no counter.
    versions = [(path, t, t._version) for path, t in found if not t.is_inference()]
    return Watch(expected, versions)
