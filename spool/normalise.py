"""From what a YAML file or the command line said to values of the schema's types.

Snakemake hands over what it was given. On the command line everything nested arrives as
text (``rank_list=[0]`` as ``['0']``, ``true`` as ``'true'``), so values are first coerced
to the type that the schema asks for, then validated; a bad value is one line with key,
value and what is allowed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spool.errors import ConfigError

ALIASES = {"nfs_path": "spool_dir"}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_MAX_RANGE = 65536
_SIZE_KEYS = ("batch.bytes", "max_failed_bytes")


def normalise(config: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve aliases and an msprobe file, coerce text, validate.

    Returns
    -------
    dict
        Keys of the schema only, each with a value of the schema's type.

    Raises
    ------
    ConfigError
        In one line: the key, its value, and what is allowed.
    """
    values = dict(config)
    source = values.pop("msprobe", None)
    for alias, key in ALIASES.items():
        given = values.pop(alias, None)
        if given not in (None, ""):
            values[key] = given
    if source not in (None, ""):
        values = _from_msprobe(str(source)) | _changed(values)
    properties = schema["properties"]
    _known("config", values, [*properties, *ALIASES, "msprobe"])
    for key, value in values.items():
        values[key] = _coerce(key, value, properties[key])
    _validate(values, schema)
    return values


def _from_msprobe(path: str) -> dict[str, Any]:
    from spool.msprobe import run_ut_settings

    values, ignored = run_ut_settings(Path(path))
    if ignored:
        print(f"spool: {path}: no meaning here: {', '.join(ignored)}", file=sys.stderr)
    return dict(values)


def _changed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what merely repeats a default: an msprobe file speaks for those keys."""
    defaults: dict[str, Any] = {
        "spool_dir": "spool-data",
        "rank_list": [0],
        "white_list": [],
        "black_list": [],
        "precision": 14,
        "error_data_path": "",
        "host": "",
        "port": -1,
        "tls_path": None,
    }
    return {key: value for key, value in values.items() if value != defaults.get(key, _NEVER)}


_NEVER = object()


def _known(where: str, values: Mapping[str, Any], names: Iterable[str]) -> None:
    odd = next((key for key in values if key not in names), None)
    if odd is not None:
        raise ConfigError(
            f"{where}: unknown key {odd!r}; valid keys are {', '.join(sorted(names))}"
        )


def _coerce(path: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Turn command-line text into the schema's type; leave what does not fit to validation."""
    kind = schema.get("type")
    if kind == "array":
        return _coerce_list(path, value, schema.get("items", {}))
    if kind == "object":
        if value is None:
            return {}
        if isinstance(value, Mapping) and "properties" in schema:
            inner = schema["properties"]
            _known(f"config: {path}", value, inner)
            return {key: _coerce(f"{path}.{key}", item, inner[key]) for key, item in value.items()}
        return _retype(value) if isinstance(value, Mapping) else value
    if kind == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if path in _SIZE_KEYS:
        return _size(value)
    if kind in ("integer", "number", ["integer", "null"]):
        return _as_number(str(value)) if isinstance(value, (str, float)) else value
    if "enum" in schema and isinstance(value, str):
        number = _as_number(value)
        return number if number in schema["enum"] else value
    return value


def _coerce_list(path: str, value: Any, items: Mapping[str, Any]) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
    elif not isinstance(value, (list, tuple)):
        value = [value]
    if items.get("type") != "integer":
        return list(value)
    return [number for item in value for number in _numbers(path, item)]


def _numbers(path: str, item: Any) -> Iterator[Any]:
    """A number, or all numbers of a range like ``"2-4"``."""
    match = _RANGE.fullmatch(item.strip()) if isinstance(item, str) else None
    if match is None:
        yield _as_number(item) if isinstance(item, str) else item
        return
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + _MAX_RANGE:
        raise ConfigError(
            f"config: {path}: {item!r} is not allowed; a range is first-last, ascending"
        )
    yield from range(first, last + 1)


def _as_number(text: str) -> Any:
    """A finite number, whole where it can be; anything else stays text and is refused later."""
    try:
        number = float(text)
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text.strip()) else _whole(number)
    except (ValueError, OverflowError):
        return text


def _whole(number: float) -> int | float:
    # int() raises for infinities and NaN, which no key allows.
    return int(number) if int(number) == number else number


def _size(value: Any) -> Any:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        return value
    return (
        int(float(match[1]) * _UNITS[match[2].upper()])
        if "." in match[1]
        else (int(match[1]) * _UNITS[match[2].upper()])
    )


def _retype(value: Any) -> Any:
    """Numbers and booleans inside a free mapping, which the command line gives as text."""
    if isinstance(value, Mapping):
        return {key: _retype(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_retype(item) for item in value]
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        return _as_number(value)
    return value


def _validate(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    if values.get("host") and (values.get("spool_dir") or "spool-data") != "spool-data":
        # As with msprobe, a shared directory makes the socket's keys moot.
        values = {key: item for key, item in values.items() if key not in ("host", "port")}
    from jsonschema import Draft202012Validator

    found = sorted(
        Draft202012Validator(dict(schema)).iter_errors(dict(values)),
        key=lambda error: [str(part) for part in error.absolute_path],
    )
    if not found:
        return
    path = [str(part) for part in found[0].absolute_path]
    allowed, value = schema, values
    for part in path:
        # An item of a list is described by the list.
        if isinstance(value, Mapping) and part in allowed.get("properties", {}):
            allowed, value = allowed["properties"][part], value[part]
    names = [part for part in path if not part.isdigit()]
    raise ConfigError(
        f"config: {'.'.join(names)}: {value!r} is not allowed; it must be {allowed['description']}"
    )
