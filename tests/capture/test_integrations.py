"""Capture in other libraries' training loops."""

from __future__ import annotations

import torch


def test_hugging_face_trainer(spooled, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from spool.integrations.transformers import SpoolCallback

    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    tokens = torch.randint(32, (12, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def train(callbacks):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()
        return [p.detach().clone() for p in model.parameters()]

    plain = train([])
    captured = train([SpoolCallback(spool_dir=spooled.root, step=[0, 2])])
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    store = spooled.store()
    assert store.steps(0) == [0, 2]
    closed = store.rank_closed(0)
    assert closed is not None
    assert closed.reason == "steps done"
    for step in (0, 2):
        names = spooled.names(step)
        assert sum(name.startswith("Functional.layer_norm.") for name in names) == 6
        assert any(name.startswith("Aten.native_layer_norm_backward.") for name in names)
