"""Schemas of the fused operators, as op-plugin publishes them."""

_ATTENTION = (
    "str input_layout, {star}Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
)
_REST = (
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, "
)

SCHEMAS = (
    "fast_gelu(Tensor self) -> Tensor",
    "npu_fast_gelu(Tensor self) -> Tensor",
    "npu_fast_gelu_backward(Tensor grad, Tensor self) -> Tensor",
    "npu_apply_adam.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar beta1, "
    "Scalar beta2, Scalar epsilon, Tensor grad, bool? use_locking, bool? use_nesterov, *, "
    "Tensor(a!) var, Tensor(b!) m, Tensor(c!) v) -> (Tensor(a!), Tensor(b!), Tensor(c!))",
    "npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, "
    "Scalar weight_decay, Scalar beta1, Scalar beta2, Scalar epsilon, Tensor grad, "
    "Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, "
    "Tensor(a!) var, Tensor(b!) m, Tensor(c!) v) -> (Tensor(a!), Tensor(b!), Tensor(c!))",
    "npu_confusion_transpose(Tensor self, int[] perm, SymInt[] shape, bool transpose_first) "
    "-> Tensor",
    "npu_confusion_transpose_backward(Tensor grad, int[] perm, SymInt[] shape, "
    "bool transpose_first) -> Tensor",
    "npu_layer_norm_eval(Tensor input, int[] normalized_shape, Tensor? weight=None, "
    "Tensor? bias=None, float eps=1e-05) -> Tensor",
    "npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "npu_linear_backward(Tensor grad, Tensor input, Tensor weight) -> (Tensor, Tensor)",
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, "
    + _ATTENTION.format(star="")
    + "float scale=1., "
    + _REST
    + "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", '
    "Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, "
    + _ATTENTION.format(star="*, ")
    + "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, "
    "Tensor? attention_in=None, float scale_value=1., "
    + _REST
    + "int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None) '
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor",
    "npu_rotary_mul_backward(Tensor grad, Tensor self, Tensor r1, Tensor r2, "
    "str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, "
    "bool fixed_triu_mask=False) -> Tensor",
    "npu_scaled_masked_softmax_backward(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, "
    "bool fixed_triu_mask) -> Tensor",
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor self, int dim=-1) -> Tensor",
    "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, "
    "float eps=0.00001) -> (Tensor, Tensor, Tensor)",
    "npu_mish(Tensor self) -> Tensor",
    "npu_mish_backward(Tensor grad, Tensor input) -> Tensor",
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
    "-> (Tensor, Tensor, Tensor)",
    "npu_sort_v2(Tensor self, int dim=-1, bool descending=False) -> Tensor",
    "npu_sort_v2.out(Tensor self, int dim=-1, bool descending=False, *, Tensor(a!) out) "
    "-> Tensor(a!)",
)
