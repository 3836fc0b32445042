"""List-of-tensor optimizer calls become one shard per element."""

from __future__ import annotations

import pytest
import torch

from spool.call import Call
from spool.tensors import thaw


def value(call: Call, tree):
    return thaw(tree, call.regions)


def test_elements_share_the_order_and_count_on(spooled):
    a, b = torch.tensor([1.0]), torch.tensor([2.0, 3.0])

    def body():
        torch.sin(a)
        torch._foreach_add_([a, b], [torch.ones(1), torch.ones(2)], alpha=2)
        torch._foreach_add_([a], 1.0)

    sin, first, second, third = spooled.capture(body)
    assert [(c.order, c.name) for c in (sin, first, second, third)] == [
        (0, "Torch.sin.0"),
        (1, "Torch._foreach_add_.0"),
        (1, "Torch._foreach_add_.1"),
        (2, "Torch._foreach_add_.2"),
    ]
    assert value(second, second.args[0])[0].tolist() == [2, 3]
    assert value(second, second.outputs)[0].tolist() == [4, 5]
    assert second.kwargs == {"alpha": 2}
    assert a.tolist() == [4.0]
    assert third.args[1] == 1.0


def test_scalar_lists_are_split_and_lone_tensors_shared(spooled):
    xs = [torch.tensor([1.0]), torch.tensor([1.0])]
    shared = torch.tensor(3.0)

    def body():
        torch._foreach_mul_(xs, [2.0, 5.0])
        torch._foreach_add_(xs, shared)
        torch._foreach_addcdiv_(
            xs, [torch.ones(1)] * 2, [torch.ones(1)] * 2, torch.tensor([1.0, 2.0])
        )

    calls = spooled.capture(body)
    assert [value(c, c.args[1]) for c in calls[:2]] == [[2.0], [5.0]]
    assert [value(c, c.args[1]).item() for c in calls[2:4]] == [3.0, 3.0]
    assert [value(c, c.args[3]).tolist() for c in calls[4:]] == [[1.0], [2.0]]
    assert [value(c, c.outputs)[0].tolist() for c in calls[4:]] == [[6.0], [10.0]]


def test_results_that_are_new_lists(spooled):
    xs = [torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0])]
    calls = spooled.capture(lambda: (torch._foreach_norm(xs), torch._foreach_pow(2.0, xs)))
    assert [value(c, c.outputs)[0].tolist() for c in calls] == [5.0, 13.0, [8, 16], [32, 4096]]
    assert calls[2].args[0] == 2.0


def test_fused_adamw_records_everything_it_writes(spooled):
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(params, lr=0.5, fused=True)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    calls = [c for c in spooled.capture(optimizer.step) if c.api == "Torch._fused_adamw_"]
    assert [c.index for c in calls] == [0, 1]
    second = calls[1]
    assert second.outputs is None
    assert set(second.mutated) >= {"args.0.0", "args.2.0", "args.3.0"}
    assert value(second, second.args[0])[0].tolist() == [1, 1, 1]
    written = value(second, second.mutated["args.0.0"])
    assert torch.equal(written, params[1].detach())
    assert written[0] < 0.6
    assert second.args[4] == []  # without amsgrad there is no list to split
    assert len(second.args[5]) == 1


def test_replaying_an_element_gives_its_result(spooled):
    params = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = torch.optim.AdamW(params, fused=True)
    for parameter in params:
        parameter.grad = torch.randn(4)
    for call in spooled.capture(optimizer.step):
        if call.api != "Torch._fused_adamw_":
            continue
        args = [value(call, tree) for tree in call.args]
        torch._fused_adamw_(*args, **{k: value(call, v) for k, v in call.kwargs.items()})
        assert torch.equal(args[0][0], value(call, call.mutated["args.0.0"]))


@pytest.mark.parametrize("wanted", [["_foreach_add_.1"], ["Torch._foreach_add_.1.forward"]])
def test_one_element_can_be_selected(spooled, wanted):
    xs = [torch.ones(1) for _ in range(3)]
    spooled.capture(lambda: torch._foreach_add_(xs, 1.0), list=wanted)
    assert spooled.names() == ["Torch._foreach_add_.1"]


def test_empty_list_is_no_call(spooled):
    assert spooled.capture(lambda: torch._foreach_zero_([torch.ones(0)])) != []
