"""A resumed capture tells that a step's shards are others than before."""

from __future__ import annotations

import pytest
import torch

import spool


def test_only_the_step_that_is_captured_anew_is_another_take(spooled):
    def crash():
        with spooled.enable():
            torch.sin(torch.ones(2))
            spool.step()
            torch.sin(torch.ones(2))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    assert spooled.store().takes(0) == {}
    with spooled.enable(resume=True):
        for _ in range(3):
            torch.sin(torch.ones(2))
            spool.step()
    assert spooled.store().takes(0) == {1: 1}
    # Every step is closed, so nothing is captured anew.
    with spooled.enable(resume=True):
        pass
    assert spooled.store().takes(0) == {1: 1}
