"""Arguments that a kernel would run out of bounds with, or never come to the end of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_writing import record
from test_execute import replayed

from spool.apinames import function_of
from spool.errors import BadShard
from spool.records import Outcome
from spool.replay.admission import check_arguments
from spool.replay.estimate import TooLarge
from spool.replay.kernels import check_values

THREE = torch.ones(3)
ONE = torch.ones(1)
STEP = torch.tensor(3.0)
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
ADAM |= {"amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}


def adam(*changed: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one element, with lists replaced by position."""
    lists: list[Any] = [[torch.ones(3)] for _ in range(4)] + [[], [STEP.clone()]]
    for position, value in zip(changed[::2], changed[1::2], strict=True):
        lists[position] = value
    return tuple(lists), ADAM | kwargs


HOSTILE_LISTS = {
    "parameter larger than its state": ("_fused_adam_", adam(0, [torch.ones(10**5)])),
    "state of another shape": ("_fused_adamw_", adam(3, [torch.ones(3, 1)])),
    "expanded parameter": (
        "_fused_adam_",
        adam(*[x for i in range(4) for x in (i, [ONE.expand(99)])]),
    ),
    "more parameters than gradients": ("_fused_adam_", adam(0, [THREE, THREE])),
    "no steps": ("_fused_adam_", adam(5, [])),
    "an empty step": ("_fused_adam_", adam(5, [torch.ones(0)])),
    "amsgrad without maxima": ("_fused_adam_", adam(amsgrad=True)),
    "maxima of another shape": ("_fused_adam_", adam(4, [ONE], amsgrad=True)),
    "no list": ("_fused_adam_", adam(1, THREE)),
    "no tensors": ("_fused_adam_", adam(1, [3.0])),
    "an empty scale": ("_fused_adam_", adam(grad_scale=torch.ones(0))),
    "a long learning rate": ("_fused_adam_", adam(lr=torch.ones(2))),
    "momentum without buffers": ("_fused_sgd_", (([THREE], [THREE], []), SGD | {"momentum": 0.9})),
    "adagrad without steps": ("_fused_adagrad_", (([THREE], [THREE], [THREE], []), {"lr": 0.1})),
    "lists by keyword": ("_fused_sgd_", ((), {"self": [THREE], "grads": [ONE], **SGD})),
    "foreach of two lengths": ("_foreach_add_", (([THREE], [THREE, THREE]), {})),
    "foreach with short scalars": ("_foreach_lerp_", (([THREE] * 2, [THREE] * 2, [1.0]), {})),
    "foreach with short out": ("_foreach_norm", (([THREE] * 2,), {"out": [ONE]})),
}


@pytest.mark.parametrize("case", HOSTILE_LISTS, ids=str)
def test_lists_that_do_not_belong_together_are_refused(case: str) -> None:
    name, arguments = HOSTILE_LISTS[case]
    with pytest.raises(BadShard, match=name):
        check_arguments(f"Torch.{name}", arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_fused_adam_", adam()),
        ("_fused_adamw_", adam(4, [torch.ones(3)], amsgrad=True, lr=torch.tensor(0.1))),
        ("_fused_adam_", adam(grad_scale=ONE, found_inf=torch.zeros(1))),
        ("_fused_sgd_", (([THREE], [THREE], []), SGD | {"momentum": 0.0, "is_first_step": True})),
        ("_foreach_mul_", (([THREE], [torch.tensor(2.0)]), {})),
        ("_foreach_mul_", (([THREE], 2.0), {})),
        ("_foreach_norm", (([THREE, ONE], 2), {})),
    ],
)
def test_sound_lists_pass_and_run(name: str, arguments: Any) -> None:
    check_arguments(f"Torch.{name}", arguments)
    args, kwargs = arguments
    function_of(f"Torch.{name}")(*args, **kwargs)


@pytest.mark.parametrize(
    ("api", "args", "kwargs", "text"),
    [
        ("Torch.sum", (ONE.expand(10**6, 10**6),), {}, "has 1000000000000 elements"),
        ("Torch.cat", ([ONE, ONE.expand(2**36 + 1)],), {}, "elements, the limit is 68719476736"),
        ("Torch.add", (ONE,), {"other": ONE.expand(2**40)}, "has 1099511627776 elements"),
        ("Torch.split", (ONE.expand(10**8), 1), {}, "100000000 results, the limit is 100000"),
        ("Tensor.split", (ONE.expand(10**8),), {"split_size": 900}, "111112 results"),
        ("Torch.unsafe_split", (ONE.expand(2, 10**6), 1, 1), {}, "1000000 results"),
        ("Torch.split", (), {"tensor": ONE.expand(10**6), "split_size_or_sections": 1}, "results"),
        ("Torch.chunk", (ONE.expand(10**8), 10**6), {}, "1000000 results"),
        ("Torch.unsafe_chunk", (ONE.expand(3, 10**8),), {"chunks": 10**7, "dim": -1}, "10000000 "),
        ("Torch.tensor_split", (ONE, 10**9), {}, "1000000000 results"),
        ("Torch.tensor_split", (ONE, torch.tensor(10**9)), {}, "1000000000 results"),
        ("Torch.hsplit", (ONE.expand(10**6), 10**6), {}, "1000000 results"),
        ("Tensor.unbind", (ONE.expand(10**6),), {}, "1000000 results"),
        ("Torch.unbind", (ONE.expand(2, 10**6), 1), {}, "1000000 results"),
    ],
)
def test_work_without_end_is_refused(
    api: str, args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TooLarge, match=text):
        check_arguments(api, (args, kwargs))


@pytest.mark.parametrize(
    ("api", "args", "kwargs"),
    [
        ("Torch.sum", (ONE.expand(2**18, 2**18),), {}),
        ("Torch.split", (ONE.expand(10**5), 1), {}),
        ("Torch.split", (torch.ones(4, 6), [1, 5], 1), {}),
        ("Torch.split_with_sizes", (torch.ones(6), [1, 5]), {}),
        ("Torch.split", (torch.ones(4), 0), {}),
        ("Torch.split", (torch.tensor(1.0), 1), {}),
        ("Torch.split", (THREE, 1, 7), {}),
        ("Torch.chunk", (THREE, 10**9), {}),
        ("Torch.tensor_split", (THREE, torch.tensor([1, 2])), {}),
        ("Torch.unbind", (torch.ones(3, 10**6),), {}),
        ("Torch.split", (3, 1), {}),
        ("Torch.split", (), {}),
    ],
)
def test_what_ends_passes(api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_arguments(api, (args, kwargs))


LOGS = torch.randn(5, 2, 3).log_softmax(2)
LENGTHS = (torch.tensor([5, 5]), torch.tensor([2, 1]))
X = torch.ones(3, 2, 4)
H = torch.zeros(1, 2, 5)
PARAMS = [torch.ones(5, 4), torch.ones(5, 5), torch.ones(5), torch.ones(5)]
RNN = (PARAMS, True, 1, 0.0, False, False)


@pytest.mark.parametrize(
    ("api", "args", "kwargs"),
    [
        ("Functional.ctc_loss", (LOGS, torch.tensor([[1, -(10**7)], [1, 0]]), *LENGTHS), {}),
        ("Torch.ctc_loss", (LOGS, torch.tensor([[1, 3], [1, 0]]), *LENGTHS), {}),
        ("Torch.ctc_loss", (LOGS, torch.tensor([1, 2, 3])), {"target_lengths": (2, 1)}),
        ("Torch.ctc_loss", (LOGS, torch.tensor([[1, 3]]), *LENGTHS), {}),
        ("Torch.ctc_loss", (LOGS, 3, *LENGTHS), {}),
        (
            "Torch.native_batch_norm",
            (torch.ones(2, 10**6), ONE, ONE, ONE, ONE, True, 0.1, 1e-5),
            {},
        ),
        ("Torch.native_batch_norm", (THREE, None, None, ONE, ONE, True, 0.1, 1e-5), {}),
        ("Torch.batch_norm_update_stats", (torch.ones(2, 10**6), ONE, ONE, 0.1), {}),
        ("Torch.rnn_tanh", (X[0], torch.zeros(0, dtype=torch.int64), H, *RNN), {}),
        ("Torch.gru", (X[0], torch.tensor([2, -2]), H, *RNN), {}),
        ("Torch.lstm", (X[0], torch.tensor([1, 2]), (H, H), *RNN), {}),
    ],
)
def test_values_that_a_kernel_would_trust_are_refused(
    api: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(BadShard, match="do not fit together"):
        check_values(api, (args, kwargs))


@pytest.mark.parametrize(
    ("api", "args"),
    [
        # What follows a target's length is padding.
        ("Torch.ctc_loss", (LOGS, torch.tensor([[1, 2], [1, -1]]), *LENGTHS)),
        ("Torch.ctc_loss", (LOGS, torch.tensor([[1, 2], [1, -1]]), (5, 5), (2, 1))),
        ("Torch.ctc_loss", (LOGS, torch.tensor([1, 2, 1]), *LENGTHS)),
        ("Torch.native_batch_norm", (torch.ones(2, 3), THREE, None, THREE, THREE, True, 0.1, 1e-5)),
        ("Torch.rnn_tanh", (X, H, *RNN, False)),
        ("Torch.rnn_tanh", (X.flatten(0, 1)[:3], torch.tensor([2, 1]), H, *RNN)),
    ],
)
def test_values_that_fit_pass_and_run(api: str, args: tuple[Any, ...]) -> None:
    check_values(api, (args, {}))
    function_of(api)(*args)


def test_a_call_is_refused_before_it_runs() -> None:
    """Each of these would end the process."""
    hostile = [torch.ones(10**5)], [THREE], [THREE], [THREE], [], [STEP]
    call = record("Torch._fused_adam_", lambda *a, **k: None, *hostile, **ADAM)
    with pytest.raises(BadShard, match="different shapes"):
        replayed(call)
    targets = torch.tensor([[1, -(10**7)], [1, 0]])
    call = record("Torch.ctc_loss", lambda *a: THREE, LOGS, targets, *LENGTHS)
    with pytest.raises(BadShard, match="ctc_loss do not fit together"):
        replayed(call)
    call = record("Torch.split", lambda *a: THREE, ONE.expand(10**6), 1)
    result = replayed(call)
    assert result.outcome is Outcome.REPLAY_FAILED
    assert result.reason == "TooLarge: it would have 1000000 results, the limit is 100000"


def test_other_calls_are_not_looked_into() -> None:
    check_values("Functional.linear", ((F, 3), {}))
