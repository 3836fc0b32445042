"""Damages every kind of file that the checking host reads, and looks what its readers do.

``python tests/faults/fuzz.py --minutes 10 --seed 1`` goes on for so long and ends with
status 1 if anything but a refusal by `SpoolError`, or the very contents of the sound
file, came out. Each failing specimen is written to a file, with the command that makes
it again. ``tests/test_fuzz.py`` runs a fixed number of cases.

A case is made by a random generator alone, whose seed is the run's seed, the kind and
a number. The readers run in children, so that a crash costs a child and not the run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import rowmaker  # noqa: E402
import shardmaker  # noqa: E402

from spool import parquet, shard  # noqa: E402
from spool.call import NamedTuple as NamedTree  # noqa: E402
from spool.call import Size, Slice, TensorRef, TorchValue  # noqa: E402
from spool.errors import SpoolError  # noqa: E402
from spool.intake.lock import Owner  # noqa: E402
from spool.ledger import Candidate, Ledger  # noqa: E402
from spool.markers import (  # noqa: E402
    Heartbeat,
    RankCounts,
    Retired,
    StepCounts,
    load,
    load_rank,
    load_run,
    load_takes,
    new_run,
    takes_to_json,
    to_json,
)
from spool.records import CallKey, Outcome  # noqa: E402
from spool.replay.batch import _rows  # noqa: E402
from spool.replay.journal import encode as journal_line  # noqa: E402
from spool.replay.journal import recover  # noqa: E402
from spool.replay.result import CallResult, header_of_file  # noqa: E402
from spool.replay.supervise import Job  # noqa: E402
from spool.settings import ReplaySettings  # noqa: E402
from spool.standards.rows import Route  # noqa: E402
from spool.workdir import Bound, Manifest, RankEnd, Segment, ShardRef  # noqa: E402

# What one case may take. A sound file takes milliseconds and next to nothing.
MAX_SECONDS = 20
MAX_BYTES = 1 << 30
# Cases of one child; then its memory is looked at.
CHUNK = 200

Draw = random.Random


# Mutators


NUMBERS = (0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def mutate_bytes(draw: Draw, data: bytes) -> bytes:
    """Damage at any place: flips, cuts, foreign numbers, pieces moved about."""
    image = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        size = len(image)
        at, to = sorted((draw.randrange(size + 1), draw.randrange(size + 1)))
        how = draw.randrange(8)
        if how == 0 and size:
            image[draw.randrange(size)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del image[at:]
        elif how == 2:
            del image[at : min(to, at + 64)]
        elif how == 3:
            image[at:at] = image[at : min(to, at + 4096)]
        elif how == 4:
            image[at:to] = bytes(to - at)
        elif how == 5:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(NUMBERS) & ((1 << 8 * width) - 1)
            image[at : at + width] = number.to_bytes(width, "little")
        elif how == 6:
            image[at : at + 8] = draw.getrandbits(64).to_bytes(8, "little")
        else:
            piece = image[at : min(to, at + 512)]
            place = draw.randrange(size + 1)
            image[place : place + len(piece)] = piece
    return bytes(image)


ODDITIES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 1 << 31, 10**12, 1 << 62, 1 << 63, 1 << 70, 10**400, -(10**30)),
    *(1.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), "", "x", "0", "../../x", "/etc"),
    *("\0", "\ud800", "\udcff", "a\nb", "x" * 5000, "torch.int8", "000001.Torch.add.0.h5"),
    *([], [[]], {}, {"tuple": 1}, {"": {}}, [None] * 100, ["x", 1, 1.5, None]),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value, with each of its keys."""
    stack = [value]
    while stack:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in keys:
            yield item, key
            if isinstance(item[key], (dict, list)):
                stack.append(item[key])


def mutate_json(draw: Draw, value: Any) -> bytes:
    """Replace, remove, double or nest any part of a JSON value."""
    value = json.loads(json.dumps(value))
    nest = None
    for _ in range(draw.choice((1, 1, 2, 3))):
        found = list(places(value))
        if not found:
            break
        container, key = draw.choice(found)
        how = draw.randrange(8)
        if how == 0:
            del container[key]
        elif how == 1:
            other, name = draw.choice(found)
            with contextlib.suppress(KeyError, IndexError):
                container[key] = json.loads(json.dumps(other[name]))
        elif how == 2 and isinstance(container, dict):
            container[draw.choice(("", "x", "0", "\ud800", "999999999999", "-1"))] = container[key]
        elif how == 3 and isinstance(container, list):
            container.append(container[key])
        elif how == 4:
            container[key] = "NEST HERE"
            nest = draw.choice((10, 40, 500, 3000, 100_000))
        else:
            container[key] = copy.deepcopy(draw.choice(ODDITIES))
    text = json.dumps(value).encode()
    if nest is not None:
        first, last = draw.choice(((b"[", b"]"), (b'{"tuple":[', b"]}"), (b'{"a":', b"}")))
        text = text.replace(b'"NEST HERE"', first * nest + b"1" + last * nest)
    if draw.random() < 0.15:
        return mutate_bytes(draw, text)
    return text


def _group(file: h5py.File, draw: Draw) -> h5py.Group:
    groups = [file, *(item for item in file.values() if isinstance(item, h5py.Group))]
    return draw.choice(groups)


def _name(file: h5py.File, draw: Draw) -> str:
    return draw.choice(("call", "storage", "storage/0", "storage/1", "storage/2", "extra"))


def _drop(file: h5py.File, name: str) -> None:
    if name in file:
        del file[name]


def _dataset(file: h5py.File, draw: Draw, **options: Any) -> None:
    name = _name(file, draw)
    _drop(file, name)
    shape = draw.choice(((6,), (0,), (1 << 40,), (1 << 61,), (2, 3), (), (1,) * 30))
    dtypes = ("<f4", ">f4", "u1", "S8", "V4", h5py.string_dtype(), h5py.ref_dtype, "?", "c16")
    file.create_dataset(name, shape=shape, dtype=draw.choice(dtypes), **options)


def _external(file: h5py.File, draw: Draw) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_external(draw.choice((b"/etc/passwd", b"/dev/zero", b"x")), 0, 1 << 20)
    name = _name(file, draw)
    _drop(file, name)
    space = h5py.h5s.create_simple((1 << 18,))
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, plist)


def _virtual(file: h5py.File, draw: Draw) -> None:
    layout = h5py.VirtualLayout((1 << 20,), np.float32)
    layout[:6] = h5py.VirtualSource(draw.choice(("/etc/passwd", ".")), "/storage/0", (6,))
    name = _name(file, draw)
    _drop(file, name)
    file.create_virtual_dataset(name, layout)


def _link(file: h5py.File, draw: Draw) -> None:
    name = _name(file, draw)
    _drop(file, name)
    targets = (
        h5py.SoftLink("/call"),
        h5py.SoftLink(f"/{name}"),
        h5py.ExternalLink("/dev/zero", "/x"),
        h5py.ExternalLink("other.h5", "/call"),
    )
    file[name] = draw.choice(targets)


def _cycle(file: h5py.File, draw: Draw) -> None:
    group = _group(file, draw)
    group[f"again{draw.randrange(99)}"] = _group(file, draw)


def _deep(file: h5py.File, draw: Draw) -> None:
    group = _group(file, draw)
    for _ in range(draw.choice((3, 50, 400))):
        group = group.require_group("g")


def _wide(file: h5py.File, draw: Draw) -> None:
    group = _group(file, draw)
    for number in range(draw.choice((3, 9, 300))):
        group.require_group(f"x{number}")


def _attribute(file: h5py.File, draw: Draw) -> None:
    values = (1, "text", np.zeros(7000), np.bytes_("x" * 60_000), np.float64(2), h5py.Empty("f4"))
    names = ("crc", "rank", "order", "api", "spool_format", "new")
    target = file[_name(file, draw)] if draw.random() < 0.3 else file
    target.attrs[draw.choice(names)] = draw.choice(values)


def _committed(file: h5py.File, draw: Draw) -> None:
    file["type"] = np.dtype([("a", "<f4"), ("b", "S3")])
    _drop(file, "storage/0")
    file.create_dataset("storage/0", shape=(3,), dtype=file["type"])


def _bomb(file: h5py.File, draw: Draw) -> None:
    _drop(file, "storage/0")
    file.create_dataset(
        "storage/0", data=np.zeros(1 << 18, np.float32), chunks=(1 << 14,), compression="gzip"
    )


HDF5_EDITS: tuple[Callable[[h5py.File, Draw], None], ...] = (
    *(_dataset, _external, _virtual, _link, _cycle, _deep, _wide, _attribute, _committed, _bomb),
    lambda file, draw: _dataset(file, draw, chunks=(1,)),
    lambda file, draw: _drop(file, _name(file, draw)),
    lambda file, draw: file.move(_name(file, draw), "moved"),
)


def mutate_hdf5(draw: Draw, path: Path) -> None:
    """Write a shard's contents through the HDF5 library, with what no shard has."""
    call = draw.choice(calls())
    path.write_bytes(shard.encode(call))
    record = shardmaker.text_of(path)

    def change(file: h5py.File) -> None:
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            # Two edits may not fit together.
            with contextlib.suppress(KeyError, ValueError, OSError, RuntimeError, TypeError):
                draw.choice(HDF5_EDITS)(file, draw)

    shardmaker.write_with_h5py(path, record, call.regions, change)
    if draw.random() < 0.2:
        path.write_bytes(mutate_bytes(draw, path.read_bytes()))


# Sound files


@cache
def calls() -> tuple[Any, ...]:
    """Calls of which shards are made."""
    trees = (
        *([1, -(1 << 70), None, True, 1.5, float("-inf"), complex(1, float("nan")), ...],),
        *({"a": (1, 2), 3: []}, Slice(None, 2, None), NamedTree("T", ("a", "b"), (1, "x"))),
        *(Size((2, 3)), TorchValue("dtype", "int8"), TorchValue("device", "npu:0")),
        TensorRef(0, "float32", (2,), (3,), 0, "npu:0", packed=False),
    )
    packed = TensorRef(0, "float32", (6, 1), (5000, 1), 0, packed=True)
    return (
        shardmaker.make_call(),
        shardmaker.make_call(args=trees, kwargs={"x": list(trees)}),
        shardmaker.make_call(args=(), kwargs={}, outputs=None, regions=[]),
        shardmaker.make_call(args=(packed,), mutated={"args.0": packed}),
        shardmaker.make_call(
            args=tuple(TensorRef(n, "uint8", (n,), (1,), 0) for n in range(150)),
            kwargs={},
            outputs=None,
            regions=[np.arange(n, dtype=np.uint8) for n in range(150)],
        ),
    )


COUNTS = StepCounts(3, 6112, 1, {"queue full": 1}, 0.5)
RANK = RankCounts({0: COUNTS, 12: COUNTS}, "disabled")
SHARDS = tuple(ShardRef(f"{n:06d}.Torch.add.{n}.h5", 100 + n) for n in range(3))
MANIFEST = Manifest(0, 1, 2, "/spool", "r", SHARDS)
END = RankEnd(
    rank=0,
    run_id="r",
    timestamp="20261130180405",
    segments=(0, 1),
    batches=9,
    found={0: 3, 12: 2},
    expected=json.loads(to_json(RANK)),
    missing={12: 1},
)
IDENTITY = {"journal": 1, "manifest": "m"}


@cache
def rows() -> list[Any]:
    return [
        *rowmaker.measured("Tensor.mul.0", 0),
        *rowmaker.measured("Torch.add.0", 1, [rowmaker.three_way_output(n) for n in range(3)]),
        *rowmaker.unmeasured("Tensor.exp.0", 2, Outcome.SKIPPED, "no reason"),
    ]


def verdicts() -> list[Any]:
    return [rowmaker.call_verdict("Tensor.mul.0", 0), rowmaker.call_verdict("Torch.add.0", 1)]


def write_ledger(path: Path) -> None:
    key = CallKey(0, 1, 0, "Torch.add.0")
    Ledger(
        directory="failed",
        segments=(0, 1),
        candidates=(Candidate(key, "000001.Torch.add.0.h5", 100),),
        evict=((0, "000002.Torch.add.1.h5"),),
    ).save(path)


def journal_records() -> list[Any]:
    headers = [header_of_file(MANIFEST, shard) for shard in SHARDS]
    result = CallResult(headers[0], Outcome.MEASURED, "", [rows()[0].output], "[]")
    return [
        {"identity": IDENTITY},
        {"start": 0},
        {"start": 0, "header": asdict(headers[0])},
        {"done": 0, "result": result.to_json()},
        {"start": 1, "header": asdict(headers[1])},
        {"lost": 1, "reason": "Crash"},
    ]


def make_journal(draw: Draw, path: Path) -> None:
    """Damage to the bytes, or to a record whose checksum is right."""
    lines = [journal_line(record) for record in journal_records()]
    if draw.random() < 0.3:
        path.write_bytes(mutate_bytes(draw, b"".join(lines)))
        return
    number = draw.randrange(len(lines))
    text = mutate_json(draw, journal_records()[number]).replace(b"\n", b" ")
    lines[number] = b"%08x %s\n" % (zlib.crc32(text), text)
    path.write_bytes(b"".join(lines))


def read_journal(path: Path) -> Any:
    # As a replay job does: what was recovered is made into rows, or the job says why not.
    progress = recover(path, IDENTITY)
    for number in range(len(SHARDS)):
        if not progress.settled(number):
            progress.lost[number] = "Crash"
    numbers = tuple(range(len(SHARDS)))
    return _rows(MANIFEST, progress, Job(path, path, ReplaySettings(), numbers))


def any_bytes(write: Callable[[Path], Any]) -> Callable[[Draw, Path], None]:
    """Makes a file with its bytes damaged."""

    def make(draw: Draw, path: Path) -> None:
        path.write_bytes(mutate_bytes(draw, bytes_of(write)))

    return make


def any_schema(write: Callable[[Path], Any]) -> Callable[[Draw, Path], None]:
    """Makes a table of other columns, or with other facts, whose checksum is right."""

    def make(draw: Draw, path: Path) -> None:
        path.write_bytes(_other_schema(draw, bytes_of(write)))

    return make


def _other_schema(draw: Draw, data: bytes) -> bytes:
    table = pq.read_table(pa.BufferReader(data))
    info = json.loads(table.schema.metadata[b"spool"])
    how = draw.randrange(4)
    if how == 0:
        names = draw.sample(table.schema.names, draw.randrange(1, 9))
        table = table.drop_columns(names)
    elif how == 1:
        at = draw.randrange(table.num_columns)
        column = draw.choice((pa.nulls(len(table)), pa.array(["x"] * len(table))))
        table = table.set_column(at, table.schema.names[at], column)
    elif how == 2:
        table = pa.table({"a": [1]}).replace_schema_metadata(table.schema.metadata)
    text = mutate_json(draw, info) if how == 3 else json.dumps(info).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({b"spool": text}), sink)
    return parquet._sealed(sink.getvalue().to_pybytes())


def write_rows(path: Path) -> None:
    parquet.write_measured(path, rows(), {"golden": "cpu"})


def write_calls(path: Path) -> None:
    rowmaker.write_segment(path, Route.TWO_WAY, verdicts(), 0, 0, 0)


def read_rows(path: Path) -> Any:
    parquet.read_meta(path)
    return parquet.read_measured(path)


def read_calls(path: Path) -> Any:
    parquet.read_verdict_info(path)
    list(parquet.read_verdicts(path, details=False))
    return list(parquet.read_verdicts(path))


# Kinds


@cache
def bytes_of(write: Callable[[Path], Any]) -> bytes:
    """What a writer makes; writing durably takes its time."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sound"
        write(path)
        return path.read_bytes()


def any_json(write: Callable[[Path], Any]) -> Callable[[Draw, Path], None]:
    """Makes a file of JSON with something changed in it."""

    def make(draw: Draw, path: Path) -> None:
        path.write_bytes(mutate_json(draw, json.loads(bytes_of(write))))

    return make


def written(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


def make_shard_bytes(draw: Draw, path: Path) -> None:
    path.write_bytes(mutate_bytes(draw, shard.encode(draw.choice(calls()))))


def make_shard_text(draw: Draw, path: Path) -> None:
    shardmaker.forge(path, lambda record: mutate_json(draw, record), call=draw.choice(calls()))


def make_lock(draw: Draw, path: Path) -> None:
    me = Owner("host", "boot", 1, 2, 3.0)
    path.write_bytes(mutate_json(draw, me.__dict__))


def is_a_sound_call(call: Any, path: Path) -> bool:
    return any(shardmaker.same_call(call, other) for other in calls())


def is_what_would_be_written(call: Any, path: Path) -> bool:
    """The text may be another one, but what was read can be written and read again."""
    again = path.with_suffix(".again")
    again.write_bytes(shard.encode(call))
    return bool(shardmaker.same_call(shard.read(again), call))


def is_same_when_saved(record: Any, path: Path) -> bool:
    again = path.parent / "again" / path.parent.name / path.name
    record.save(again)
    return bool(type(record).load(again) == record)


def has_usable_numbers(marker: Any, path: Path) -> bool:
    """What later code adds up, compares and subtracts from clocks."""
    numbers = [item for item in asdict(marker).values() if isinstance(item, (int, float))]
    return all(math.isfinite(float(number)) for number in numbers)


def are_rows(found: Any, path: Path) -> bool:
    return bool(found == rows())


def are_calls(found: Any, path: Path) -> bool:
    return [call.key for call in found] == [call.key for call in verdicts()]


def anything(found: Any, path: Path) -> bool:
    return True


class Kind(NamedTuple):
    """How a damaged file is made and read, and what may come out where it is not refused.

    Records are refused in another place than theirs.
    """

    make: Callable[[Draw, Path], None]
    read: Callable[[Path], Any]
    accepts: Callable[[Any, Path], bool] = anything
    place: str = "case"


KINDS: dict[str, Kind] = {
    "shard-bytes": Kind(make_shard_bytes, shard.read, is_a_sound_call),
    "shard-hdf5": Kind(mutate_hdf5, shard.read, is_a_sound_call),
    "shard-text": Kind(make_shard_text, shard.read, is_what_would_be_written),
    "run": Kind(any_json(written(to_json(new_run({"torch": "2"})))), load_run, has_usable_numbers),
    "step-closed": Kind(
        any_json(written(to_json(COUNTS))),
        lambda path: load(StepCounts, path.parent, path),
        has_usable_numbers,
    ),
    "rank-closed": Kind(
        any_json(written(to_json(RANK))), lambda path: load_rank(path.parent, path)
    ),
    "heartbeat": Kind(
        any_json(written(to_json(Heartbeat(1.5, 77, "h", 1, 4, 6112)))),
        lambda path: load(Heartbeat, path.parent, path),
        has_usable_numbers,
    ),
    "retired": Kind(
        any_json(written(to_json(Retired("host:/a/work")))),
        lambda path: load(Retired, path.parent, path),
    ),
    "takes": Kind(
        any_json(written(takes_to_json({0: 1, 3: 2}))),
        lambda path: load_takes(path.parent, 0),
        place="rank0.takes.json",
    ),
    "manifest": Kind(
        any_json(MANIFEST.save), Manifest.load, is_same_when_saved, "rank0/000002.json"
    ),
    "segment": Kind(
        any_json(Segment(0, 1, 2, (3, 4)).save),
        Segment.load,
        is_same_when_saved,
        "rank0/000002.json",
    ),
    "end": Kind(any_json(END.save), RankEnd.load, is_same_when_saved, "ends/rank0.json"),
    "bound": Kind(any_json(Bound("r", "/spool").save), Bound.load, is_same_when_saved),
    "ledger": Kind(
        any_json(write_ledger), Ledger.load, is_same_when_saved, "failed/rank0/ledger.json"
    ),
    "lock": Kind(make_lock, lambda path: Owner.parse(path.read_text("utf-8", "replace"))),
    "journal": Kind(make_journal, read_journal),
    "measured": Kind(any_bytes(write_rows), read_rows, are_rows),
    "verdicts": Kind(any_bytes(write_calls), read_calls, are_calls),
    "measured-schema": Kind(any_schema(write_rows), read_rows),
    "verdicts-schema": Kind(any_schema(write_calls), read_calls),
}


# Running


class Fault(Exception):
    """A reader did something else than refuse, or give what is in the sound file."""


class Slow(BaseException):
    """A reader took too long."""


def try_file(kind: Kind, path: Path) -> str:
    """Read a file; return what came out in a word.

    Raises
    ------
    Fault
    """
    try:
        found = kind.read(path)
    except SpoolError as error:
        if "\n" in str(error):
            raise Fault("the message is of several lines") from error
        return "refused"
    except Exception as error:
        raise Fault(f"{type(error).__name__} instead of a SpoolError: {error}"[:300]) from error
    if found is None:
        return "nothing"
    if not kind.accepts(found, path):
        raise Fault("was accepted, and is not what was written")
    return "accepted"


def run_case(name: str, draw: Draw, directory: Path) -> str:
    """Make a case and read it; return the outcome."""
    kind = KINDS[name]
    path = directory / kind.place
    path.parent.mkdir(parents=True, exist_ok=True)
    kind.make(draw, path)
    return try_file(kind, path)


def generator(seed: int, name: str, number: int) -> Draw:
    """What makes one case."""
    return random.Random(f"{seed}:{name}:{number}")


@dataclass(frozen=True)
class Chunk:
    """Consecutive cases of one kind."""

    seed: int
    name: str
    first: int
    count: int


def _too_slow(*_: object) -> None:
    raise Slow


def _child(chunk: Chunk, directory: Path, report: int) -> None:
    """Run the cases; write the outcomes, one line each, as they come."""
    signal.signal(signal.SIGALRM, _too_slow)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MAX_BYTES,) * 2)
    for number in range(chunk.first, chunk.first + chunk.count):
        os.write(report, f"begin {number}\n".encode())
        signal.alarm(MAX_SECONDS)
        try:
            outcome = run_case(chunk.name, generator(chunk.seed, chunk.name, number), directory)
            line = f"end {outcome}"
        except Slow:
            line = f"fault took longer than {MAX_SECONDS} s"
        except Fault as fault:
            line = "fault " + " ".join(str(fault).encode("ascii", "replace").decode().split())
        signal.alarm(0)
        os.write(report, line.encode() + b"\n")
        if line.startswith("fault"):
            os._exit(1)
    gc.collect()


def _data_bytes() -> int:
    """What this process holds already, as RLIMIT_DATA counts it."""
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line[:6] == "VmData")


def run_chunk(chunk: Chunk, directory: Path) -> tuple[Counter[str], tuple[int, str] | None]:
    """Run a chunk in a child.

    Returns
    -------
    Counter
        Cases by outcome.
    (int, str) or None
        The case that failed, and how; its file is left in `directory`.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.close(reader)
            _child(chunk, directory, writer)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    outcomes: Counter[str] = Counter()
    current, failed = chunk.first, None
    with os.fdopen(reader) as lines:
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            if word == "begin":
                current = int(rest)
            elif word == "end":
                outcomes[rest] += 1
            else:
                failed = (current, rest)
    _, status = os.waitpid(child, 0)
    if failed is None and status != 0:
        failed = (current, f"the process ended with {os.waitstatus_to_exitcode(status)}")
    if failed is not None:
        outcomes["fault"] += 1
    return outcomes, failed


def soak(seed: int, minutes: float, names: list[str], keep: Path) -> int:
    """Run cases of all kinds in turn until the time is over; return how many failed."""
    began = said = time.monotonic()
    totals = {name: Counter[str]() for name in names}
    faults = first = 0
    with tempfile.TemporaryDirectory() as directory:
        while time.monotonic() - began < 60 * minutes:
            for name in names:
                at = first
                while at < first + CHUNK:
                    chunk = Chunk(seed, name, at, first + CHUNK - at)
                    outcomes, failed = run_chunk(chunk, Path(directory))
                    totals[name] += outcomes
                    at += sum(outcomes.values())
                    if failed is not None:
                        faults += 1
                        tell_fault(seed, name, failed, Path(directory), keep)
                        at = failed[0] + 1
                if time.monotonic() - said > 30:
                    said = time.monotonic()
                    done = sum(sum(counts.values()) for counts in totals.values())
                    print(
                        f"{said - began:6.0f} s  {done} cases  {done / (said - began):.0f}/s  "
                        f"{faults} faults",
                        flush=True,
                    )
            first += CHUNK
    seconds = time.monotonic() - began
    done = sum(sum(counts.values()) for counts in totals.values())
    print(f"\nseed {seed}: {done} cases in {seconds:.0f} s, {done / seconds:.0f}/s")
    for name, counts in totals.items():
        print(f"  {name:12}", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))
    print(f"{faults} faults")
    return faults


def tell_fault(seed: int, name: str, failed: tuple[int, str], directory: Path, keep: Path) -> None:
    """Keep the specimen, and say how to make it again."""
    number, why = failed
    keep.mkdir(parents=True, exist_ok=True)
    specimen = keep / f"{name}-{seed}-{number}"
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(directory / KINDS[name].place, specimen)
    print(f"FAULT {name} {number}: {why}\n  specimen: {specimen}")
    print(f"  again: python tests/faults/fuzz.py --seed {seed} --case {name}:{number}", flush=True)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="one case, with its traceback")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="for specimens")
    options = parser.parse_args()
    if options.case:
        name, _, number = options.case.partition(":")
        with tempfile.TemporaryDirectory() as directory:
            draw = generator(options.seed, name, int(number))
            print(run_case(name, draw, Path(directory)))
        return 0
    names = options.kind or list(KINDS)
    return 1 if soak(options.seed, options.minutes, names, options.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
