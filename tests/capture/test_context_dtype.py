"""torch's default dtype is part of a call's context."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_default_dtype_is_captured(spooled, dtype):
    ids = torch.arange(5)
    torch.set_default_dtype(dtype)
    try:
        call = spooled.one(lambda: ids / 3)
    finally:
        torch.set_default_dtype(torch.float32)
    name = str(dtype).removeprefix("torch.")
    assert call.context.default_dtype == name
    assert call.outputs.dtype == name
