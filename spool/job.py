"""How a rule's script runs one function: errors are one line here and in the job's log."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from spool.errors import SpoolError, explain
from spool.files import make_dirs, opener


@contextmanager
def job(log: str) -> Iterator[None]:
    """Run the body of a script; end the process with status 1 if it fails, 130 on Ctrl-C.

    Parameters
    ----------
    log : str
        The job's log file. It is written only if there is something to say.
    """
    try:
        yield
    except SpoolError as error:
        _fail(log, f"spool: {error}\n")
    except OSError as error:
        why = " ".join(explain(error).split())
        _fail(log, f"spool: {why}; mend that and run the same command again\n")
    except KeyboardInterrupt:
        # Whoever pressed Ctrl-C knows, and nothing is lost.
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:
        _fail(log, traceback.format_exc())


def _fail(log: str, text: str) -> NoReturn:
    sys.stderr.write(text)
    path = Path(log)
    # What fails may be the very disk that the log is on.
    with suppress(OSError):
        make_dirs(path.parent)
        with open(path, "w", encoding="utf-8", errors="backslashreplace", opener=opener) as file:
            file.write(text)
    raise SystemExit(1)
