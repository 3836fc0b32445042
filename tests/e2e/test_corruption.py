"""One run over a spool in which one file of each kind of damage lies beside healthy shards."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import HOSTILE, OTHERS
from shardmaker import text_of, write_with_h5py

from spool import shard
from spool._hdf5 import checksum

CAPTURE = """
import torch, torch.nn.functional as F, spool
torch.manual_seed({seed})
spool.enable(spool_dir="{spool}")
x = torch.randn(4, 8)
for _ in range({rounds}):
    x = F.softmax(torch.tanh(x) * 2, dim=-1)
spool.step()
spool.disable()
"""
Damage = Callable[[Path], None]


def truncated(part: int) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * part // 20])

    return damage


def flipped(part: int) -> Damage:
    """One bit, so far into the file."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[(len(data) - 1) * part // 7] ^= 1 << part
        path.write_bytes(data)

    return damage


def repaired(path: Path) -> None:
    """The file says that it is longer, and HDF5's own checksum is right again."""
    data = bytearray(path.read_bytes())
    data[28] ^= 1
    data[44:48] = checksum(bytes(data[:44])).to_bytes(4, "little")
    path.write_bytes(data)


def renumbered(**members: Any) -> Damage:
    """A sound shard of another place."""

    def damage(path: Path) -> None:
        call = replace(shard.read(path), **members)
        path.unlink()
        shard.write(call, path)

    return damage


def edited(change: Any) -> Damage:
    def damage(path: Path) -> None:
        call, record = shard.read(path), text_of(path)
        write_with_h5py(path, record, call.regions, change)

    return damage


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def listed(path: Path) -> None:
    path.unlink()
    path.mkdir()


PLACE = r"holds call .*, but lies where .* belongs"
STRUCTURE = "structure of the file|laid out|filters|layout|datatype|attributes|old kind of header"
SPECIMENS: dict[str, tuple[Damage, str]] = {
    "empty": (truncated(0), "the file is empty"),
    **{f"truncated to {part}/20": (truncated(part), ".") for part in range(1, 20)},
    **{f"bit {part}": (flipped(part), ".") for part in range(8)},
    "repaired": (repaired, "bytes, but should have"),
    "other rank": (renumbered(rank=1), PLACE),
    "other step": (renumbered(step=5), PLACE),
    "other order": (renumbered(order=9999), PLACE),
    "other name": (renumbered(api="Torch.sin"), PLACE),
    **{f"hdf5 {what}": (edited(change), what) for what, change in HOSTILE.items()},
    **{f"hdf5 {what}": (edited(change), STRUCTURE) for what, change in OTHERS.items()},
    "sparse giant": (sparse, "larger than"),
    "symbolic link": (linked, "a symbolic link, not a file"),
    "pipe": (piped, "not a regular file"),
    "directory": (listed, "not a regular file"),
}
# These are no files: they go, and only the reason stays.
NO_FILES = ("symbolic link", "pipe", "directory")


def victims(shards: list[Path]) -> Iterator[Path]:
    """Every other shard: each specimen lies between healthy ones."""
    return iter(shards[1::2])


def healthy_rows(run: Path, damaged: set[str]) -> dict[str, list[dict[str, str]]]:
    """Rows of healthy calls in every table that has one per call."""
    found = {}
    for table in (*harness.TABLES, "summary"):
        rows = harness.rows(run, table)
        names = [row.get("api") or row.get("API name") or row.get("API Name") for row in rows]
        calls = [re.sub(r"\.(forward|backward)\.output.*", "", str(name)) for name in names]
        found[table] = [row for row, call in zip(rows, calls, strict=True) if call not in damaged]
    return found


def test_damaged_shards_are_set_aside_and_all_others_are_judged(tmp_path: Path) -> None:
    rounds = (2 * len(SPECIMENS) + 12) // 3 + 1
    harness.python(tmp_path, CAPTURE.format(seed=0, spool="spool-data", rounds=rounds))
    other = CAPTURE.format(seed=1, spool="other", rounds=rounds)
    harness.python(tmp_path, other.replace("torch.tanh(x)", "torch.sigmoid(x)"))
    spool = tmp_path / "spool-data"
    shards = harness.shards(spool)
    places = victims(shards)
    wanted: dict[str, str] = {}

    for what, (damage, reason) in SPECIMENS.items():
        path = next(places)
        path.chmod(0o640)
        damage(path)
        wanted[path.name] = reason
        assert os.path.lexists(path), what

    one, two = next(places), next(places)
    for source, target in ((one, tmp_path / "kept"), (two, one), (tmp_path / "kept", two)):
        os.rename(source, target)
    wanted |= {one.name: PLACE, two.name: PLACE}

    # A call of another run, and one that lies here twice.
    foreign = next(path for path in places if ".tanh." in path.name)
    order = foreign.name.split(".", 1)[0]
    (stranger,) = (tmp_path / "other/rank0/step0").glob(f"{order}.*")
    shutil.copyfile(stranger, foreign)
    copy = one.with_name(f"999999.{shards[0].name.split('.', 1)[1]}")
    shutil.copyfile(shards[0], copy)
    wanted |= {foreign.name: PLACE, copy.name: PLACE}

    # The same spool, as if nothing damaged had ever been in it.
    clean = tmp_path / "clean"
    clean.mkdir()
    shutil.copytree(
        spool, clean / "spool-data", ignore=lambda _, names: [n for n in names if n in wanted]
    )

    done = harness.workflow(tmp_path, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output[-4000:]
    assert "Traceback" not in output, output[-4000:]
    said = f"error: rank 0: {len(wanted)} shards are unusable and set aside; reasons in "
    assert said in output, output[-4000:]
    assert f"error: rank 0 step 0: {len(shards) + 1} shards found, but only" in output

    summary = harness.rows(tmp_path, "summary")
    assert len(summary) == len(shards) + 1
    refused = {
        f"{int(row['order']):06d}.{row['api']}.h5": row["reason"]
        for row in summary
        if not row["verdict"].strip()
    }
    assert refused.keys() == wanted.keys()
    odd = {
        name: (reason, refused[name])
        for name, reason in wanted.items()
        if not re.search(f"^quarantined: .*({reason})", refused[name])
    }
    assert odd == {}
    aside = tmp_path / "work/quarantine/rank0/step0"
    for name, reason in wanted.items():
        note = json.loads((aside / f"{name}.json").read_text())
        assert re.search(reason, note["reason"])
        assert not os.path.lexists(spool / "rank0/step0" / name)
    names = {path.name for path in aside.glob("*.h5")}
    assert len(names) == len(wanted) - len(NO_FILES)
    assert names < wanted.keys()

    again = harness.workflow(clean, check=False)
    assert again.returncode == 1, again.stdout + again.stderr  # what is not there is missing
    damaged = {name.split(".", 1)[1].removesuffix(".h5") for name in wanted} - {
        shards[0].name.split(".", 1)[1].removesuffix(".h5")
    }
    rows, undisturbed = healthy_rows(tmp_path, damaged), healthy_rows(clean, damaged)
    rows["summary"] = [row for row in rows["summary"] if row["order"] != "999999"]
    assert len(undisturbed["summary"]) == len(shards) - len(wanted) + 1
    assert rows == undisturbed
