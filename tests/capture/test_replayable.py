"""What was captured is enough to compute the same again, bit for bit."""

from __future__ import annotations

import contextlib

import pytest
import torch

import spool
from spool.apinames import function_of
from spool.call import Call
from spool.tensors import thaw_all

RANDOM = {"Functional.dropout"}


def bits(value):
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1)
        return (value.dtype, tuple(value.shape), value.stride(), plain.view(torch.uint8).tolist())
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def again(call: Call) -> None:
    """Call the function on the stored arguments and compare with the stored results."""
    *args, kwargs = thaw_all([*call.args, call.kwargs], call.regions)
    expected = thaw_all([call.outputs, *call.mutated.values()], call.regions)
    with contextlib.ExitStack() as settings:
        settings.enter_context(torch.no_grad())
        for device, dtype in call.context.autocast.items():
            settings.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        result = function_of(call.api, call.overload)(*args, **kwargs)
    written = []
    for path in call.mutated:
        kind, first, *rest = path.split(".")
        item = args[int(first)] if kind == "args" else kwargs[first]
        for key in rest:
            item = item[int(key)]
        written.append(item)
    assert [bits(result), *map(bits, written)] == [bits(item) for item in expected], call.name


def models():
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    return {
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, attn_pdrop=0.0
            )
        ),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**small, intermediate_size=32, num_key_value_heads=1)
        ),
        "bert": lambda: BertForMaskedLM(
            BertConfig(**small, intermediate_size=32, attention_probs_dropout_prob=0.0)
        ),
    }


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers(spooled, name, autocast, fused):
    torch.manual_seed(0)
    model = models()[name]()
    options = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with spooled.enable() as session:
        for _ in range(2):
            ids = torch.randint(0, 32, (2, 8))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            spool.step()
        session.disable()
    for step in range(2):
        counts = spooled.store().step_closed(0, step)
        assert (counts.dropped, counts.skipped) == (0, {})
        calls = spooled.calls(step)
        assert len(calls) > 100
        for call in calls:
            if call.api not in RANDOM:
                again(call)


def test_convolutions_and_pooling(spooled):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(2),
        torch.nn.Linear(4, 3),
    )
    x = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def body():
        net(x).square().mean().backward()
        optimizer.step()

    calls = spooled.capture(body)
    apis = {call.api for call in calls}
    assert {"Functional.conv2d", "Functional.batch_norm", "Functional.max_pool2d"} <= apis
    for call in calls:
        again(call)
