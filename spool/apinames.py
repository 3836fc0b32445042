"""Which torch functions Spool knows, and their names: one table for capture and replay.

`name_of` gives a function its API name when it is captured, `function_of` gives
the function back when the name arrives in a shard. Names are looked up in a
table that is generated from what torch itself declares overridable; they are
never walked through with ``getattr``, so that a shard cannot name anything else.

=====================  ====================================================
name                   function
=====================  ====================================================
``Functional.x``       ``torch.nn.functional.x``
``Tensor.x``           ``torch.Tensor.x``
``Torch.x``            ``torch.x``, ``torch._foreach_x``, ``torch._fused_x_``
``Torch.linalg.x``     ``torch.linalg.x``; likewise ``fft`` and ``special``
``Aten.x``             ``torch.ops.aten.x``, see `spool.atennames`
``NPU.x``              ``torch.ops.npu.x`` (a name only: replay has no such function)
=====================  ====================================================

One function may be reachable by several names (``torch.conv2d`` is
``torch.nn.functional.conv2d``). All resolve; `name_of` gives the first by the
order of the table above, then public before private, shorter before longer.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional
import torch.overrides
from torch._ops import OpOverload, OpOverloadPacket

from spool.atennames import overloads, words

Function = Callable[..., Any]


class Refused(LookupError):
    """A name is not in the table."""


REACHES_OUTSIDE = (
    # Takes a callable, a pickle or a hook.
    words(
        "apply_ map_ map2_ module_load register_hook register_post_accumulate_grad_hook"
        " __reduce_ex__ __setstate__ __deepcopy__ triplet_margin_with_distance_loss"
    )
    # Hands out or replaces memory, or resizes to memory that was never written.
    | words(
        "set_ numpy __array__ __array_wrap__ __dlpack__ __dlpack_device__ data_ptr const_data_ptr"
        " storage untyped_storage storage_type share_memory_ pin_memory record_stream resize"
        " resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_"
    )
    # Runs autograd, or changes how later calls behave.
    | words("backward requires_grad_ retain_grad autocast")
    # Moves to devices that the checking host does not have.
    | words("cuda ipu xpu mtia")
    # Packs weights into opaque forms, whose readers trust what they get.
    | words(
        "to_mkldnn fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix"
        " fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation"
        " fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation"
        " fbgemm_linear_quantize_weight choose_qparams_optimized"
    )
)
"""Overridable functions that a shard may not ask for."""

VALUELESS = (
    # Metadata, printing and conversion to Python: nothing was computed.
    words(
        "__len__ __repr__ __format__ __reversed__ __bool__ __nonzero__ __int__ __long__ __index__"
        " __float__ __complex__ item tolist dim dim_order size numel nelement ndimension"
        " element_size storage_offset get_device is_coalesced is_complex is_conj is_contiguous"
        " is_distributed is_floating_point is_inference is_neg is_pinned is_same_size is_set_to"
        " is_shared is_signed is_nonzero sym_float sym_int sym_ite sym_max sym_min sym_not"
        " sym_sqrt sym_sum"
    )
    # Sparse and quantized tensors are not captured.
    | words(
        "coalesce ccol_indices col_indices crow_indices row_indices indices values dense_dim"
        " sparse_dim sparse_mask to_sparse int_repr qscheme q_per_channel_axis"
        " q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point"
        " quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic"
        " quantized_batch_norm quantized_gru_cell quantized_lstm_cell quantized_max_pool1d"
        " quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell"
        " quantized_rnn_tanh_cell indices_copy values_copy ccol_indices_copy col_indices_copy"
        " crow_indices_copy row_indices_copy"
    )
)
"""Overridable functions without a value to check."""

# They reach the function protocol, but torch does not list them. (What experts of a
# mixture multiply with is private; ``torch.nn.functional.grouped_mm`` calls it.)
UNLISTED: dict[str, tuple[str, ...]] = {
    "Functional": ("hardsigmoid", "hardswish"),
    "Tensor": ("unflatten",),
    "Torch": ("vander", "_grouped_mm"),
}

MADE_IN_C = (
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    ClassMethodDescriptorType,
)
"""Types of functions that nobody writes in Python."""

# Where torch writes the functions in Python that the table has.
_MODULES = {
    "torch.nn.functional": "Functional",
    "torch._tensor": "Tensor",
    "torch.functional": "Torch",
    "torch._lowrank": "Torch",
    "torch._lobpcg": "Torch",
    "torch._jit_internal": None,  # those that choose by a flag between two of the others
}

_c: Any = torch._C
C_MODULES = (_c._nn, _c._linalg, _c._fft, _c._special)
"""Modules in which torch looks up functions in C when they report a call."""

# Where torch keeps its functions in C, and what precedes their names there.
_C_HOMES: dict[str, tuple[tuple[Any, str], ...]] = {
    "Functional": ((_c._nn, ""), (_c._VariableFunctions, "")),
    "Tensor": ((_c.TensorBase, ""),),
    "Torch": ((_c._VariableFunctions, ""),),
    "Torch.linalg": ((_c._linalg, "linalg_"),),
    "Torch.fft": ((_c._fft, "fft_"),),
    "Torch.special": ((_c._special, "special_"),),
}


def name_of(func: object) -> str | None:
    """API name of a function that the function or dispatch protocol reported.

    Parameters
    ----------
    func : object
        As ``__torch_function__`` and ``__torch_dispatch__`` hand it over.

    Returns
    -------
    str or None
        None for everything that is not in the table: such a call is not captured.
    """
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        namespace, _, op = str(packet._qualified_op_name).partition("::")
        if namespace == "aten" and isinstance(func, OpOverload):
            return f"Aten.{op}" if func._overloadname in overloads(op, _public()) else None
        return f"NPU.{op}" if namespace == "npu" else None
    by_name, by_function = _tables()
    try:
        name = by_function.get(func)
    except TypeError:  # unhashable: certainly not a function of torch
        return None
    if name is None and isinstance(func, FunctionType) and is_torchs_own(func):
        # A program took its place before the table was made.
        name = f"{_MODULES.get(func.__module__)}.{func.__name__}"
        name = name if name in by_name else None
    return name


def function_of(api: str, overload: str = "") -> Function:
    """The function that an API name stands for.

    Parameters
    ----------
    api : str
        Prefixed name without counter.
    overload : str
        Of an ATen operator.

    Raises
    ------
    Refused
        If the name is not in the table; nothing is imported or looked up for it.
    """
    prefix, _, name = api.partition(".")
    if prefix == "Aten":
        function: Function | None = overloads(name, _public()).get(overload)
    else:
        function = None if overload else _tables()[0].get(api)
    if function is None:
        raise Refused(api)
    return function


def is_torchs_own(value: object) -> bool:
    """Whether a function that stands under a name of torch's was written there."""
    if isinstance(value, FunctionType):
        return is_torchs_module(value.__globals__)
    return isinstance(value, MADE_IN_C)


def is_torchs_module(names: Mapping[str, Any]) -> bool:
    """Whether the names of a module are of one whose functions the table has."""
    return names.get("__name__") in _MODULES


def made_in_c(home: Any, name: str) -> Any:
    """What torch itself put under a name of its class or of a module in C.

    Parameters
    ----------
    home : type or module
        ``torch.Tensor``, ``torch._C._nn``, ...
    name : str
        There.

    Returns
    -------
    method, descriptor, function or None
        None if it is found nowhere else.
    """
    if home is torch.Tensor:
        return vars(torch._C.TensorBase).get(name)
    for function in _tables()[0].values():
        if (
            isinstance(function, BuiltinFunctionType)
            and function.__module__ == home.__name__
            and function.__name__ == name
        ):
            return function
    return None


def names() -> list[str]:
    """Every name that `function_of` takes without an overload, sorted."""
    return sorted(_tables()[0])


@functools.lru_cache(maxsize=1)
def _public() -> frozenset[str]:
    """ATen operators that are public functions of torch.

    A function that torch writes in Python is not: it may check what the operator of its
    name trusts.
    """
    return frozenset(
        name.partition(".")[2].replace(".", "_")
        for name, function in _tables()[0].items()
        if not isinstance(function, FunctionType)
    )


@functools.lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, Function], dict[object, str]]:
    by_name: dict[str, Function] = {}
    by_function: dict[object, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own deprecated attributes
        declared = {
            f for group in torch.overrides.get_overridable_functions().values() for f in group
        }
        for prefix, namespace in _namespaces():
            known = dict(_members(prefix, namespace, declared))
            for name in sorted(known, key=lambda n: (n.startswith("_"), len(n), n)):
                function = known[name]
                if not is_torchs_own(function):
                    function = _torchs_own(prefix, name) or function
                by_name[f"{prefix}.{name}"] = function
                by_function.setdefault(function, f"{prefix}.{name}")
    return by_name, by_function


def _torchs_own(prefix: str, name: str) -> Function | None:
    """The function in C whose place a program took before this table was made."""
    if name == "logsigmoid":  # the only one that has another name in C
        name = "log_sigmoid"
    for home, before in _C_HOMES[prefix]:
        function: Function | None = getattr(home, before + name, None)
        if is_torchs_own(function):
            return function
    return None


def _namespaces() -> list[tuple[str, object]]:
    return [
        ("Functional", torch.nn.functional),
        ("Tensor", torch.Tensor),
        ("Torch", torch),
        ("Torch.linalg", torch.linalg),
        ("Torch.fft", torch.fft),
        ("Torch.special", torch.special),
    ]


def _members(
    prefix: str, namespace: object, declared: set[Function]
) -> Iterable[tuple[str, Function]]:
    """Functions of a namespace that are allowed: declared, in-place twins, optimizer operators."""
    found = {name: value for name in dir(namespace) if _is_function(value := _get(namespace, name))}
    listed = {name for name, value in found.items() if value in declared}
    if prefix == "Torch":  # some it lists where they are written: a program may replace one alone
        listed |= {name for name in found if _get(torch.functional, name) in declared}
    for name, value in found.items():
        if name in REACHES_OUTSIDE or name in VALUELESS:
            continue
        private = name.startswith("_") and not name.startswith("__")
        if (
            prefix == "Torch"
            and (
                name.startswith("_foreach_") or (name.startswith("_fused_") and name.endswith("_"))
            )
        ) or name in UNLISTED.get(prefix, ()):
            yield name, value
        elif private:
            continue
        elif name in listed:
            yield name, value
        elif prefix != "Tensor" and name.endswith("_") and name[:-1] in listed:
            yield name, value  # torch.relu_ is not listed; torch.relu is


def _get(namespace: object, name: str) -> Any:
    try:
        return getattr(namespace, name)
    except Exception:  # a property of the class, or a name that only raises a deprecation
        return None


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type) and _hashable(value)


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
