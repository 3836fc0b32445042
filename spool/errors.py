"""The one family of errors that a user can cause.

Each message is a single line: what was wrong, where (file, key, value), and
what to do about it. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpoolError(Exception):
    """Base of every error that a user, a configuration or foreign data can cause."""


def explain(error: OSError) -> str:
    """One line for what the system refused: a file, and why."""
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why


def is_of_system(error: OSError) -> bool:
    """Whether the system raised it.

    Otherwise it is a program's own, such as the ``TimeoutError`` of a signal handler, which
    may strike in any line of ours and must reach the program.
    """
    return error.errno is not None


@contextmanager
def ignoring_refusals() -> Iterator[None]:
    """Go on where the system refuses something."""
    try:
        yield
    except OSError as error:
        if not is_of_system(error):
            raise


@contextmanager
def about(path: object) -> Iterator[None]:
    """Let what the system refuses name the file, which calls on a descriptor do not."""
    try:
        yield
    except OSError as error:
        if is_of_system(error) and error.filename is None:
            error.filename = str(path)
        raise


class ConfigError(SpoolError):
    """A configuration key or value is not usable."""


class StoreError(SpoolError):
    """The spool directory cannot be used as asked."""


class BadShard(SpoolError):
    """A shard is torn, altered, hostile, or asks for something that is refused.

    Parameters
    ----------
    reason : str
        Why, in one line, without the path.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
