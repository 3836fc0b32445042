from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from spool.standards.inputs import input_facts, reduction_length


def test_facts_of_nested_arguments() -> None:
    nan, inf = math.nan, math.inf
    facts = input_facts(
        [torch.tensor([[1.0, -3.0, 0.0], [nan, inf, -inf]]), 3, [torch.tensor([2, -5])]],
        {"mask": torch.tensor([True, False]), "x": {"y": torch.ones(0)}},
    )
    assert json.loads(json.dumps(facts)) == facts
    assert facts[0] == {
        "path": "args[0]",
        "dtype": "float32",
        "shape": [2, 3],
        "count": 6,
        "nan": 1,
        "inf": 2,
        "zeros": 1,
        "max_abs": 3.0,
        "mean_abs": pytest.approx(4 / 3),
    }
    assert [fact["path"] for fact in facts[1:]] == [
        "args[2][0]",
        "kwargs['mask']",
        "kwargs['x']['y']",
    ]
    assert (facts[1]["max_abs"], facts[2]["zeros"]) == (5.0, 1)
    assert (facts[3]["count"], facts[3]["max_abs"]) == (0, None)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.int64]
)
def test_facts_of_any_dtype(dtype: torch.dtype) -> None:
    (fact,) = input_facts([torch.tensor([0.0, 2.0, 4.0]).to(dtype)], {})
    assert (fact["max_abs"], fact["mean_abs"], fact["zeros"]) == (4.0, 2.0, 1)


def test_facts_of_complex_and_all_nan() -> None:
    facts = input_facts([torch.tensor([3 - 4j]), torch.tensor([math.nan])], {})
    assert (facts[0]["count"], facts[0]["max_abs"]) == (2, 4.0)
    assert (facts[1]["nan"], facts[1]["max_abs"], facts[1]["mean_abs"]) == (1, None, None)


A = torch.ones


@pytest.mark.parametrize(
    ("api", "args", "kwargs", "length"),
    [
        ("Functional.linear.0", [A(2, 5), A(3, 5)], {}, 5),
        ("matmul", [A(2, 5), A(5, 3)], {}, 5),
        ("Tensor.__rmatmul__", [A(5, 3), A(2, 5)], {}, 5),
        ("addmm", [A(3), A(2, 7), A(7, 3)], {}, 7),
        ("addbmm", [A(2, 3), A(4, 2, 5), A(4, 5, 3)], {}, 20),
        ("bilinear", [A(1, 2), A(1, 3), A(4, 2, 3)], {}, 6),
        ("conv2d", [A(1, 4, 8, 8)], {"weight": A(6, 4, 3, 3)}, 36),
        ("conv_transpose2d", [A(1, 4, 8, 8), A(4, 6, 3, 3)], {}, 36),
        ("layer_norm", [A(2, 5), (5,)], {}, 5),
        ("rms_norm", [A(2, 3, 5)], {"normalized_shape": (3, 5)}, 15),
        ("batch_norm", [A(2, 3, 4)], {}, 8),
        ("softmax", [A(2, 9)], {"dim": -1}, 9),
        ("softmax", [A(2, 9)], {}, None),
        ("sum", [A(2, 9)], {}, 18),
        ("sum", [A(2, 9), 0], {}, 2),
        ("mean", [A(2, 3, 4)], {"dim": (0, 2)}, 8),
        ("var", [A(2, 3), True], {}, 6),  # a bool here is `unbiased`, not `dim`
        ("relu", [A(2)], {}, None),
        ("linear", [], {}, None),
        ("sum", [A(2, 9), 7], {}, None),
    ],
)
def test_reduction_length(api: str, args: Any, kwargs: Any, length: int | None) -> None:

    assert reduction_length(api, args, kwargs) == length
