"""Lines for the person who watches the workflow."""

from __future__ import annotations

import sys
from collections.abc import Callable

# A line about what is waited for comes this often, in seconds.
EVERY = 30.0

Say = Callable[[str], None]


def say(line: str) -> None:
    """Print one line on stderr."""
    print(f"spool: {line}", file=sys.stderr, flush=True)


class Reminder:
    """Says what is waited for, at once and then every half minute.

    Parameters
    ----------
    say : callable
        Takes the lines.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, say: Say, clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._last: dict[str, float] = {}

    def __call__(self, what: str, line: str) -> None:
        """Say `line`, unless something about `what` was said lately."""
        now = self._clock()
        if now - self._last.get(what, -EVERY) >= EVERY:
            self._last[what] = now
            self._say(line)
