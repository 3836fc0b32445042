"""The training host's end of a connection: where the receiver is, and greeting it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.errors import ConfigError, StoreError
from spool.markers import RunInfo, StepCounts, check, run_info
from spool.transport import tls
from spool.transport.frames import HEADER, MAX_SMALL, Frame, FrameError, Kind, decode_meta, unpack

CONNECT_SECONDS = 10.0
# The receiver speaks every few seconds too.
IDLE_SECONDS = 15.0
PIECE = 1 << 20
_RETRY_SECONDS = 1.0


class Away(Exception):
    """The receiver cannot be reached, or not now."""


@dataclass(frozen=True)
class Link:
    """Where the receiver is, and who this is.

    Parameters
    ----------
    host, port
    directory : Path or None
        Of certificates and keys; None is without TLS.
    rank : int
    session : str
        32 hex digits: this capture.
    server_name : str
        That the receiver's certificate must carry; "" for any.
    """

    host: str
    port: int
    directory: Path | None
    rank: int
    session: str
    server_name: str = ""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Welcome:
    """What the receiver answered.

    Parameters
    ----------
    run : RunInfo
        Of its spool.
    kept : dict of int to StepCounts
        Steps that were closed when this capture began.
    """

    run: RunInfo
    kept: dict[int, StepCounts]


class Connection:
    """A connection to a receiver that has answered a greeting."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.welcome = welcome

    async def close(self) -> None:
        """Hang up."""
        self.writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.wait_closed(), 1.0)


async def connect(
    link: Link, context: Any, *, resume: bool = False, versions: dict[str, str] | None = None
) -> Connection:
    """Connect and greet.

    Raises
    ------
    Away
        With the reason: it may be tried again.
    StoreError
        If the receiver refuses this capture.
    """
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(
                link.host,
                link.port,
                ssl=context,
                server_hostname=(link.server_name or link.host) if context else None,
                limit=PIECE,
            ),
            CONNECT_SECONDS,
        )
    except (OSError, asyncio.TimeoutError) as error:
        raise Away(_reason(link, error)) from None
    hello = Frame(
        Kind.HELLO,
        meta={
            "rank": link.rank,
            "session": link.session,
            "resume": resume,
            "versions": versions or {},
        },
    )
    try:
        writer.write(hello.encode())
        await asyncio.wait_for(writer.drain(), CONNECT_SECONDS)
        answer = await asyncio.wait_for(read_frame(reader), 6 * CONNECT_SECONDS)
        return Connection(reader, writer, _welcome(link, answer))
    except (OSError, EOFError, asyncio.TimeoutError, FrameError) as error:
        writer.close()
        raise Away(_reason(link, error)) from None
    except BaseException:
        writer.close()
        raise


def _welcome(link: Link, answer: Frame) -> Welcome:
    if answer.kind == Kind.REFUSED:
        why = str(answer.meta.get("why", ""))[:1000]
        if answer.meta.get("again") is True:
            raise Away(f"it says: {why}")
        raise StoreError(f"receiver {link.where}: {why}")
    run, kept = answer.meta.get("run"), answer.meta.get("kept")
    if answer.kind != Kind.WELCOME or not isinstance(run, dict) or not isinstance(kept, dict):
        raise FrameError("it does not answer a greeting")
    path = Path(link.where)
    try:
        steps = {int(step): check(StepCounts, counts, path) for step, counts in kept.items()}
    except (ValueError, AttributeError):
        raise FrameError("it does not answer a greeting") from None
    return Welcome(run_info(run, path), steps)


def greet(link: Link, *, resume: bool, versions: dict[str, str], patience: float) -> Welcome:
    """Connect once, from a program that may have an event loop of its own.

    Parameters
    ----------
    link : Link
    resume : bool
    versions : dict
    patience : float
        Seconds for which a receiver that is away is waited for.

    Raises
    ------
    ConfigError
        If certificates are not in order, or the receiver is away for too long.
    StoreError
        If it refuses this capture.
    """
    context = tls.context(link.directory, "client", link.server_name) if link.directory else None
    found: list[Welcome | BaseException] = []

    async def try_long() -> Welcome:
        end = asyncio.get_running_loop().time() + patience
        while True:
            try:
                connection = await connect(link, context, resume=resume, versions=versions)
            except Away as away:
                if asyncio.get_running_loop().time() >= end:
                    raise ConfigError(
                        f"host={link.host} port={link.port}: no receiver there: {away}; start "
                        "`spool receive`, or the workflow with port=, on that host"
                    ) from None
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await connection.close()
            return connection.welcome

    def run() -> None:
        try:
            found.append(asyncio.run(try_long()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="spool-greeting", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Take in one frame of the receiver.

    Raises
    ------
    FrameError
        If it is none.
    """
    header = unpack(await reader.readexactly(HEADER.size), MAX_SMALL)
    text = await reader.readexactly(header.meta)
    body = await reader.readexactly(header.body)
    if zlib.crc32(body, zlib.crc32(text)) != header.crc:
        raise FrameError("a frame does not match its checksum")
    return Frame(header.kind, header.sequence, decode_meta(text), body)


def _reason(link: Link, error: BaseException) -> str:
    if isinstance(error, FrameError):
        return str(error)
    if isinstance(error, asyncio.TimeoutError):
        return "it does not answer"
    if link.directory is not None:
        return tls.reason(error, link.directory, "server")
    if isinstance(error, asyncio.IncompleteReadError):
        return "it hangs up: see its log; perhaps it wants TLS (tls_path)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
