"""Makes the package's log lines seen where a program has not set up logging."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("spool")


class _Fallback(logging.Handler):
    """Writes to stderr as long as nobody else handles the program's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logger.handlers if handler is not self]
        if others or logging.getLogger().handlers:
            return
        try:
            level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            sys.stderr.write(f"spool: {level}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is gone: nothing left to tell
            pass


def ensure_visible() -> None:
    """Let INFO lines through, and write them to stderr unless logging is configured."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Fallback) for handler in logger.handlers):
        logger.addHandler(_Fallback())
