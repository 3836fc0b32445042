"""Steps, ranks, filters, counters and names."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import spool
from spool.capture.filters import Filters
from spool.config import load
from spool.errors import ConfigError


def three():
    x = torch.ones(2)
    for _ in range(3):
        F.relu(x)
        x + 1


def test_step_selection_and_end_of_capture(spooled):
    session = spooled.enable(step=[1, "3-4"])
    for _ in range(7):
        three()
        spool.step()
    assert not session.active
    assert torch.overrides._get_current_function_mode_stack() == []
    spool.disable()
    assert spooled.store().steps(0) == [1, 3, 4]
    assert [len(spooled.names(step)) for step in (1, 3, 4)] == [6, 6, 6]
    closed = spooled.store().rank_closed(0)
    assert {step: counts.shards for step, counts in closed.steps.items()} == {1: 6, 3: 6, 4: 6}
    assert closed.reason == "steps done"


def test_counters_begin_again_with_each_step(spooled):
    with spooled.enable():
        three()
        spool.step()
        three()
    assert spooled.names(0) == spooled.names(1)
    assert spooled.names(0)[:3] == ["Functional.relu.0", "Tensor.add.0", "Functional.relu.1"]


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        ({"white_list": ["relu"]}, ["Functional.relu.0", "Functional.relu.1", "Functional.relu.2"]),
        ({"black_list": ["relu"]}, ["Tensor.add.0", "Tensor.add.1", "Tensor.add.2"]),
        ({"white_list": ["relu", "add"], "black_list": ["relu"]},
         ["Tensor.add.0", "Tensor.add.1", "Tensor.add.2"]),
        ({"white_list": ["__add__"]}, ["Tensor.add.0", "Tensor.add.1", "Tensor.add.2"]),
        ({"list": ["Functional.relu.2.forward"]}, ["Functional.relu.2"]),
        ({"list": ["Tensor.__add__.1.forward"]}, ["Tensor.add.1"]),
        ({"list": ["relu.1"]}, ["Functional.relu.1"]),
        ({"scope": ["Tensor.add.0.forward", "Functional.relu.2.forward"]},
         ["Tensor.add.0", "Functional.relu.1", "Tensor.add.1", "Functional.relu.2"]),
        ({"scope": ["Tensor.add.1", "Tensor.add.1"]}, ["Tensor.add.1"]),
        ({"scope": ["Tensor.add.1", "Tensor.never.0"], "white_list": ["relu"]},
         ["Functional.relu.2"]),
    ],
)  # fmt: skip
def test_filters_select_and_leave_names_and_order_alone(spooled, keywords, names):
    calls = spooled.capture(three, **keywords)
    assert [call.name for call in calls] == names
    everything = ["Functional.relu.0", "Tensor.add.0", "Functional.relu.1", "Tensor.add.1",
                  "Functional.relu.2", "Tensor.add.2"]  # fmt: skip
    assert [call.order for call in calls] == [everything.index(name) for name in names]


def test_scope_opens_again_in_the_next_step(spooled):
    with spooled.enable(scope=["Tensor.add.1", "Functional.relu.2"]):
        three()
        spool.step()
        three()
    assert spooled.names(0) == spooled.names(1) == ["Tensor.add.1", "Functional.relu.2"]


def test_scope_passes_only_once(tmp_path):
    filters = Filters(load(spool_dir=tmp_path, scope=["Torch.sin.0", "Torch.sin.1"]))
    assert [filters.wants("Torch.sin", n) for n in range(3)] == [True, True, False]
    assert not filters.wants("Torch.sin", 0)


def test_operators_are_named_as_torch_reports_them(spooled):
    x = torch.tensor([2.0])
    i = torch.tensor([6])

    def body():
        x + 1, 1 + x, x - 1, x * 2, x / 2, x**2, x @ x, -x, x > 1, i & 1
        2 - x

    spooled.capture(body)
    assert spooled.names() == [
        "Tensor.add.0",
        "Tensor.add.1",
        "Tensor.sub.0",
        "Tensor.mul.0",
        "Tensor.div.0",
        "Tensor.__pow__.0",
        "Tensor.matmul.0",
        "Tensor.neg.0",
        "Tensor.gt.0",
        "Tensor.__and__.0",
        "Tensor.__rsub__.0",
    ]


def test_operators_of_other_namespaces(spooled, said):
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_double_for_tests(Tensor self) -> Tensor")
    library.impl("npu_double_for_tests", lambda x: x * 2, "CPU")
    library.define("npu_fill_for_tests(Tensor(a!) out, float v) -> ()")

    def fill(out, v):
        out.fill_(v)

    library.impl("npu_fill_for_tests", fill, "CPU")
    other = torch.library.Library("elsewhere_for_tests", "DEF")
    other.define("twice(Tensor self) -> Tensor")
    other.impl("twice", lambda x: x * 2, "CPU")
    x = torch.ones(2)
    with spooled.enable() as session:
        torch.ops.npu.npu_double_for_tests(x)
        torch.ops.npu.npu_fill_for_tests.default(x, 3.0)
        torch.ops.aten.mm.default(torch.ones(1, 1), torch.ones(1, 1))
        torch.ops.aten.mm(torch.ones(1, 1), torch.ones(1, 1))
        torch.ops.elsewhere_for_tests.twice(x)
        session.step()
    assert spooled.names() == [
        "NPU.npu_double_for_tests.0",
        "NPU.npu_fill_for_tests.0",
        "Aten.mm.0",
    ]
    assert set(spooled.calls()[1].mutated) == {"args.0"}
    assert spooled.store().step_closed(0, 0).skipped == {"custom operator": 2}


def test_without_distributed_the_rank_is_0(spooled):
    assert spooled.enable().rank == 0


def test_rank_of_the_launcher(spooled, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    spooled.capture(lambda: None)
    with spooled.enable(rank=["2-4"], resume=True):
        torch.sin(torch.ones(1))
    assert spooled.store().ranks() == [3]
    assert spooled.calls(rank=3)[0].rank == 3


def test_bad_rank_of_the_launcher(spooled, monkeypatch):
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ConfigError, match="RANK='two'"):
        spooled.enable()


def test_other_ranks_are_left_alone_and_told_so(spooled, said):
    with spooled.enable(rank=[4, 5]) as session:
        assert session.inert
        assert torch.overrides._get_current_function_mode_stack() == []
        three()
        session.start()
        session.stop()
        session.step()
        with session.attach():
            three()
        spool.step()
    assert "rank 0 is not among the captured ranks [4, 5]" in said()
    assert not spooled.root.exists()


def test_two_ranks_in_one_spool(spooled, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with spooled.enable():
            F.relu(torch.ones(1))
    assert spooled.names(rank=0) == spooled.names(rank=1) == ["Functional.relu.0"]


def test_msprobe_file_as_it_is(spooled, tmp_path, said):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "task": "tensor",
                "dump_path": "/tmp/dump",
                "rank": [],
                "step": ["0-1"],
                "level": "L1",
                "seed": 1234,
                "tensor": {
                    "online_run_ut": True,
                    "nfs_path": str(spooled.root),
                    "host": "",
                    "port": -1,
                    "tls_path": "./",
                    "online_run_ut_recompute": False,
                    "scope": [],
                    "list": ["relu"],
                    "data_mode": ["all"],
                },
                "run_ut": {"rank_list": [0]},
            }
        )
    )
    session = spool.enable(str(file))
    for _ in range(3):
        three()
        spool.step()
    session.disable()
    assert spooled.store().steps(0) == [0, 1]
    assert len(spooled.names(1)) == 3
    assert "ignored: dump_path, seed, tensor.data_mode" in said()


def test_what_was_asked_for_and_never_came_is_said_at_the_end(spooled, said):
    keywords = {
        "white_list": ["sin", "gleu"],
        "black_list": ["cosh", "sin"],
        "list": ["Torch.sin.7", "cos", "Torch.add.0"],
        "scope": ["Torch.sin.0", "Torch.tan.0"],
        "step": [0, 3, "5-20"],
    }
    with spooled.enable(**keywords) as session:
        torch.sin(torch.ones(2))
        torch.cos(torch.ones(2))
        session.step()
    for line in (
        "rank 0: white_list: no call was made of gleu",
        "rank 0: black_list: no call was made of cosh",
        "rank 0: list: no call was like Torch.add.0, Torch.sin.7",
        "rank 0: scope: Torch.tan.0 was never called, so it went on to the step's end",
        "rank 0: step: 3, 5, 6, 7, 8, ... never came, the last one was 1; spool.step() ends a step",
    ):
        assert line in said()


def test_a_scope_that_never_begins_is_said(spooled, said):
    spooled.capture(lambda: torch.sin(torch.ones(2)), scope=["Torch.tan.0", "Torch.sin.0"])
    assert "scope: Torch.tan.0 was never called, so nothing was captured" in said()


def test_nothing_is_said_where_all_came(spooled, said):
    spooled.capture(
        lambda: (torch.ones(2) + 1).sin(),
        white_list=["__add__", "sin"],
        list=["sin", "Tensor.add.0"],
        scope=["Tensor.add.0", "Tensor.sin.0"],
        step=[0],
    )
    assert "no call" not in said()
    assert "never" not in said()


def test_a_rank_beyond_the_last_is_said(spooled, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    spooled.capture(lambda: torch.sin(torch.ones(2)), rank=[0, "2-3"])
    assert "rank: [2, 3] will never come: there are 2 ranks" in said()
