"""The receiver: takes shards from training hosts and publishes them into its spool.

One connection carries one rank. What is taken in at a time is bounded per connection, each
has a thread of its own for the disk, and a connection that says nothing, or nonsense, is
ended: none can hold up another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from spool import shard
from spool.errors import ConfigError, StoreError, explain
from spool.files import opener
from spool.store import Store
from spool.transport import tls
from spool.transport.frames import HEADER, Frame, FrameError, Kind, decode_meta, unpack
from spool.transport.inbox import Arrived, Inbox, Refused
from spool.transport.link import read_frame

# A client speaks every few seconds; who is silent for so long is gone.
IDLE_SECONDS = 15.0
BEAT_SECONDS = 5.0
HANDSHAKE_SECONDS = 10.0
MAX_CLIENTS = 512
MAX_SHARD = 4 << 30
_PIECE = 1 << 20
_COMMIT = 64
_AGAIN_SECONDS = 30.0
_T = TypeVar("_T")


@dataclass
class Counts:
    """What came of one rank: for those who watch."""

    shards: int = 0
    bytes: int = 0
    last: str = ""
    waiting: int = 0
    connected: bool = False
    closed: bool = False


class Receiver:
    """Listens until it is stopped.

    Parameters
    ----------
    root : Path
        The spool; made when the first rank comes.
    host : str
        Address to listen at; "" is all addresses with TLS, and this host alone without.
    port : int
        0 takes any that is free.
    directory : Path or None
        Of certificates and keys, see `spool.transport.tls`; None is without TLS.
    say : callable
        Takes lines for people.
    max_shard : int
        Most bytes of a shard.

    Raises
    ------
    ConfigError
        If certificates are not in order.
    """

    def __init__(
        self,
        root: Path,
        host: str,
        port: int,
        directory: Path | None,
        say: Callable[[str], None],
        max_shard: int = MAX_SHARD,
    ) -> None:
        self.root = Path(root).absolute()
        self.port = port
        self.ranks: dict[int, Counts] = {}
        self._host = host or (None if directory else "localhost")
        self._directory = directory
        self._context = tls.context(directory, "server") if directory else None
        self._say = say
        self._max_shard = max_shard
        self._serving: dict[int, str] = {}
        self._said: dict[str, float] = {}
        self._clients = 0
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spool-receiver", daemon=True)

    def start(self) -> None:
        """Listen, in a thread of its own.

        Raises
        ------
        ConfigError
            If the address cannot be listened at.
        """
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Hang up on everybody and end."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended by itself just now
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            server = await asyncio.start_server(
                self._on_client, self._host, self.port, limit=_PIECE
            )
        except OSError as error:
            raise ConfigError(
                f"host={self._host or ''} port={self.port}: cannot listen there: "
                f"{error.strerror or error}; name another port, or end what listens"
            ) from None
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._stopped.wait()
        # What is left are clients, whose tasks end with the loop.

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        where = peer[0] if peer else "a client"
        if self._clients >= MAX_CLIENTS:
            self.tell(where, f"{MAX_CLIENTS} clients are connected already; this one is not taken")
            writer.close()
            return
        self._clients += 1
        try:
            await self._talk(reader, writer, where)
        except (FrameError, StoreError) as error:
            self.tell(where, str(error))
        except ssl.SSLError as error:
            self.tell(where, self._reason(error))
        except TimeoutError:
            self.tell(where, f"says nothing for {IDLE_SECONDS:g} s; it is taken as gone")
        except (asyncio.IncompleteReadError, OSError):
            pass  # it hung up, and comes again
        finally:
            self._clients -= 1
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str
    ) -> None:
        if self._context is not None:
            await writer.start_tls(self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS)
        hello = await asyncio.wait_for(read_frame(reader), HANDSHAKE_SECONDS)
        if hello.kind != Kind.HELLO:
            raise FrameError("begins with something else than a greeting")
        rank, session = hello.meta.get("rank"), hello.meta.get("session")
        if type(rank) is not int or not 0 <= rank < 10**6 or not isinstance(session, str):
            raise FrameError("greets without a rank or a session")
        other = self._serving.get(rank)
        if other is not None and other != session:
            await _send(writer, _refusal(f"rank {rank} is being captured by another process", True))
            return
        self._serving[rank] = session
        disks = [ThreadPoolExecutor(1, thread_name_prefix=f"spool-rank{rank}") for _ in range(2)]
        try:
            await _Connection(self, reader, writer, disks, rank, where).run(hello)
        finally:
            for disk in disks:
                disk.shutdown(wait=False)  # a disk that hangs holds up nobody else
            if self._serving.get(rank) == session:
                del self._serving[rank]

    async def open_store(self, versions: dict[str, str]) -> Store:
        """The spool, made for the first rank that comes."""
        async with self._lock:
            return await asyncio.to_thread(Store.create, self.root, versions)

    def _reason(self, error: BaseException) -> str:
        assert self._directory is not None
        return tls.reason(error, self._directory, "client")

    def tell(self, where: str, what: str) -> None:
        """Say what is wrong with a client; the same of one place not all the time."""
        line = f"{where}: {what}"
        now = time.monotonic()
        if now - self._said.get(line, -_AGAIN_SECONDS) >= _AGAIN_SECONDS:
            if len(self._said) > MAX_CLIENTS:
                self._said.clear()
            self._said[line] = now
            self._say(line)

    @property
    def limits(self) -> shard.Limits:
        """Of a shard."""
        return shard.Limits(file_bytes=self._max_shard, region_bytes=self._max_shard)

    @property
    def max_shard(self) -> int:
        """Most bytes of a shard."""
        return self._max_shard


class _Connection:
    """One rank's connection, after its greeting."""

    def __init__(
        self,
        receiver: Receiver,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        disks: list[ThreadPoolExecutor],
        rank: int,
        where: str,
    ) -> None:
        self._receiver = receiver
        self._reader = reader
        self._writer = writer
        self._disk, self._publisher = disks
        self._rank = rank
        self._where = where
        # What is written waits here to be read and published, by a thread of its own.
        self._arrived: asyncio.Queue[_Written] = asyncio.Queue(_COMMIT)
        self._sending = asyncio.Lock()
        self._inbox: Inbox | None = None

    async def run(self, hello: Frame) -> None:
        """Take in what comes until the connection ends."""
        await self._welcome(hello)
        counts = self._receiver.ranks.setdefault(self._rank, Counts())
        counts.connected = True
        others = [asyncio.create_task(self._commit(counts)), asyncio.create_task(self._beat())]
        taking = asyncio.create_task(self._take(counts))
        try:
            done, _ = await asyncio.wait([taking, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            counts.connected = False
            for task in (taking, *others):
                task.cancel()
            await asyncio.gather(taking, *others, return_exceptions=True)
            # When nothing is begun any more; and not beside what is being published.
            await self._on_disk(lambda: None)
            await self._publishing(self._here.discard)

    async def _welcome(self, hello: Frame) -> None:
        versions = hello.meta.get("versions")
        if not isinstance(versions, dict):
            raise FrameError("greets without its versions")
        named = {str(key)[:100]: str(value)[:100] for key, value in list(versions.items())[:50]}
        try:
            store = await self._receiver.open_store(named)
            self._inbox = Inbox(store, self._rank, self._receiver.limits)
            kept = await self._on_disk(
                lambda: self._here.begin(
                    str(hello.meta["session"]), hello.meta.get("resume") is True, 0.0
                )
            )
        except StoreError as error:
            await _send(self._writer, _refusal(str(error), False))
            raise
        except OSError as error:
            await _send(self._writer, _refusal(explain(error), True))
            raise StoreError(explain(error)) from None
        await self._answer(Kind.WELCOME, 0, run=asdict(store.run), kept=kept)

    @property
    def _here(self) -> Inbox:
        assert self._inbox is not None
        return self._inbox

    async def _on_disk(self, act: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, act)

    async def _publishing(self, act: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._publisher, act)

    async def _answer(self, kind: Kind, sequence: int, **meta: Any) -> None:
        async with self._sending:
            await _send(self._writer, Frame(kind, sequence, meta))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._answer(Kind.BEAT, 0)

    async def _take(self, counts: Counts) -> None:
        while True:
            data = await asyncio.wait_for(self._reader.readexactly(HEADER.size), IDLE_SECONDS)
            header = unpack(data, self._receiver.max_shard)
            text = await _piece(self._reader, header.meta)
            meta = decode_meta(text)
            if header.kind == Kind.SHARD:
                await self._take_shard(header.sequence, meta, header.body, header.crc, text)
                continue
            body = await _piece(self._reader, header.body)
            if zlib.crc32(body, zlib.crc32(text)) != header.crc:
                raise FrameError("a frame does not match its checksum")
            await self._take_marker(Frame(header.kind, header.sequence, meta, body), counts)

    async def _take_shard(
        self, sequence: int, meta: dict[str, Any], size: int, crc: int, text: bytes
    ) -> None:
        step, file = meta.get("step"), meta.get("file")
        if type(step) is not int or not isinstance(file, str):
            raise FrameError("a shard without its step or name")
        landing = _Landing()
        try:
            if zlib.crc32(text) != crc:
                raise FrameError("a frame does not match its checksum")
            await self._on_disk(lambda: landing.open(lambda: self._here.place(step, file)))
            while size:
                data = await _some(self._reader, size)
                size -= len(data)
                if landing.is_open:
                    await self._on_disk(lambda d=data: landing.write(d))  # type: ignore[misc]
        finally:
            landing.close()
        if landing.refused:
            self._receiver.tell(self._where, landing.refused)
            await self._answer(Kind.BAD, sequence, why=landing.refused)
        elif landing.failure:
            if landing.path is not None:
                failed = landing.path
                await self._on_disk(lambda: self._here.discard(failed))
            await self._answer(Kind.BUSY, sequence, why=landing.failure)
        elif landing.path is None:  # it came before
            await self._answer(Kind.ACK, sequence)
        else:
            await self._arrived.put(_Written(sequence, step, file, landing.path))
            self._receiver.ranks[self._rank].waiting = self._arrived.qsize()

    async def _commit(self, counts: Counts) -> None:
        """Read and publish what has arrived, as much as there is at a time; answer each."""
        while True:
            items = [await self._arrived.get()]
            while not self._arrived.empty():
                items.append(self._arrived.get_nowait())
            arrived, answers = await self._publishing(lambda i=items: self._publish(i))  # type: ignore[misc]
            counts.waiting = self._arrived.qsize()
            counts.shards += len(arrived)
            counts.bytes += sum(item.nbytes for item in arrived)
            counts.last = arrived[-1].file if arrived else counts.last
            for sequence, kind, why in answers:
                if kind == Kind.BAD:
                    self._receiver.tell(self._where, why)
                await self._answer(kind, sequence, **({"why": why} if why else {}))

    def _publish(self, items: list[_Written]) -> tuple[list[Arrived], list[tuple[int, Kind, str]]]:
        """What is published, and the answers for all."""
        answers: list[tuple[int, Kind, str]] = []
        good: dict[int, Arrived] = {}
        for item in items:
            try:
                good[item.sequence] = self._here.check(item.step, item.file, item.partial)
            except Refused as error:
                answers.append((item.sequence, Kind.BAD, str(error)))
            except OSError as error:
                self._here.discard(item.partial)
                answers.append((item.sequence, Kind.BUSY, explain(error)))
        try:
            self._here.commit(list(good.values()))
        except OSError as error:
            return [], answers + [(sequence, Kind.BUSY, explain(error)) for sequence in good]
        return list(good.values()), answers + [(sequence, Kind.ACK, "") for sequence in good]

    async def _take_marker(self, frame: Frame, counts: Counts) -> None:
        here = self._here
        try:
            if frame.kind == Kind.STEP:
                step = frame.meta.get("step")
                if type(step) is not int:
                    raise FrameError("a step without its number")
                await self._publishing(lambda: here.close_step(step, frame.body))
            elif frame.kind == Kind.RANK:
                await self._publishing(lambda: here.close_rank(frame.body))
                counts.closed = True
            elif frame.kind == Kind.BEAT:
                if frame.body:  # else nobody captures yet
                    await self._on_disk(lambda: here.beat(frame.body))
                return
            else:
                raise FrameError(f"a frame of kind {frame.kind.name} from a client")
        except OSError as error:
            if frame.kind != Kind.BEAT:
                await self._answer(Kind.BUSY, frame.sequence, why=explain(error))
            return
        await self._answer(Kind.ACK, frame.sequence)


@dataclass(frozen=True)
class _Written:
    """A shard that was written, and is not yet read."""

    sequence: int
    step: int
    file: str
    partial: Path


class _Landing:
    """The file that a shard is written to; what the disk refuses does not end the connection."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.failure = ""
        self.refused = ""
        self._file = -1

    def open(self, place: Callable[[], Path | None]) -> None:
        """Ask where the shard belongs, and begin there."""
        try:
            self.path = place()
            if self.path is not None:
                self._file = opener(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except Refused as error:
            self.refused = str(error)
        except OSError as error:
            self.fail(error)

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        self.failure = explain(error)
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _refusal(why: str, again: bool) -> Frame:
    return Frame(Kind.REFUSED, meta={"why": why, "again": again})


async def _send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    writer.write(frame.encode())
    await asyncio.wait_for(writer.drain(), IDLE_SECONDS)


async def _piece(reader: asyncio.StreamReader, size: int) -> bytes:
    """So many bytes; some must come within the time that a client may be silent."""
    data = b""
    while len(data) < size:
        data += await _some(reader, size - len(data))
    return data


async def _some(reader: asyncio.StreamReader, most: int) -> bytes:
    data = await asyncio.wait_for(reader.read(min(most, _PIECE)), IDLE_SECONDS)
    if not data:
        raise asyncio.IncompleteReadError(b"", most)
    return data
