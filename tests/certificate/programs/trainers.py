"""The Trainers of transformers and of Lightning, in which our callbacks record, too."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.certificate.programs.catalog import program
from tests.certificate.programs.language import gpt2, ids
from tests.certificate.run import Run


def import_libraries() -> None:
    for module in ("transformers.trainer", "accelerate", "lightning.pytorch"):
        import_module(module)
    for library in ("transformers", "lightning"):
        import_module(f"tb_memplugin.callbacks.{library}")


def _start_profilers_thread() -> None:
    """Use torch's profiler once: it keeps a thread, which would be there only where a callback records."""
    with torch.profiler.profile():
        pass


@program("trainers", stacks=False, has_trainer=True)
def trainer_of_transformers(run: Run) -> None:
    """Three steps, an evaluation after each, and a checkpoint at the end."""
    from transformers import Trainer, TrainingArguments

    _start_profilers_thread()
    model = gpt2()
    rows = [{"input_ids": row, "labels": row} for row in ids(8)]
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=run.callbacks("transformers")
    )
    with run.window(model) as step:
        trainer.train()
        step()
    run.value([entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history])
    run.keep(optimizer=trainer.optimizer.optimizer)


@program("trainers", stacks=False, has_trainer=True)
def trainer_of_lightning(run: Run) -> None:
    """Three steps with a validation in between."""
    from lightning.pytorch import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

        def training_step(self, batch, number):
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            run.value(loss)
            return loss

        def validation_step(self, batch, number):
            run.value(self.layers(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    _start_profilers_thread()
    model = Classifier()
    loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,))), batch_size=4)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        val_check_interval=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=run.callbacks("lightning"),
    )
    with run.window(model) as step:
        trainer.fit(model, loader, loader)
        step()
    run.keep(optimizer=trainer.optimizers[0])
