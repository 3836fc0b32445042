"""From an API name in a shard to the function that replays it: an allow-list, nothing else."""

from __future__ import annotations

from spool import apinames
from spool.apinames import Function
from spool.errors import BadShard
from spool.records import no_reference
from spool.replay import registry


class NoReference(Exception):
    """A fused operator of the training device has no reference here; the call is skipped.

    Parameters
    ----------
    reason : str
        For the verdict table, e.g. ``no reference for npu_rms_norm``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def resolve(api: str, overload: str = "") -> Function:
    """The function that replays an API.

    Parameters
    ----------
    api : str
        Prefixed name without counter, from a shard.
    overload : str
        Of an ATen operator, from a shard.

    Raises
    ------
    NoReference
        For a fused operator (``NPU.*``) that nobody gave a reference for.
    BadShard
        For any other name that is not in the table of `spool.apinames`: the shard
        asks for something that no capture writes.
    """
    prefix, _, name = api.partition(".")
    if prefix == "NPU":
        reference = registry.find(name)
        if reference is None:
            raise NoReference(no_reference(name))
        return reference.function
    try:
        return apinames.function_of(api, overload)
    except apinames.Refused:
        raise BadShard(f"asks for {api[:80]!r}, which is refused") from None
