"""How a rule's script runs one function: errors are one line here and in the job's log."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spool.errors import SpoolError


@contextmanager
def job(log: str) -> Iterator[None]:
    """Run the body of a script; end the process with status 1 if it fails.

    Parameters
    ----------
    log : str
        The job's log file. It is written only if there is something to say.
    """
    try:
        yield
    except SpoolError as error:
        _fail(log, f"spool: {error}\n")
    except Exception:
        _fail(log, traceback.format_exc())


def _fail(log: str, text: str) -> None:
    sys.stderr.write(text)
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    raise SystemExit(1)
