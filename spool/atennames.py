"""Which ATen operators Spool knows: those that the autograd engine runs and replay may run.

``Aten.x`` stands for ``torch.ops.aten.x``; which overload it was is kept beside the name.
Many kernels of ATen trust indices, sizes and statistics that the public functions above
them check, and read or write out of bounds if they are wrong. So an operator is known
only if it belongs to one of three groups, and nothing else in a shard can be called:

* The operator *is* a public function that `spool.apinames` lists: torch implements both
  by the same entry, checks included.
* `CHECKING`: not public, but its kernel checks what it is given, or walks its arguments
  with torch's broadcasting iterator, which does.
* `TRUSTING`: its kernel trusts its arguments; `spool.replay.backward` checks them first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


CHECKING = (
    # Elementwise.
    words(
        "_conj_physical _masked_scale _prelu_kernel _prelu_kernel_backward _safe_softmax _softmax"
        " _log_softmax _softmax_backward_data _log_softmax_backward_data _logcumsumexp _to_copy"
        " _standard_gamma_grad _dirichlet_grad _cast_Float _cast_Half _cast_Double"
        " binary_cross_entropy binary_cross_entropy_backward elu elu_ elu_backward gelu_"
        " gelu_backward glu glu_backward glu_jvp glu_backward_jvp hardshrink_backward hardsigmoid"
        " hardsigmoid_ hardsigmoid_backward hardswish hardswish_ hardswish_backward hardtanh"
        " hardtanh_backward huber_loss huber_loss_backward infinitely_differentiable_gelu_backward"
        " l1_loss leaky_relu leaky_relu_backward log_sigmoid log_sigmoid_forward"
        " log_sigmoid_backward logit_backward masked_scatter_backward mish mish_ mish_backward"
        " mse_loss mse_loss_backward native_dropout_backward relu6 relu6_ rrelu_with_noise_backward"
        " sigmoid_backward silu silu_ silu_backward smooth_l1_loss smooth_l1_loss_backward"
        " soft_margin_loss soft_margin_loss_backward softplus_backward softshrink_backward"
        " tanh_backward threshold_backward"
    )
    # Reductions, norms and products.
    | words(
        "_cdist_forward _convolution _euclidean_dist _linalg_det _linalg_eigh _linalg_slogdet"
        " _linalg_solve_ex _linalg_svd _trilinear chain_matmul cumprod_backward norm tensordot"
        " nll_loss_forward nll_loss2d_forward"
    )
    # Pooling, resampling, padding: sizes are checked against each other.
    | words(
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa"
        " _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward"
        " _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d"
        " _upsample_nearest_exact2d_backward _upsample_nearest_exact3d"
        " _upsample_nearest_exact3d_backward adaptive_max_pool2d adaptive_max_pool3d"
        " col2im im2col max_pool2d_with_indices"
        " max_pool3d_with_indices reflection_pad1d reflection_pad2d reflection_pad3d"
        " replication_pad1d replication_pad2d replication_pad3d upsample_bicubic2d"
        " upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward"
        " upsample_linear1d upsample_linear1d_backward upsample_nearest1d"
        " upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward"
        " upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d"
        " upsample_trilinear3d_backward"
    )
    # The gradient of taking a part: zeros of the whole, and a checked copy into the part.
    | words(
        "diagonal_backward index_select_backward masked_select_backward select_backward"
        " slice_backward trace_backward value_selecting_reduction_backward"
    )
)
"""Operators without a public function whose kernels check their arguments."""

TRUSTING = words(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_backward _fft_c2c _fft_c2r"
    " _fft_r2c avg_pool2d_backward avg_pool3d_backward"
    " _fused_rms_norm_backward _index_put_impl_ _native_batch_norm_legit"
    " _scaled_dot_product_flash_attention_for_cpu_backward _unsafe_index _unsafe_index_put"
    " _weight_norm_interface _weight_norm_interface_backward adaptive_max_pool2d_backward"
    " adaptive_max_pool3d_backward convolution_backward embedding_dense_backward"
    " fractional_max_pool2d_backward fractional_max_pool3d_backward index"
    " grid_sampler_2d_backward grid_sampler_3d_backward max_pool2d_with_indices_backward"
    " max_pool3d_with_indices_backward native_batch_norm_backward native_group_norm_backward"
    " native_layer_norm_backward nll_loss_backward nll_loss2d_backward reflection_pad1d_backward"
    " reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward"
    " replication_pad2d_backward replication_pad3d_backward unfold_backward"
)
"""Operators without a public function whose arguments must be checked before they run."""

# What a schema may take: values, and names of variants from a fixed list.
_TYPES = words(
    "Tensor int SymInt float number bool complex Device ScalarType Layout MemoryFormat Generator"
)
_STRINGS = words(
    "approximate mode rounding_mode reduce indexing driver UPLO side padding padding_mode pad_mode"
    " padding_side interpolation norm ord activation dim dims dimension"
)


def overloads(operator: str, public: Iterable[str]) -> dict[str, OpOverload]:
    """The overloads of an operator that replay may run, by name.

    Parameters
    ----------
    operator : str
        Without namespace.
    public : collection of str
        Operators that are public functions, see `spool.apinames`.

    Returns
    -------
    dict
        Empty if the operator is not known.
    """
    if operator in CHECKING or operator in TRUSTING:
        return _overloads(operator, out=False)
    return _overloads(operator, out=True) if operator in public else {}


@functools.cache
def _overloads(operator: str, *, out: bool) -> dict[str, OpOverload]:
    found: dict[str, OpOverload] = {}
    packet = getattr(torch.ops.aten, operator, None)  # a name of our own table, not of a shard
    for name in () if packet is None else packet.overloads():
        overload = getattr(packet, name)
        if isinstance(overload, OpOverload) and _allowed(overload._schema, out=out):
            found[name] = overload
    return found


def _allowed(schema: Any, *, out: bool) -> bool:
    """Whether an operator takes tensors and otherwise only harmless values."""
    if not out and any(argument.is_out for argument in schema.arguments):
        return False
    kinds = {_base_type(str(argument.type)) for argument in schema.arguments}
    strings = {a.name for a in schema.arguments if _base_type(str(a.type)) == "str"}
    return "Tensor" in kinds and kinds <= _TYPES | {"str"} and strings <= _STRINGS


def _base_type(kind: str) -> str:
    while kind.startswith(("Optional[", "List[")):
        kind = kind[kind.index("[") + 1 : -1]
    return kind
