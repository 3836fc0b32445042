"""References of fused operators by name: Spool's own, and those that a user gives.

Nothing in a shard adds to them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from spool.errors import ConfigError
from spool.records import no_reference
from spool.replay.fused import REFERENCES
from spool.replay.fused.reference import Reference

_registered: dict[str, Reference] = {}


def register_reference(
    name: str, function: Callable[..., Any], *, compared: tuple[int, ...] | None = None
) -> None:
    """Give a fused operator a reference, in place of Spool's own if it has one.

    Parameters
    ----------
    name : str
        Of the operator: ``npu_my_op`` for ``torch_npu.npu_my_op``.
    function : callable
        Takes the operator's arguments, on the CPU or on a GPU, and gives its results.
        For the golden it is called with tensors of raised precision.
    compared : tuple of int, optional
        Positions of the results that are compared, where not all are: seeds and the
        like cannot be.

    Raises
    ------
    ConfigError
        If `name` is no name of an operator, or `function` cannot be called.
    """
    if not name.isidentifier():
        raise ConfigError(f"fused: {name!r} is no name of an operator, such as npu_my_op")
    if not callable(function):
        raise ConfigError(f"fused: {name}: {function!r:.80} cannot be called")
    _registered[name] = Reference(function, compared)


def reference(name: str) -> Callable[..., Any]:
    """The function that stands for a fused operator, with the operator's signature.

    Parameters
    ----------
    name : str
        Such as ``npu_rms_norm``.

    Raises
    ------
    LookupError
        If there is none.
    """
    found = find(name)
    if found is None:
        raise LookupError(no_reference(name))
    return found.function


def find(name: str) -> Reference | None:
    """The reference of an operator, a user's before Spool's own; None without one."""
    return _registered.get(name) or REFERENCES.get(name)


def is_own(name: str) -> bool:
    """Whether the reference of an operator is one of Spool's."""
    return name in REFERENCES and name not in _registered


def load(fused: Mapping[str, str]) -> dict[str, str]:
    """Import the references that a configuration names and register them.

    Parameters
    ----------
    fused : mapping
        Name of an operator to ``package.module:function``.

    Returns
    -------
    dict of str to str
        Digest of each module's file: a reference that is mended is another one.

    Raises
    ------
    ConfigError
        If a module cannot be imported, or has no such function.
    """
    digests = {}
    for name, target in fused.items():
        module, _, attribute = target.partition(":")
        try:
            imported = importlib.import_module(module)
            function = getattr(imported, attribute)
            digests[module] = _digest(imported)
        except AttributeError:
            raise ConfigError(f"fused: {name}: {target}: {module} has no {attribute}") from None
        except Exception as error:  # a module may do anything while it is imported
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"fused: {name}: {target}: cannot be imported: {why:.200}; "
                "check the name and PYTHONPATH"
            ) from error
        register_reference(name, function)
    return digests


def _digest(module: ModuleType) -> str:
    """Of a module's source, "" if it has no file."""
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""


if __name__ == "__main__":
    try:
        result = load(json.load(sys.stdin))
        print()  # a module may have printed without an end of line
        print(json.dumps(result))
    except ConfigError as error:
        sys.exit(str(error))
