"""Capture in a Lightning ``Trainer``, of the ``lightning`` or ``pytorch_lightning`` package."""

from __future__ import annotations

import os
from typing import Any

import spool

try:
    from lightning.pytorch import Callback
except ImportError:  # the same library under its other name
    from pytorch_lightning import Callback


class SpoolCallback(Callback):  # type: ignore[misc]
    """Captures the training of a ``Trainer``: a step ends with each optimizer step.

    ::

        Trainer(..., callbacks=[SpoolCallback(spool_dir="/nfs/run7", step=[0, "2-4"])])

    Batches whose gradients are accumulated are one step; so are the optimizers that one
    batch steps. Do not call `spool.enable` besides.

    Parameters
    ----------
    config : path-like, optional
    **keywords
        As `spool.enable` takes them.
    """

    def __init__(self, config: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        self._config = config
        self._keywords = keywords
        self._session: spool.Session | None = None
        self._updates = 0

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        """Begin to capture."""
        self._updates = trainer.global_step
        self._session = spool.enable(self._config, **self._keywords)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End the step if the weights were updated."""
        if self._session is not None and trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._session.step()

    def on_train_end(self, *args: Any) -> None:
        """Write what is left, and close the rank."""
        self._end("disabled")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the rank with the reason."""
        self._end(f"exception: {type(exception).__name__}")

    def _end(self, reason: str) -> None:
        if self._session is not None:
            self._session.disable(reason)
            self._session = None
