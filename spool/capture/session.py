"""What the user holds: `enable`, `step`, `disable`, and the session between them."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from spool.capture.live import Live
from spool.capture.logs import ensure_visible
from spool.capture.spawn import IN_WRITER
from spool.config import CaptureConfig, load
from spool.errors import ConfigError, SpoolError

logger = logging.getLogger("spool")


class Session:
    """A capture of one rank; made by `enable`.

    Without a matching rank it is inert: every method does nothing.

    Parameters
    ----------
    config : CaptureConfig
    rank : int
    live : Live or None
        None makes it inert.
    """

    def __init__(self, config: CaptureConfig, rank: int, live: Live | None) -> None:
        self.config = config
        self.rank = rank
        self._live = live

    @property
    def inert(self) -> bool:
        """Whether this process captures nothing at all."""
        return self._live is None

    @property
    def active(self) -> bool:
        """Whether a call that is made now would be captured."""
        return self._live is not None and self._live.recorder.active

    @property
    def over(self) -> bool:
        """Whether a capture ended; its last shards may still be on their way."""
        return self._live is not None and self._live.ended

    def start(self) -> None:
        """Capture calls from here on, in the steps that are configured."""
        if self._live is not None:
            self._live.guarded(self._live.start)

    def stop(self) -> None:
        """Capture nothing until the next `start`; the step goes on."""
        if self._live is not None:
            self._live.guarded(self._live.stop)

    def step(self) -> None:
        """End the current step and begin the next."""
        if self._live is not None:
            self._live.guarded(self._live.step)

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Capture the calls of the current thread too, within a ``with`` block.

        The thread that enabled the session is captured anyway; others are not
        unless they attach, because torch keeps its modes per thread.
        """
        live = self._live
        if live is None or live.ended or live.mode.present():
            yield
            return
        live.mode.place()
        try:
            yield
        finally:
            live.mode.remove()

    def disable(self, reason: str = "disabled") -> None:
        """End the capture: remove the hooks, write what was accepted, close the rank."""
        if self._live is not None:
            self._live.end(reason)
        _forget(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable("disabled" if kind is None else f"exception: {kind.__name__}")


_current: Session | None = None
_said_without = False


def _in_child() -> None:
    global _current
    if _current is not None and _current._live is not None:
        _current._live.orphan()
    _current = None


os.register_at_fork(after_in_child=_in_child)


def enable(
    config: str | os.PathLike[str] | None = None, *, autostart: bool = True, **keywords: Any
) -> Session:
    """Begin to capture the calls of this process.

    Parameters
    ----------
    config : path-like, optional
        A YAML or JSON file, or an msprobe ``config.json``; default is the file
        that ``SPOOL_CONFIG`` names.
    autostart : bool
        False waits for `Session.start`.
    **keywords
        Keys of `spool.config.CaptureConfig`; they win over the file.

    Returns
    -------
    Session
        Inert if this rank is not among the configured ones.

    Raises
    ------
    ConfigError
        For a wrong setting.
    SpoolError
        If a session is active already.
    StoreError
        If the spool cannot be used, or holds shards of this rank.
    """
    global _current, _said_without
    ensure_visible()
    if _current is not None and _current.over:
        _current.disable()
    if _current is not None:
        raise SpoolError(
            "spool.enable() was called before and is active in this process: "
            "call spool.disable() first"
        )
    settings = load(config, **keywords)
    if settings.ignored:
        logger.info("keys without a meaning here are ignored: %s", ", ".join(settings.ignored))
    rank = find_rank()
    world = os.environ.get("WORLD_SIZE", "")
    beyond = sorted(r for r in settings.rank if world.isdigit() and r >= int(world))
    if beyond and rank == 0:
        logger.warning(
            "rank: %s will never come: there are %s ranks", _shown(frozenset(beyond)), world
        )
    if not settings.wants_rank(rank):
        logger.info(
            "rank %d is not among the captured ranks %s: nothing is captured here",
            rank,
            _shown(settings.rank),
        )
        _current = Session(settings, rank, None)
        return _current
    if IN_WRITER in os.environ:
        return Session(settings, rank, None)  # enabled by what runs at the start of any Python
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # It imports the program again before it begins: what stands at the top of it runs.
        logger.info("a spawned child imports the program again: nothing is captured there")
        return Session(settings, rank, None)  # which may enable by itself later
    if settings.spool_dir is not None:
        _check_directory(settings.spool_dir)
    session = Session(settings, rank, None)
    session._live = Live(settings, rank, on_end=lambda: _forget(session))
    _current, _said_without = session, True
    logger.info("rank %d is captured into %s", rank, session._live.where)
    if autostart:
        session.start()
    return session


def step() -> None:
    """End the current step; without a session nothing happens, and that is said once."""
    global _said_without
    if _current is not None:
        _current.step()
    elif not _said_without:
        _said_without = True
        logger.info("spool.step() without an active capture does nothing")


def disable() -> None:
    """End the capture of this process, if there is one."""
    if _current is not None:
        _current.disable()


def _forget(session: Session) -> None:
    global _current
    if _current is session:
        _current = None


def find_rank() -> int:
    """This process's rank: of torch.distributed, else of the launcher, else 0.

    Raises
    ------
    ConfigError
        If the environment's ``RANK`` is not a number from 0.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise ConfigError(f"RANK={text!r} in the environment: allowed is a number from 0")
    return int(text)


def _check_directory(path: Path) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(
            f"spool_dir={str(path)!r}: directory {parent} does not exist; create or mount it"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"spool_dir={str(path)!r}: is not a directory; name another")
    if not os.access(path if path.exists() else parent, os.W_OK | os.X_OK):
        raise ConfigError(f"spool_dir={str(path)!r}: cannot be written by this user; name another")


def _shown(numbers: frozenset[int]) -> str:
    ordered = sorted(numbers)
    more = ", ..." if len(ordered) > 10 else ""
    return f"[{', '.join(map(str, ordered[:10]))}{more}]"
