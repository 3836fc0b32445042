"""Where a capture writes to: a shared directory, or one of its own that is sent away."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from spool.capture.spawn import start_program
from spool.claim import claim
from spool.config import CaptureConfig
from spool.errors import ConfigError
from spool.processes import Process
from spool.store import StepCounts, Store
from spool.transport.link import Link, greet
from spool.transport.shipper import LOG, save_order

logger = logging.getLogger("spool")

SHIPPER = "spool.transport.shipper"
_MEMORY = Path("/dev/shm")
_LOOK_SECONDS = 0.05


class Destination(Protocol):
    """Where shards are published."""

    store: Store
    kept: Mapping[int, StepCounts]
    """Steps of an earlier capture that stay."""
    limit: int | None
    """Most bytes that may lie there."""

    where: str
    """For people."""

    def tell(self) -> None:
        """Log what there is to say."""

    def wait(self, seconds: float) -> None:
        """Once everything is published: wait until it is where it belongs."""

    def abandon(self) -> None:
        """Capture does not begin after all."""


class Shared:
    """A directory that the checking host sees too.

    Parameters
    ----------
    root : Path
    rank : int
    config : CaptureConfig
    versions : dict of str to str
    patience : float
        As in `claim`.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        config: CaptureConfig,
        versions: dict[str, str],
        patience: float,
    ) -> None:
        self.store = Store.create(root, versions)
        self.kept: Mapping[int, StepCounts] = claim(self.store, rank, config.resume, patience)
        self.limit = config.max_spool_bytes
        self.where = str(root)

    def tell(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass

    def abandon(self) -> None:
        pass


class Shipped:
    """A directory on this host, in memory unless `spill_dir` is set, whose shipper empties it.

    Parameters
    ----------
    rank, config, versions
        As in `Shared`.

    Raises
    ------
    ConfigError
        If certificates are not in order, there is no receiver, or no place.
    StoreError
        If the receiver refuses this capture.
    """

    def __init__(self, rank: int, config: CaptureConfig, versions: dict[str, str]) -> None:
        assert config.port is not None
        directory = Path(config.tls_path).absolute() if config.tls_path else None
        link = Link(
            config.host,
            config.port,
            directory,
            rank,
            uuid.uuid4().hex,
            config.tls_server_name,
        )
        self._link = link
        # First: who greets has the rank, and must be able to begin.
        self._root = _make_root(config, link)
        with contextlib.ExitStack() as undo:
            undo.callback(self.abandon)
            welcome = greet(link, resume=config.resume, versions=versions, patience=config.max_wait)
            self.kept: Mapping[int, StepCounts] = welcome.kept
            self.store = Store.create(self._root, versions, welcome.run)
            save_order(self._root, link)
            self._process = _start(self._root)
            undo.pop_all()
        # In memory it counts as what waits there.
        limits = [config.max_spool_bytes, None if config.spill_dir else config.queue_bytes]
        self.limit = min((limit for limit in limits if limit is not None), default=None)
        self._told = 0
        self.where = f"receiver {link.where}, by way of {self._root}"

    def tell(self) -> None:
        try:
            with open(self._root / LOG, "rb") as log:
                log.seek(self._told)
                data = log.read(1 << 16)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._told += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            logger.warning("%s", line)

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._root.exists() and self._process.is_alive() and time.monotonic() < end:
            self.tell()
            time.sleep(_LOOK_SECONDS)
        self.tell()
        if not self._root.exists():
            logger.info("rank %d: receiver %s has all of it", self._link.rank, self._link.where)
        elif self._process.is_alive():
            logger.warning(
                "rank %d: receiver %s has not all of it after %.0f s (max_wait); process %d goes "
                "on sending, from %s",
                self._link.rank,
                self._link.where,
                seconds,
                self._process.pid,
                self._root,
            )
        else:
            logger.error(
                "rank %d: receiver %s has not all of it; `spool ship %s` sends the rest",
                self._link.rank,
                self._link.where,
                self._root,
            )

    def abandon(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _make_root(config: CaptureConfig, link: Link) -> Path:
    """A directory of this capture alone."""
    name = f"spool-{link.session[:8]}-rank{link.rank}-"
    if config.spill_dir is not None:
        try:
            os.makedirs(config.spill_dir, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=name, dir=config.spill_dir))
        except OSError as error:
            raise ConfigError(
                f"spill_dir={str(config.spill_dir)!r}: cannot be written: {error.strerror}; name "
                "another directory of this host"
            ) from None
    with contextlib.suppress(OSError):
        free = os.statvfs(_MEMORY)
        if free.f_bavail * free.f_frsize >= config.queue_bytes:
            return Path(tempfile.mkdtemp(prefix=name, dir=_MEMORY))
    return Path(tempfile.mkdtemp(prefix=name))


def _start(root: Path) -> Process:
    try:
        return start_program(SHIPPER, [str(root)])
    except OSError as error:
        raise ConfigError(f"no process can be started to send what is captured: {error}") from None
