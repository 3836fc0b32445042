"""Find the operators of a training run that compute wrong numbers.

In training code::

    import spool

    spool.enable(spool_dir="/nfs/run7", rank=[0], step=[0, "2-4"])
    for batch in loader:
        ...
        spool.step()
    spool.disable()

Importing the package imports nothing heavy; `enable` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spool.capture.session import Session, disable, enable, step
    from spool.replay.registry import reference, register_reference

_CAPTURE = ("Session", "disable", "enable", "step")
_REPLAY = ("reference", "register_reference")

__all__ = ["Session", "disable", "enable", "reference", "register_reference", "step"]


def __getattr__(name: str) -> Any:
    if name in _CAPTURE:
        from spool.capture import session

        return getattr(session, name)
    if name in _REPLAY:
        from spool.replay import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'spool' has no attribute {name!r}")
