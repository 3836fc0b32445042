"""What is stored: values at call time, exactly, and nothing else changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import relu as relu_by_name

from spool.call import Call, Slice, TensorRef, TorchValue
from spool.tensors import thaw


def value(call: Call, tree: Any) -> Any:
    return thaw(tree, call.regions)


def test_in_place_call_keeps_the_argument_from_before_and_the_result_from_after(spooled):
    x = torch.tensor([3.0])
    call = spooled.one(lambda: x.add_(1))
    assert call.name == "Tensor.add_.0"
    assert value(call, call.args[0]).tolist() == [3.0]
    assert value(call, call.outputs).tolist() == [4.0]
    assert call.mutated == {}  # it is returned


def test_argument_that_is_changed_after_the_call_is_stored_as_it_was(spooled):
    def body():
        x = torch.tensor([1.0, 2.0])
        y = torch.exp(x)
        x.mul_(100)
        y.zero_()

    exp, _, _ = spooled.capture(body)
    assert value(exp, exp.args[0]).tolist() == [1.0, 2.0]
    assert torch.equal(value(exp, exp.outputs), torch.tensor([1.0, 2.0]).exp())


def test_strides_come_back(spooled):
    a = torch.arange(6.0).view(2, 3).t()
    call = spooled.one(lambda: torch.matmul(a, torch.ones(2, 4)))
    left = value(call, call.args[0])
    assert left.stride() == (1, 3)
    assert torch.equal(left, a)


def test_expanded_argument_keeps_stride_zero_and_little_room(spooled):
    wide = torch.ones(1, 1).expand(1000, 1000)
    call = spooled.one(lambda: torch.sum(wide))
    assert call.args[0].stride == (0, 0)
    assert call.nbytes <= 16


def test_view_of_a_large_storage_takes_only_its_own_bytes_and_once(spooled):
    small = torch.zeros(1 << 20)[5:15]
    call = spooled.one(lambda: torch.add(small, small))
    assert call.args[0].region == call.args[1].region
    (entry,) = spooled.store().shards(0, 0)
    assert entry.nbytes < 16 * 1024


def test_setitem_stores_the_index_and_the_written_tensor(spooled):
    x = torch.zeros(3, 4)
    mask = torch.tensor([True, False, True])

    def body():
        x[mask, ..., 1:3] = 7.0
        x[None, torch.tensor([0, 2])]

    write, read = spooled.capture(body)
    assert write.name == "Tensor.__setitem__.0"
    assert value(write, write.args[0]).sum() == 0
    found_mask, ellipsis, part = write.args[1]
    assert value(write, found_mask).tolist() == [True, False, True]
    assert ellipsis is Ellipsis
    assert part == Slice(1, 3, None)
    assert write.args[2] == 7.0
    assert set(write.mutated) == {"args.0"}
    assert torch.equal(value(write, write.mutated["args.0"]), x)
    assert read.name == "Tensor.__getitem__.0"
    assert read.args[1][0] is None
    assert value(read, read.args[1][1]).tolist() == [0, 2]


def test_dtype_and_memory_format_arguments(spooled):
    def body():
        torch.sum(torch.ones(2, 3, dtype=torch.float16), dim=-1, dtype=torch.float32)
        torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)

    total, to = spooled.capture(body)
    assert total.kwargs == {"dim": -1, "dtype": TorchValue("dtype", "float32")}
    assert to.kwargs == {"memory_format": TorchValue("memory_format", "channels_last")}
    assert to.outputs.stride == (48, 1, 12, 3)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (lambda x: x.to(torch.bfloat16), ["Tensor.to.0"]),
        (lambda x: x.double(), ["Tensor.double.0"]),
        (lambda x: x.to(torch.float32), []),
        (lambda x: x.to("cpu"), []),
        (lambda x: x.cpu(), []),
        (lambda x: x.float(), []),
        (lambda x: x.contiguous(), []),
        (lambda x: x.t().contiguous(), ["Tensor.t.0", "Tensor.contiguous.0"]),
        (lambda x: x.type(), []),
    ],
)
def test_conversions_are_captured_only_if_they_convert(spooled, body, names):
    x = torch.ones(2, 3)
    spooled.capture(lambda: body(x))
    assert spooled.names() == names


def test_unused_conversion_still_counts_as_a_use(spooled):
    x = torch.ones(2)
    spooled.capture(lambda: (x.to(torch.float32), x.to(torch.float64)))
    assert spooled.names() == ["Tensor.to.1"]


def test_dotted_names_and_named_outputs(spooled):
    x = torch.tensor([[2.0, 1.0], [1.0, 3.0]])

    def body():
        torch.linalg.svd(x)
        torch.linalg.inv(x)
        torch.fft.fft(x)
        torch.special.erf(x)
        torch.max(x, dim=0)

    svd, inv, fft, erf, top = spooled.capture(body)
    assert [c.name for c in (svd, inv, fft, erf)] == [
        "Torch.linalg.svd.0",
        "Torch.linalg.inv.0",
        "Torch.fft.fft.0",
        "Torch.special.erf.0",
    ]
    assert len(svd.outputs.values) == 3
    assert svd.outputs.fields == ("U", "S", "Vh")
    assert torch.equal(value(inv, inv.outputs), torch.linalg.inv(x))
    assert fft.outputs.dtype == "complex64"
    assert top.outputs.fields == ("values", "indices")


def test_out_arguments(spooled):
    out = torch.zeros(2)
    values, indices = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    x = torch.tensor([[1.0, 5.0], [7.0, 2.0]])

    def body():
        torch.add(torch.ones(2), 1, out=out)
        torch.max(x, 0, out=(values, indices))

    add, top = spooled.capture(body)
    assert value(add, add.kwargs["out"]).tolist() == [0, 0]
    assert value(add, add.outputs).tolist() == [2, 2]
    assert value(top, top.kwargs["out"][0]).tolist() == [0, 0]
    assert value(top, top.outputs.values[0]).tolist() == [7, 5]


def test_batch_norm_statistics_are_outputs_too(spooled):
    norm = torch.nn.BatchNorm1d(2)
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    calls = spooled.capture(lambda: (norm(x), norm.eval()(x)))
    training = next(c for c in calls if c.name == "Functional.batch_norm.0")
    assert set(training.mutated) == {"args.1", "args.2"}
    assert value(training, training.args[1]).tolist() == [0, 0]
    assert value(training, training.mutated["args.1"]).tolist() == pytest.approx([0.2, 0.4])
    evaluating = next(c for c in calls if c.name == "Functional.batch_norm.1")
    assert evaluating.mutated == {}


def test_operator_whose_schema_hides_what_it_writes(spooled):
    mean, var = torch.zeros(2), torch.ones(2)
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    call = spooled.one(lambda: torch.native_batch_norm(x, None, None, mean, var, True, 0.5, 1e-5))
    assert set(call.mutated) == {"args.3", "args.4"}
    assert value(call, call.args[3]).tolist() == [0, 0]
    assert value(call, call.mutated["args.3"]).tolist() == [1, 2]


def test_embedding_that_renormalizes_its_weight(spooled):
    weight = torch.full((3, 2), 4.0)
    ids = torch.tensor([1])
    call = spooled.one(lambda: F.embedding(ids, weight, max_norm=1.0))
    assert set(call.mutated) == {"args.1"}
    assert value(call, call.args[1])[1].tolist() == [4, 4]
    assert value(call, call.mutated["args.1"])[1].norm() == pytest.approx(1.0, abs=1e-3)


def test_inplace_flag(spooled):
    x = torch.tensor([-1.0, 2.0])
    relu, drop = spooled.capture(lambda: (F.relu(x, inplace=True), F.dropout(x, 0.0, True, True)))
    assert value(relu, relu.args[0]).tolist() == [-1, 2]
    assert value(relu, relu.outputs).tolist() == [0, 2]
    assert drop.name == "Functional.dropout.0"


def test_write_through_inference_tensors(spooled):
    def body():
        with torch.inference_mode():
            x = torch.zeros(2)
            x[0] = 5.0

    call = spooled.one(body)
    assert value(call, call.mutated["args.0"]).tolist() == [5, 0]
    assert call.context.inference_mode


def test_functions_imported_by_name_and_identity(spooled):
    gelu = F.gelu
    with spooled.enable():
        relu_by_name(torch.ones(1))
        assert gelu is F.gelu
        assert pickle.loads(pickle.dumps(F.relu)) is F.relu
    assert spooled.names() == ["Torch.relu.0"]


def test_result_is_the_same_object_and_exceptions_pass(spooled, said):
    x = torch.ones(2, requires_grad=True)
    with spooled.enable() as session:
        y = x * 2
        assert y.mul_(2) is y
        assert y.grad_fn is not None
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(TypeError):
            x + "a"  # type: ignore[operator]
        session.step()
    assert spooled.names() == ["Tensor.mul.0", "Tensor.mul_.0"]
    assert "hook failed" not in said()


def test_what_is_not_a_call(spooled):
    x = torch.ones(2, 2, requires_grad=True)

    def body():
        x.shape, x.T, x.grad, x.is_leaf, x.dtype, x.size(), x.dim(), x.numel(), len(x)
        x.detach(), x.requires_grad_(), x.stride(), x.data_ptr(), x.is_contiguous()
        torch.empty(3), torch.empty_like(x), torch.ones(2), torch.tensor([1])
        repr(x), f"{x}", x.sum, torch.is_tensor(x), torch.is_floating_point(x)
        x.grad = None
        x.data = x.data

    assert spooled.capture(body) == []
    assert spooled.store().rank_closed(0).steps == {}


def test_reading_a_number_is_not_a_call_but_the_sum_is(spooled):
    x = torch.ones(2)
    spooled.capture(lambda: (x.sum().item(), bool(x.sum() > 0), x.tolist()))
    assert spooled.names() == ["Tensor.sum.0", "Tensor.sum.1", "Tensor.gt.0"]


def test_without_backward_the_engine_runs_unseen(spooled):
    x = torch.tensor([2.0], requires_grad=True)

    def body():
        (x * x).sum().backward()
        torch.autograd.grad((x * x).sum(), x)

    spooled.capture(body, backward=False)
    assert spooled.names() == ["Tensor.mul.0", "Tensor.sum.0", "Tensor.mul.1", "Tensor.sum.1"]
    assert x.grad is not None
    assert x.grad.tolist() == [4.0]


def test_checkpointed_forward_is_captured_once(spooled):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for on in (False, True):
        x = torch.linspace(-3, 3, 7, requires_grad=True)
        if on:
            spooled.enable()
        for reentrant in (False, True):
            checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
        grads.append(x.grad)
    import spool

    spool.disable()
    assert [n for n in spooled.names() if ".sin." in n] == ["Torch.sin.0", "Torch.sin.1"]
    assert torch.equal(*grads)


def test_context(spooled):
    x = torch.ones(2, 3)
    w = torch.ones(4, 3)

    def body():
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            F.linear(x, w)

    call = spooled.one(body)
    assert call.context.autocast == {"cpu": "bfloat16"}
    assert not call.context.grad_enabled
    assert not call.context.inference_mode
    assert call.outputs.dtype == "bfloat16"
    assert call.args[1].dtype == "float32"
    assert call.context.device == "cpu"
    assert call.context.torch_version == str(torch.__version__)
    assert call.context.stack[0].startswith(f"{__file__}:")
    assert call.context.stack[0].endswith(" in body")


def test_module_path_names_where_in_the_model(spooled):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(2, 2)

        def forward(self, x):
            return F.gelu(self.up(x)) + 1

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = Net()
    calls = spooled.capture(lambda: (net(torch.ones(1, 2)), torch.sin(torch.ones(1))))
    assert [(c.api, c.context.module) for c in calls] == [
        ("Functional.linear", "Net.layers.0.up"),
        ("Functional.gelu", "Net.layers.0"),
        ("Tensor.add", "Net.layers.0"),
        ("Functional.linear", "Net.layers.1.up"),
        ("Functional.gelu", "Net.layers.1"),
        ("Tensor.add", "Net.layers.1"),
        ("Torch.sin", ""),
    ]


def test_requires_grad_and_special_floats(spooled):
    x = torch.tensor([float("nan"), -0.0, float("inf")], requires_grad=True)
    call = spooled.one(lambda: torch.neg(x))
    ref = call.args[0]
    assert isinstance(ref, TensorRef)
    assert ref.requires_grad
    stored = np.asarray(call.regions[ref.region]).view(np.uint32)
    assert stored.tolist() == x.detach().numpy().view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "meta tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), ""),
    ],
    ids=["sparse", "meta", "nested", "quantized"],
)
def test_tensors_that_cannot_be_stored_are_counted(
    spooled, make: Callable[[], torch.Tensor], reason, said
):
    x = make()
    with spooled.enable() as session:
        torch.clone(x)
        torch.sin(torch.ones(1))
        session.step()
    assert spooled.names() == ["Torch.sin.0"]
    skipped = spooled.store().step_closed(0, 0).skipped
    assert sum(skipped.values()) == 1
    assert reason in next(iter(skipped))
    assert "hook failed" not in said()


def test_argument_of_unknown_type_is_counted_with_its_type(spooled):
    class Odd:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "odd"

    with spooled.enable() as session:
        assert torch.sin(Odd()) == "odd"
        session.step()
    (reason,) = spooled.store().step_closed(0, 0).skipped
    assert "Odd" in reason
    assert spooled.names() == []
