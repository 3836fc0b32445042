"""Which calls of a step the user wants: white and black list, scope, list of names."""

from __future__ import annotations

from spool.config import CaptureConfig
from spool.names import base_name, spellings, split_name


class Filters:
    """The user's choice of calls; one object per session.

    Parameters
    ----------
    config : CaptureConfig
        Its `white_list`, `black_list`, `scope` and `list`.
    """

    def __init__(self, config: CaptureConfig) -> None:
        self._white = _spread(config.white_list)
        self._black = _spread(config.black_list)
        self._full = {name for name in config.list if _is_full(name)}
        self._parts = tuple(name for name in config.list if not _is_full(name))
        self._scope = config.scope
        self._inside = self._scope is None
        self._passed = False

    def new_step(self) -> None:
        """Begin a step: the scope is closed until its first call is met."""
        self._inside = self._scope is None
        self._passed = False

    def wants(self, api: str, index: int) -> bool:
        """Whether to capture a call; must be asked for every call, in order.

        Parameters
        ----------
        api : str
            Prefixed API name.
        index : int
            Its counter.
        """
        base = base_name(api)
        listed = (not self._white or base in self._white) and base not in self._black
        if self._scope is None and not self._full and not self._parts:
            return listed
        names = {f"{stem}.{index}" for stem in _stems(api, base)}
        inside = self._step_scope(names)
        return inside and listed and self._named(names)

    def _step_scope(self, names: set[str]) -> bool:
        if self._scope is None:
            return True
        first, last = self._scope
        if not self._inside and not self._passed and first in names:
            self._inside = True
        inside = self._inside
        if inside and last in names:
            self._inside, self._passed = False, True
        return inside

    def _named(self, names: set[str]) -> bool:
        if not self._full and not self._parts:
            return True
        if not self._full.isdisjoint(names):
            return True
        return any(part in name for part in self._parts for name in names)


def _spread(bases: frozenset[str]) -> frozenset[str]:
    return frozenset(name for base in bases for name in spellings(base))


def _stems(api: str, base: str) -> list[str]:
    prefix = api[: len(api) - len(base)]
    return [prefix + name for name in spellings(base)]


def _is_full(name: str) -> bool:
    try:
        split_name(name)
    except ValueError:
        return False
    return True
