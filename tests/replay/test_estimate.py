"""Calls that order more memory than there is are refused before they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from shard_writing import record

from spool.apinames import function_of
from spool.call import TensorRef
from spool.replay.estimate import TooLarge, check_call, check_stored, estimate, format_bytes

LIMIT = 10**10
ONE = torch.zeros(1)
HUGE = 10**12


@pytest.mark.parametrize(
    ("api", "args", "kwargs"),
    [
        ("Tensor.repeat", (torch.zeros(4), 10**6, 10**6), {}),
        ("Tensor.tile", (ONE, (HUGE,)), {}),
        ("Tensor.expand", (ONE, HUGE), {}),
        ("Tensor.contiguous", (ONE.expand(HUGE),), {}),
        ("Tensor.clone", (ONE.expand(HUGE),), {"memory_format": torch.contiguous_format}),
        ("Tensor.add", (ONE.expand(10**6, 1), ONE.expand(10**6)), {}),
        ("Torch.zeros_like", (ONE.expand(HUGE),), {"memory_format": torch.contiguous_format}),
        ("Torch.outer", (ONE.expand(10**6), ONE.expand(10**6)), {}),
        ("Torch.kron", (ONE.expand(10**4, 10**4), ONE.expand(10**4, 10**4)), {}),
        ("Torch.einsum", ("i,j->ij", ONE.expand(10**6), ONE.expand(10**6)), {}),
        ("Torch.bincount", (torch.tensor([HUGE]),), {}),
        ("Torch.bincount", (torch.tensor([1]),), {"minlength": HUGE}),
        ("Torch.repeat_interleave", (ONE, HUGE), {}),
        ("Torch.repeat_interleave", (ONE, torch.tensor([HUGE])), {}),
        ("Torch.histc", (ONE, HUGE), {}),
        ("Torch.nonzero_static", (ONE,), {"size": HUGE}),
        ("Torch.nonzero", (ONE.expand(HUGE),), {}),
        ("Torch.vander", (ONE, HUGE), {}),
        ("Torch.combinations", (torch.zeros(300), 6), {}),
        ("Torch.fft.fft", (ONE, HUGE), {}),
        ("Functional.pad", (ONE, (HUGE, 0)), {}),
        ("Functional.one_hot", (torch.tensor([HUGE]),), {}),
        ("Functional.one_hot", (torch.tensor([0]), HUGE), {}),
        ("Functional.interpolate", (torch.zeros(1, 1, 4), HUGE), {}),
        ("Torch.full_like", (ONE.expand(HUGE), 1), {"memory_format": torch.contiguous_format}),
    ],
)
def test_an_order_of_terabytes_is_refused(
    api: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TooLarge, match=r"would take .*, the limit is 10 GB"):
        check_call(api, function_of(api), (args, kwargs), LIMIT)


@pytest.mark.parametrize(
    ("api", "args", "needed"),
    [
        ("Tensor.repeat", (torch.zeros(4), 3), 48),
        ("Functional.gelu", (torch.zeros(2, 2, dtype=torch.float64),), None),
        ("Torch.cumsum", (torch.zeros(5), 0), 20),
        ("Tensor.add_", (torch.zeros(5), 1), None),
        ("Torch.nonzero", (torch.ones(2, 3),), 96),
        ("Torch.bincount", (torch.tensor([0, 6]),), 56),
        ("Functional.one_hot", (torch.tensor([0, 3]),), 64),
        ("Torch.linalg.inv", (torch.eye(3),), None),
        ("Tensor.__getitem__", (torch.zeros(4), torch.tensor([True] * 4)), None),
        ("Torch.masked_select", (torch.zeros(3), torch.ones(2, 3, dtype=torch.bool)), 24),
    ],
)
def test_ordinary_calls_pass(api: str, args: tuple[Any, ...], needed: int | None) -> None:
    check_call(api, function_of(api), (args, {}), LIMIT)
    if needed is not None:
        assert estimate(api, function_of(api), (args, {}), LIMIT) == needed


def test_arguments_are_left_as_they_are() -> None:
    x = torch.zeros(3)
    estimate("Tensor.add_", function_of("Tensor.add_"), ((x, 1), {}), 0)
    assert torch.equal(x, torch.zeros(3))


def test_a_stored_tensor_that_unfolds_to_terabytes_is_refused() -> None:
    call = record("Tensor.clone", torch.clone, torch.zeros(2))
    gap = TensorRef(0, "float32", (2,), (HUGE,), 0, packed=True)
    with pytest.raises(TooLarge, match="arguments and outputs would take 4 TB"):
        check_stored(replace(call, args=(gap,)), LIMIT)
    wide = TensorRef(1, "float32", (HUGE,), (0,), 0)
    with pytest.raises(TooLarge, match="outputs would take 4 TB"):
        check_stored(replace(call, outputs=[wide]), LIMIT)
    with pytest.raises(TooLarge, match="outputs would take 4 TB"):
        check_stored(replace(call, mutated={"args.0": wide}), LIMIT)
    check_stored(replace(call, args=(wide,)), LIMIT)  # an expanded argument costs nothing
    check_stored(call, LIMIT)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (4e12, "4 TB"), (1e21, "1e+03 EB")],
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert format_bytes(count) == text
