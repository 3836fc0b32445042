"""Keeping Snakemake quiet and cheap while it waits for a queue.

Two habits of its scheduler do not suit a run of hours with thousands of jobs: it
logs several lines for each job and each second of waiting, and each finished job
adds one more timer that wakes it up every second for the rest of the run.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

# One line per batch comes from the intake; errors and the final words stay.
_CHATTER_EVENTS = frozenset(["job_info", "job_started", "job_finished", "progress", "shellcmd"])
_CHATTER = (
    "Waiting for queue input",
    "Updating jobs with queue input",
    "Select jobs to execute",
    "Execute ",
)


def quieten(logger: logging.Logger) -> None:
    """Leave out what Snakemake logs for each job and each second."""
    logger.addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        return True
    event = getattr(record, "event", None)
    if event is not None and str(getattr(event, "value", event)) in _CHATTER_EVENTS:
        return False
    return not str(record.msg).startswith(_CHATTER)


def share_timer(scheduler: Any) -> None:
    """Let all requests of a scheduler to look again later share one timer.

    Each look asks for another one, and so does each finished job: without this the
    number of looks per second grows with the number of jobs done. A request that
    comes while the timer runs is met when it fires. A Snakemake that goes about it
    in another way is left alone.
    """
    wake = getattr(getattr(scheduler, "_open_jobs", None), "release", None)
    if wake is None or not hasattr(scheduler, "_schedule_reevalutation"):
        return
    lock = threading.Lock()
    is_running = False

    def fire() -> None:
        nonlocal is_running
        with lock:
            is_running = False
        wake()

    def request(delay: float) -> None:
        nonlocal is_running
        with lock:
            if is_running:
                return
            is_running = True
        timer = threading.Timer(delay, fire)
        timer.daemon = True
        timer.start()

    scheduler._schedule_reevalutation = request
