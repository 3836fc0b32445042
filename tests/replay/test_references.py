"""Goldens of our own agree with torch where torch has the operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spool.replay.references import grouped_mm

ENDS = torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("one", "two", "ends"),
    [
        ((6, 8), (2, 8, 8), ENDS),
        ((8, 6), (6, 8), ENDS),
        ((2, 8, 8), (8, 6), ENDS),
        ((2, 8, 8), (2, 8, 8), None),
        ((6, 8), (2, 8, 8), torch.tensor([0, 6], dtype=torch.int32)),
    ],
)
def test_grouped_mm(one: tuple[int, ...], two: tuple[int, ...], ends: torch.Tensor | None) -> None:
    torch.manual_seed(0)

    def aligned(shape: tuple[int, ...]) -> torch.Tensor:
        """torch wants strides of whole 16 bytes."""
        wide = torch.randn(*shape[:-1], 8)
        return wide[..., : shape[-1]]

    a, b = aligned(one), aligned(two)
    expected = F.grouped_mm(a, b, offs=ends)
    found = grouped_mm(a.double(), b.double(), ends)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected.double(), atol=1e-5)
