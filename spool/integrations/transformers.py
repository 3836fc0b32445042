"""Capture in a Hugging Face ``Trainer``."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

import spool


class SpoolCallback(TrainerCallback):  # type: ignore[misc]
    """Captures the training of a ``Trainer``: a step ends with each optimizer step.

    ::

        Trainer(..., callbacks=[SpoolCallback(spool_dir="/nfs/run7", step=[0, "2-4"])])

    Do not call `spool.enable` besides.

    Parameters
    ----------
    config : path-like, optional
    **keywords
        As `spool.enable` takes them.
    """

    def __init__(self, config: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        self._config = config
        self._keywords = keywords

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to capture."""
        spool.enable(self._config, **self._keywords)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        spool.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Write what is left, and close the rank."""
        spool.disable()
