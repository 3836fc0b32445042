from __future__ import annotations

import json
from pathlib import Path

import pytest

from spool.config import CaptureConfig, load
from spool.errors import ConfigError
from spool.msprobe import run_ut_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOOL_CONFIG", raising=False)
    monkeypatch.delenv("SPOOL_DIR", raising=False)


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_defaults() -> None:
    assert load() == CaptureConfig()
    config = load()
    assert config.spool_dir == Path("spool-data")
    assert config.queue_bytes == config.max_call_bytes == 2 << 30
    assert (config.writers, config.max_wait, config.on_full) == (2, 60.0, "block")
    assert config.wants_rank(7)
    assert config.wants_step(123)
    assert config.last_step is None


def test_keywords() -> None:
    config = load(
        spool_dir="/a",
        rank=[0, "4-6"],
        step="2",
        scope=["Tensor.add.0.forward", "Functional.square.2.forward"],
        list=["relu", "Torch.linalg.inv.0.forward"],
        white_list=["linear", "Functional.relu", "Torch.linalg.inv"],
        black_list=("relu",),
        queue_bytes="1.5GiB",
        max_spool_bytes="500MB",
        max_call_bytes=100,
        writers=3,
        max_wait=2,
        on_full="drop",
        recompute=True,
        resume=True,
    )
    assert config.spool_dir == Path("/a")
    assert config.rank == {0, 4, 5, 6}
    assert config.step == {2}
    assert config.last_step == 2
    assert config.scope == ("Tensor.add.0", "Functional.square.2")
    assert config.list == ("relu", "Torch.linalg.inv.0")
    assert config.white_list == {"linear", "relu", "linalg.inv"}
    assert config.black_list == {"relu"}
    assert config.queue_bytes == 3 << 29
    assert config.max_spool_bytes == 500_000_000
    assert not config.wants_rank(1)
    assert config.wants_rank(5)


def test_files_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write(tmp_path / "a.yaml", "spool_dir: /y\nstep: [0, 2-4]\nqueue_bytes: 1GB\n")
    assert load(yaml).step == {0, 2, 3, 4}
    assert load(yaml).queue_bytes == 10**9
    file = write(tmp_path / "a.json", {"spool_dir": "/j", "rank": [1]})
    assert load(file, rank=[2]).rank == {2}
    assert load(file, rank=[2]).spool_dir == Path("/j")
    monkeypatch.setenv("SPOOL_DIR", "/env")
    assert load().spool_dir == Path("/env")
    assert load(file).spool_dir == Path("/j")
    assert load(spool_dir="/k").spool_dir == Path("/k")
    monkeypatch.setenv("SPOOL_CONFIG", str(file))
    assert load().spool_dir == Path("/j")
    assert load(yaml).spool_dir == Path("/y")
    assert load(write(tmp_path / "empty.yaml", "")).spool_dir == Path("/env")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rank", ["a-b"], "rank=['a-b']"),
        ("rank", [-1], "list of numbers"),
        ("rank", [True], "list of numbers"),
        ("rank", ["3-1"], "ascending"),
        ("rank", ["0-99999999"], "shorter than"),
        ("rank", [1.5], "list of numbers"),
        ("rank", {"a": 1}, "list of numbers"),
        ("step", "1-", "list of numbers"),
        ("step", [[0]], "list of numbers"),
        ("port", 70000, "port=70000: allowed is a number from 1 to 65535"),
        ("port", "80", "1 to 65535"),
        ("port", 0, "1 to 65535"),
        ("host", 3, "host name"),
        ("host", "a b", "host name"),
        ("tls_path", 3, "a string"),
        ("spool_dir", 3, "path of a directory"),
        ("spool_dir", "a\0b", "path of a directory"),
        ("scope", ["Tensor.add.0"], "two full names"),
        ("scope", ["add", "mul"], "two full names"),
        ("scope", "Tensor.add.0", "list of names"),
        ("scope", ["Tensor.add.0.backward", "Tensor.add.1"], "such as Aten.mm.0"),
        ("list", ["Tensor.add.0.backward"], "such as Aten.mm.0"),
        ("list", "relu", "list of names"),
        ("list", ["re*"], "letters, digits"),
        ("white_list", [1], "letters, digits"),
        ("backward", "yes", "true or false"),
        ("recompute", 1, "true or false"),
        ("resume", "no", "true or false"),
        ("first_step", -1, "a step's number, from 0"),
        ("first_step", True, "a step's number, from 0"),
        ("queue_bytes", 0, "number of bytes"),
        ("queue_bytes", "2 parsecs", "number of bytes"),
        ("queue_bytes", True, "number of bytes"),
        ("max_spool_bytes", -5, "number of bytes"),
        ("max_call_bytes", 1.5, "number of bytes"),
        ("writers", 0, "1 to 64"),
        ("writers", 65, "1 to 64"),
        ("on_full", "wait", "'block' or 'drop'"),
        ("on_full", ["block"], "'block' or 'drop'"),
        ("max_wait", -1, "seconds"),
        ("max_wait", float("nan"), "seconds"),
        ("max_wait", "60", "seconds"),
    ],
)
def test_wrong_values_are_one_line(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{"spool_dir": "/a", key: value})
    message = str(caught.value)
    assert said in message
    assert message.startswith(key)
    assert "\n" not in message


def test_unknown_key_names_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'ranks'; known keys: .*rank, .*writers"):
        load(ranks=[0])
    with pytest.raises(ConfigError, match=r"b\.yaml: unknown key 'x'"):
        load(write(tmp_path / "b.yaml", "x: 1"))


def test_same_key_twice() -> None:
    with pytest.raises(ConfigError, match="spool_dir and nfs_path are the same key"):
        load(spool_dir="/a", nfs_path="/b")


@pytest.mark.parametrize("document", ["[1, 2]", "3", "a: [", "\x00"])
def test_files_that_are_no_configuration(tmp_path: Path, document: str) -> None:
    for name in ("c.yaml", "c.json"):
        with pytest.raises(ConfigError) as caught:
            load(write(tmp_path / name, document))
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold keys and values, such as .*; it holds list"):
        load(write(tmp_path / "list.json", [1]))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"is a directory; write spool_dir="):
        load(tmp_path)
    with pytest.raises(ConfigError, match="allowed is the path of a directory"):
        load(spool_dir="")
    assert load(nfs_path="").spool_dir == Path("spool-data")
    (tmp_path / "d.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "d.yaml")


def test_a_receiver_of_an_msprobe_file(tmp_path: Path) -> None:
    tensor = {**MSPROBE["tensor"], "nfs_path": "", "host": "127.0.0.1", "port": 29500}  # type: ignore[dict-item]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MSPROBE, "tensor": tensor}))
    settings = load(path)
    assert (settings.spool_dir, settings.port, settings.tls_path) == (None, 29500, "")


def test_a_receiver_is_named_whole_and_counts_without_a_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for keywords in ({"host": "h"}, {"port": 5}):
        with pytest.raises(ConfigError, match="a receiver is named by both; or set spool_dir"):
            load(**keywords)
    with pytest.raises(ConfigError, match="tls_path is missing: name the directory"):
        load(host="h", port=1)
    settings = load(host="h", port=1, tls_path="", spill_dir="/s", tls_server_name="n")
    assert (settings.spool_dir, settings.spill_dir) == (None, Path("/s"))
    assert load(spool_dir="/a", host="h", port=1).host == "h"
    assert load(port=-1, host="").port is None
    monkeypatch.setenv("SPOOL_DIR", "/env")
    assert load(host="h", port=1).spool_dir == Path("/env")


MSPROBE = {
    "task": "tensor",
    "dump_path": "/home/data_dump",
    "rank": [],
    "step": [0, "2-3"],
    "level": "L1",
    "enable_dataloader": False,
    "tensor": {
        "scope": [],
        "list": [],
        "data_mode": ["all"],
        "online_run_ut": True,
        "nfs_path": "/nfs/run7",
        "host": "",
        "port": -1,
        "tls_path": "",
        "online_run_ut_recompute": False,
    },
    "run_ut": {
        "white_list": ["linear"],
        "black_list": [],
        "error_data_path": "./",
        "is_online": True,
        "nfs_path": "/nfs/run7",
        "host": "",
        "port": -1,
        "rank_list": [0],
        "tls_path": "./",
    },
}


def changed(**changes: object) -> dict[str, object]:
    document: dict[str, object] = json.loads(json.dumps(MSPROBE))
    section = document["tensor"]
    assert isinstance(section, dict)
    for key, value in changes.items():
        (section if key in section else document)[key] = value
    return document


def test_msprobe_file(tmp_path: Path) -> None:
    config = load(write(tmp_path / "config.json", MSPROBE))
    assert config.spool_dir == Path("/nfs/run7")
    assert config.step == {0, 2, 3}
    assert config.rank == frozenset()
    assert (config.host, config.port, config.tls_path) == ("", None, "")
    assert config.ignored == ("dump_path", "tensor.data_mode")


def test_msprobe_unset_values_mean_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOL_DIR", "/env")
    file = write(tmp_path / "config.json", changed(nfs_path=""))
    assert load(file).spool_dir == Path("/env")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "statistics"}, "task='statistics' is not supported; set it to 'tensor'"),
        ({"level": "L0"}, "level='L0' holds no API calls; allowed: "),
        ({"tensor": []}, "tensor must be an object"),
        ({"rank": ["a-b"]}, "rank=['a-b']"),
        ({"port": 70000}, "port=70000"),
        ({"scope": ["relu"]}, "scope=['relu']"),
    ],
)
def test_msprobe_wrong_values(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "config.json", changed(**changes)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_msprobe_level_mix(tmp_path: Path) -> None:
    assert load(write(tmp_path / "config.json", changed(level="mix"))).spool_dir


def test_run_ut_section(tmp_path: Path) -> None:
    settings, ignored = run_ut_settings(write(tmp_path / "config.json", MSPROBE))
    assert settings == {
        "white_list": ["linear"],
        "error_data_path": "./",
        "spool_dir": "/nfs/run7",
        "rank_list": [0],
        "tls_path": "./",
    }
    assert ignored == ("run_ut.is_online",)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "is not JSON"),
        ({"task": "tensor"}, "has no run_ut section; name an msprobe config.json"),
        ({"run_ut": 3}, "an object"),
    ],
)
def test_run_ut_section_that_is_not_there(tmp_path: Path, document: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_ut_settings(write(tmp_path / "config.json", document))
    with pytest.raises(ConfigError, match="cannot be read"):
        run_ut_settings(tmp_path / "none")
