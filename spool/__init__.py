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

__all__ = ["Session", "disable", "enable", "step"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from spool.capture import session

        return getattr(session, name)
    raise AttributeError(f"module 'spool' has no attribute {name!r}")
