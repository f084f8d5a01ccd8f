"""``infinity.LightningStrategy``: losses, clipping and checkpoints are those without infinity."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what other packages do
]


class Learner(lightning.LightningModule):
    def __init__(self, *, ours: bool) -> None:
        super().__init__()
        self.model: Any = None
        self.ours, self.losses = ours, list[float]()

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = LlamaForCausalLM(CONFIG).train()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        if self.ours:
            optimizer: Any = infinity.AdamW(
                self.model, lr=3e-3, max_grad_norm=1.0, params=[{"params": list(self.model.parameters())}]
            )
        else:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(count: int = 12) -> DataLoader:
    rows = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader(list(rows), batch_size=2)


def recipe(folder: Path) -> infinity.Recipe:
    return infinity.load_recipe(
        overrides=["train.dtype=fp32", f"memory.nvme=[{folder / 'drive'}]", "memory.host=64MiB"]
    )


def fit(
    folder: Path, *, ours: bool, ckpt_path: str | None = None, count: int = 12, **more: Any
) -> tuple[Any, Any]:  # fmt: skip
    strategy = infinity.LightningStrategy(recipe(folder)) if ours else "auto"
    kept = ModelCheckpoint(folder / str(ours), every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        max_steps=5, accumulate_grad_batches=2, gradient_clip_val=0.5, strategy=strategy, devices=1,
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[kept], **more,
    )  # fmt: skip
    learner = Learner(ours=ours)
    trainer.fit(learner, loader(count), loader(4), ckpt_path=ckpt_path)
    return trainer, learner


def test_a_step_at_the_end_of_an_epoch_may_have_fewer_micro_batches(tmp_path: Path):
    _, plain = fit(tmp_path, ours=False, count=14)
    trainer, learner = fit(tmp_path, ours=True, count=14)
    infinity.close(learner)
    assert trainer.global_step == 5
    assert len(learner.losses) == 9  # seven of an epoch are four steps
    assert learner.losses == pytest.approx(plain.losses, abs=5e-6)


def test_losses_and_checkpoints_are_those_without_infinity(tmp_path: Path):
    _, plain = fit(tmp_path, ours=False)
    _, whole = fit(tmp_path, ours=True)
    infinity.close(whole)
    assert whole.losses == pytest.approx(plain.losses, abs=5e-6)
    assert len(whole.losses) == 10
    (tmp_path / "saved").mkdir()
    saved = (tmp_path / "True/step=2.ckpt").rename(tmp_path / "saved/ours.ckpt")
    assert {each.name for each in saved.iterdir()} == {"loops.ckpt", "training_state"}
    _, theirs = fit(tmp_path, ours=False, ckpt_path=str(tmp_path / "False/step=2.ckpt"))
    trainer, again = fit(tmp_path, ours=True, ckpt_path=str(saved))
    assert again.losses == pytest.approx(theirs.losses, abs=5e-6)  # of the epoch's first batches
    assert len(again.losses) == 6
    assert not (tmp_path / "True/step=2.ckpt").exists()  # which Lightning asks for after a micro-batch
    best = tmp_path / "True/step=4.ckpt"
    [found] = trainer.validate(again, loader(4), ckpt_path=str(best), verbose=False)
    [now] = trainer.validate(again, loader(4), verbose=False)
    assert found == now  # the weights of that checkpoint are there
    infinity.close(again)


@pytest.mark.parametrize("skipped", [(2,), (2, 3)], ids=["first", "all"])
def test_a_step_goes_without_micro_batches_that_have_no_loss(
    tmp_path: Path, skipped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    step = Learner.training_step

    def skipping(self: Learner, batch: torch.Tensor, number: int) -> torch.Tensor | None:
        loss = step(self, batch, number)
        return None if len(self.losses) - 1 in skipped else loss

    monkeypatch.setattr(Learner, "training_step", skipping)
    _, plain = fit(tmp_path, ours=False)
    _, learner = fit(tmp_path, ours=True)
    infinity.close(learner)
    assert learner.losses == pytest.approx(plain.losses, abs=5e-6)


def test_a_last_micro_batch_without_a_loss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = Learner.training_step
    monkeypatch.setattr(
        Learner,
        "training_step",
        lambda self, batch, at: (step(self, batch, at), None)[at] if at < 2 else None,
    )
    with pytest.raises(infinity.StateError, match=r"returned None for the last.*Return the loss times 0"):
        fit(tmp_path, ours=True)


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(infinity.StateError, match="leave precision out"):
        lightning.Trainer(
            strategy=infinity.LightningStrategy(recipe(tmp_path)), precision="bf16-mixed", accelerator="cpu",
            logger=False,
        )  # fmt: skip
    (tmp_path / "other.ckpt").touch()
    with pytest.raises(infinity.StateError, match=r"not written by infinity.LightningStrategy"):
        fit(tmp_path, ours=True, ckpt_path=str(tmp_path / "other.ckpt"))
