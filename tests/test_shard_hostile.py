"""Shards that are torn, altered, or made to harm whoever reads them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
from hostile import HOSTILE, OTHERS, external_storage
from shardmaker import forge, make_call, same_call, text_of, write_with_h5py

from spool import _hdf5, shard
from spool._hdf5 import checksum
from spool.errors import BadShard
from spool.shard import Limits, NewerShard


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "sound.h5"
    shard.write(make_call(), path)
    return text_of(path)


def refusal(path, limits=None):
    with pytest.raises(BadShard) as caught:
        shard.read(path) if limits is None else shard.read(path, limits)
    assert caught.value.reason
    assert "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize("reason", HOSTILE)
def test_hostile_structure_is_refused_by_name(tmp_path, record, reason):
    path = tmp_path / "hostile.h5"
    write_with_h5py(path, record, make_call().regions, HOSTILE[reason])
    assert reason in refusal(path)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_any_other_structure_is_refused(tmp_path, record, change):
    path = tmp_path / "hostile.h5"
    write_with_h5py(path, record, make_call().regions, change)
    refusal(path)


def test_old_kind_of_hdf5_file(tmp_path):
    path = tmp_path / "old.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["x"] = 1
    assert "another kind" in refusal(path)


def test_nothing_outside_the_file_is_opened(tmp_path, record):
    """Reading a file with every way out of it opens that file and no other."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"\x01" * 24)
    os.mkfifo(tmp_path / "fifo")

    def change(file):
        file["out"] = h5py.ExternalLink(str(tmp_path / "fifo"), "/x")
        external_storage(file)

    path = tmp_path / "hostile.h5"
    write_with_h5py(path, record, make_call().regions, change)
    opened = []
    armed = [True]

    def audit(event, arguments):
        if armed and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(audit)
    refusal(path)
    armed.clear()
    assert opened == [str(path)]


def test_newer_format_is_another_error(tmp_path, record):
    path = tmp_path / "newer.h5"
    write_with_h5py(path, record, [], attributes={"spool_format": 2})
    with pytest.raises(NewerShard, match="shard format 2, but this Spool reads format 1"):
        shard.read(path)


def test_newer_format_in_our_own_layout(tmp_path, monkeypatch):
    monkeypatch.setattr("spool._hdf5.FORMAT_VERSION", 7)
    from spool import _hdf5

    _hdf5._common_attributes.cache_clear()
    image = shard.encode(make_call())
    monkeypatch.undo()
    _hdf5._common_attributes.cache_clear()
    (tmp_path / "newer.h5").write_bytes(image)
    with pytest.raises(NewerShard, match="update Spool"):
        shard.read(tmp_path / "newer.h5")


FOREIGN = {
    "empty": b"",
    "one byte": b"\x89",
    "signature only": b"\x89HDF\r\n\x1a\n",
    "pickle": pickle.dumps({"a": [1, 2]}),
    "zip": b"PK\x03\x04" + bytes(100),
    "text": b"hello\n" * 100,
    "noise": random.Random(0).randbytes(10_000),
    "signature and noise": b"\x89HDF\r\n\x1a\n" + random.Random(1).randbytes(10_000),
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_files_of_another_kind(tmp_path, data):
    path = tmp_path / "foreign.h5"
    path.write_bytes(data)
    refusal(path)


def test_no_file_and_no_permission_are_not_the_shards_fault(tmp_path):
    with pytest.raises(FileNotFoundError):
        shard.read(tmp_path / "absent.h5")


def test_only_regular_files_are_read(tmp_path):
    shard.write(make_call(), tmp_path / "real.h5")
    (tmp_path / "link.h5").symlink_to(tmp_path / "real.h5")
    assert "symbolic link" in refusal(tmp_path / "link.h5")
    os.mkfifo(tmp_path / "fifo.h5")
    assert "regular" in refusal(tmp_path / "fifo.h5")
    (tmp_path / "directory.h5").mkdir()
    assert "regular" in refusal(tmp_path / "directory.h5")


def test_truncated_anywhere(tmp_path):
    image = shard.encode(make_call())
    path = tmp_path / "torn.h5"
    lengths = {len(image) * part // 20 for part in range(20)}
    for length in sorted(lengths | {len(image) - 1, 47, 48, 52, 100}):
        path.write_bytes(image[:length])
        refusal(path)
    path.write_bytes(image + b"\0")
    assert "bytes, but should have" in refusal(path)
    path.write_bytes(image[: len(image) // 2] + bytes(len(image) - len(image) // 2))
    refusal(path)


def test_every_flipped_bit_is_noticed(tmp_path):
    """Metadata is compared and data is checksummed, so no bit is free to change."""
    image = bytearray(shard.encode(make_call()))
    path = tmp_path / "flipped.h5"
    for position in range(len(image)):
        bit = 1 << position % 8
        image[position] ^= bit
        path.write_bytes(image)
        refusal(path)
        image[position] ^= bit
    path.write_bytes(image)
    assert same_call(shard.read(path), make_call())


def test_random_damage_with_repaired_checksums(tmp_path):
    """Damage that HDF5's own checksums would vouch for."""
    sound = shard.encode(make_call())
    path = tmp_path / "damaged.h5"
    draw = random.Random(5)
    headers = [48, sound.index(b"OHDR", 60)]
    for _ in range(300):
        image = bytearray(sound)
        for _ in range(draw.randint(1, 4)):
            image[draw.randrange(8, 900)] = draw.choice([0, 1, 0x7F, 0xFF, draw.randrange(256)])
        image[44:48] = checksum(bytes(image[:44])).to_bytes(4, "little")
        end = headers[1] - 4
        image[end : end + 4] = checksum(bytes(image[48:end])).to_bytes(4, "little")
        path.write_bytes(image)
        with contextlib.suppress(BadShard):
            assert same_call(shard.read(path), make_call())


def set_member(*keys, value):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


def set_tensor(**members):
    return lambda record: record["args"][0]["tensor"].update(members)


def nest(levels, text=b"[", close=b"]"):
    def change(record):
        record["outputs"] = "HERE"
        body = text * levels + close * levels
        return json.dumps(record).encode().replace(b'"HERE"', body)

    return change


TEXTS = {
    "not json": lambda record: b"{]",
    "not ascii": lambda record: "{é}".encode(),
    "NaN": lambda record: json.dumps(record).encode().replace(b"1.5", b"NaN"),
    "overflow": lambda record: json.dumps(record).encode().replace(b"1.5", b"1e999"),
    "twice": lambda record: b'{"api":"T.x",' + json.dumps(record).encode()[1:],
    "list": lambda record: b"[]",
    "deep list": nest(1000),
    "deeper list": nest(100_000),
    "deep tuple": nest(100, b'{"tuple":[', b"]}"),
    "missing member": lambda record: record.pop("args") and None,
    "extra member": set_member("extra", value=1),
    "other name": set_member("api", value="Functional.relu"),
    "other rank": set_member("rank", value=1),
    "negative step": set_member("step", value=-1),
    "boolean order": set_member("order", value=True),
    "path as name": set_member("api", value="Functional/../../x"),
    "direction": set_member("direction", value="sideways"),
    "unknown tag": set_member("outputs", value={"pickle": "gASV"}),
    "two tags": set_member("outputs", value={"tuple": [], "dict": []}),
    "no tag": set_member("outputs", value={}),
    "tuple of text": set_member("outputs", value={"tuple": "abc"}),
    "dict key": set_member("outputs", value={"dict": [[1.5, 2]]}),
    "dict key twice": set_member("outputs", value={"dict": [["a", 2], ["a", 3]]}),
    "dict pair": set_member("outputs", value={"dict": [["a"]]}),
    "complex": set_member("outputs", value={"complex": [1, 2]}),
    "float bits": set_member("outputs", value={"float": "xyz"}),
    "int text": set_member("outputs", value={"int": "10"}),
    "int digits": set_member("outputs", value={"int": "0x" + "f" * 70_000}),
    "many digits": lambda record: json.dumps(record).encode().replace(b"1.5", b"1" * 5000),
    "ellipsis": set_member("outputs", value={"ellipsis": True}),
    "slice": set_member("outputs", value={"slice": [1, 2]}),
    "size": set_member("outputs", value={"size": [1.5]}),
    "named": set_member("outputs", value={"named": ["T", ["a"], []]}),
    "named twice": set_member("outputs", value={"named": ["T", ["a", "a"], [1, 2]]}),
    "named field": set_member("outputs", value={"named": ["T", ["a()"], [1]]}),
    "torch kind": set_member("outputs", value={"torch": ["function", "load"]}),
    "torch name": set_member("outputs", value={"torch": ["dtype", "load"]}),
    "torch device": set_member("outputs", value={"torch": ["device", "cpu; rm"]}),
    "long text": set_member("outputs", value="x" * (1 << 21)),
    "wide": set_member("outputs", value=[0] * 1_000_000),
    "kwargs list": set_member("kwargs", value=[]),
    "kwargs name": set_member("kwargs", value={"a b": 1}),
    "mutated path": set_member("mutated", value={"../x": {}}),
    "mutated value": set_member("mutated", value={"args.0": 3}),
    "context member": set_member("context", "extra", value=1),
    "context type": set_member("context", "grad_enabled", value=1),
    "context autocast": set_member("context", "autocast", value={"npu": "os"}),
    "context autocast list": set_member("context", "autocast", value={"npu": ["os"]}),
    "context default dtype": set_member("context", "default_dtype", value="int64"),
    "context default dtype prefix": set_member("context", "default_dtype", value="torch.float32"),
    "context default dtype list": set_member("context", "default_dtype", value=["float32"]),
    "context stack": set_member("context", "stack", value=[1]),
    "regions": set_member("regions", value=[]),
    "region type": set_member("regions", 0, 0, value="O"),
    "region type list": set_member("regions", 0, 0, value=["O"]),
    "region size": set_member("regions", 0, 1, value=20),
    "region size odd": set_member("regions", 0, 1, value=23),
    "region size huge": set_member("regions", 0, 1, value=1 << 61),
    "region checksum": set_member("regions", 0, 2, value=1),
    "tensor region": set_tensor(region=3),
    "tensor region negative": set_tensor(region=-1),
    "tensor dtype": set_tensor(dtype="torch.object"),
    "tensor dtype unprefixed": set_tensor(dtype="float32"),
    "tensor dtype wider": set_tensor(dtype="torch.float64"),
    "tensor shape": set_tensor(shape=[3, 3]),
    "tensor negative": set_tensor(shape=[-2, -3]),
    "tensor float shape": set_tensor(shape=[2.0, 3]),
    "tensor huge": set_tensor(shape=[1 << 31, 1 << 31], stride=[0, 0]),
    "tensor overflow": set_tensor(shape=[1 << 62] * 2, stride=[1 << 62] * 2),
    "tensor axes": set_tensor(shape=[1] * 65, stride=[1] * 65),
    "tensor stride": set_tensor(stride=[1]),
    "tensor negative stride": set_tensor(stride=[-1, 2]),
    "tensor stride outside": set_tensor(stride=[1, 3]),
    "tensor offset": set_tensor(offset=1),
    "tensor offset negative": set_tensor(offset=-1),
    "tensor device": set_tensor(device="npu:0/../x"),
    "tensor flag": set_tensor(grad=1),
    "tensor member": set_tensor(name="x"),
    "packed wrongly": set_tensor(packed=True, stride=[9, 1], shape=[2, 2]),
    "packed huge": set_tensor(packed=True, stride=[1 << 50, 1]),
    "packed large": set_tensor(packed=True, stride=[1 << 37, 1]),
    "packed twice": lambda record: record["args"].append(
        {"tensor": {**record["args"][0]["tensor"], "packed": True}}
    ),
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS.keys())
def test_text_that_is_not_a_call(tmp_path, change):
    path = tmp_path / "forged.h5"
    forge(path, change)
    refusal(path)


def nodes_of(value, found):
    """Every container of a JSON value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        found.append((value, key))
        if isinstance(item, (dict, list)):
            nodes_of(item, found)
    return found


ODDITIES = [None, True, -1, 0, 1, 1 << 70, 1.5, "", "x", "torch.int8", [], [[]], {}, {"tuple": 1}]


def test_random_texts_are_read_or_refused(tmp_path):
    """Any part of the text replaced by anything: no other exception, no wrong bytes."""
    draw = random.Random(11)
    path = tmp_path / "forged.h5"
    accepted = 0

    def change(record):
        record["outputs"] = [
            {"slice": [None, {"complex": [1.0, {"float": "7ff0000000000000"}]}, {"ellipsis": 1}]},
            {"named": ["T", ["a"], [{"dict": [["k", {"size": [1]}], [3, {"int": "-0xf"}]]}]]},
            {"torch": ["dtype", "int8"]},
        ]
        for _ in range(draw.randint(1, 2)):
            container, key = draw.choice(nodes_of(record, []))
            container[key] = draw.choice(ODDITIES)

    for _ in range(1500):
        forge(path, change)
        try:
            call = shard.read(path)
        except BadShard:
            continue
        accepted += 1
        assert shard.encode(call)
    assert accepted > 50


def test_forging_itself_is_sound(tmp_path):
    path = tmp_path / "forged.h5"
    forge(path, lambda record: None)
    assert same_call(shard.read(path), make_call())


def test_wrong_checksums(tmp_path):
    path = tmp_path / "forged.h5"
    forge(path, lambda record: None, crc=1)
    assert "checksum" in refusal(path)
    forge(path, set_member("regions", 1, 2, value=zlib.crc32(b"x")))
    assert "the bytes of region 1 do not match their checksum" in refusal(path)


def test_bytes_between_regions(tmp_path):
    image = bytearray(shard.encode(make_call()))
    path = tmp_path / "gap.h5"
    path.write_bytes(image)
    with h5py.File(path, locking=False) as file:
        end = file["storage/0"].id.get_offset()
    assert image[end - 1] == 0
    image[end - 1] = 1
    path.write_bytes(image)
    refusal(path)


def test_limits(tmp_path):
    path = tmp_path / "call.h5"
    size = shard.write(make_call(), path)
    assert "larger than 100 bytes" in refusal(path, Limits(file_bytes=100))
    assert refusal(path, Limits(text_bytes=100))
    assert refusal(path, Limits(regions=2))
    assert same_call(shard.read(path, Limits(size, 10_000, 3)), make_call())


def test_a_sparse_giant_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "giant.h5"
    path.write_bytes(shard.encode(make_call()))
    os.truncate(path, 1 << 40)
    assert "larger than" in refusal(path)
    os.truncate(path, 200 << 30)
    assert "should have" in refusal(path)


def test_a_writer_that_dies_leaves_no_shard_that_reads(tmp_path):
    """Every prefix of the writes of one shard is refused."""
    program = """
import os, sys
sys.path.insert(0, {tests!r})
from shardmaker import make_call
from spool import _hdf5, shard
from pathlib import Path
writev = os.writev
os.writev = lambda file, parts: (writev(file, parts[:2]), os._exit(1))
shard.write(make_call(), Path(sys.argv[1]))
"""
    path = tmp_path / "torn.h5"
    tests = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", program.format(tests=tests), path], check=False)
    assert done.returncode == 1
    assert 0 < path.stat().st_size < len(shard.encode(make_call()))
    refusal(path)


def grown_by(function):
    """Bytes by which the largest memory of a child grows while it runs `function`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = peak()
        function()
        os.write(writer, str(peak() - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(text)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_structure_of_any_kind_takes_no_memory(tmp_path, record):
    """Declared sizes, compressed zeros, depths and loops cost what the file itself does."""
    paths = []
    for number, change in enumerate([*HOSTILE.values(), *OTHERS.values()]):
        paths.append(tmp_path / f"{number}.h5")
        write_with_h5py(paths[-1], record, make_call().regions, change)
    paths.append(tmp_path / "giant.h5")
    paths[-1].write_bytes(shard.encode(make_call()))
    os.truncate(paths[-1], 200 << 30)
    assert grown_by(lambda: [refusal(path) for path in paths]) < 32 << 20


@pytest.mark.parametrize("item", [b"[],", b"{},", b'{"a":0},', b"[[[]]],", b"1.5,", b'"x",'])
def test_text_takes_memory_in_proportion(tmp_path, item):
    """A text may be 64 MiB, and its values are counted when they are there: 50 times as much."""
    size = 2 << 20
    path = tmp_path / "forged.h5"
    body = b"[" + item * (size // len(item)) + b"0]"
    forge(path, lambda record: json.dumps({**record, "outputs": 7}).encode().replace(b"7", body))
    assert grown_by(lambda: refusal(path)) < 50 * size + (32 << 20)


def test_layouts_of_many_regions_are_not_remembered(tmp_path):
    """Thousands of shards, each of another layout of thousands of regions, would add up."""
    path = tmp_path / "many.h5"
    known = _hdf5._storage.cache_info().currsize
    for number in range(3):
        regions = [np.zeros((place + number) % 5, np.float32) for place in range(3000)]
        call = make_call(args=(), kwargs={}, outputs=None, regions=regions)
        path.write_bytes(shard.encode(call))
        assert same_call(shard.read(path), call)
    assert _hdf5._storage.cache_info().currsize == known
