"""From what Snakemake hands over to typed settings, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from spool.errors import ConfigError
from spool.settings import (
    JudgeSettings,
    ReplaySettings,
    RetireSettings,
    Settings,
    load_replay_settings,
    load_schema,
    load_settings,
)

CONFIG = Path(__file__).parents[1] / "config"
SCHEMA = load_schema(CONFIG / "schema.yaml")


def load(**config: Any) -> Settings:
    return load_settings(config, SCHEMA)


def test_the_shipped_configuration_holds_every_key_with_its_default() -> None:
    shipped = yaml.safe_load((CONFIG / "config.yaml").read_text())
    assert set(shipped) == set(SCHEMA["properties"])
    assert load_settings(shipped, SCHEMA) == load()


def test_every_key_says_what_is_allowed() -> None:
    def walk(schema: dict[str, Any]) -> None:
        for value in schema.get("properties", {}).values():
            assert value["description"]
            walk(value)

    walk(SCHEMA)


@pytest.mark.parametrize(
    ("config", "attribute", "value"),
    [
        # As the command line gives them: everything nested is text.
        ({"rank_list": ["0"]}, "rank_list", (0,)),
        ({"rank_list": ["3", "1", "3"]}, "rank_list", (1, 3)),
        ({"rank_list": 0}, "rank_list", (0,)),
        ({"rank_list": "0,2"}, "rank_list", (0, 2)),
        ({"rank_list": "[0, 2]"}, "rank_list", (0, 2)),
        ({"rank_list": ["0", "4-6"]}, "rank_list", (0, 4, 5, 6)),
        ({"rank_list": [7, "7-7"]}, "rank_list", (7,)),
        ({"watch": "true"}, "watch", True),
        ({"watch": "False"}, "watch", False),
        ({"watch": False}, "watch", False),
        ({"precision": "3"}, "precision", 3),
        ({"precision": 3.0}, "precision", 3),
        ({"idle_timeout": "1.5"}, "idle_timeout", 1.5),
        ({"idle_timeout": 3}, "idle_timeout", 3.0),
        ({"gpus": ["0", "1"]}, "gpus", (0, 1)),
        ({"gpus": None}, "gpus", ()),
        ({"spool_dir": "/nfs/a"}, "spool_dir", Path("/nfs/a")),
        ({"nfs_path": "/nfs/b"}, "spool_dir", Path("/nfs/b")),
        ({"nfs_path": "/nfs/b", "spool_dir": "spool-data"}, "spool_dir", Path("/nfs/b")),
        ({"nfs_path": "", "spool_dir": "x"}, "spool_dir", Path("x")),
    ],
)
def test_a_value_is_coerced(config: dict[str, Any], attribute: str, value: object) -> None:
    got = getattr(load(**config), attribute)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


def test_nested_values_are_coerced() -> None:
    settings = load(batch={"calls": "5", "bytes": "1.5 MB", "seconds": "0.5"})
    assert (settings.batch.calls, settings.batch.nbytes) == (5, 1_500_000)
    assert settings.batch.seconds == 0.5
    # What is not given keeps its default.
    assert load(batch={"calls": 5}).batch.nbytes == 2_000_000_000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("10B", 10), ("2GB", 2 * 10**9), ("3 GiB", 3 * 2**30), ("7tb", 7 * 10**12)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert load(max_failed_bytes=text).retire.max_failed_bytes == nbytes


def test_settings_reach_their_part() -> None:
    settings = load(
        bench_device="cpu",
        golden="bench",
        threads=3,
        allow_tf32="true",
        call_timeout=5,
        white_list=["relu", "add", "add"],
        black_list="mul",
        retain="none",
        keep_per_api=2,
        error_data_path="kept",
    )
    assert settings.replay == ReplaySettings("cpu", "bench", 3, None, True, {}, 5.0)
    assert settings.judge == JudgeSettings(("add", "relu"), ("mul",), {})
    assert settings.retire.retain == "none"
    assert settings.retire.keep_per_api == 2
    assert settings.retire.failed_dir == str(Path("kept").absolute())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rank_lst": 0}, ["unknown key 'rank_lst'; valid keys are ", "rank_list", "nfs_path"]),
        ({"batch": {"cals": 1}}, ["batch", "unknown key 'cals'", "bytes, calls, seconds"]),
        ({"batch": 3}, ["batch: 3", "calls: 1000"]),
        ({"batch": {"calls": 0}}, ["batch.calls: 0", "from 1 to 100000"]),
        ({"batch": {"bytes": "2 apples"}}, ["batch.bytes: '2 apples'", "500MB"]),
        ({"rank_list": []}, ["rank_list: []", "at least one"]),
        ({"rank_list": ["a"]}, ["rank_list: ['a']"]),
        ({"rank_list": [-1]}, ["rank_list: [-1]"]),
        ({"rank_list": [1.5]}, ["rank_list: [1.5]"]),
        (
            {"rank_list": ["5-2"]},
            ["rank_list: '5-2' is not allowed; a range is first-last, ascending"],
        ),
        ({"rank_list": ["0-999999999"]}, ["rank_list: '0-999999999'"]),
        ({"rank_list": [True]}, ["rank_list: [True]"]),
        ({"watch": "maybe"}, ["config: watch: 'maybe' is not allowed; it must be true or false"]),
        ({"watch": 1}, ["watch: 1", "true or false"]),
        ({"precision": "x"}, ["precision: 'x'", "1 to 17"]),
        ({"precision": 0}, ["precision: 0"]),
        ({"idle_timeout": "nan"}, ["idle_timeout: 'nan'"]),
        ({"idle_timeout": float("inf")}, ["idle_timeout: 'inf'"]),
        ({"threads": True}, ["threads: True"]),
        ({"bench_device": "npu"}, ["bench_device: 'npu'", "auto, cuda or cpu"]),
        ({"golden": None}, ["golden: None", "cpu or bench"]),
        ({"spool_dir": ""}, ["spool_dir: ''"]),
        ({"spool_dir": 7}, ["spool_dir: 7"]),
        ({"white_list": ["a b"]}, ["white_list: ['a b']"]),
        ({"white_list": [["add"]]}, ["white_list: [['add']]"]),
        ({"retain": "some"}, ["retain: 'some'", "failed, all or none"]),
        ({"fail_on": "warning"}, ["fail_on: 'warning'", "nothing or error"]),
        ({"host": "a b"}, ["host: 'a b'", "an address of this host to listen at"]),
        ({"port": 0}, ["port: 0", "a number from 1 to 65535"]),
        ({"port": "x"}, ["port: 'x'", "a number from 1 to 65535"]),
        ({"port": 59208}, ["port=59208: tls_path is missing: name the directory"]),
        ({"standards": ["add"]}, ["standards: ['add']"]),
        ({"msprobe": "/absent.json"}, ["/absent.json"]),
    ],
)
def test_a_bad_value_is_one_line(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_bad_override_of_a_standard_is_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_standard"):
        load(standards={"add": "no_such_standard"})


def test_overrides_from_the_command_line_become_numbers() -> None:
    settings = load(standards={"softmax": {"benchmark": {"mean_rel": "3"}}})
    assert settings.judge.standards == {"softmax": {"benchmark": {"mean_rel": 3}}}
    assert settings.replay.standards == settings.judge.standards


def test_an_msprobe_file_fills_what_is_left_at_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    section = {
        "white_list": ["conv2d"],
        "black_list": [],
        "error_data_path": "./kept",
        "nfs_path": "/nfs/run7",
        "host": "",
        "port": -1,
        "rank_list": [0, 1],
        "tls_path": "./",
    }
    path.write_text(json.dumps({"task": "run_ut", "run_ut": section}))
    shipped = yaml.safe_load((CONFIG / "config.yaml").read_text())
    settings = load_settings({**shipped, "msprobe": str(path)}, SCHEMA)
    assert settings.spool_dir == Path("/nfs/run7")
    assert settings.rank_list == (0, 1)
    assert settings.judge.white_list == ("conv2d",)
    assert settings.retire.failed_dir == str(Path("kept").absolute())
    settings = load_settings({**shipped, "msprobe": str(path), "rank_list": ["5"]}, SCHEMA)
    assert settings.rank_list == (5,)


@pytest.mark.parametrize(
    "settings",
    [
        JudgeSettings(("add",), (), {"x": {"benchmark": {"mean_rel": 3}}}),
        ReplaySettings("cpu", gpu=1),
        RetireSettings(failed_dir="/x"),
    ],
)
def test_json_round_trip(settings: JudgeSettings | ReplaySettings | RetireSettings) -> None:
    data = json.loads(json.dumps(settings.to_json()))
    assert type(settings).from_json(data) == settings
    with pytest.raises(ConfigError, match="unknown or missing"):
        type(settings).from_json({**data, "other": 1})
    for key in data:
        with pytest.raises(ConfigError, match=f"{key}: .* is not allowed; rerun the workflow"):
            type(settings).from_json({**data, key: -1.5j})


def test_a_settings_file_changes_only_with_its_content(tmp_path: Path) -> None:
    def times() -> dict[str, int]:
        return {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "settings").iterdir()}

    load(work_dir=str(tmp_path)).save()
    before = times()
    load(work_dir=str(tmp_path), threads=1, rank_list=[0, 1]).save()
    after = times()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"replay", "verdict"}
    load(work_dir=str(tmp_path), threads=1, rank_list=[0, 1], white_list=["add"]).save()
    assert {name for name in before if times()[name] != after[name]} == {"judging"}
    load(work_dir=str(tmp_path), golden="bench").save()
    assert times()["measuring"] != after["measuring"]
    assert load_replay_settings(tmp_path, 3).gpu == 3
    assert load_replay_settings(tmp_path, None).golden == "bench"


@pytest.mark.parametrize("key", ["work_dir", "results_dir"])
@pytest.mark.parametrize("value", ["w{rank}", "a{", "b}"])
def test_braces_in_directories_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"config: {key}: .* a path without braces"):
        load(**{key: value})


@pytest.mark.parametrize(
    ("change", "name", "output"),
    [
        ({"black_list": ["add"]}, "judging", "work/two_way/rank0/000000.parquet"),
        ({"black_list": ["add"]}, "judging", "work/three_way/rank0/000001.parquet"),
        ({"golden": "bench"}, "measuring", "work/replay/rank3/000000.parquet"),
        ({"keep_per_api": 3}, "retiring", "work/retired/rank0/000000.json"),
        ({"precision": 3}, "tables", "results/summary_20260102030405_rank0.csv"),
        ({"fail_on": "error"}, "verdict", "work/verdict.txt"),
    ],
)
def test_a_changed_setting_is_later_than_what_was_made_under_it(
    tmp_path: Path, change: dict[str, Any], name: str, output: str
) -> None:
    """Also if the clock was set back in between; else it would not be made again."""
    where = {"work_dir": str(tmp_path / "work"), "results_dir": str(tmp_path / "results")}
    load(**where).save()
    made = tmp_path / output
    made.parent.mkdir(parents=True, exist_ok=True)
    made.touch()
    os.utime(made, (4e9, 4e9))
    path = tmp_path / "work" / "settings" / f"{name}.json"
    load(**where).save()
    assert path.stat().st_mtime < 4e9
    load(**where, **change).save()
    assert path.stat().st_mtime == 4e9 + 1
    # Under a clock that goes right the time is its own.
    os.utime(made, (5, 5))
    load(**where).save()
    assert path.stat().st_mtime < 4e9
