"""The allow-list: what a shard may name, and that every captured name comes back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spool import apinames
from spool.errors import BadShard
from spool.names import base_name, split_name
from spool.replay.resolve import NoReference, resolve

HOSTILE = [
    "Torch.load",
    "Torch.save",
    "Torch.from_file",
    "Torch.hub.load",
    "Torch.serialization.load",
    "Torch.os.mkdir",
    "Torch.sys.exit",
    "Torch.compile",
    "Torch.ops.load_library",
    "Torch.classes.load_library",
    "Torch.manual_seed",
    "Torch.set_default_device",
    "Torch.autocast",
    "Torch.zeros",
    "Torch.empty",
    "Torch.linalg.load",
    "Torch.linalg.__builtins__",
    "Torch.linalg.torch",
    "Torch.__builtins__",
    "Torch._C",
    "Torch._dynamo",
    "Torch._fused_dropout",
    "Torch._fused_sdp_choice",
    "Torch._foobar",
    "Functional.__builtins__",
    "Functional.torch",
    "Functional.importlib",
    "Functional.handle_torch_function",
    "Functional.boolean_dispatch",
    "Functional.linear.__call__",
    "Functional.linear.__self__",
    "Functional.",
    "Functional",
    "Tensor.apply_",
    "Tensor.map_",
    "Tensor.map2_",
    "Tensor.__reduce_ex__",
    "Tensor.__reduce__",
    "Tensor.__setstate__",
    "Tensor.__class__",
    "Tensor.__init__",
    "Tensor.__new__",
    "Tensor.__getattribute__",
    "Tensor.__setattr__",
    "Tensor.__torch_function__",
    "Tensor.__deepcopy__",
    "Tensor.__dlpack__",
    "Tensor.module_load",
    "Tensor.set_",
    "Tensor.resize_",
    "Tensor.resize_as_",
    "Tensor.numpy",
    "Tensor.tolist",
    "Tensor.item",
    "Tensor.storage",
    "Tensor.untyped_storage",
    "Tensor.data_ptr",
    "Tensor.record_stream",
    "Tensor.register_hook",
    "Tensor.backward",
    "Tensor.requires_grad_",
    "Tensor.share_memory_",
    "Tensor.pin_memory",
    "Tensor.cuda",
    "Tensor.grad",
    "Tensor.data.__set__",
    "Tensor.as_subclass",
    "Tensor._make_subclass",
    "Tensor.add.__class__",
    "Aten.from_file",
    "Aten.set_",
    "Aten.resize_",
    "Aten.record_stream",
    "Aten.save",
    "Aten.warn",
    "Aten.format",
    "Aten.append",
    "Aten._test_check_tensor",
    "Aten._backward",
    "Aten._print",
    "Aten.item",
    "Aten.manual_seed",
    "Aten.name",
    "Aten.__class__",
    "Aten.__dict__",
    "Aten._dir",
    "Aten.add.Tensor",
    "Aten.mm",
    "Aten.add",
    "Aten.max_pool2d_with_indices_backward",
    "Aten.adaptive_max_pool2d_backward",
    "Aten.segment_reduce",
    "Aten._ctc_loss",
    "Aten._log_softmax_backward_data",
    "Aten._sparse_coo_tensor_unsafe",
    "Aten._convert_indices_from_csr_to_coo",
    "Aten._embedding_bag_dense_backward",
    "Aten.native_layer_norm_backward",
    "Aten.add; import os",
    "Aten.",
    "os.mkdir",
    "builtins.eval",
    "Spool.enable",
    "",
    ".",
    "..",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_off_the_list_is_refused(name: str) -> None:
    with pytest.raises(BadShard, match="refused"):
        resolve(name)


def test_the_refusal_names_what_was_asked_for_and_is_short() -> None:
    with pytest.raises(BadShard) as caught:
        resolve("Torch." + "x" * 10_000)
    assert caught.value.reason.startswith("asks for 'Torch.xxx")
    assert caught.value.reason.endswith(", which is refused")
    assert len(caught.value.reason) < 200


def test_a_fused_operator_without_reference_is_no_bad_shard() -> None:
    with pytest.raises(NoReference) as caught:
        resolve("NPU.npu_my_op")
    assert caught.value.reason == "no reference for npu_my_op"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Functional.linear", F.linear),
        ("Functional.hardswish", F.hardswish),
        ("Functional.relu_", F.relu_),
        ("Tensor.add", torch.Tensor.add),
        ("Tensor.__getitem__", torch.Tensor.__getitem__),
        ("Tensor.__rtruediv__", torch.Tensor.__rtruediv__),
        ("Torch.matmul", torch.matmul),
        ("Torch.einsum", torch.einsum),
        ("Torch.linalg.inv", torch.linalg.inv),
        ("Torch.fft.rfft", torch.fft.rfft),
        ("Torch.special.expm1", torch.special.expm1),
        ("Torch._foreach_add_", torch._foreach_add_),
        ("Torch._fused_adamw_", torch._fused_adamw_),
        ("Torch.conv2d", F.conv2d),
    ],
)
def test_a_name_gives_its_function(name: str, function: object) -> None:
    assert resolve(name) == function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.conv2d, "Functional.conv2d"),
        (F.gelu, "Functional.gelu"),
        (torch.gelu if hasattr(torch, "gelu") else F.gelu, "Functional.gelu"),
        (torch.relu, "Torch.relu"),
        (F.relu, "Functional.relu"),
        (torch.relu_, "Functional.relu_"),
        (torch.Tensor.__abs__, "Tensor.abs"),
        (torch.Tensor.__pow__, "Tensor.__pow__"),
        (torch.linalg.svd, "Torch.linalg.svd"),
        (torch.ops.aten.mm.default, "Aten.mm"),
        (torch.ops.aten.add_.Tensor, "Aten.add_"),
        (torch.ops.aten.set_.source_Tensor, None),
        (torch.ops.aten.sum, None),
        (torch.ops.aten.from_file, None),
        (torch.ops.prims.sin, None),
        (torch.Tensor.T.__get__, None),
        (torch.Tensor.item, None),
        (torch.zeros, None),
        (len, None),
        ([], None),
    ],
)
def test_a_function_gives_its_name(function: object, name: str | None) -> None:
    assert apinames.name_of(function) == name


def test_every_name_that_capture_writes_comes_back_as_the_same_function() -> None:
    assert len(apinames.names()) > 1000
    for name in apinames.names():
        function = apinames.function_of(name)
        written = apinames.name_of(function)
        assert written is not None
        assert apinames.function_of(written) == function
        assert split_name(f"{written}.0") == (written, 0)
        assert base_name(f"{written}.0") == base_name(written)


def test_every_function_that_the_mode_reports_has_a_name_that_resolves() -> None:
    seen: dict[str, object] = {}

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = apinames.name_of(func)
            if name is not None:
                seen[name] = func
            return func(*args, **(kwargs or {}))

    x, image = torch.rand(4), torch.rand(1, 3, 8, 8)
    with Mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = (1 - x + 2 / (x + 1)) ** 2 // 3 @ x
        x[0] = y
        x *= 2
        F.max_pool2d(image, 2)
        F.max_pool2d(image, 2, return_indices=True)
        torch.unique(x)
        torch._foreach_mul_([x], 2.0)
        F.cross_entropy(image.flatten(1), torch.tensor([0]))
        torch.nn.LSTM(4, 4)(image[0, 0, :, :4])
        torch.nn.MultiheadAttention(4, 2)(x[None], x[None], x[None])
    expected = {
        "Tensor.__rsub__",
        "Tensor.__rdiv__",
        "Tensor.__pow__",
        "Tensor.__floordiv__",
        "Tensor.matmul",
        "Tensor.__setitem__",
        "Tensor.mul_",
        "Functional.max_pool2d",
        "Functional.max_pool2d_with_indices",
        "Torch.unique",
        "Torch._foreach_mul_",
        "Functional.cross_entropy",
        "Torch.lstm",
        "Functional.multi_head_attention_forward",
    }
    assert expected <= seen.keys()
    for name, function in seen.items():
        assert resolve(name) == function
