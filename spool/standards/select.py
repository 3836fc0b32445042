"""Which standard judges an API, and so which route its calls take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import yaml

from spool.names import base_name
from spool.standards.rows import Kind, Route, Standard
from spool.standards.thresholds import Overrides

FAMILIES = Path(__file__).with_name("families.yaml")


def spellings(name: str, words: list[str]) -> Iterator[str]:
    """Every API name of a family, as `families.yaml` describes it."""
    aliases = [word for word in words if word != "_" and "__" not in word]
    for alias in [name, *aliases]:
        yield alias
        if "_" in words and "." not in alias:
            yield f"{alias}_"
    for word in words:
        if word.startswith("="):
            yield word[1:]
        elif word.startswith("__"):
            operator = word.strip("_")
            yield from (f"__{form}{operator}__" for form in ("", "r", "i"))


@lru_cache(maxsize=1)
def families() -> dict[str, Standard]:
    """Base name to standard, for every name that the table lists or derives."""
    table: dict[str, Standard] = {}
    for standard, members in yaml.safe_load(FAMILIES.read_text(encoding="utf-8")).items():
        for name, words in members.items():
            table.update(dict.fromkeys(spellings(name, words), Standard(standard)))
    return table


def standard_of(api: str, overrides: Overrides | None = None) -> Standard:
    """The standard of an API.

    Parameters
    ----------
    api : str
        A base name (``linear``) or a call's name (``Functional.linear.3``).
    overrides : mapping, optional
        A user's ``standards``, see `thresholds.validate_overrides`.
    """
    name = base_name(api)
    chosen = (overrides or {}).get(name)
    if chosen is None:
        return families().get(name, Standard.BENCHMARK)
    return Standard(chosen if isinstance(chosen, str) else next(iter(chosen)))


def route_of(api: str, overrides: Overrides | None = None) -> Route:
    """The route of an API's calls; see `standard_of` for the parameters."""
    return standard_of(api, overrides).route


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "native_dropout")
_CHANNEL_DROPOUTS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout")
# Inputs of these many axes have no batch axis.
_UNBATCHED = {"dropout1d": 2, "dropout3d": 4}
_RANDOM_FILLS = ("alpha_dropout", "feature_alpha_dropout")


def dropout_kind(name: str) -> Kind | None:
    """How a random dropout is compared, by base name; None for every other API.

    A dropout that writes zeros is judged by their share; an alpha dropout writes
    none, so nothing of it can be compared.
    """
    plain = name.removesuffix("_")
    if plain in _DROPOUTS:
        return Kind.DROPOUT
    return Kind.RANDOM if plain in _RANDOM_FILLS else None


def channel_axes(name: str, axes: int) -> int:
    """How many leading axes number what a dropout zeroes together: elements or channels.

    Parameters
    ----------
    name : str
        Base name of a dropout.
    axes : int
        Of its input: batch and channels first, the rest is within a channel.
    """
    plain = name.removesuffix("_")
    if plain not in _CHANNEL_DROPOUTS:
        return axes
    return min(axes, 1 if _UNBATCHED.get(plain) == axes else 2)
