"""The shipper: sends what is published in a spool of the training host to the receiver.

It runs in a process of its own, outlives the training process, and keeps no state: what
lies in the spool is not acknowledged yet. A shard is deleted when the receiver has it
durably; a step's marker follows its last shard, the rank's marker its last step. So
whatever is killed, the same program started again on the same directory goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.errors import SpoolError, StoreError
from spool.files import atomic_write
from spool.processes import is_running
from spool.store import Heartbeat, Store
from spool.transport import tls
from spool.transport.frames import Kind, checksum, encode_meta, pack
from spool.transport.link import IDLE_SECONDS, PIECE, Away, Connection, Link, connect, read_frame

ORDER, LOG = "ship.json", "ship.log"
"""In the spool's directory: where it is sent, and what there is to say about that."""

WINDOW_BYTES = 64 << 20
WINDOW_FRAMES = 256
_LOOK_SECONDS = 0.05
_BEAT_SECONDS = 5.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 15.0
_BUSY_SECONDS = 1.0
_ATTEMPTS = 10
# A disk may be slow; a receiver that has lost count must not hold us for ever.
_ANSWER_SECONDS = 60.0


def save_order(root: Path, link: Link) -> None:
    """Write down where the spool at `root` is sent."""
    record = {
        "host": link.host,
        "port": link.port,
        "tls_path": str(link.directory) if link.directory else "",
        "tls_server_name": link.server_name,
        "rank": link.rank,
        "session": link.session,
    }
    atomic_write(root / ORDER, json.dumps(record).encode() + b"\n")


def load_order(root: Path) -> Link:
    """Read what `save_order` wrote.

    Raises
    ------
    StoreError
        If the directory holds no spool that is sent anywhere.
    """
    try:
        record = json.loads((root / ORDER).read_bytes())
        return Link(
            str(record["host"]),
            int(record["port"]),
            Path(record["tls_path"]) if record["tls_path"] else None,
            int(record["rank"]),
            str(record["session"]),
            str(record["tls_server_name"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{root}: holds nothing that is to be sent ({ORDER}: {error}); name the directory that "
            "the training process named"
        ) from None


@dataclass(frozen=True)
class _Sent:
    """What a frame was about, until it is answered."""

    path: Path
    nbytes: int
    step: int | None


class Shipper:
    """Sends one rank.

    Parameters
    ----------
    root : Path
        The spool; deleted when everything is sent.
    link : Link
    say : callable
        Takes lines for people.
    linger : float
        Seconds for which a receiver that is away is waited for once nobody captures here.
    """

    def __init__(
        self, root: Path, link: Link, say: Callable[[str], None], linger: float = 3600.0
    ) -> None:
        self._root = root
        self._link = link
        self._say = say
        self._linger = linger
        self._store = Store.open(root)
        self._context = (
            tls.context(link.directory, "client", link.server_name) if link.directory else None
        )
        self._sent: dict[int, _Sent] = {}
        self._names: set[Path] = set()
        self._window = 0
        self._sequence = 0
        self._answered = asyncio.Event()
        self._busy_until = 0.0
        self._away = ""
        self._beaten = b""
        self._moved = 0.0
        self._refusals: dict[Path, int] = {}
        self.shards = 0
        self.refused = 0

    def run(self) -> bool:
        """Send everything until the rank is closed and sent, or nobody captures any more.

        Returns
        -------
        bool
            Whether all of it was sent.
        """
        return asyncio.run(self._run())

    async def _run(self) -> bool:
        backoff, alone_since = _FIRST_BACKOFF, None
        while self._root.is_dir():
            try:
                connection = await connect(self._link, self._context)
            except Away as away:
                self._tell_away(str(away))
            else:
                self._tell_back()
                backoff = _FIRST_BACKOFF
                try:
                    if await self._serve(connection):
                        shutil.rmtree(self._root, ignore_errors=True)
                        return True
                except (OSError, EOFError, asyncio.TimeoutError) as error:
                    self._tell_away(str(error) or "the connection broke")
                except ValueError as error:
                    self._tell_away(str(error))
                finally:
                    await connection.close()
                    self._sent, self._names, self._window = {}, set(), 0
            if self._is_captured():
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._linger:
                self._say(
                    f"rank {self._link.rank}: receiver {self._link.where} is away and training is "
                    f"over; `spool ship {self._root}` sends the rest when it is back"
                )
                return False
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LONGEST_BACKOFF)
        return False  # capture did not begin after all

    def _tell_away(self, why: str) -> None:
        if why != self._away:
            self._away = why
            self._say(
                f"rank {self._link.rank}: receiver {self._link.where} is away: {why}; what is "
                "captured waits"
            )

    def _tell_back(self) -> None:
        if self._away:
            self._away = ""
            self._say(f"rank {self._link.rank}: receiver {self._link.where} is back")

    async def _serve(self, connection: Connection) -> bool:
        """Send over one connection; True when everything is sent."""
        reading = asyncio.create_task(self._read(connection))
        sending = asyncio.create_task(self._send(connection))
        try:
            done, _ = await asyncio.wait([reading, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending in done:  # whoever hangs up then has everything
                sending.result()
                return True
            reading.result()
            return False
        finally:
            for task in (reading, sending):
                task.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)

    # Sending.

    async def _send(self, connection: Connection) -> None:
        next_beat = 0.0
        while self._root.is_dir():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                await self._frame(connection, Kind.BEAT, {}, self._heartbeat())
            if time.monotonic() < self._busy_until:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            is_over = self._store.rank_closed(self._link.rank) is not None
            is_gone = not is_over and not self._is_captured()
            if not await self._look(connection) and not self._sent:
                if is_over:
                    await self._close_rank(connection)
                    return
                if is_gone:
                    self._say(
                        f"rank {self._link.rank}: what was captured is sent; its training process "
                        "is gone and did not close the rank"
                    )
                    return
            self._answered.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._answered.wait(), _LOOK_SECONDS)

    async def _look(self, connection: Connection) -> bool:
        """Send what is new in the spool; False if there was nothing."""
        found = False
        rank = self._link.rank
        for step in self._store.steps(rank):
            counts = self._store.step_closed(rank, step)
            entries = [e for e in self._store.shards(rank, step) if e.path not in self._names]
            for entry in entries:
                found = True
                while self._sent and (
                    self._window + entry.nbytes > WINDOW_BYTES or len(self._sent) >= WINDOW_FRAMES
                ):
                    self._answered.clear()
                    await self._answered.wait()
                await self._shard(connection, step, entry.path)
            marker = self._store.step_dir(rank, step) / "closed.json"
            if counts is None or marker in self._names:
                continue
            if not entries and not any(sent.step == step for sent in self._sent.values()):
                found = True
                text = marker.read_bytes()
                await self._note(
                    connection, Kind.STEP, {"step": step}, text, _Sent(marker, 0, None)
                )
        return found

    async def _shard(self, connection: Connection, step: int, path: Path) -> None:
        data = await asyncio.to_thread(path.read_bytes)
        sent = _Sent(path, len(data), step)
        await self._note(connection, Kind.SHARD, {"step": step, "file": path.name}, data, sent)

    async def _note(
        self, connection: Connection, kind: Kind, meta: dict[str, Any], body: bytes, sent: _Sent
    ) -> None:
        self._sequence += 1
        self._sent[self._sequence] = sent
        self._names.add(sent.path)
        self._window += sent.nbytes
        await self._frame(connection, kind, meta, body, self._sequence)
        self._moved = time.monotonic()

    async def _frame(
        self,
        connection: Connection,
        kind: Kind,
        meta: dict[str, Any],
        body: bytes,
        sequence: int = 0,
    ) -> None:
        text = encode_meta(meta)
        crc = checksum(text, b"" if kind == Kind.SHARD else body)
        connection.writer.write(pack(kind, sequence, text, len(body), crc) + text)
        view = memoryview(body)
        for start in range(0, len(body), PIECE):
            connection.writer.write(view[start : start + PIECE])
            await asyncio.wait_for(connection.writer.drain(), IDLE_SECONDS)
        await asyncio.wait_for(connection.writer.drain(), IDLE_SECONDS)

    async def _close_rank(self, connection: Connection) -> None:
        marker = self._store.rank_dir(self._link.rank) / "closed.json"
        sent = _Sent(marker, 0, None)
        await self._note(connection, Kind.RANK, {}, marker.read_bytes(), sent)
        while self._sent:
            self._answered.clear()
            await asyncio.wait_for(self._answered.wait(), IDLE_SECONDS)
            if time.monotonic() < self._busy_until:
                raise OSError("its disk does not take the end of the rank")

    def _heartbeat(self) -> bytes:
        """The training process's last sign of life; this one's greeting is as good as none."""
        path = self._store.rank_dir(self._link.rank) / "heartbeat.json"
        with contextlib.suppress(OSError):
            self._beaten = path.read_bytes()
        return self._beaten

    # Reading.

    async def _read(self, connection: Connection) -> None:
        while True:
            frame = await asyncio.wait_for(read_frame(connection.reader), IDLE_SECONDS)
            if frame.kind == Kind.BEAT:
                if self._sent and time.monotonic() - self._moved > _ANSWER_SECONDS:
                    raise OSError(f"it answers nothing for {_ANSWER_SECONDS:g} s")
                continue
            self._moved = time.monotonic()
            sent = self._sent.pop(frame.sequence, None)
            if sent is None:
                raise ValueError(f"it answers {frame.sequence}, which was not sent")
            self._window -= sent.nbytes
            if frame.kind == Kind.ACK:
                self._settle(sent)
            elif frame.kind == Kind.BUSY:
                self._names.discard(sent.path)
                if time.monotonic() >= self._busy_until:
                    self._say(
                        f"rank {self._link.rank}: receiver {self._link.where} waits: "
                        f"{str(frame.meta.get('why', ''))[:300]}"
                    )
                self._busy_until = time.monotonic() + _BUSY_SECONDS
            elif frame.kind == Kind.BAD and self._try_again(sent.path):
                self._names.discard(sent.path)
            elif frame.kind == Kind.BAD:
                self.refused += 1
                why = str(frame.meta.get("why", ""))[:300]
                self._say(
                    f"rank {self._link.rank}: the receiver refuses {sent.path.name}, which is "
                    f"lost: {why}"
                )
                self._settle(sent)
            else:
                raise ValueError(f"it answers with {frame.kind.name}")
            self._answered.set()

    def _try_again(self, path: Path) -> bool:
        """Whether what was refused is sent once more: it may have been damaged on the way."""
        self._refusals[path] = self._refusals.get(path, 0) + 1
        return self._refusals[path] < _ATTEMPTS

    def _settle(self, sent: _Sent) -> None:
        """Delete what the receiver has; the rank's marker goes last, with all."""
        self._names.discard(sent.path)
        if sent.step is not None:
            self.shards += 1
            sent.path.unlink(missing_ok=True)
        elif sent.path.parent.name.startswith("step"):
            with contextlib.suppress(OSError):
                shutil.rmtree(sent.path.parent)

    def _is_captured(self) -> bool:
        """Whether somebody on this host still captures into the spool, or is about to."""
        if self._store.rank_closed(self._link.rank) is not None:
            return False
        beat = self._read_heartbeat()
        if beat is None:
            return _is_parent_alive()
        return is_running(beat.pid) or bool(beat.writer and is_running(beat.writer))

    def _read_heartbeat(self) -> Heartbeat | None:
        with contextlib.suppress(SpoolError):
            return self._store.read_heartbeat(self._link.rank)
        return None


_parent = 0


def _is_parent_alive() -> bool:
    return bool(_parent) and is_running(_parent)


def main() -> None:
    """Serve a training process.

    Arguments: its number, the directory of its spool, and a descriptor that is not used.
    What there is to say goes into a file there, which that process reads: nothing here may
    hold its terminal or pipe when it is gone.
    """
    global _parent
    _parent, root = int(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def say(line: str) -> None:
        with contextlib.suppress(OSError), open(root / LOG, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    try:
        Shipper(root, load_order(root), say).run()
    except BaseException as error:
        say(f"sending what is captured ends: {type(error).__name__}: {error}")
        raise
