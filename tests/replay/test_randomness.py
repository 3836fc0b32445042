"""Which calls cannot be compared element by element, by position and by keyword."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spool.replay.randomness import Determinism, determinism

X = torch.ones(2, 2)
H = torch.zeros(2, 1, 2)
ORDINARY, DROPOUT = Determinism.ORDINARY, Determinism.DROPOUT
RANDOM, UNINITIALISED = Determinism.RANDOM, Determinism.UNINITIALISED


@pytest.mark.parametrize(
    ("api", "args", "kwargs", "kind"),
    [
        ("Functional.dropout", (X,), {}, DROPOUT),
        ("Functional.dropout", (X, 0.1), {}, DROPOUT),
        ("Functional.dropout", (X, 0.0), {}, ORDINARY),
        ("Functional.dropout", (X, 0.1, False), {}, ORDINARY),
        ("Functional.dropout", (X,), {"p": 0.1, "training": False}, ORDINARY),
        ("Functional.dropout", (X,), {"p": 0.1, "training": True}, DROPOUT),
        ("Functional.dropout", (), {"input": X, "p": 0}, ORDINARY),
        ("Functional.dropout", (X, 1), {}, DROPOUT),
        ("Functional.dropout1d", (X,), {}, DROPOUT),
        ("Functional.dropout2d", (X, 0.5, True), {}, DROPOUT),
        ("Functional.dropout3d", (X, 0.5, False), {}, ORDINARY),
        ("Torch.dropout", (X, 0.5, True), {}, DROPOUT),
        ("Torch.dropout", (X,), {"p": 0.5, "train": False}, ORDINARY),
        ("Torch.feature_dropout", (X, 0.5, True), {}, DROPOUT),
        ("Torch.native_dropout", (X, 0.5, None), {}, DROPOUT),
        ("Aten.native_dropout", (X, 0.5, False), {}, ORDINARY),
        ("Aten.native_dropout_backward", (X, X > 0, 2.0), {}, ORDINARY),
        ("Functional.alpha_dropout", (X,), {}, ORDINARY),
        ("Functional.alpha_dropout", (X, 0.5, True), {}, RANDOM),
        ("Torch.feature_alpha_dropout", (X, 0.5, True), {}, RANDOM),
        ("Torch.bernoulli", (X,), {}, RANDOM),
        ("Tensor.bernoulli_", (X, 0.5), {}, RANDOM),
        ("Tensor.normal_", (X,), {}, RANDOM),
        ("Tensor.uniform_", (X,), {}, RANDOM),
        ("Tensor.exponential_", (X,), {}, RANDOM),
        ("Tensor.random_", (X,), {}, RANDOM),
        ("Tensor.cauchy_", (X,), {}, RANDOM),
        ("Torch.multinomial", (X, 1), {}, RANDOM),
        ("Torch.poisson", (X,), {}, RANDOM),
        ("Aten.rand_like", (X,), {}, RANDOM),
        ("Aten.randperm", (3,), {}, RANDOM),
        ("Functional.gumbel_softmax", (X,), {}, RANDOM),
        ("Torch.pca_lowrank", (X,), {}, RANDOM),
        ("Torch.lobpcg", (X,), {}, RANDOM),
        ("Torch.lobpcg", (X,), {"X": X}, ORDINARY),
        ("Functional.rrelu", (X,), {}, ORDINARY),
        ("Functional.rrelu", (X, 0.1, 0.3, True), {}, RANDOM),
        ("Functional.rrelu", (X,), {"training": True}, RANDOM),
        ("Aten.rrelu_with_noise", (X, X, 0.1, 0.3, True), {}, RANDOM),
        ("Functional.fractional_max_pool2d", (X, 2, (1, 1)), {}, RANDOM),
        ("Functional.fractional_max_pool2d", (X, 2), {"_random_samples": X}, ORDINARY),
        ("Functional.scaled_dot_product_attention", (X, X, X), {}, ORDINARY),
        ("Functional.scaled_dot_product_attention", (X, X, X, None, 0.1), {}, RANDOM),
        ("Functional.scaled_dot_product_attention", (X, X, X), {"dropout_p": 0.1}, RANDOM),
        ("Functional.scaled_dot_product_attention", (X, X, X), {"dropout_p": 0.0}, ORDINARY),
        ("Aten._scaled_dot_product_flash_attention_for_cpu", (X, X, X, 0.0), {}, ORDINARY),
        ("Aten._scaled_dot_product_flash_attention_for_cpu", (X, X, X, 0.5), {}, RANDOM),
        ("Torch.lstm", (X, (H, H), [X], True, 2, 0.5, True, False, False), {}, RANDOM),
        ("Torch.lstm", (X, (H, H), [X], True, 1, 0.5, True, False, False), {}, ORDINARY),
        ("Torch.lstm", (X, (H, H), [X], True, 2, 0.5, False, False, False), {}, ORDINARY),
        ("Torch.lstm", (X, X, (H, H), [X], True, 2, 0.5, True, False), {}, RANDOM),
        ("Torch.gru", (X, H, [X], True, 2, 0.0, True, False, False), {}, ORDINARY),
        ("Torch.gru", (X, X, H, [X], True, 2, 0.5, True, False), {}, RANDOM),
        ("Torch.empty_like", (X,), {}, UNINITIALISED),
        ("Aten.empty_strided", ((2,), (1,)), {}, UNINITIALISED),
        ("Functional.linear", (X, X), {}, ORDINARY),
        ("Torch.linalg.inv", (X,), {}, ORDINARY),
        ("Tensor.__getitem__", (X, 0), {}, ORDINARY),
        ("NPU.npu_rms_norm", (X,), {}, ORDINARY),
    ],
)
def test_determinism(
    api: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Determinism
) -> None:
    assert determinism(api, args, kwargs) is kind


def test_attention_of_a_whole_module() -> None:
    args: list[Any] = [X] * 3 + [2, 1] + [X] * 2 + [None, None, False, 0.1, X, X]
    attention = "Functional.multi_head_attention_forward"
    assert determinism(attention, args, {}) is RANDOM
    assert determinism(attention, args, {"training": False}) is ORDINARY
    args[10] = 0.0
    assert determinism(attention, args, {}) is ORDINARY
