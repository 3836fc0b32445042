"""The keeper thread: heartbeat of the rank, and measuring the spool's usage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spool.capture.watermark import Watermark
from spool.claim import HEARTBEAT_SECONDS

logger = logging.getLogger("spool")

_MEASURE_SECONDS = 0.5
_TICK = 0.25


class Keeper:
    """Runs beside training until it is told to stop.

    Parameters
    ----------
    beat : callable
        Writes the heartbeat.
    blocked : callable
        Whether training waits for room; a change of it is told at once.
    watermark : Watermark
        Measured again whenever it asks to, at most twice a second.
    """

    def __init__(
        self, beat: Callable[[], None], blocked: Callable[[], bool], watermark: Watermark
    ) -> None:
        self._beat = beat
        self._blocked = blocked
        self._watermark = watermark
        self._stop = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="spool-keeper", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; it is a daemon, so a dead mount cannot hold the program."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        next_beat = 0.0
        next_measure = 0.0
        was_blocked = False
        while not self._stop.is_set():
            now = time.monotonic()
            is_blocked = self._blocked()
            if now >= next_beat or is_blocked != was_blocked:
                was_blocked = is_blocked
                next_beat = now + HEARTBEAT_SECONDS
                self._try(self._beat)
            if now >= next_measure and self._watermark.stale:
                self._try(self._watermark.refresh)
                next_measure = time.monotonic() + _MEASURE_SECONDS
            self._stop.wait(_TICK)

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            if not self._complained:
                self._complained = True
                logger.warning("the spool cannot be looked after: %s", error)
