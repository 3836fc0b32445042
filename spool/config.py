"""Settings of a capture: one frozen, validated dataclass.

They come from keywords, from a YAML or JSON file, from an msprobe
``config.json`` (`spool.msprobe`), and from the environment: ``SPOOL_CONFIG``
names a file when none is given, ``SPOOL_DIR`` the spool directory when neither
a keyword nor the file sets it. Keywords win over the file. Every wrong value is
one `ConfigError` that names the key, the value and what is allowed.

A spool directory wins over a receiver: ``host``, ``port`` and ``tls_path`` count where
none is named.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import yaml

from spool import msprobe
from spool.errors import ConfigError
from spool.names import base_name, split_name

DEFAULT_DIR = "spool-data"
GIB = 1 << 30

_UNITS = {
    "": 1,
    **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T"))},
    **{f"{p}iB": 1024**n for n, p in enumerate(("", "K", "M", "G", "T")) if n},
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SPAN = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_MAX_SPAN = 1_000_000
_MAX_STEP = 10**12 - 1  # of the store, where it is the most digits of a name


@dataclass(frozen=True)
class CaptureConfig:
    """What to capture, and where to put it.

    Parameters
    ----------
    spool_dir : Path or None
        The spool directory; its parent must exist. None where a receiver is named instead.
    host, port : str, int or None
        Where the receiver listens.
    tls_path : str or None
        Directory of certificates and keys; "" sends without TLS.
    tls_server_name : str
        That the receiver's certificate must carry; "" for any.
    spill_dir : Path or None
        Where what is not sent yet lies; None is in memory.
    rank, step : frozenset of int
        Empty means all.
    scope : tuple of two str, or None
        Names of the first and the last call, in every step.
    list : tuple of str
        Full names, or parts of names; empty means all.
    white_list, black_list : frozenset of str
        Base names; the black list is taken off the white list.
    backward : bool
        Also capture the operators that the autograd engine runs.
    recompute : bool
        Accepted for msprobe's sake; needs no setting.
    queue_bytes : int
        Bytes that the sink may hold in memory.
    writers : int
        Writer threads.
    writer : str
        ``process``, or ``threads`` of the training process itself.
    max_spool_bytes : int or None
        Watermark of the whole spool directory; None is no limit.
    on_full : str
        ``block`` or ``drop``, at the watermark.
    max_call_bytes : int
        Calls with more tensor bytes than this are not captured.
    max_wait : float
        Seconds that the trainer may be blocked before a call is dropped.
    resume : bool
        Go on in a spool where this rank has shards: closed steps stay.
    first_step : int
        Number of the step that capture begins with, as after a checkpoint.
    ignored : tuple of str
        Keys of an msprobe file that do not apply, to be logged once.
    """

    spool_dir: Path | None = Path(DEFAULT_DIR)
    host: str = ""
    port: int | None = None
    tls_path: str | None = None
    tls_server_name: str = ""
    spill_dir: Path | None = None
    rank: frozenset[int] = frozenset()
    step: frozenset[int] = frozenset()
    scope: tuple[str, str] | None = None
    list: tuple[str, ...] = ()
    white_list: frozenset[str] = frozenset()
    black_list: frozenset[str] = frozenset()
    backward: bool = True
    recompute: bool = False
    queue_bytes: int = 2 * GIB
    writers: int = 2
    writer: str = "process"
    max_spool_bytes: int | None = None
    on_full: str = "block"
    max_call_bytes: int = 2 * GIB
    max_wait: float = 60.0
    resume: bool = False
    first_step: int = 0
    ignored: tuple[str, ...] = ()

    def wants_rank(self, rank: int) -> bool:
        """Whether this rank is captured."""
        return not self.rank or rank in self.rank

    def wants_step(self, step: int) -> bool:
        """Whether this step is captured."""
        return not self.step or step in self.step

    @property
    def last_step(self) -> int | None:
        """The last step that is captured; None if all are."""
        return max(self.step) if self.step else None


def load(config: str | os.PathLike[str] | None = None, **keywords: object) -> CaptureConfig:
    """Settings from a file, keywords and the environment.

    Parameters
    ----------
    config : path-like, optional
        A YAML or JSON file, or an msprobe ``config.json``. Default: the file
        that ``SPOOL_CONFIG`` names, if it is set.
    **keywords
        Keys of `CaptureConfig`, and ``nfs_path`` for ``spool_dir``.

    Raises
    ------
    ConfigError
        For an unknown key, a wrong value or an unreadable file.
    """
    source = os.fspath(config) if config is not None else os.environ.get("SPOOL_CONFIG", "")
    values: dict[str, object] = {}
    ignored: tuple[str, ...] = ()
    if source:
        document = _read(Path(source))
        if msprobe.is_msprobe(document):
            values, ignored = msprobe.capture_settings(document, source)
        else:
            values = dict(document)
    checked = _check(values, f"{source}: ") | _check(keywords, "")
    if checked.get("spool_dir") is None:
        named = os.environ.get("SPOOL_DIR", "")
        is_sent = not named and _names_receiver(checked)
        checked["spool_dir"] = None if is_sent else Path(named or DEFAULT_DIR)
    return CaptureConfig(**checked, ignored=ignored)


def _read(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; write spool_dir={str(path)!r}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path}: is not {kind}: {problem}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{path}: must hold keys and values, such as step: [0]; it holds "
            f"{type(document).__name__}"
        )
    return {str(key): value for key, value in document.items()}


def _check(values: Mapping[str, object], where: str) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in values.items():
        name = "spool_dir" if key == "nfs_path" else key
        if name not in CHECKS:
            known = ", ".join(sorted((*CHECKS, "nfs_path")))
            raise ConfigError(f"{where}unknown key {key!r}; known keys: {known}")
        if name in checked:
            raise ConfigError(f"{where}spool_dir and nfs_path are the same key; set one of them")
        checked[name] = _default(name) if value is None else CHECKS[name](f"{where}{key}", value)
    return checked


def _default(name: str) -> object:
    if name == "spool_dir":
        return None
    return next(field.default for field in fields(CaptureConfig) if field.name == name)


def _names_receiver(checked: Mapping[str, object]) -> bool:
    """Whether a receiver is named, and everything that it takes."""
    host, port = checked.get("host"), checked.get("port")
    if not host and port is None:
        return False
    if not host or port is None:
        raise ConfigError(
            f"host={host or ''!r} port={port}: a receiver is named by both; or set spool_dir "
            "(nfs_path) to a shared directory"
        )
    if checked.get("tls_path") is None:
        raise ConfigError(
            f"host={host!r} port={port}: tls_path is missing: name the directory of certificates, "
            "or say tls_path='' to send without TLS, where everybody on the way can read and "
            "change it"
        )
    return True


# Checks of one value each: (key as the user wrote it, value) -> validated value.


def _fail(key: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    raise ConfigError(f"{key}={shown[:120]}: allowed is {allowed}")


def _directory(key: str, value: object) -> Path | None:
    if value == "" and key.endswith("nfs_path"):  # how msprobe's own examples say unset
        return None
    if value == "" or not isinstance(value, (str, os.PathLike)) or "\0" in os.fspath(value):
        _fail(key, value, "the path of a directory")
    return Path(value)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        _fail(key, value, "a string")
    return value


def _host(key: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._:\-\[\]%]*", value):
        _fail(key, value, "a host name or address")
    return value


def _port(key: str, value: object) -> int | None:
    if _is_int(value) and value == -1:
        return None
    if not _is_int(value) or not 1 <= value <= 65535:
        _fail(key, value, "a number from 1 to 65535")
    return value


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        _fail(key, value, "true or false")
    return value


def _numbers(key: str, value: object) -> frozenset[int]:
    allowed = 'a list of numbers from 0 and spans such as [0, "2-4"]'
    items = value if isinstance(value, (list, tuple, set, frozenset, range)) else [value]
    numbers: set[int] = set()
    for item in items:
        if _is_int(item) and item >= 0:
            numbers.add(item)
            continue
        match = _SPAN.fullmatch(item) if isinstance(item, str) else None
        if match is None:
            _fail(key, value, allowed)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_SPAN:
            _fail(key, value, allowed + f", ascending and shorter than {_MAX_SPAN}")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _names(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        _fail(key, value, "a list of names")
    for item in value:
        if not isinstance(item, str) or not re.fullmatch(r"[A-Za-z0-9_.]+", item):
            _fail(key, item, "a name of letters, digits, underscores and dots")
    return tuple(value)


def _parts(key: str, value: object) -> tuple[str, ...]:
    return tuple(_forward(key, name) for name in _names(key, value))


def _forward(key: str, name: str) -> str:
    """Take the direction off a full name: operators of the engine have a prefix of their own."""
    if name.endswith(".backward") and not name.startswith("Aten."):
        raise ConfigError(
            f"{key}: {name!r} names the backward of a forward call, whose operators have names "
            "of their own, such as Aten.mm.0; take them from the shards of a capture"
        )
    return name.removesuffix(".forward").removesuffix(".backward")


def _scope(key: str, value: object) -> tuple[str, str] | None:
    allowed = 'two full names, such as ["Tensor.add.0.forward", "Functional.square.2.forward"]'
    names = _names(key, value)
    if not names:
        return None
    if len(names) != 2:
        _fail(key, value, allowed)
    first, last = (_forward(key, name) for name in names)
    for name in (first, last):
        try:
            split_name(name)
        except ValueError:
            _fail(key, name, allowed)
    return first, last


def _bases(key: str, value: object) -> frozenset[str]:
    return frozenset(base_name(name) for name in _names(key, value))


def _amount(key: str, value: object) -> int:
    number = value if _is_int(value) else _parse_amount(value)
    if number is None or number < 1:
        _fail(key, value, 'a number of bytes from 1, or a string such as "2GiB" or "500MB"')
    return number


def _parse_amount(value: object) -> int | None:
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def _writers(key: str, value: object) -> int:
    if not _is_int(value) or not 1 <= value <= 64:
        _fail(key, value, "a number from 1 to 64")
    return value


def _writer(key: str, value: object) -> str:
    if value not in ("process", "threads"):
        _fail(key, value, "'process' or 'threads'")
    return str(value)


def _on_full(key: str, value: object) -> str:
    if value not in ("block", "drop"):
        _fail(key, value, "'block' or 'drop'")
    return str(value)


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        _fail(key, value, "a number of seconds from 0")
    return float(value)


def _step_number(key: str, value: object) -> int:
    if not _is_int(value) or not 0 <= value <= _MAX_STEP:
        _fail(key, value, f"a step's number, from 0 to {_MAX_STEP}")
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


CHECKS: dict[str, Callable[[str, object], Any]] = {
    "spool_dir": _directory,
    "host": _host,
    "port": _port,
    "tls_path": _text,
    "tls_server_name": _host,
    "spill_dir": _directory,
    "rank": _numbers,
    "step": _numbers,
    "scope": _scope,
    "list": _parts,
    "white_list": _bases,
    "black_list": _bases,
    "backward": _flag,
    "recompute": _flag,
    "queue_bytes": _amount,
    "writers": _writers,
    "writer": _writer,
    "max_spool_bytes": _amount,
    "on_full": _on_full,
    "max_call_bytes": _amount,
    "max_wait": _seconds,
    "resume": _flag,
    "first_step": _step_number,
}
