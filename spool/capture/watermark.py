"""How full the spool may get: a measured usage plus what was written since."""

from __future__ import annotations

import threading
from collections.abc import Callable

_SHARD_OVERHEAD = 4096
_SMALLEST_SLACK = 1 << 20


class Watermark:
    """Answers from memory; somebody else measures when it asks to.

    Other ranks write into the same spool and the checking host frees it, so the
    usage is measured again whenever a good part of the room that was left has
    been used, and all the time while there is none.

    Parameters
    ----------
    limit : int or None
        Bytes of the whole spool; None is no limit.
    drop : bool
        At the limit, calls are dropped at once rather than after a wait.
    measure : callable
        Bytes in the spool, by looking.
    """

    def __init__(self, limit: int | None, drop: bool, measure: Callable[[], int]) -> None:
        self.drop = drop
        self._limit = limit
        self._measure = measure
        self._usage = 0
        self._since = 0
        self._lock = threading.Lock()
        self._changed: Callable[[], None] = lambda: None
        self._stale = False
        if limit is not None:
            self.refresh()

    def on_change(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each measurement."""
        self._changed = notify

    def relaxed(self, nbytes: int) -> bool:
        """Whether a tenth of the spool would still be free behind `nbytes` more."""
        return self._limit is None or self.has_room(nbytes + self._limit // 10)

    def never(self, nbytes: int) -> bool:
        """Whether `nbytes` would not even fit into an empty spool."""
        return self._limit is not None and nbytes + _SHARD_OVERHEAD > self._limit

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more would fit; asks for a measurement if not.

        Takes no lock: a signal handler may interrupt the trainer in here and then
        wait for writers, which must not wait for the trainer.
        """
        if self._limit is None:
            return True
        fits = self._usage + self._since + nbytes + _SHARD_OVERHEAD <= self._limit
        if not fits:
            self._stale = True
        return fits

    def wrote(self, nbytes: int) -> None:
        """Account for a shard that was published."""
        if self._limit is None:
            return
        with self._lock:
            self._since += nbytes
            slack = max((self._limit - self._usage) // 4, _SMALLEST_SLACK)
            if self._since > slack:
                self._stale = True

    @property
    def stale(self) -> bool:
        """Whether a measurement is asked for."""
        return self._stale

    def refresh(self) -> None:
        """Measure the spool; may take long, never called by the trainer after start."""
        self._stale = False
        with self._lock:
            before = self._since
        usage = self._measure()
        with self._lock:
            self._usage = usage
            self._since -= before
        self._changed()
