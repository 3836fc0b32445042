"""The spool directory: what is there is whole, and what is counted is there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from shardmaker import make_call, same_call

from spool import shard
from spool.call import TensorRef
from spool.errors import StoreError
from spool.files import exclusive_write, is_abandoned, is_partial, partial_path
from spool.store import (
    Heartbeat,
    RankCounts,
    ShardEntry,
    StepCounts,
    Store,
    atomic_write,
    parse_shard_name,
)

TESTS = os.path.dirname(__file__)
PRELUDE = f"""
import os, sys
sys.path.insert(0, {TESTS!r})
from pathlib import Path
from shardmaker import make_call
from spool.store import *
"""


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "spool", {"torch": "2.1.0"})


def run(program, *arguments):
    command = [sys.executable, "-c", PRELUDE + program, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_store_and_shard_need_neither_torch_nor_hdf5():
    program = "import sys, spool.store; print(*{'torch', 'h5py', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == []


def test_create_and_open(tmp_path):
    store = Store.create(tmp_path / "deep" / "spool", {"torch": "2.1.0", "spool": "0.1.0"})
    assert store.run.format == 1
    assert store.run.versions == {"torch": "2.1.0", "spool": "0.1.0"}
    assert len(store.run.timestamp) == 14
    assert store.run.timestamp.isdigit()
    again = Store.open(tmp_path / "deep" / "spool")
    assert again.run == store.run
    adopted = Store.create(tmp_path / "deep" / "spool", {"torch": "9"})
    assert adopted.run == store.run
    assert files(store.root) == ["run.json"]


def test_first_of_many_creators_wins(tmp_path):
    root, runs = tmp_path / "spool", []
    barrier = threading.Barrier(8)

    def create():
        barrier.wait()
        runs.append(Store.create(root, {}).run)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.run_id for run in runs}) == 1
    assert len(runs) == 8
    assert files(root) == ["run.json"]


def test_publish_and_list(store):
    calls = [
        make_call(order=2, index=10),
        make_call(order=2, index=9),
        make_call(order=1, index=11, api="Torch.linalg.inv"),
        make_call(order=1_000_000, index=12),
    ]
    entries = [store.publish(call) for call in calls]
    path = store.root / "rank0/step3/000002.Functional.linear.10.h5"
    assert entries[0] == ShardEntry(
        0, 3, 2, "Functional.linear.10", path, os.path.getsize(entries[0].path)
    )
    assert entries[0].path == store.shard_path(0, 3, 2, "Functional.linear.10")
    assert same_call(shard.read(entries[0].path), calls[0])
    listed = store.shards(0, 3)
    assert listed == [entries[2], entries[1], entries[0], entries[3]]
    assert [entry.sort_key for entry in listed][:2] == [(3, 1, 11), (3, 2, 9)]
    assert listed[3].path.name == "1000000.Functional.linear.12.h5"
    assert store.shards(0, 3, known={listed[0].path.name, listed[1].path.name}) == listed[2:]
    assert store.ranks() == [0]
    assert store.steps(0) == [3]
    assert store.shards(0, 4) == []
    assert store.shards(7, 0) == []
    assert store.steps(7) == []


def test_ranks_and_steps_are_numbers_in_order(store):
    for rank, step in ((0, 0), (10, 2), (2, 10), (2, 9)):
        store.publish(make_call(rank=rank, step=step))
    for name in ("rank01", "rankx", "rank-1", "ranks", "rank3", "rank0/step01", "rank0/x"):
        (store.root / name).mkdir() if name != "rank3" else (store.root / name).touch()
    assert store.ranks() == [0, 2, 10]
    assert store.steps(2) == [9, 10]
    assert store.steps(0) == [0]


def test_what_is_no_shard_is_not_listed(store):
    entry = store.publish(make_call())
    directory = entry.path.parent
    for name in (
        ".000018.Tensor.add.4.h5.x.partial",
        "000018.Tensor.add.4.h5.partial",
        "18.Tensor.add.4.h5",
        "0000018.Tensor.add.4.h5",
        "000018.Tensor.add.h5",
        "000018.Tensor.add.04.h5",
        "000018.add.4.h5",
        "000018.Tensor add.4.h5",
        "closed.json",
        "core",
    ):
        (directory / name).touch()
    assert store.shards(0, 3) == [entry]
    (directory / "000019.Tensor.add.4.h5").symlink_to("/etc/passwd")
    assert [item.order for item in store.shards(0, 3)] == [17, 19]
    assert parse_shard_name("000019.Tensor.add.4.h5") == (19, "Tensor.add.4")


def test_nothing_is_published_twice(store):
    entry = store.publish(make_call())
    before = entry.path.read_bytes()
    with pytest.raises(StoreError) as error:
        store.publish(make_call(args=(1,)))
    assert "exists already" in one_line(error)
    assert entry.path.read_bytes() == before
    assert len(files(store.root)) == 2


@pytest.mark.parametrize(
    ("rank", "step", "order", "name"),
    [
        (-1, 0, 0, "Tensor.add.0"),
        ("0/../../x", 0, 0, "Tensor.add.0"),
        (True, 0, 0, "Tensor.add.0"),
        (10**6, 0, 0, "Tensor.add.0"),
        (0, -1, 0, "Tensor.add.0"),
        (0, 1.0, 0, "Tensor.add.0"),
        (0, 0, None, "Tensor.add.0"),
        (0, 0, 10**12, "Tensor.add.0"),
        (0, 0, 0, "../../etc.passwd.0"),
        (0, 0, 0, "Tensor.add.0\n"),
        (0, 0, 0, "Tensor.add/x.0"),
        (0, 0, 0, ""),
        (0, 0, 0, "Tensor." + "x" * 300 + ".0"),
    ],
)
def test_nothing_unchecked_becomes_a_path(store, rank, step, order, name):
    with pytest.raises(StoreError) as error:
        store.shard_path(rank, step, order, name)
    one_line(error)
    assert files(store.root) == ["run.json"]


def test_longest_name_fits_a_file_name(store):
    name = "Torch." + "x" * 180
    entry = store.publish(make_call(api=name, index=10**12 - 1, order=10**12 - 1))
    assert store.shards(0, 3) == [entry]


def test_markers(store):
    counts = StepCounts(2, 300, 1, {"sparse tensor": 4}, 0.25)
    assert store.step_closed(0, 3) is None
    assert store.rank_closed(0) is None
    assert store.read_heartbeat(0) is None
    store.publish(make_call())
    assert store.unclosed_steps(0) == [3]
    store.close_step(0, 3, counts)
    store.close_step(0, 10, StepCounts(0, 0))
    assert store.step_closed(0, 3) == counts
    assert store.step_closed(0, 10) == StepCounts(0, 0, 0, {}, 0.0)
    assert store.unclosed_steps(0) == []
    rank = RankCounts({3: counts, 10: StepCounts(0, 0)}, "disabled")
    store.close_rank(0, rank)
    assert store.rank_closed(0) == rank
    record = json.loads((store.root / "rank0/closed.json").read_text())
    assert record["reason"] == "disabled"
    assert record["steps"]["3"]["shards"] == 2
    beat = Heartbeat(12.5, 77, "host", 3, 5, 600, True)
    store.heartbeat(0, beat)
    assert store.read_heartbeat(0) == beat
    store.heartbeat(0, Heartbeat(13.5, 77, "host", 3, 6, 700))
    assert store.read_heartbeat(0).captured == 6
    store.reopen_rank(0)
    assert store.rank_closed(0) is None
    store.reopen_rank(0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"shards": -1, "bytes": 0, "dropped": 0, "skipped": {}, "blocked_seconds": 0}',
        '{"shards": true, "bytes": 0, "dropped": 0, "skipped": {}, "blocked_seconds": 0}',
        '{"shards": 1, "bytes": 0, "dropped": 0, "skipped": {"a": "b"}, "blocked_seconds": 0}',
        '{"steps": {"x": {}}, "reason": ""}',
        '{"steps": {"1": {}}, "reason": ""}',
        '{"steps": {}, "reason": 3}',
    ],
)
def test_a_marker_of_something_else_is_an_error(store, text):
    store.publish(make_call())
    for path, load in (
        (store.root / "rank0/step3/closed.json", lambda: store.step_closed(0, 3)),
        (store.root / "rank0/closed.json", lambda: store.rank_closed(0)),
        (store.root / "rank0/heartbeat.json", lambda: store.read_heartbeat(0)),
        (store.root / "run.json", lambda: Store.open(store.root)),
    ):
        path.write_text(text)
        with pytest.raises(StoreError) as error:
            load()
        assert str(path) in one_line(error)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("time", float("inf")),
        ("bytes", 1 << 53),
        ("captured", 10**400),
        ("step", -1),
    ],
)
def test_numbers_that_cannot_be_counted_with_are_refused(store, member, value):
    path = store.root / "rank0/heartbeat.json"
    store.heartbeat(0, Heartbeat(1.0, 1, "h", 0, 0, 0))
    path.write_text(json.dumps({**json.loads(path.read_text()), member: value}))
    with pytest.raises(StoreError) as error:
        store.read_heartbeat(0)
    assert f"member '{member}'" in one_line(error)


def test_errors_of_opening(tmp_path):
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "absent")
    assert "does not exist" in one_line(error)
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path)
    assert "is not a spool" in one_line(error)
    (tmp_path / "run.json").write_text('{"format": 2, "anything": []}')
    for opener in (Store.open, lambda root: Store.create(root, {})):
        with pytest.raises(StoreError) as error:
            opener(tmp_path)
        assert "spool format 2, but this Spool reads 1: update Spool" in one_line(error)
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError) as error:
            Store.create(root, {})
        assert str(root) in one_line(error)
    with pytest.raises(StoreError) as error:
        Store.create(Path("/proc/spool"), {})
    assert "/proc/spool" in one_line(error)


@pytest.mark.parametrize(
    ("mask", "file", "directory"), [(0o022, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_modes_honour_the_umask(tmp_path, mask, file, directory):
    previous = os.umask(mask)
    try:
        store = Store.create(tmp_path / "spool", {})
        entry = store.publish(make_call())
        store.close_step(0, 3, StepCounts(1, 1))
        store.heartbeat(0, Heartbeat(0.0, 1, "h", 0, 0, 0))
    finally:
        os.umask(previous)
    for path in store.root.rglob("*"):
        expected = directory if path.is_dir() else file
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert stat.S_IMODE(entry.path.stat().st_mode) == file


def test_a_writer_that_dies_leaves_only_whole_shards(tmp_path):
    """`os._exit` while a shard is half written: it never appears, and is cleaned up."""
    root = tmp_path / "spool"
    program = """
store = Store.create(Path(sys.argv[1]), {})
store.publish(make_call(order=1))
writev = os.writev
os.writev = lambda file, parts: (writev(file, parts[:3]), os._exit(1))
store.publish(make_call(order=2, index=3))
"""
    assert run(program, root).returncode == 1
    store = Store.open(root)
    (entry,) = store.shards(0, 3)
    assert same_call(shard.read(entry.path), make_call(order=1))
    (partial,) = [name for name in os.listdir(entry.path.parent) if is_partial(name)]
    assert is_abandoned(partial) is True
    assert store.remove_partials(0) == 1
    assert files(root) == ["rank0/step3/" + entry.path.name, "run.json"]


@pytest.mark.parametrize(
    "function", ["os.fsync", "os.rename", "os.replace", "os.link", "os.unlink"]
)
def test_a_kill_around_any_step_leaves_only_whole_files(tmp_path, function):
    """Die before the n-th use of each system call: what is visible is whole."""
    program = """
count, function = int(sys.argv[2]), sys.argv[3].removeprefix("os.")
original = getattr(os, function)
def dying(*arguments, **options):
    global count
    count -= 1
    if count < 0:
        os._exit(1)
    return original(*arguments, **options)
setattr(os, function, dying)
store = Store.create(Path(sys.argv[1]), {})
for order in range(2):
    store.publish(make_call(order=order, index=order))
store.close_step(0, 3, StepCounts(2, 2))
store.close_rank(0, RankCounts({3: StepCounts(2, 2)}, "disabled"))
"""
    for count in range(40):
        root = tmp_path / str(count)
        done = run(program, root, count, function)
        if (root / "run.json").exists():
            store = Store.open(root)
            found = [shard.read(entry.path).order for entry in store.shards(0, 3)]
            assert found == list(range(len(found)))
            if store.step_closed(0, 3) or store.rank_closed(0):
                assert found == [0, 1]
            if store.rank_closed(0):
                assert store.step_closed(0, 3) == StepCounts(2, 2)
        if done.returncode == 0:
            break
    assert done.returncode == 0


def test_readers_never_see_a_shard_that_is_not_whole(tmp_path):
    """A process publishes large shards while this one reads everything it sees."""
    root = tmp_path / "spool"
    program = """
import numpy as np
from spool.call import TensorRef
store = Store.create(Path(sys.argv[1]), {})
data = np.arange(1 << 20, dtype=np.int32)
for order in range(30):
    store.publish(make_call(order=order, index=order, kwargs={}, outputs=None, regions=[data],
        args=(TensorRef(0, "int32", (1 << 20,), (1,), 0),)))
store.close_step(0, 3, StepCounts(30, 0))
"""
    writer = subprocess.Popen([sys.executable, "-c", PRELUDE + program, root])
    seen: set[str] = set()
    try:
        while writer.poll() is None or len(seen) < 30:
            store = Store.open(root) if (root / "run.json").exists() else None
            entries = store.shards(0, 3, known=seen) if store else []
            for entry in entries:
                assert shard.read(entry.path).order == entry.order
                seen.add(entry.path.name)
            if not entries and writer.poll() is not None:
                break
    finally:
        writer.wait()
    assert writer.returncode == 0
    assert len(seen) == 30


def test_failed_publish_leaves_nothing(store, monkeypatch):
    def full(file, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        store.publish(make_call())
    with pytest.raises(ValueError):
        store.publish(make_call(regions=[np.zeros(2, complex)]))
    monkeypatch.undo()
    assert files(store.root) == ["run.json"]
    assert store.publish(make_call()).order == 17


def test_partials_of_the_living_and_of_others_stay(store):
    directory = store.publish(make_call()).path.parent
    mine = partial_path(directory / "000001.Tensor.add.1.h5")
    mine.touch()
    foreign = directory / ".000002.Tensor.add.2.h5.00000000-1-0123abcd.partial"
    foreign.touch()
    other = directory / ".keep.partial"
    other.touch()
    assert is_abandoned(mine.name) is False
    assert is_abandoned(foreign.name) is None
    assert store.remove_partials(0) == 0
    assert store.remove_partials(0, foreign=True) == 1
    assert mine.exists()
    assert other.exists()
    assert store.remove_partials(5) == 0


def test_resume_drops_open_steps_only(store):
    for step in (1, 2):
        store.publish(make_call(step=step))
    store.close_step(0, 1, StepCounts(1, 1))
    assert store.unclosed_steps(0) == [2]
    store.drop_step(0, 2)
    store.drop_step(0, 9)
    assert store.steps(0) == [1]
    with pytest.raises(StoreError) as error:
        store.drop_step(0, 1)
    assert "complete" in one_line(error)
    assert store.publish(make_call(step=2)).step == 2


def test_usage_and_clear(store):
    entries = [store.publish(make_call(rank=rank)) for rank in (0, 1)]
    assert store.usage(0) == entries[0].nbytes
    run_bytes = (store.root / "run.json").stat().st_size
    assert store.usage() == run_bytes + sum(entry.nbytes for entry in entries)
    assert store.usage(9) == 0
    (store.root / "notes.txt").write_text("mine")
    (store.root / "rank7").symlink_to("/etc")
    store.clear(0)
    assert store.ranks() == [1]
    store.clear()
    assert sorted(os.listdir(store.root)) == ["notes.txt", "rank7"]
    assert os.path.exists("/etc/passwd")


def test_atomic_write(tmp_path):
    path = tmp_path / "file.json"
    atomic_write(path, b"one")
    atomic_write(path, b"two", durable=False)
    assert path.read_bytes() == b"two"
    assert exclusive_write(path, b"three") is False
    assert path.read_bytes() == b"two"
    assert exclusive_write(tmp_path / "other", b"") is True
    with pytest.raises(IsADirectoryError):
        atomic_write(tmp_path, b"")
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "absent" / "file", b"")
    assert sorted(os.listdir(tmp_path)) == ["file.json", "other"]


def test_many_threads_publish(store):
    def publish(first):
        for order in range(first, first + 25):
            store.publish(make_call(order=order, index=order))

    threads = [threading.Thread(target=publish, args=(n * 25,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.sync()
    assert [entry.order for entry in store.shards(0, 3)] == list(range(100))


def test_elements_of_a_list_call_share_their_order(store):
    for index in (3, 4):
        store.publish(make_call(index=index, api="Torch._foreach_add_", order=5))
    names = [entry.path.name for entry in store.shards(0, 3)]
    assert names == ["000005.Torch._foreach_add_.3.h5", "000005.Torch._foreach_add_.4.h5"]


def test_tensor_reference_is_kept(store):
    ref = TensorRef(0, "uint8", (3,), (1,), 0)
    call = make_call(args=(ref,), kwargs={}, outputs=ref, regions=[np.arange(3, dtype=np.uint8)])
    assert shard.read(store.publish(call).path).outputs == ref


def test_a_step_captured_anew_is_another_take(store):
    assert store.takes(0) == {}
    for step in (1, 2):
        store.publish(make_call(step=step))
    store.drop_step(0, 9)
    assert not (store.root / "rank0.takes.json").exists()
    store.drop_step(0, 2)
    assert json.loads((store.root / "rank0.takes.json").read_text()) == {"2": 1}
    store.publish(make_call(step=2))
    # The counts outlive the rank, whose next shards have the same names in the same run.
    store.clear(0)
    assert store.ranks() == []
    assert Store.open(store.root).takes(0) == {1: 1, 2: 2}
    assert store.takes(1) == {}
    store.clear()
    assert os.listdir(store.root) == []


def test_a_take_is_counted_before_the_step_is_deleted(store, monkeypatch):
    entry = store.publish(make_call(step=2))

    def killed(directory):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_remove", killed)
    with pytest.raises(KeyboardInterrupt):
        store.drop_step(0, 2)
    assert entry.path.exists()
    assert store.takes(0) == {2: 1}


@pytest.mark.parametrize("text", ["[]", '{"x": 1}', '{"0": -1}', '{"0": true}', "{"])
def test_takes_that_are_not_ours_are_one_line(store, text):
    (store.root / "rank0.takes.json").write_text(text)
    with pytest.raises(StoreError) as error:
        store.takes(0)
    assert "rank0.takes.json" in one_line(error)
