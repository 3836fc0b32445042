"""Capture in other libraries' training loops."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from conftest import Spool


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


@pytest.fixture
def lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return pytest.skip("neither lightning nor pytorch_lightning is installed")


BATCHES = 6


def fit(lightning: Any, callbacks: list[Any], fail_at: int = -1) -> list[torch.Tensor]:
    """Train a small module with accumulated and clipped gradients; its weights."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)
            )

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == fail_at:
                raise KeyError(index)
            return self.net(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            torch.special.erf(self.net(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            torch.manual_seed(1)
            return torch.utils.data.DataLoader(torch.randn(2 * BATCHES, 4), batch_size=2)

        val_dataloader = train_dataloader

    torch.manual_seed(0)
    module = Module()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(module)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(spooled: Spool, lightning: Any) -> None:
    from spool.integrations.lightning import SpoolCallback

    plain = fit(lightning, [])
    captured = fit(lightning, [SpoolCallback(spool_dir=spooled.root)])
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert closed.reason == "disabled"
    steps = BATCHES // 2
    for step in range(steps):
        names = spooled.names(step)
        assert (closed.steps[step].shards, closed.steps[step].dropped) == (len(names), 0)
        assert sum(name.startswith("Functional.gelu.") for name in names) == 2
        assert sum(name.startswith("Aten.gelu_backward.") for name in names) == 2
        assert "Tensor.addcdiv_.0" in names or "Torch._foreach_addcdiv_.0" in names
    # What is validated after the last update is in the step that follows it.
    after = spooled.names(steps)
    assert sum(name.startswith("Torch.special.erf.") for name in after) == BATCHES
    assert not [name for name in after if name.startswith("Aten.")]


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer_that_ends_early(spooled: Spool, lightning: Any) -> None:
    from spool.integrations.lightning import SpoolCallback

    with pytest.raises(KeyError):
        fit(lightning, [SpoolCallback(spool_dir=spooled.root)], fail_at=3)
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert closed.reason == "exception: KeyError"
    assert spooled.store().step_closed(0, 0) is not None
    assert spooled.store().unclosed_steps(0) == [1]
    callback = SpoolCallback(spool_dir=spooled.root, step=[1], resume=True)
    fit(lightning, [callback])
    closed = spooled.store().rank_closed(0)
    assert closed is not None
    assert closed.reason == "steps done"
    assert sorted(closed.steps) == [0, 1]
