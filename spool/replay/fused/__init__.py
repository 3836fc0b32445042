"""References of the NPU's fused operators, one file each, by name in `REFERENCES`."""

from __future__ import annotations

from spool.replay.fused.attention_problem import results_of_backward, results_of_forward
from spool.replay.fused.npu_apply_adam import npu_apply_adam, npu_apply_adam_w
from spool.replay.fused.npu_confusion_transpose import (
    npu_confusion_transpose,
    npu_confusion_transpose_backward,
)
from spool.replay.fused.npu_fast_gelu import npu_fast_gelu, npu_fast_gelu_backward
from spool.replay.fused.npu_fusion_attention import npu_fusion_attention
from spool.replay.fused.npu_fusion_attention_grad import npu_fusion_attention_grad
from spool.replay.fused.npu_group_norm_silu import npu_group_norm_silu
from spool.replay.fused.npu_layer_norm_eval import npu_layer_norm_eval
from spool.replay.fused.npu_linear import npu_linear, npu_linear_backward
from spool.replay.fused.npu_mish import npu_mish, npu_mish_backward
from spool.replay.fused.npu_moe_gating_top_k_softmax import npu_moe_gating_top_k_softmax
from spool.replay.fused.npu_rms_norm import npu_rms_norm, npu_rms_norm_backward
from spool.replay.fused.npu_rotary_mul import npu_rotary_mul, npu_rotary_mul_backward
from spool.replay.fused.npu_scaled_masked_softmax import (
    npu_scaled_masked_softmax,
    npu_scaled_masked_softmax_backward,
)
from spool.replay.fused.npu_sort_v2 import npu_sort_v2
from spool.replay.fused.npu_swiglu import npu_swiglu, npu_swiglu_backward
from spool.replay.fused.reference import Reference

REFERENCES = {
    function.__name__: Reference(function)
    for function in (
        npu_apply_adam,
        npu_apply_adam_w,
        npu_confusion_transpose,
        npu_confusion_transpose_backward,
        npu_fast_gelu,
        npu_fast_gelu_backward,
        npu_group_norm_silu,
        npu_layer_norm_eval,
        npu_linear,
        npu_linear_backward,
        npu_mish,
        npu_mish_backward,
        npu_moe_gating_top_k_softmax,
        npu_rms_norm,
        npu_rms_norm_backward,
        npu_rotary_mul,
        npu_rotary_mul_backward,
        npu_scaled_masked_softmax,
        npu_scaled_masked_softmax_backward,
        npu_sort_v2,
        npu_swiglu,
        npu_swiglu_backward,
    )
}
REFERENCES |= {
    "fast_gelu": Reference(npu_fast_gelu),
    "npu_fusion_attention": Reference(npu_fusion_attention, results_of_forward),
    "npu_fusion_attention_grad": Reference(npu_fusion_attention_grad, results_of_backward),
}
"""What stands for ``torch.ops.npu.<name>``."""
