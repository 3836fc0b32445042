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
        self._chosen = {"white_list": config.white_list, "black_list": config.black_list}
        self._unseen = {name for names in self._chosen.values() for name in names}
        self._unmet = set(config.list)
        self._has_begun = self._has_ended = False

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
        if self._unseen:
            self._unseen.difference_update(spellings(base))
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
            self._inside = self._has_begun = True
        inside = self._inside
        if inside and last in names:
            self._inside, self._passed = False, True
            self._has_ended = True
        return inside

    def _named(self, names: set[str]) -> bool:
        if not self._full and not self._parts:
            return True
        found = self._full & names
        found.update(part for part in self._parts if any(part in name for name in names))
        if self._unmet:
            self._unmet -= found
        return bool(found)

    def unmet(self) -> list[str]:
        """What the user asked for and no call was: a line each."""
        lines = [
            f"{key}: no call was made of {', '.join(missing)}"
            for key, names in self._chosen.items()
            if (missing := sorted(names & self._unseen))
        ]
        if self._unmet:
            lines.append(f"list: no call was like {', '.join(sorted(self._unmet))}")
        if self._scope is not None and not self._has_begun:
            lines.append(f"scope: {self._scope[0]} was never called, so nothing was captured")
        elif self._scope is not None and not self._has_ended:
            lines.append(
                f"scope: {self._scope[1]} was never called, so it went on to the step's end"
            )
        return lines


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
