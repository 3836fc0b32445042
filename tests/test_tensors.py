"""Live values to trees and back: bit for bit, stride for stride, alias for alias."""

from __future__ import annotations

import collections
import enum
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from spool.call import NamedTuple, Size, Slice, TensorRef, TorchValue, leaves
from spool.tensors import (
    DTYPES,
    Plan,
    Unsupported,
    copy_to_host,
    dtype_name,
    freeze,
    thaw,
    thaw_all,
)

Point = collections.namedtuple("Point", "x y")


def bits(tensor):
    """The elements of a tensor as bytes, in the order of its shape."""
    size = tensor.element_size()
    raw = tensor.resolve_conj().resolve_neg().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(raw, 0, (raw.nbytes(),), (1,)).numpy()
    resolved = tensor.resolve_conj().resolve_neg()
    start = resolved.storage_offset() * size
    strides = [step * size for step in resolved.stride()] + [1]
    shape = [*resolved.shape, size]
    if 0 in shape:
        return b""
    return np.lib.stride_tricks.as_strided(flat[start:], shape, strides).tobytes()


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.stride() == other.stride()
    assert bits(one) == bits(other)


def round_trip(value):
    (tree,), regions = freeze([value])
    return thaw(tree, regions)


def random_bytes(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_every_bit(name):
    dtype = DTYPES[name]
    tensor = torch.empty(0, dtype=dtype).set_(
        random_bytes(6 * dtype.itemsize).untyped_storage(), 0, (2, 3), (3, 1)
    )
    same(tensor, round_trip(tensor))
    same(tensor.as_strided((3, 2), (1, 3)), round_trip(tensor.as_strided((3, 2), (1, 3))))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_packed_bit_exactly(name):
    dtype = DTYPES[name]
    raw = random_bytes(9000 * dtype.itemsize)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 3, (4, 5), (2400, 7))
    (tree,), regions = freeze([tensor])
    assert tree.packed
    assert sum(region.nbytes for region in regions) == 20 * dtype.itemsize
    same(tensor, thaw(tree, regions))


def test_every_dtype_of_this_torch_is_known_or_quantized():
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in every - set(DTYPES.values()):
        assert str(dtype).startswith(("torch.qint", "torch.quint"))
        with pytest.raises(Unsupported, match=r"quint|qint"):
            dtype_name(dtype)


def test_nan_payloads_and_signed_zero():
    words = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1], np.uint32)
    tensor = torch.from_numpy(words.view(np.float32))
    back = round_trip(tensor)
    assert back.numpy().view(np.uint32).tolist() == words.tolist()


STRIDED = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "expanded scalar": lambda: torch.tensor(2.0).expand(5, 1, 2),
    "overlapping": lambda: torch.arange(8.0).unfold(0, 3, 1),
    "step": lambda: torch.arange(100.0)[7::9],
    "column": lambda: torch.arange(4000.0).view(40, 100)[:, 3],
    "columns": lambda: torch.arange(8000.0).view(40, 200)[:, 3:9],
    "expanded column": lambda: torch.arange(4000.0).view(40, 100)[:, 3].expand(2, 40),
    "overlapping and sparse": lambda: torch.arange(9000.0).as_strided((2, 2, 2), (4000, 1, 1)),
    "zero-size": lambda: torch.empty(3, 0, 2),
    "zero-size, strange strides": lambda: torch.arange(9.0).as_strided((0, 3), (100, 7), 5),
    "0-d": lambda: torch.tensor(-0.0),
    "0-d in a large storage": lambda: torch.arange(1000.0)[999],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "size one, odd stride": lambda: torch.arange(9.0).as_strided((1, 3), (77, 2), 1),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_strides_are_kept(make):
    tensor = make()
    same(tensor, round_trip(tensor))


def test_transposed_argument_has_its_stride():
    assert round_trip(torch.arange(6.0).view(2, 3).t()).stride() == (1, 3)


def test_only_what_is_used_is_copied_and_once():
    big = torch.arange(1_000_000, dtype=torch.float32)
    sizes = []

    def copy(source, nbytes):
        sizes.append(nbytes)
        return copy_to_host(source, nbytes)

    for argument in (big[500_000:500_010], big[::100_000], big.view(1000, 1000)[:10, 7]):
        sizes.clear()
        plan = Plan([argument, (argument, {"out": argument})])
        assert plan.nbytes == 40
        regions = [data.view(np.float32) for _, data in plan.copy(copy)]
        assert sizes == [40]
        trees = plan.trees
        first, (second, named) = thaw_all(trees, regions)
        same(argument, first)
        second.zero_()
        assert first.sum() == 0
        assert named["out"].sum() == 0


def test_aliasing_survives_and_disjoint_ranges_are_apart():
    base = torch.arange(10.0)
    trees, regions = freeze([base[:6], base[4:], base[:2], torch.arange(10.0)])
    assert len(regions) == 2
    one, two, three, other = thaw_all(trees, regions)
    one.fill_(-1)
    assert two.tolist() == [-1, -1, 6, 7, 8, 9]
    assert three.tolist() == [-1, -1]
    assert other.tolist() == list(range(10))
    trees, regions = freeze([base[:3], base[3:]])
    assert [region.nbytes for region in regions] == [12, 28]


def test_interleaved_views_share_one_region():
    qkv = torch.randn(2, 5, 3, 4)
    trees, regions = freeze(list(qkv.unbind(2)))
    assert len(regions) == 1
    for expected, actual in zip(qkv.unbind(2), thaw_all(trees, regions), strict=True):
        same(expected, actual)


def test_columns_of_a_large_matrix_are_apart_unless_they_meet():
    matrix = torch.arange(200_000, dtype=torch.float32).view(200, 1000)
    for columns, regions_wanted, nbytes in (
        ([matrix[:, 1], matrix[:, 7]], 2, 1600),
        ([matrix[:, 1], matrix[50:, 1:3]], 1, None),
        ([matrix[:, 1], matrix[:, 1], matrix[:, 2:4]], 2, 2400),
        ([matrix[:, 999], matrix[:, 0]], 2, 1600),
        ([matrix.as_strided((100, 4), (1000, 1), 998), matrix[:, 0]], 1, None),
        ([matrix[:, :400], matrix[:, 500:900]], 1, None),
        ([matrix[:, 1], matrix[::2, 1]], 1, None),
    ):
        trees, regions = freeze(columns)
        assert len(regions) == regions_wanted
        if nbytes is not None:
            assert sum(region.nbytes for region in regions) == nbytes
        back = thaw_all(trees, regions)
        for expected, actual in zip(columns, back, strict=True):
            same(expected, actual)
        copies = [column.clone() for column in columns]
        back[0].add_(1)
        columns[0].add_(1)
        for expected, actual in zip(columns, back, strict=True):
            assert torch.equal(expected, actual)
        columns[0].copy_(copies[0])


def test_views_of_several_dtypes_share_bytes():
    base = torch.arange(64, dtype=torch.uint8)
    views = [base[3:30], base[8:24].view(torch.float64), base[16:28].view(torch.int32)]
    trees, regions = freeze(views)
    assert [region.dtype for region in regions] == [np.uint8]
    back = thaw_all(trees, regions)
    for expected, actual in zip(views, back, strict=True):
        same(expected, actual)
    back[1].zero_()
    assert back[0][5:21].sum() == 0


def test_empty_tensors_of_different_storages_can_be_resized_apart():
    trees, regions = freeze([torch.empty(0), torch.empty(0, dtype=torch.int64)])
    values, indices = thaw_all(trees, regions)
    torch.max(torch.tensor([[1.0, 5.0]]), 1, out=(values, indices))
    assert values.tolist() == [5.0]
    assert indices.tolist() == [1]


def test_empty_views_of_one_storage_share_it():
    base = torch.arange(9.0)
    trees, regions = freeze([base[3:3], base[1:1].view(torch.int32), base[2:4]])
    assert [tree.offset for tree in trees] == [0, 0, 0]
    assert [region.nbytes for region in regions] == [0, 8]
    assert [list(value.shape) for value in thaw_all(trees, regions)] == [[0], [0], [2]]


def test_conjugate_and_negative_bits_are_resolved_with_strides_kept():
    base = torch.view_as_complex(torch.arange(12.0).view(2, 3, 2))
    for tensor in (base.conj(), base.t().conj(), base.conj().imag, base.conj()[:, 1].imag):
        back = round_trip(tensor)
        assert not back.is_conj()
        assert not back.is_neg()
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
    trees, regions = freeze([base, base.conj()])
    assert len(regions) == 2
    assert torch.equal(thaw_all(trees, regions)[1], base.conj())


def test_context_of_tensors():
    parameter = torch.nn.Parameter(torch.zeros(2))
    (tree,), regions = freeze([parameter])
    assert tree == TensorRef(0, "float32", (2,), (1,), 0, "cpu", True)
    assert not thaw(tree, regions).requires_grad
    assert type(thaw(tree, regions)) is torch.Tensor


def test_regions_are_numbered_from_the_first():
    trees, regions = freeze([torch.zeros(1), torch.zeros(1)], first_region=7)
    assert [tree.region for tree in trees] == [7, 8]
    assert len(regions) == 2


class Color(enum.IntEnum):
    RED = 2


PLAIN = [
    None,
    True,
    -3,
    1 << 64,
    -(1 << 200),
    1.5,
    -0.0,
    math.inf,
    -math.inf,
    2 - 3j,
    complex(math.inf, -0.0),
    "text",
    "\ud800 lone",
    Ellipsis,
    [],
    (),
    {},
    [1, (2, [None])],
    {"a": 1, 3: {"b": ()}},
    torch.float32,
    torch.quint8,
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.device("cpu"),
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.Size([-1]),
    slice(None),
    slice(1, None, 2),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_keeps_its_bits():
    nan = struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0]
    assert struct.pack(">d", round_trip(nan)).hex() == "fff8000000001234"


def test_subclasses_count_for_what_they_are():
    assert type(round_trip(Color.RED)) is int
    assert round_trip(collections.OrderedDict(a=1)) == {"a": 1}
    assert round_trip(np.float32(0.5)) == 0.5
    assert type(round_trip(np.float64(0.5))) is float
    assert type(round_trip(np.bool_(True))) is bool
    assert round_trip(np.int8(-4)) == -4


def test_indexing_arguments():
    x = torch.arange(24.0).view(2, 3, 4)
    index = (Ellipsis, None, slice(torch.tensor(1), 3), torch.tensor([0, 2]))
    (tree,), regions = freeze([index])
    assert isinstance(tree[2], Slice)
    back = thaw(tree, regions)
    assert back[0] is Ellipsis
    assert back[2].start == 1
    mask = x > 5
    assert torch.equal(x[round_trip(mask)], x[mask])


def test_named_tuples():
    (tree,), regions = freeze([Point(torch.ones(1), 2)])
    assert tree.fields == ("x", "y")
    back = thaw(tree, regions)
    assert type(back).__name__ == "Point"
    assert (back.x.item(), back.y) == (1, 2)


def test_return_types_come_back_as_they_were():
    value = torch.max(torch.arange(6.0).view(2, 3), 0)
    back = round_trip(value)
    assert type(back) is torch.return_types.max
    assert back.indices.tolist() == [1, 1, 1]


def test_thawed_names_are_never_code():
    tree = NamedTuple("os.system('x')", ("class", "_hidden", "ok"), (1, 2, 3))
    assert tuple(thaw(tree, [])) == (1, 2, 3)


def test_devices_are_rewritten():
    tree = (TorchValue("device", "npu:0"), Size((1,)))
    assert thaw(tree, [], "cpu") == (torch.device("cpu"), torch.Size([1]))


def test_meta_device_allocates_nothing():
    tree = TensorRef(0, "float32", (1 << 30,), (0,), 0)
    back = thaw(tree, [np.zeros(1, np.float32)], "meta")
    assert back.is_meta
    assert back.shape == (1 << 30,)


def test_regions_are_never_written_by_what_is_thawed():
    trees, regions = freeze([torch.ones(3)])
    for region in regions:
        region.setflags(write=False)
    thaw_all(trees, regions)[0].zero_()
    assert regions[0].tolist() == [1, 1, 1]


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("seen")


class Harmless(torch.Tensor):
    pass


def fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.zeros(2))


def cycle():
    value = []
    value.append(value)
    return value


UNSUPPORTED = {
    "sparse_coo tensor": lambda: torch.eye(2).to_sparse(),
    "sparse_csr tensor": lambda: torch.eye(2).to_sparse_csr(),
    "meta tensor": lambda: torch.zeros(2, device="meta"),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
    "uninitialized parameter": lambda: torch.nn.UninitializedParameter(),
    "FakeTensor": fake_tensor,
    "Wrapper": lambda: Wrapper([1.0]),
    "torch._C.Generator": lambda: torch.Generator(),
    "numpy.ndarray": lambda: np.zeros(2),
    "set": lambda: {1},
    "object": lambda: object(),
    "range": lambda: range(3),
    "function": lambda: torch.relu,
    "nesting too deep": cycle,
    "too many values": lambda: [0] * 300_000,
    "text too long": lambda: "x" * (1 << 21),
    "integer too long": lambda: 1 << (1 << 20),
    "dict with keys other than text and integers": lambda: {(1,): 2},
    "tensor of more than 64 axes": lambda: torch.zeros([1] * 65),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_values_are_named_when_they_are_planned(reason):
    with pytest.raises(Unsupported) as caught:
        Plan([torch.zeros(2), [UNSUPPORTED[reason]()]])
    assert reason in caught.value.reason


def test_a_tensor_whose_memory_was_taken_away_is_refused():
    x = torch.ones(1000)
    view = x[500:]
    x.untyped_storage().resize_(8)
    for tensor in (x, view):
        with pytest.raises(Unsupported, match="tensor without storage"):
            freeze([tensor])
    same(x[:2], round_trip(x[:2]))


def test_functorch_tensors_are_refused():
    reasons = []

    def probe(x):
        with pytest.raises(Unsupported) as caught:
            freeze([x])
        reasons.append(caught.value.reason)
        return x

    torch.func.vmap(probe)(torch.zeros(2, 3))
    torch.func.grad(lambda x: probe(x).sum())(torch.zeros(2))
    assert len(reasons) == 2


def test_harmless_subclass_is_a_tensor():
    tensor = torch.arange(3.0).as_subclass(Harmless)
    assert type(round_trip(tensor)) is torch.Tensor


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class WatchFunctions(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_training_does_not_notice():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    hidden = (weight * 2).t()
    strided = torch.randn(100, 100)[:, 0]
    conjugated = torch.randn(2, dtype=torch.complex64).conj()
    values = [weight, hidden, strided, conjugated]
    versions = [value._version for value in values]
    state = torch.get_rng_state()
    with Watch() as dispatch, WatchFunctions() as functions:
        freeze(values)
    assert dispatch.seen == []
    assert functions.seen == []
    assert torch.is_grad_enabled()
    assert [value._version for value in values] == versions
    assert torch.equal(torch.get_rng_state(), state)
    assert conjugated.is_conj()
    assert hidden.grad_fn is not None
    hidden.sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 3), 2.0))


def test_inference_tensors():
    with torch.inference_mode():
        tensor = torch.arange(4.0).view(2, 2).t()
        same(tensor, round_trip(tensor))
    same(tensor, round_trip(tensor))


def test_leaves_are_named_by_path():
    tree = [
        (1, {"w": None, 3: 2.0}),
        NamedTuple("P", ("x",), (Slice(None, 4, Ellipsis),)),
        Size((2,)),
    ]
    assert list(leaves(tree)) == [
        ("0.0", 1),
        ("0.1.w", None),
        ("0.1.3", 2.0),
        ("1.x.start", None),
        ("1.x.stop", 4),
        ("1.x.step", Ellipsis),
        ("2", Size((2,))),
    ]
    assert list(leaves(5)) == [("", 5)]
    assert list(leaves(5, "args")) == [("args", 5)]
    assert list(leaves([5], "args")) == [("args.0", 5)]


@pytest.mark.parametrize("pack_from", [0, 4096])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_views_of_any_storages(pack_from, data):
    """Random views: values, strides and mutual aliasing are those of the originals."""
    with pytest.MonkeyPatch.context() as patch:
        # From 0, small extents are packed and split, too.
        patch.setattr("spool._regions._PACK_FROM", pack_from)
        check_views(data)


def check_views(data):
    storages = [torch.arange(96, dtype=torch.int32) + 1000 * n for n in range(2)]
    tensors = []
    for _ in range(data.draw(st.integers(1, 5))):
        base = data.draw(st.sampled_from(storages))
        shape, stride, reach = [], [], 1
        for _ in range(data.draw(st.integers(0, 3))):
            size, step = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, 1, 2, 4, 12]))
            shape.append(size)
            stride.append(step)
            reach += max(size - 1, 0) * step
        offset = data.draw(st.integers(0, 96 - reach))
        tensors.append(base.as_strided(shape, stride, offset))
    trees, regions = freeze(tensors)
    back = thaw_all(trees, regions)
    for expected, actual in zip(tensors, back, strict=True):
        same(expected, actual)
    # Writing through one changes exactly what it changes among the originals.
    written = data.draw(st.integers(0, len(tensors) - 1))
    for group in (tensors, back):
        group[written].numpy()[...] = -7
    for expected, actual in zip(tensors, back, strict=True):
        assert expected.tolist() == actual.tolist()
