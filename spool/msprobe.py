"""Reading an msprobe ``config.json`` as it is.

Its capture part becomes keywords of `spool.config.load`; its ``run_ut`` section
configures the checking host. Values that msprobe's own examples carry for
*unset* (``"port": -1``, ``"host": ""``, ``"nfs_path": ""``, empty lists) mean
unset here too. Keys that mean nothing to Spool are returned, to be named once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from spool.errors import ConfigError

# Any of these at the top level makes a file an msprobe file.
MARKS = frozenset({"task", "level", "dump_path", "tensor", "run_ut"})

LEVELS = ("L1", "mix")

TENSOR_KEYS = {
    "nfs_path": "spool_dir",
    "host": "host",
    "port": "port",
    "tls_path": "tls_path",
    "online_run_ut_recompute": "recompute",
    "scope": "scope",
    "list": "list",
}

# What asks for exactly that which is done anyway.
IMPLIED = frozenset({"online_run_ut"})

RUN_UT_KEYS = {
    "white_list": "white_list",
    "black_list": "black_list",
    "error_data_path": "error_data_path",
    "nfs_path": "spool_dir",
    "host": "host",
    "port": "port",
    "rank_list": "rank_list",
    "tls_path": "tls_path",
}

Settings = dict[str, object]


def is_msprobe(document: Mapping[str, object]) -> bool:
    """Whether a configuration document has msprobe's shape."""
    return not MARKS.isdisjoint(document)


def capture_settings(
    document: Mapping[str, object], where: str
) -> tuple[Settings, tuple[str, ...]]:
    """Keywords for capture, and the keys that do not apply.

    Parameters
    ----------
    document : mapping
        The parsed file.
    where : str
        The file's name, for messages.

    Returns
    -------
    settings : dict
        Under Spool's key names, without unset values.
    ignored : tuple of str
        Dotted names of set keys that have no meaning here, sorted.

    Raises
    ------
    ConfigError
        For another task than ``tensor`` or a level without API calls.
    """
    task = document.get("task", "tensor")
    if task != "tensor":
        raise ConfigError(f"{where}: task={task!r} is not supported; set it to 'tensor'")
    level = document.get("level", "L1")
    if level not in LEVELS:
        raise ConfigError(
            f"{where}: level={level!r} holds no API calls; allowed: {', '.join(LEVELS)}"
        )
    settings: Settings = {}
    ignored = []
    for key, value in document.items():
        if key in ("rank", "step"):
            settings[key] = value
        elif key not in ("task", "level", "tensor", "run_ut") and not _unset(value):
            ignored.append(key)
    for key, value in _section(document, "tensor", where).items():
        if key == "tls_path":
            settings["tls_path"] = value  # "" is a value here: plain TCP
        elif _unset(value) or key in IMPLIED:
            continue
        elif key in TENSOR_KEYS:
            settings[TENSOR_KEYS[key]] = value
        else:
            ignored.append(f"tensor.{key}")
    return settings, tuple(sorted(ignored))


def run_ut_settings(path: Path | str) -> tuple[Settings, tuple[str, ...]]:
    """The checking host's settings from a file's ``run_ut`` section.

    Parameters
    ----------
    path : path-like
        An msprobe ``config.json``.

    Returns
    -------
    settings : dict
        Any of ``white_list``, ``black_list``, ``error_data_path``, ``spool_dir``,
        ``host``, ``port``, ``rank_list``, ``tls_path``, unset values left out.
        Values are as the file has them, not validated.
    ignored : tuple of str
        Dotted names of set keys that have no meaning here, sorted.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not JSON, or has no ``run_ut`` section.
    """
    where = str(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(document, dict) or "run_ut" not in document:
        raise ConfigError(f"{where}: has no run_ut section; name an msprobe config.json that has")
    settings: Settings = {}
    ignored = []
    for key, value in _section(document, "run_ut", where).items():
        if key == "tls_path":
            settings["tls_path"] = value
        elif _unset(value):
            continue
        elif key in RUN_UT_KEYS:
            settings[RUN_UT_KEYS[key]] = value
        else:
            ignored.append(f"run_ut.{key}")
    return settings, tuple(sorted(ignored))


def _section(document: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    section = document.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{where}: {name} must be an object of keys, not {type(section).__name__}"
        )
    return section


def _unset(value: object) -> bool:
    """Whether msprobe's examples write this value for a key that is not set."""
    return value is None or value is False or value in ("", [], {}) or _is_minus_one(value)


def _is_minus_one(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == -1
