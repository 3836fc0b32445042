"""The shard: a standard HDF5 file that comes back as exactly the call it was."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
import zlib

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardmaker import make_call, same_call, text_of

from spool import shard
from spool._hdf5 import DATATYPES, Identity, checksum, compose
from spool.call import Call, CallContext, NamedTuple, Size, Slice, TensorRef, TorchValue
from spool.dtypes import ITEMSIZE, STORAGE, STORAGE_CODES
from spool.tensors import DTYPES, freeze, thaw_all


def round_trip(call, tmp_path):
    path = tmp_path / "call.h5"
    path.unlink(missing_ok=True)
    shard.write(call, path)
    return shard.read(path)


def test_a_call_comes_back(tmp_path):
    call = make_call()
    back = round_trip(call, tmp_path)
    assert same_call(call, back)
    assert all(region.flags.writeable for region in back.regions)


def test_encode_is_what_write_writes(tmp_path):
    call = make_call()
    size = shard.write(call, tmp_path / "call.h5")
    assert (tmp_path / "call.h5").read_bytes() == shard.encode(call)
    assert size == (tmp_path / "call.h5").stat().st_size


def test_hdf5_reads_it(tmp_path):
    call = make_call(
        regions=[
            np.arange(6, dtype=np.float32),
            np.arange(4, dtype=np.uint16),
            np.array([1.5, -0.0], np.float32),
        ]
    )
    path = tmp_path / "call.h5"
    shard.write(call, path)
    with h5py.File(path, "r", locking=False) as file:
        attributes = {name: value.item() for name, value in file.attrs.items()}
        assert attributes == {
            "spool_format": 1,
            "api": b"Functional.linear",
            "index": 2,
            "rank": 0,
            "step": 3,
            "order": 17,
            "direction": b"forward",
            "crc": zlib.crc32(file["call"][:].tobytes()),
        }
        assert list(file) == ["call", "storage"]
        assert sorted(file["storage"]) == ["0", "1", "2"]
        assert file["call"].dtype == np.uint8
        for number, region in enumerate(call.regions):
            dataset = file[f"storage/{number}"]
            assert dataset.chunks is None
            assert dataset.dtype == region.dtype
            assert np.array_equal(dataset[:], region)
        assert file.id.get_filesize() == path.stat().st_size
    record = text_of(path)
    assert record["kwargs"]["bias"]["tensor"]["dtype"] == "torch.bfloat16"
    assert record["regions"][1] == ["<u2", 8, zlib.crc32(call.regions[1].tobytes())]


@pytest.mark.parametrize("code", sorted(DATATYPES))
def test_datatypes_are_those_of_hdf5(code):
    # The library's own encoding, after its two bytes of wrapping.
    assert h5py.h5t.py_create(np.dtype(code)).encode()[2:] == DATATYPES[code]


def test_checksum_is_lookup3():
    # Values of the function's author (hashlittle, initial value 0).
    assert checksum(b"Four score and seven years ago") == 0x17770551
    for size in range(1, 40):
        image = compose(Identity("T." + "a" * size, 0, 0, 0, 0, "forward", 0), (), 1)
        block = image.head[:44]
        assert int.from_bytes(image.head[44:48], "little") == checksum(block)


@pytest.mark.parametrize("regions", [0, 1, 8, 9, 300])
def test_any_number_of_regions(tmp_path, regions):
    call = make_call(
        args=tuple(TensorRef(n, "int16", (n,), (1,), 0) for n in range(regions)),
        kwargs={},
        outputs=None,
        regions=[np.arange(n, dtype=np.int16) for n in range(regions)],
    )
    assert same_call(call, round_trip(call, tmp_path))
    with h5py.File(tmp_path / "call.h5", locking=False) as file:
        assert len(file["storage"]) == regions
        for n in range(regions):
            assert file[f"storage/{n}"][:].tolist() == list(range(n))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 1 << 20, (1 << 20) + 3, 5_000_001])
def test_any_size_of_region(tmp_path, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    call = make_call(
        args=(TensorRef(0, "uint8", (size,), (1,), 0),), kwargs={}, outputs=None, regions=[data]
    )
    assert same_call(call, round_trip(call, tmp_path))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_through_a_file(tmp_path, name):
    dtype = DTYPES[name]
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 6 * dtype.itemsize, np.uint8))
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (2, 3), (1, 2))
    trees, regions = freeze([(tensor,)])
    call = make_call(args=trees[0], kwargs={}, outputs=None, regions=regions)
    back = round_trip(call, tmp_path)
    assert back.regions[0].dtype == STORAGE[name]
    (live,) = thaw_all(back.args, back.regions)
    assert live.dtype == dtype
    assert live.stride() == (1, 2)
    assert bytes(live.untyped_storage()) == raw.numpy().tobytes()


def test_table_of_dtypes_is_torchs():
    for name, dtype in DTYPES.items():
        assert ITEMSIZE[name] == dtype.itemsize
        assert STORAGE[name] in STORAGE_CODES.values()


def test_ten_elements_of_a_large_storage_twice(tmp_path):
    big = torch.arange(1_000_000, dtype=torch.float32)
    for view in (big[1000:1010], big[::100_000]):
        trees, regions = freeze([(view, view)])
        call = make_call(args=trees[0], kwargs={}, outputs=None, regions=regions)
        path = tmp_path / f"{view.stride(0)}.h5"
        assert shard.write(call, path) < 16 << 10
        back = shard.read(path)
        one, two = thaw_all(back.args, back.regions)
        assert torch.equal(one, view)
        one.zero_()
        assert not two.any()


def test_transposed_argument_replays_with_its_stride(tmp_path):
    matrix = torch.arange(6.0).view(2, 3).t()
    trees, regions = freeze([(matrix,)])
    back = round_trip(make_call(args=trees[0], kwargs={}, outputs=None, regions=regions), tmp_path)
    (live,) = thaw_all(back.args, back.regions)
    assert live.stride() == (1, 3)
    assert (live @ torch.ones(2)).tolist() == [3.0, 5.0, 7.0]


def test_overhead_is_small():
    call = make_call(
        args=tuple(TensorRef(n, "float32", (8, 8), (8, 1), 0) for n in range(4)),
        kwargs={},
        outputs=TensorRef(4, "float32", (8, 8), (8, 1), 0),
        context=CallContext(module="model.layers.0.mlp", stack=("train.py:10 in step",) * 4),
        regions=[np.zeros(64, np.float32) for _ in range(5)],
    )
    assert len(shard.encode(call)) - call.nbytes <= 4096


def test_bytes_depend_on_the_call_alone():
    assert shard.encode(make_call()) == shard.encode(make_call())


def test_file_is_new_private_and_gone_after_failure(tmp_path):
    path = tmp_path / "call.h5"
    previous = os.umask(0o027)
    try:
        shard.write(make_call(), path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        shard.write(make_call(index=5), path)
    assert path.read_bytes() == before
    (tmp_path / "link.h5").symlink_to(tmp_path / "elsewhere.h5")
    with pytest.raises(FileExistsError):
        shard.write(make_call(), tmp_path / "link.h5")
    assert not (tmp_path / "elsewhere.h5").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_an_error(tmp_path):
    from spool.shard import _parts, _write_all

    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            _write_all(file, _parts(shard.draft_of(make_call())))
    finally:
        os.close(file)


def test_large_writes_go_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "_MAX_WRITE", 1000)
    monkeypatch.setattr(shard, "_MAX_BUFFERS", 2)
    monkeypatch.setattr("spool._shard_read._MAX_READ", 999)
    data = np.arange(5000, dtype=np.int32)
    call = make_call(
        args=(TensorRef(0, "int32", (5000,), (1,), 0),), kwargs={}, outputs=None, regions=[data]
    )
    assert same_call(call, round_trip(call, tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"api": "Functional/../x"},
        {"api": "linear"},
        {"api": "Functional." + "x" * 300},
        {"index": -1},
        {"rank": 10**13},
        {"step": True},
        {"direction": "sideways"},
        {"regions": [np.zeros((2, 2), np.float32)]},
        {"regions": [np.zeros(8, np.float32)[::2]]},
        {"regions": [np.zeros(2, ">f4")]},
        {"regions": [np.zeros(2, np.complex64)]},
        {"regions": [np.zeros(2, bool)]},
        {"regions": [np.zeros(1, np.uint8)] * 10_001},
    ],
    ids=repr,
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path, changes):
    with pytest.raises(ValueError):
        shard.write(make_call(**changes), tmp_path / "call.h5")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_tree_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="set"):
        shard.encode(make_call(args=({1},)))


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.just(Ellipsis),
    st.just(math.nan),
    st.builds(Size, st.lists(st.integers(-1, 9), max_size=4).map(tuple)),
    st.sampled_from(
        [
            TorchValue("dtype", "bfloat16"),
            TorchValue("device", "npu:0"),
            TorchValue("memory_format", "channels_last"),
            TorchValue("layout", "strided"),
        ]
    ),
    st.builds(
        TensorRef,
        region=st.integers(0, 2),
        dtype=st.sampled_from(["uint8", "float8_e4m3fn", "bool"]),
        shape=st.just((2, 3)),
        stride=st.sampled_from([(3, 1), (1, 2), (0, 0), (0, 1)]),
        offset=st.integers(0, 2),
        device=st.sampled_from(["cpu", "cuda:1", "npu:12", "privateuseone:0"]),
        requires_grad=st.booleans(),
    ),
)
KEYS = st.one_of(st.text(max_size=8), st.integers(-(1 << 60), 1 << 60))
TREES = st.recursive(
    PLAIN,
    lambda tree: st.one_of(
        st.lists(tree, max_size=4),
        st.lists(tree, max_size=4).map(tuple),
        st.dictionaries(KEYS, tree, max_size=4),
        st.builds(Slice, tree, tree, tree),
        st.lists(tree, max_size=3).map(
            lambda items: NamedTuple(
                "torch.return_types.x", tuple(f"f{n}" for n in range(len(items))), tuple(items)
            )
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    args=st.lists(TREES, max_size=3).map(tuple),
    kwargs=st.dictionaries(st.sampled_from(["dim", "out", "größe"]), TREES, max_size=2),
    outputs=TREES,
    order=st.integers(0, 10**12 - 1),
)
def test_any_tree_comes_back(tmp_path_factory, args, kwargs, outputs, order):
    call = make_call(
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        order=order,
        regions=[np.arange(8, dtype=np.uint8) for _ in range(3)],
    )
    assert same_call(call, round_trip(call, tmp_path_factory.getbasetemp()))


CONTEXTS = st.builds(
    CallContext,
    autocast=st.dictionaries(st.sampled_from(["cpu", "npu"]), st.just("float16")),
    grad_enabled=st.booleans(),
    inference_mode=st.booleans(),
    deterministic=st.booleans(),
    allow_tf32=st.booleans(),
    default_dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    module=st.text(max_size=30),
    stack=st.lists(st.text(max_size=30), max_size=3).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(
    context=CONTEXTS,
    mutated=st.dictionaries(
        st.sampled_from(["args.0", "kwargs.out.1"]), st.just(TensorRef(0, "uint8", (1,), (1,), 0))
    ),
)
def test_any_context_comes_back(tmp_path_factory, context, mutated):
    call = make_call(context=context, mutated=mutated)
    assert same_call(call, round_trip(call, tmp_path_factory.getbasetemp()))


def test_deepest_and_widest_tree_that_is_frozen_can_be_read(tmp_path):
    deep = torch.ones(1)
    for _ in range(32):
        deep = [deep]
    wide = {str(n): (n, float("nan")) for n in range(20_000)}
    trees, regions = freeze([deep, wide, "x" * (1 << 20), 1 << (1 << 18) - 1])
    call = make_call(args=(), kwargs={}, outputs=trees[0], regions=regions)
    assert same_call(call, round_trip(call, tmp_path))
    call = make_call(args=tuple(trees[1:]), kwargs={}, outputs=None, regions=[])
    back = round_trip(call, tmp_path)
    assert back.args[1:] == call.args[1:]
    assert len(back.args[0]) == 20_000


def test_every_member_of_a_call_is_stored(tmp_path):
    shard.write(make_call(), tmp_path / "call.h5")
    record = text_of(tmp_path / "call.h5")
    assert set(record) == {field.name for field in dataclasses.fields(Call)}
    assert set(record["context"]) == {field.name for field in dataclasses.fields(CallContext)}
