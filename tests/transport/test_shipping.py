"""What lies in a spool of the training host lies in the receiver's in the end, and once."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from spools import make_call

from spool import shard
from spool.errors import ConfigError, StoreError
from spool.store import Heartbeat, RankCounts, StepCounts, Store
from spool.transport import receiver
from spool.transport.frames import Frame, Kind
from spool.transport.inbox import Arrived, Inbox
from spool.transport.link import Link, greet
from spool.transport.receiver import Receiver
from spool.transport.shipper import Shipper

SESSION = "0123456789abcdef" * 2
OTHER = "f" * 32


class Site:
    """A receiver and what training hosts send to it."""

    def __init__(self, root: Path, certificates: Path | None) -> None:
        self.root = root
        self.certificates = certificates
        self.said: list[str] = []
        self.port = 0
        self.receiver: Receiver | None = None

    @property
    def spool(self) -> Path:
        return self.root / "received"

    def listen(self) -> Receiver:
        self.receiver = Receiver(
            self.spool, "localhost", self.port, self.certificates, self.said.append
        )
        self.receiver.start()
        self.port = self.receiver.port
        return self.receiver

    def link(self, rank: int = 0, session: str = SESSION, port: int = 0) -> Link:
        return Link("localhost", port or self.port, self.certificates, rank, session)

    def begin(self, rank: int = 0, session: str = SESSION, resume: bool = False) -> Store:
        """Greet, and make the training host's own spool."""
        welcome = greet(
            self.link(rank, session), resume=resume, versions={"torch": "2"}, patience=0.0
        )
        root = self.root / f"local{rank}-{session[:4]}"
        return Store.create(root, {}, welcome.run)

    def ship(self, store: Store, rank: int = 0, session: str = SESSION, port: int = 0) -> Shipper:
        return Shipper(store.root, self.link(rank, session, port), self.said.append, linger=30.0)


@pytest.fixture(params=["plain", "tls"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    certificates = request.getfixturevalue("certificates") if request.param == "tls" else None
    site = Site(tmp_path, certificates)
    site.listen()
    yield site
    assert site.receiver is not None
    site.receiver.stop()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, None)
    site.listen()
    yield site
    assert site.receiver is not None
    site.receiver.stop()


def fill(store: Store, rank: int = 0, steps: int = 2, calls: int = 5, elements: int = 8) -> None:
    """Steps of calls, closed as a training process closes them."""
    counts = {}
    for step in range(steps):
        entries = [
            store.publish(
                make_call(rank=rank, step=step, order=order, index=order, elements=elements)
            )
            for order in range(calls)
        ]
        counts[step] = StepCounts(calls, sum(entry.nbytes for entry in entries))
        store.close_step(rank, step, counts[step])
    store.close_rank(rank, RankCounts(counts, "disabled"))


def files(root: Path) -> dict[str, bytes]:
    """All files of a spool but for what only one side has."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.parts[len(root.parts)] != ".received"
        and path.name != "ship.json"
    }


def test_the_received_spool_is_the_local_one_byte_for_byte(site: Site) -> None:
    store = site.begin()
    fill(store)
    store.heartbeat(0, Heartbeat(1.5, os.getpid(), "far", 1, 10, 100))
    expected = files(store.root)
    assert len(expected) == 15
    shipper = site.ship(store)
    assert shipper.run()
    assert site.said == []
    assert files(site.spool) == expected
    assert not store.root.exists()
    assert shipper.shards == 10
    assert site.said == []
    assert site.receiver is not None
    assert site.receiver.ranks[0].shards == 10
    assert not list((site.spool / ".received").rglob("*.names"))


def test_many_ranks_at_once(site: Site) -> None:
    stores = {rank: site.begin(rank) for rank in range(8)}
    expected: dict[str, bytes] = {}
    for rank, store in stores.items():
        fill(store, rank, elements=1000)
        expected |= files(store.root)
    shippers = [
        threading.Thread(target=site.ship(store, rank).run) for rank, store in stores.items()
    ]
    for thread in shippers:
        thread.start()
    for thread in shippers:
        thread.join(60)
    assert not site.said
    assert files(site.spool) == expected


def test_capture_and_shipping_at_the_same_time(site: Site) -> None:
    store = site.begin()
    store.heartbeat(0, Heartbeat(1.5, os.getpid(), socket.gethostname(), 0, 0, 0))
    thread = threading.Thread(target=site.ship(store).run)
    thread.start()
    kept = {}
    for order in range(40):
        entry = store.publish(make_call(order=order, index=order))
        kept[entry.name] = entry.nbytes
        time.sleep(0.005)
    counts = StepCounts(40, sum(kept.values()))
    store.close_step(0, 0, counts)
    store.close_rank(0, RankCounts({0: counts}, "disabled"))
    thread.join(30)
    assert not thread.is_alive()
    assert [e.name for e in Store.open(site.spool).shards(0, 0)] == list(kept)
    assert Store.open(site.spool).rank_closed(0) == RankCounts({0: counts}, "disabled")


class Proxy:
    """Stands between the ends and treats what goes by badly."""

    def __init__(self, port: int, treat: Callable[[bytes, int], bytes | None]) -> None:
        self._port = port
        self._treat = treat
        self._listener = socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("localhost", self._port))
            ends = (client, server)
            for source, target, is_up in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pipe, args=(source, target, is_up, ends), daemon=True
                ).start()

    def _pipe(
        self,
        source: socket.socket,
        target: socket.socket,
        is_up: bool,
        ends: tuple[socket.socket, ...],
    ) -> None:
        number = self.connections
        try:
            while data := source.recv(4096):
                treated = self._treat(data, number) if is_up else data
                if treated is None:
                    break
                target.sendall(treated)
        except OSError:
            pass
        for end in ends:
            with_shutdown(end)

    def close(self) -> None:
        self._listener.close()


def with_shutdown(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def treated(site: Site, treat: Callable[[bytes, int], bytes | None]) -> Iterator[Proxy]:
    proxy = Proxy(site.port, treat)
    try:
        yield proxy
    finally:
        proxy.close()


def flip(draw: random.Random) -> Callable[[bytes, int], bytes | None]:
    def treat(data: bytes, connection: int) -> bytes | None:
        if connection < 6 and draw.random() < 0.1:
            place = draw.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        return data

    return treat


def cut(draw: random.Random) -> Callable[[bytes, int], bytes | None]:
    def treat(data: bytes, connection: int) -> bytes | None:
        return None if connection < 8 and draw.random() < 0.1 else data

    return treat


def delay(draw: random.Random) -> Callable[[bytes, int], bytes | None]:
    def treat(data: bytes, connection: int) -> bytes | None:
        time.sleep(draw.uniform(0, 0.01))
        return data

    return treat


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", [flip, cut, delay])
def test_any_network_trouble_ends_in_the_same_spool(
    site: Site, how: Callable[[random.Random], Callable[[bytes, int], bytes | None]], seed: int
) -> None:
    store = site.begin()
    fill(store, calls=20, elements=500)
    expected = files(store.root)
    with treated(site, how(random.Random(seed))) as proxy:
        shipper = Shipper(store.root, site.link(port=proxy.port), site.said.append, linger=60.0)
        assert shipper.run()
    assert files(site.spool) == expected
    if proxy.connections > 1:
        where = f"rank 0: receiver localhost:{proxy.port}"
        assert any(line.startswith(f"{where} is away: ") for line in site.said)
        assert f"{where} is back" in site.said


def test_what_was_retired_meanwhile_does_not_come_back(plain: Site) -> None:
    """Acknowledged or not: a shard that was published once is never published again."""
    store = plain.begin()
    fill(store, steps=1)
    saved = {path: path.read_bytes() for path in store.root.rglob("*.h5")}
    text = (store.root / "rank0/closed.json").read_bytes()
    (store.root / "rank0/closed.json").unlink()
    (store.root / "rank0/step0/closed.json").rename(store.root / "closed")
    assert plain.ship(store).run()  # nobody captures there: what lies there is sent
    there = Store.open(plain.spool)
    assert len(there.shards(0, 0)) == 5
    for entry in there.shards(0, 0):
        entry.path.unlink()  # checked, and retired
    plain.receiver.stop()  # type: ignore[union-attr]
    plain.listen()
    again = Store.create(store.root, {}, there.run)
    for path, data in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    again.close_step(0, 0, StepCounts(5, 1))
    (store.root / "rank0/closed.json").write_bytes(text)
    shipper = plain.ship(again)
    assert shipper.run()
    assert shipper.shards == 5
    assert Store.open(plain.spool).shards(0, 0) == []


def test_another_capture_of_a_rank_is_refused_unless_it_goes_on(plain: Site) -> None:
    store = plain.begin()
    fill(store, steps=2)
    (store.root / "rank0/closed.json").unlink()
    (store.root / "rank0/step1/closed.json").unlink()
    assert plain.ship(store).run()
    with pytest.raises(StoreError, match="holds a capture of rank 0 already: enable with resume"):
        plain.begin(session=OTHER)
    welcome = greet(plain.link(session=OTHER), resume=True, versions={}, patience=0.0)
    assert sorted(welcome.kept) == [0]
    assert Store.open(plain.spool).steps(0) == [0]


def test_a_receiver_that_is_not_there_is_one_line(plain: Site) -> None:
    plain.receiver.stop()  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as refused:
        plain.begin()
    assert f"host=localhost port={plain.port}: no receiver there: " in str(refused.value)


def raw(port: int, *pieces: bytes, wait: float = 5.0) -> bytes:
    """Say something to a receiver, and what it answers until it hangs up."""
    with socket.create_connection(("localhost", port)) as end:
        end.settimeout(wait)
        try:
            for piece in pieces:
                end.sendall(piece)
            answer = b""
            while data := end.recv(65536):
                answer += data
            return answer
        except OSError:
            return b""


def hello(rank: int = 3) -> bytes:
    meta = {"rank": rank, "session": OTHER, "resume": False, "versions": {}}
    return Frame(Kind.HELLO, 0, meta).encode()


def damaged(frame: Frame) -> bytes:
    data = bytearray(frame.encode())
    data[-1] ^= 1
    return bytes(data)


def header(version: int = 1, kind: int = Kind.SHARD, body: int = 0) -> bytes:
    fields = struct.pack(">4sBBHQIQI", b"SPOL", version, kind, 0, 1, 0, body, 0)
    return fields + zlib.crc32(fields).to_bytes(4, "big")


SHARD = Frame(Kind.SHARD, 1, {"step": 0, "file": "000000.Tensor.add.0.h5"}, b"x" * 100)
HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "garbage": ([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 4], "speaks something else"),
    "tls": ([b"\x16\x03\x01\x02\x00" + b"\0" * 100], "the other end speaks TLS, not Spool's"),
    "another version": ([header(version=9)], "speaks version 9, this one 1"),
    "an unknown kind": ([hello(), header(kind=99)], "there is no frame of kind 99"),
    "a damaged header": ([hello(), SHARD.encode()[:20] + b"x" * 40], "a header does not match"),
    "no greeting": (
        [Frame(Kind.STEP, 1, {"step": 0}, b"{}").encode()],
        "begins with something else than a greeting",
    ),
    "no rank": ([Frame(Kind.HELLO, 0, {"rank": -1, "session": OTHER}).encode()], "without a rank"),
    "no object": (
        [hello(), Frame(Kind.SHARD, 1).encode()],
        "a shard without its step or name",
    ),
    "huge": (
        [hello(), header(body=1 << 60)],
        f"a frame of 0 and {1 << 60} bytes; {4 << 30} are allowed",
    ),
    "damaged": (
        [hello(), damaged(Frame(Kind.STEP, 1, {"step": 0}, b"{}"))],
        "does not match its checksum",
    ),
    "a path": (
        [hello(), Frame(Kind.SHARD, 1, {"step": 0, "file": "../../x.h5"}, b"x").encode()],
        "is no name of a shard",
    ),
    "no shard": ([hello(), SHARD.encode()], "not an HDF5 file"),
    "a marker of nonsense": (
        [hello(), Frame(Kind.STEP, 1, {"step": 0}, b"[]").encode()],
        "a marker that is no JSON object",
    ),
    "session": (
        [Frame(Kind.HELLO, 0, {"rank": 1, "session": "../x", "versions": {}}).encode()],
        "names no capture",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_who_speaks_nonsense_is_told_and_disturbs_nobody(plain: Site, case: str) -> None:
    pieces, words = HOSTILE[case]
    store = plain.begin()
    fill(store)
    expected = files(store.root)
    thread = threading.Thread(target=raw, args=(plain.port, *pieces))
    thread.start()
    assert plain.ship(store).run()
    thread.join()
    assert any(words in line for line in plain.said), plain.said
    found = files(plain.spool)
    assert {name: data for name, data in found.items() if "rank3" not in name} == expected
    assert not [name for name in found if "rank3" in name and name.endswith(".h5")]
    assert not list(plain.root.glob("x*"))


def test_a_disk_that_is_full_is_waited_for(plain: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from spool.transport import inbox

    store = plain.begin()
    fill(store, steps=1)
    expected = files(store.root)
    real, failures = inbox._fsync, [28, 5, 122]

    def failing(path: Path) -> None:
        if failures:
            raise OSError(failures.pop(), os.strerror(28), str(path))
        real(path)

    monkeypatch.setattr(inbox, "_fsync", failing)
    assert plain.ship(store).run()
    assert files(plain.spool) == expected
    assert any("waits: " in line for line in plain.said)


def test_two_takes_of_one_name_on_one_connection(plain: Site) -> None:
    """A duplicated frame is one shard."""
    store = plain.begin()
    call = make_call()
    entry = store.publish(call)
    data = entry.path.read_bytes()
    meta = {"step": 0, "file": entry.path.name}
    frames = [Frame(Kind.SHARD, number, meta, data).encode() for number in (1, 2, 3)]
    greeting = Frame(
        Kind.HELLO, 0, {"rank": 0, "session": SESSION, "resume": False, "versions": {}}
    ).encode()
    with socket.create_connection(("localhost", plain.port)) as end:
        end.sendall(greeting + b"".join(frames))
        end.settimeout(5)
        answer = b""
        while answer.count(b"SPOL") < 4:
            answer += end.recv(65536)
    there = plain.spool / "rank0/step0"
    assert sorted(path.name for path in there.iterdir()) == [entry.path.name]
    assert (there / entry.path.name).read_bytes() == data


def test_a_shard_of_another_call_than_its_name_is_lost_and_said(plain: Site) -> None:
    store = plain.begin()
    fill(store, steps=1)
    good = make_call(order=2, index=2)
    path = next(store.root.rglob("000003*.h5"))
    other = store.root / "other"
    Store.create(other, {}).publish(replace(good))
    path.write_bytes(next(other.rglob("*.h5")).read_bytes())
    import shutil

    shutil.rmtree(other)
    shipper = plain.ship(store)
    assert shipper.run()
    assert shipper.refused == 1
    assert any("rank 0: the receiver refuses 000003." in line for line in plain.said)
    assert len(Store.open(plain.spool).shards(0, 0)) == 4
    assert any("holds another call than its name says" in line for line in plain.said)


def test_two_processes_with_one_rank(plain: Site) -> None:
    """The second is told, also where nothing of the first has come yet."""
    plain.begin()
    with pytest.raises(StoreError, match="holds a capture of rank 0 already: enable with resume"):
        plain.begin(session=OTHER)
    there = Store.open(plain.spool)
    there.clear()
    plain.begin(session=OTHER)


def test_a_capture_that_is_being_sent_is_not_taken_over(plain: Site) -> None:
    store = plain.begin()
    store.heartbeat(0, Heartbeat(1.5, os.getpid(), socket.gethostname(), 0, 0, 0))
    thread = threading.Thread(target=plain.ship(store).run)
    thread.start()
    time.sleep(1)
    with pytest.raises(ConfigError, match="rank 0 is being captured by another process"):
        plain.begin(session=OTHER, resume=True)
    store.close_rank(0, RankCounts({}, "disabled"))
    thread.join(20)
    assert not thread.is_alive()


def test_shards_of_one_name_in_two_steps_are_two(plain: Site) -> None:
    """Published together, and each twice."""
    store = plain.begin()
    inbox = Inbox(Store.open(plain.spool), 0, shard.Limits())
    inbox.begin(SESSION, False, 0.0)
    arrived = []
    for step in (0, 1, 0, 1):
        call = make_call(step=step)
        partial = inbox.place(step, "000000.Torch.add.0.h5")
        assert partial is not None
        shard.write(call, partial)
        arrived.append(inbox.check(step, "000000.Torch.add.0.h5", partial))
    inbox.commit(arrived)
    assert sorted(files(plain.spool)) == [
        "rank0/step0/000000.Torch.add.0.h5",
        "rank0/step1/000000.Torch.add.0.h5",
        "run.json",
    ]
    assert inbox.place(1, "000000.Torch.add.0.h5") is None
    store.clear()


@pytest.mark.parametrize("stage", ["noted", "moved"])
def test_a_receiver_that_is_killed_between_two_steps_of_publishing(
    plain: Site, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    plain.begin()
    inbox = Inbox(Store.open(plain.spool), 0, shard.Limits())
    inbox.begin(SESSION, False, 0.0)
    name = "000000.Torch.add.0.h5"
    partial = inbox.place(0, name)
    assert partial is not None
    shard.write(make_call(), partial)
    data = partial.read_bytes()

    class Killed(BaseException):
        pass

    move = inbox._move

    def die(items: Sequence[Arrived]) -> None:
        if stage == "moved":
            move(items)
        raise Killed

    monkeypatch.setattr(inbox, "_move", die)
    with pytest.raises(Killed):
        inbox.commit([inbox.check(0, name, partial)])
    again = Inbox(Store.open(plain.spool), 0, shard.Limits())
    again.begin(SESSION, False, 0.0)
    place = plain.spool / "rank0/step0"
    assert [path.name for path in place.iterdir()] == [name]
    assert (place / name).read_bytes() == data
    assert again.place(0, name) is None
    (place / name).unlink()  # checked, and retired
    assert again.place(0, name) is None


def test_who_says_nothing_is_hung_up_on(plain: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its greeting, in the middle of a shard, and before; others go on meanwhile."""
    monkeypatch.setattr(receiver, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(receiver, "HANDSHAKE_SECONDS", 1.0)
    slow = [
        threading.Thread(target=raw, args=(plain.port, *pieces), kwargs={"wait": 20.0})
        for pieces in (
            [b"S"],
            [hello(rank=3)],
            [hello(rank=4), Frame(Kind.SHARD, 1, SHARD.meta, b"x" * 5000).encode()[:3000]],
        )
        for _ in range(10)
    ]
    began = time.monotonic()
    for thread in slow:
        thread.start()
    store = plain.begin()
    fill(store)
    expected = files(store.root)
    assert plain.ship(store).run()
    for thread in slow:
        thread.join()
    assert time.monotonic() - began < 20
    assert any("says nothing for 1 s; it is taken as gone" in line for line in plain.said)
    found = files(plain.spool)
    assert {
        name: data for name, data in found.items() if not re.search("rank[34]", name)
    } == expected
    assert not [name for name in found if name.endswith(".partial")]


def test_sixty_four_training_processes(plain: Site) -> None:
    stores = {rank: plain.begin(rank) for rank in range(64)}
    expected: dict[str, bytes] = {}
    for rank, store in stores.items():
        fill(store, rank, steps=1, calls=3)
        expected |= files(store.root)
    threads = [
        threading.Thread(target=plain.ship(store, rank).run) for rank, store in stores.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert files(plain.spool) == expected
