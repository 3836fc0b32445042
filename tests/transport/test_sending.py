"""A training process sends what it captures: as users do it, with processes that are killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import spool
from spool.cli import main
from spool.errors import ConfigError, StoreError
from spool.store import Store
from spool.transport.tls import context

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

import harness  # noqa: E402

TRAINING = """
import sys, time, torch, spool
torch.manual_seed(0)
with spool.enable({where}, max_wait={max_wait}) as session:
    for step in range(3):
        x = torch.rand(4, 8) + 1
        for _ in range(10):
            x = torch.tanh(x) * 1.5
            time.sleep({pause})
        print("step", step, flush=True)
        session.step()
"""


def training(where: str, pause: float = 0.0, max_wait: float = 60.0) -> str:
    return TRAINING.format(where=where, pause=pause, max_wait=max_wait)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class Receiving:
    """``spool receive`` in a process of its own, which can be killed and started again."""

    def __init__(self, root: Path, certificates: Path | str) -> None:
        self.root = root
        self.port = free_port()
        self.certificates = certificates
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "spool", "receive", "--port", str(self.port)),
                *("--tls-path", str(self.certificates), "--spool-dir", str(self.root)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        assert "receiving at port" in self.process.stderr.readline()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture
def receiving(tmp_path: Path, certificates: Path) -> Iterator[Receiving]:
    receiving = Receiving(tmp_path / "spool-data", certificates)
    yield receiving
    receiving.kill()


def captured(root: Path) -> dict[str, bytes]:
    """Shards and markers of a rank, but for how long training waited."""
    return {
        str(path.relative_to(root)): re.sub(
            rb'"blocked_seconds": [0-9.e-]+', b"", path.read_bytes()
        )
        for path in sorted((root / "rank0").rglob("*"))
        if path.is_file() and path.name != "heartbeat.json"
    }


@pytest.mark.parametrize(
    ("model", "checks"),
    [
        ("gpt2", False),
        pytest.param("gpt2", True, marks=pytest.mark.soak),
        pytest.param("llama", True, marks=pytest.mark.soak),
    ],
)
def test_a_receiver_that_is_killed_twice_leaves_the_same_spool_and_tables(
    model: str, checks: bool, tmp_path: Path, receiving: Receiving, certificates: Path
) -> None:
    """Of a real model, over TLS; and training's numbers are the same."""
    shared, sent = tmp_path / "shared", tmp_path
    shared.mkdir()
    options = ("--model", model, "--pause", "1")
    harness.train(shared, *options, "--out", "on.pt", "--spool-dir", "spool-data")
    receiving.start()

    def kill_twice() -> None:
        for enough in (50, 400):
            while len(list(receiving.root.rglob("*.h5"))) < enough:
                time.sleep(0.01)
            receiving.kill()
            time.sleep(0.5)
            receiving.start()

    killing = threading.Thread(target=kill_twice)
    killing.start()
    where = f"{receiving.port}:{certificates}"
    done = harness.train(sent, *options, "--out", "on.pt", "--receiver", where)
    killing.join(1)
    assert not killing.is_alive()
    said = done.stderr
    assert f"receiver localhost:{receiving.port} has all of it" in said
    assert said.count("is back") == 2
    assert (sent / "on.pt").read_bytes() == (shared / "on.pt").read_bytes()
    spools = [captured(cwd / "spool-data") for cwd in (shared, sent)]
    assert spools[0] == spools[1]
    assert len(spools[0]) > 400
    found = []
    for cwd in (shared, sent) if checks else ():
        harness.workflow(cwd)
        found.append(
            {re.sub(r"_\d{14}_", "_", name): data for name, data in harness.tables(cwd).items()}
        )
    assert found[:1] == found[1:]


def test_the_workflow_receives(tmp_path: Path, certificates: Path) -> None:
    """With `port` it needs no other process; both ends begin in any order."""
    port = free_port()
    log = (tmp_path / "log").open("w")
    workflow = subprocess.Popen(
        harness.command(rank_list="[0]", port=port, tls_path=str(certificates)),
        cwd=tmp_path,
        env=harness.environment(),
        stdout=log,
        stderr=log,
    )
    where = f"host='localhost', port={port}, tls_path={str(certificates)!r}"
    elsewhere = tmp_path / "training"
    elsewhere.mkdir()
    harness.python(elsewhere, training(where))
    assert workflow.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    assert f"receiving at port {port} into" in (tmp_path / "log").read_text()
    assert len(harness.rows(tmp_path, "summary")) == 63
    assert not list(elsewhere.iterdir())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level("INFO", logger="spool")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    spool.disable()


def test_what_was_captured_while_the_receiver_was_away_is_sent_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Callable[[], str]
) -> None:
    receiving = Receiving(tmp_path / "received", "")
    receiving.start()
    session = spool.enable(
        host="localhost",
        port=receiving.port,
        tls_path="",
        spill_dir=tmp_path / "spill",
        max_wait=1.0,
    )
    process = session._live._destination._process.pid
    torch.sin(torch.ones(3))
    session.step()
    receiving.kill()
    torch.cos(torch.ones(3))
    session.disable()
    text = said()
    assert re.search(
        rf"rank 0: receiver localhost:{receiving.port} is away: .*; what is captured waits", text
    )
    assert "has not all of it after 1 s (max_wait); process" in text
    (root,) = (tmp_path / "spill").iterdir()
    os.kill(process, signal.SIGKILL)
    assert main(["ship", str(root)]) == 1
    assert "is away and training is over; `spool ship" in capsys.readouterr().out
    receiving.start()
    assert main(["ship", str(root)]) == 0
    receiving.kill()
    assert not root.exists()
    store = Store.open(tmp_path / "received")
    assert [entry.name for entry in store.shards(0, 0)] == ["Torch.sin.0"]
    assert [entry.name for entry in store.shards(0, 1)] == ["Torch.cos.0"]
    closed = store.rank_closed(0)
    assert closed is not None
    assert closed.reason == "disabled"
    assert main(["ship", str(root)]) == 2
    assert "holds nothing that is to be sent" in capsys.readouterr().err


def test_a_sender_that_is_killed_is_told(tmp_path: Path, said: Callable[[], str]) -> None:
    receiving = Receiving(tmp_path / "received", "")
    receiving.start()
    session = spool.enable(
        host="localhost", port=receiving.port, tls_path="", spill_dir=tmp_path / "spill"
    )
    os.kill(session._live._destination._process.pid, signal.SIGKILL)
    torch.sin(torch.ones(3))
    session.disable()
    assert f"receiver localhost:{receiving.port} has not all of it; `spool ship" in said()
    (root,) = (tmp_path / "spill").iterdir()
    assert main(["ship", str(root)]) == 0
    receiving.kill()


def test_a_trainer_that_is_killed_is_closed_as_killed(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path / "received", "")
    receiving.start()
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            training(f"host='localhost', port={receiving.port}, tls_path=''", pause=0.2),
        ],
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdout is not None
    trainer.stdout.readline()
    trainer.kill()
    trainer.wait()
    store = Store.open(tmp_path / "received")
    end = time.monotonic() + 60
    while (closed := store.rank_closed(0)) is None and time.monotonic() < end:
        time.sleep(0.1)
    receiving.kill()
    assert closed is not None
    assert closed.reason == "killed"
    assert closed.steps[0].shards == 21
    assert sum(c.shards for c in closed.steps.values()) == sum(
        len(store.shards(0, step)) for step in closed.steps
    )


def test_what_is_wrong_at_the_start_is_one_line(tmp_path: Path, certificates: Path) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"host=localhost port={port}: no receiver there: "):
        spool.enable(host="localhost", port=port, tls_path="", max_wait=0.0)
    (certificates / "client.key").unlink()
    with pytest.raises(ConfigError, match=r"client\.key: cannot be read"):
        spool.enable(host="localhost", port=port, tls_path=str(certificates))
    receiving = Receiving(tmp_path / "received", "")
    receiving.start()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        spool.enable(
            host="localhost", port=receiving.port, tls_path="", spill_dir=tmp_path / "file" / "x"
        )
    assert "cannot be written: Not a directory; name another directory of this host" in str(
        refused.value
    )
    # Nothing of it is in the way of the next one.
    spill = tmp_path / "spill"
    where = {"host": "localhost", "port": receiving.port, "tls_path": "", "spill_dir": spill}
    with spool.enable(**where):
        torch.sin(torch.ones(3))
    assert list(spill.iterdir()) == []
    with pytest.raises(StoreError, match="holds a capture of rank 0 already"):
        spool.enable(**where)
    assert list(spill.iterdir()) == []
    receiving.kill()
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        for path in ("", str(certificates)):
            if path:
                (certificates / "server.key").write_text((certificates / "ca.key").read_text())
            command = ["receive", "--host", "localhost", "--port", str(port), "--tls-path", path]
            done = subprocess.run(
                [sys.executable, "-m", "spool", *command], capture_output=True, text=True
            )
            assert done.returncode == 2
            assert "Traceback" not in done.stderr
    assert "is not the key of" in done.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "spool", "receive", "--host", "localhost"),
                *("--port", str(port), "--tls-path", ""),
            ],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert re.search("cannot listen there: .*; name another port, or end what listens", done.stderr)


def test_the_recipe_of_the_documents(tmp_path: Path) -> None:
    """As written, with openssl; and what was revoked is refused."""
    text = (ROOT / "docs" / "transport.md").read_text()
    make, revoke = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    subprocess.run(["sh", "-e", "-c", make], cwd=tmp_path, check=True, capture_output=True)
    context(tmp_path, "server")
    context(tmp_path, "client")
    subprocess.run(["sh", "-e", "-c", revoke], cwd=tmp_path, check=True, capture_output=True)
    context(tmp_path, "server")
    with pytest.raises(ConfigError, match=r"client\.crt: is revoked by "):
        context(tmp_path, "client")


def test_certificates_to_try_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path / "tls")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    context(tmp_path / "tls", "server")
    context(tmp_path / "tls", "client")
    assert (tmp_path / "tls" / "server.key").stat().st_mode & 0o777 == 0o600
    assert main(["certs", str(tmp_path / "tls")]) == 2
    assert "ca.key: is there already; name another directory" in capsys.readouterr().err
