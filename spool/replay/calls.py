"""Replay one call, measure its outputs, and turn every failure into that call's row."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from spool.apinames import Function
from spool.call import Call
from spool.errors import BadShard
from spool.names import base_name, is_fused
from spool.records import CallHeader, Outcome, no_reference
from spool.replay import registry
from spool.replay.admission import check_arguments
from spool.replay.backward import check_operator
from spool.replay.estimate import check_call, check_stored
from spool.replay.execute import (
    Bench,
    autocast_dtype,
    chosen,
    compared,
    default_dtype,
    run,
    thaw_arguments,
    to_device,
)
from spool.replay.facts import describe_inputs
from spool.replay.fused.arguments import check_signature
from spool.replay.fused.reference import Unsupported
from spool.replay.golden import raise_precision, raised_default
from spool.replay.kernels import check_values
from spool.replay.randomness import REASONS, Determinism, determinism
from spool.replay.references import REFERENCES
from spool.replay.resolve import NoReference, resolve
from spool.replay.result import CallResult
from spool.standards.inputs import reduction_length
from spool.standards.measure import measure_three_way, measure_two_way
from spool.standards.rows import Route
from spool.tensors import DTYPES, thaw_all

_MAX_REASON = 300


class Poisoned(Exception):
    """The device is unusable for the rest of this process; carries the call's result."""

    def __init__(self, result: CallResult) -> None:
        super().__init__(result.reason)
        self.result = result


def replay_call(call: Call, header: CallHeader, bench: Bench, limit: int) -> CallResult:
    """Replay and measure one call.

    Parameters
    ----------
    call : Call
        As read from its shard.
    header : CallHeader
        Its route decides whether a golden is made.
    bench : Bench
    limit : int
        Most bytes that arguments, or any result, may take.

    Returns
    -------
    CallResult
        Measured; or skipped or failed with a reason.

    Raises
    ------
    BadShard
        If the call asks for something that is refused.
    Poisoned
        If the device failed in a way that later calls would feel.
    """
    try:
        function = resolve(call.api, call.overload)
        return _retried(lambda: _replay(call, header, function, bench, limit), bench)
    except NoReference as skip:
        return CallResult(header, Outcome.SKIPPED, skip.reason)
    except Unsupported as error:
        reason = no_reference(base_name(call.api), str(error))
        return CallResult(header, Outcome.SKIPPED, reason[:_MAX_REASON])
    except BadShard:
        raise
    except Exception as error:
        result = CallResult(header, Outcome.REPLAY_FAILED, describe(error))
        if _is_sticky(error):
            raise Poisoned(result) from error
        return result


def describe(error: BaseException) -> str:
    """``Class: text`` in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        # Its text has addresses and free bytes, which differ between equal runs.
        return "OutOfMemoryError: out of memory on the bench device"
    text = " ".join(str(error).split("\nException raised from")[0].split())
    return f"{type(error).__name__}: {text}"[:_MAX_REASON]


def _is_sticky(error: Exception) -> bool:
    """Whether CUDA will fail from now on whatever is called."""
    sticky = getattr(torch, "AcceleratorError", None)
    if sticky is not None and isinstance(error, sticky):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _retried(attempt: Callable[[], CallResult], bench: Bench) -> CallResult:
    try:
        return attempt()
    except torch.OutOfMemoryError:
        if bench.device.type != "cuda":
            raise
    # Outside the handler, whose traceback holds the first attempt's tensors.
    torch.cuda.empty_cache()
    return attempt()


def _replay(
    call: Call, header: CallHeader, function: Function, bench: Bench, limit: int
) -> CallResult:
    check_stored(call, limit)
    arguments = thaw_arguments(call, bench.device)
    check_arguments(call.api, arguments)
    check_values(call.api, arguments)
    if registry.is_own(base_name(call.api)) and is_fused(call.api):
        check_signature(base_name(call.api), function, *arguments)
    if isinstance(function, OpOverload):
        check_operator(function, arguments)
    kind = determinism(call.api, *arguments)
    if kind is not Determinism.ORDINARY:
        header = replace(header, random=kind is not Determinism.UNINITIALISED)
    if kind in REASONS:
        return CallResult(header, Outcome.SKIPPED, REASONS[kind])
    default = DTYPES[call.context.default_dtype]
    with default_dtype(default):
        check_call(call.api, function, arguments, limit)
    facts = describe_inputs(arguments)
    reduction = reduction_length(call.api, *arguments)
    autocast = autocast_dtype(call.context)
    tf32 = bench.allow_tf32 and call.context.allow_tf32
    if kind is Determinism.DROPOUT:
        # The share of zeros is a measurement, so a rerun must draw the same ones.
        torch.manual_seed(zlib.crc32(f"{call.rank} {call.step} {call.order} {call.name}".encode()))
    value = run(
        call,
        function,
        arguments,
        device=bench.device,
        autocast=autocast,
        default=default,
        allow_tf32=tf32,
    )
    del arguments
    dropout = kind is Determinism.DROPOUT
    if header.route == Route.TWO_WAY.value:
        trained = _trained(call, bench.device)
        outputs = measure_two_way(call.api, value, trained, dropout=dropout, reduction=reduction)
    else:
        header = replace(header, golden=bench.golden.type)
        golden = _golden(call, function, bench)
        trained = _trained(call, bench.device)
        outputs = measure_three_way(
            call.api, trained, value, golden, dropout=dropout, reduction=reduction
        )
    return CallResult(header, Outcome.MEASURED, "", outputs, facts)


def _golden(call: Call, function: Function, bench: Bench) -> Any:
    given = thaw_arguments(call, bench.golden)
    default = raised_default(call.api, *given, DTYPES[call.context.default_dtype])
    function = REFERENCES.get(base_name(call.api), function)
    arguments = raise_precision(call.api, *given)
    try:
        value = run(
            call,
            function,
            arguments,
            device=bench.golden,
            autocast=None,
            default=default,
            allocate=True,
        )
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or _is_sticky(error):
            raise
        raise RuntimeError(f"at raised precision: {describe(error)}") from error
    return to_device(value, bench.device)


def _trained(call: Call, device: torch.device) -> Any:
    """What the call gave in training, arranged like the replay's result."""
    outputs, *written = thaw_all([call.outputs, *call.mutated.values()], call.regions, device)
    return compared(chosen(call, outputs), written)
