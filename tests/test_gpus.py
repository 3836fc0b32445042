"""Which GPUs jobs use, and that two jobs never share one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from spool import gpus
from spool.errors import ConfigError
from spool.gpus import claimed_gpu, gpus_to_use, visible_gpus


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "numbers"), [(None, [0, 1]), ("1", [0]), ("", []), ("-1", []), ("0,1,2", [0, 1])]
)
def test_gpus_are_counted_as_torch_counts_them(
    devices: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, numbers: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(devices) == numbers


@pytest.mark.parametrize(
    ("device", "chosen", "there", "used"),
    [
        ("cpu", [], [0, 1], []),
        ("auto", [], [], []),
        ("auto", [], [0, 1], [0, 1]),
        ("cuda", [1], [0, 1], [1]),
        ("auto", [0], [], []),
        ("cpu", [7], [0], []),
    ],
)
def test_gpus_to_use(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    chosen: list[int],
    there: list[int],
    used: list[int],
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: there)
    assert gpus_to_use(device, chosen) == used


@pytest.mark.parametrize(("device", "there"), [("cuda", []), ("cuda", [0]), ("auto", [0])])
def test_an_absent_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, there: list[int]
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: there)
    with pytest.raises(ConfigError, match=r"gpus: \[3\] is not allowed; visible are "):
        gpus_to_use(device, [3])


def test_two_jobs_get_two_gpus_and_a_third_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_WAIT", 0.01)
    third: list[int | None] = []

    def claim() -> None:
        with claimed_gpu(tmp_path, [4, 5]) as gpu:
            third.append(gpu)

    with claimed_gpu(tmp_path, [4, 5]) as one:
        with claimed_gpu(tmp_path, [4, 5]) as two:
            assert (one, two) == (4, 5)
            waiting = threading.Thread(target=claim)
            waiting.start()
            waiting.join(0.2)
            assert third == []
        waiting.join(30)
        assert third == [5]


def test_without_gpus_none_is_claimed(tmp_path: Path) -> None:
    with claimed_gpu(tmp_path / "locks", []) as gpu:
        assert gpu is None
    assert not (tmp_path / "locks").exists()
