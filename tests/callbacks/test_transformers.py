"""The callback in a real Hugging Face Trainer, on a GPT-2 of two layers made from its configuration."""

from __future__ import annotations

import gc
import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, schedule

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tb_memplugin.callbacks.recorder import is_profiling  # noqa: E402
from tb_memplugin.callbacks.transformers import MemoryTraceCallback  # noqa: E402
from tb_memplugin.record.alive_before import alive_now  # noqa: E402
from tb_memplugin.store.reader import full_summary  # noqa: E402
from tb_memplugin.trace import Category  # noqa: E402
from tests.callbacks.plain import PlainProfiler, counted_peaks, recorded, stats_in, steps_in  # noqa: E402
from tests.watched import is_watched  # noqa: E402

ROOT = Path(__file__).parents[2]
AS_IT_WAS = dict(vars(Trainer))


class Sentences(torch.utils.data.Dataset):
    """Sixteen sentences of twelve words."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        words = (torch.arange(12) * (index + 3)) % 50
        return {"input_ids": words, "labels": words}


class GPT2(GPT2LMHeadModel):
    """Takes 16 MiB in every evaluation, and may fail in one training step."""

    def __init__(self, fails_at=None, error=MemoryError):
        super().__init__(
            GPT2Config(
                vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
            )
        )
        self.fails_at, self.error, self.calls, self.evaluated_bytes = fails_at, error, 0, 0

    def forward(self, *arguments, **named):
        if not self.training:
            self.evaluated_bytes += torch.ones(1 << 22).nbytes
        elif self.calls == self.fails_at:
            raise self.error("the fourth batch is too large")
        self.calls += self.training
        return super().forward(*arguments, **named)


def trainer_in(folder, *callbacks, model=None, **options):
    gc.collect()  # an earlier training's garbage would be given back inside a window
    options = {"max_steps": 6, "report_to": "none", "save_strategy": "no", **options}
    transformers.set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        remove_unused_columns=False,  # our forward names none
        **options,
    )
    return Trainer(
        model or GPT2(),
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=list(callbacks),
    )


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Stepping(TrainerCallback):
    """As the documentation of torch.profiler has it: `prof.step()` after each step."""

    def __init__(self, plain):
        self.plain = plain

    def on_train_begin(self, *_, **__):
        self.plain.profile.start()

    def on_step_end(self, *_, **__):
        self.plain.profile.step()

    def on_train_end(self, *_, **__):
        self.plain.profile.stop()


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_and_peaks_are_those_of_a_plain_profiler(tmp_path, micro_batches):
    plain = PlainProfiler(steps=3)
    options = {"gradient_accumulation_steps": micro_batches}
    trainer_in(tmp_path / "a", Stepping(plain), **options).train()
    trainer_in(tmp_path / "b", MemoryTraceCallback(tmp_path / "ours", steps=[0, 1, 2]), **options).train()
    assert counted_peaks(tmp_path / "ours") == plain.peaks
    assert list(plain.peaks) == [0, 1, 2]


def test_training_is_bit_for_bit_the_same(tmp_path):
    def run(*callbacks):
        trainer = trainer_in(tmp_path, *callbacks)
        trainer.train()
        return losses_of(trainer), list(trainer.model.parameters())

    losses, weights = run()
    ours, our_weights = run(MemoryTraceCallback(steps=range(6)))
    assert len(losses) == 6
    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(weights, our_weights, strict=True))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(None, [2, 3, 4]), (range(4, 9), [4, 5]), (schedule(wait=0, warmup=1, active=1, repeat=2), [1, 3])],
    ids=["the default", "beyond the end", "a schedule"],
)
def test_the_chosen_steps_are_recorded(tmp_path, steps, expected):
    trainer_in(tmp_path, MemoryTraceCallback(steps=steps)).train()
    assert steps_in(tmp_path) == expected


class TestTheFolder:
    def test_is_where_the_trainer_logs_for_tensorboard(self, tmp_path):
        trainer_in(tmp_path, MemoryTraceCallback(), report_to="tensorboard").train()
        (logged,) = [path.parent for path in tmp_path.glob("runs/*/events.out.tfevents.*")]
        assert {Path(step.folder).parent for step in recorded(tmp_path)} == {logged}

    def test_is_the_one_that_the_environment_names(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "named"))
        trainer_in(tmp_path / "out", MemoryTraceCallback(), report_to="tensorboard").train()
        assert steps_in(tmp_path / "named") == [2, 3, 4]
        assert list((tmp_path / "named").glob("events.out.tfevents.*"))

    def test_is_below_the_output_without_tensorboard(self, tmp_path):
        trainer_in(tmp_path, MemoryTraceCallback()).train()
        assert steps_in(tmp_path / "runs" / "memory") == [2, 3, 4]

    def test_is_the_one_given(self, tmp_path):
        callback = MemoryTraceCallback(tmp_path / "mine", worker_name="me")
        trainer_in(tmp_path / "out", callback, report_to="tensorboard").train()
        assert {Path(step.folder) for step in recorded(tmp_path)} == {tmp_path / "mine" / "me"}


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    ],
    ids=["each step", "each epoch", "before the first", "with checkpoints"],
)
def test_evaluation_is_in_no_step(tmp_path, options):
    chosen = [0, 1, 2, 6, 7, 8, 9]
    trainer = trainer_in(
        tmp_path, MemoryTraceCallback(tmp_path / "memory", steps=chosen), max_steps=10, **options
    )
    trainer.train()
    assert trainer.model.evaluated_bytes >= 16 << 20
    assert steps_in(tmp_path / "memory") == chosen
    assert max(stats.peak_bytes for stats in stats_in(tmp_path / "memory").values()) < 1 << 20


class Asking(TrainerCallback):
    """Stands after ours, and asks for what comes next when its turn comes."""

    def __init__(self, **asked):
        self.asked = asked

    def on_step_end(self, args, state, control, **_):
        for name, at in self.asked.items():
            setattr(control, name, state.global_step >= at)


def test_an_evaluation_that_a_later_callback_asks_for_is_in_no_step(tmp_path):
    callbacks = MemoryTraceCallback(tmp_path, steps=[0, 1, 2, 3]), Asking(should_evaluate=1)
    trainer = trainer_in(tmp_path, *callbacks)
    trainer.train()
    assert trainer.model.evaluated_bytes >= 6 * (16 << 20)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert max(stats.peak_bytes for stats in stats_in(tmp_path).values()) < 1 << 20


@pytest.mark.parametrize("before", [True, False], ids=["told before us", "told after us"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_training_that_stops_early_is_as_without_us(tmp_path, before, micro_batches):
    def run(*ours):
        stopping = EarlyStoppingCallback(1)
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = trainer_in(
            tmp_path / f"{len(ours)}",
            *((stopping, *ours) if before else (*ours, stopping)),
            gradient_accumulation_steps=micro_batches,
            label_names=["labels"],  # without them there is no loss to stop at
            metric_for_best_model="loss",
            greater_is_better=True,  # so that the second step is worse
            load_best_model_at_end=True,
            **options,
        )
        trainer.train()
        return losses_of(trainer), list(trainer.model.parameters())

    losses, weights = run()
    ours, our_weights = run(MemoryTraceCallback(tmp_path / "memory", steps=range(1, 6)))
    assert len(losses) == 2
    assert ours == losses
    assert all(torch.equal(one, other) for one, other in zip(weights, our_weights, strict=True))
    assert steps_in(tmp_path / "memory") == [1]
    assert not is_profiling()


def test_a_training_that_ends_before_the_chosen_steps_says_so(tmp_path, caplog):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(steps=[4]), Asking(should_training_stop=2))
    trainer.train()
    assert "the training ran steps 0 to 1, and steps= selects none of them" in caplog.text
    assert not is_profiling()


def test_an_evaluation_outside_a_training_records_nothing(tmp_path):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(steps=[0]))
    trainer.evaluate()
    assert not is_profiling()
    assert steps_in(tmp_path) == []


def test_a_resumed_training_goes_on_counting(tmp_path):
    trainer_in(tmp_path, save_strategy="steps", save_steps=3, max_steps=3).train()
    callback = MemoryTraceCallback(tmp_path / "memory", steps=[1, 4])
    trainer_in(tmp_path, callback, max_steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert steps_in(tmp_path / "memory") == [4]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_training_passes_and_the_step_that_failed_is_written(tmp_path, error):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(steps=[2, 3]), model=GPT2(fails_at=3, error=error))
    with pytest.raises(error, match="the fourth batch is too large") as raised:
        trainer.train()
    assert raised.value.__cause__ is None
    assert not is_profiling()
    assert not is_watched(trainer.model)
    assert steps_in(tmp_path) == [2, 3]


def test_training_twice_gives_two_workers(tmp_path, caplog):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(worker_name="w"))
    trainer.train()
    trainer.train()
    assert [(step.metadata.worker, step.metadata.step) for step in recorded(tmp_path)] == [
        ("w", 2),
        ("w", 3),
        ("w", 4),
        ("w_training2", 2),
        ("w_training2", 3),
        ("w_training2", 4),
    ]
    assert "tb_memplugin" not in {record.name for record in caplog.records}


def test_beside_a_profiler_of_the_users_own(tmp_path, caplog):
    with profile(profile_memory=True) as other:
        trainer_in(tmp_path, MemoryTraceCallback()).train()
    assert caplog.text.count("Another torch profiler is on") == 1
    assert any(event.key.startswith("aten::addmm") for event in other.key_averages())
    assert steps_in(tmp_path) == []


def test_the_optimizers_state_is_told_apart(tmp_path):
    gc.collect()
    models_of_others = sum(one.storage.nbytes() for one in alive_now() if one.category is Category.PARAMETER)
    trainer_in(tmp_path, MemoryTraceCallback(steps=[3]), optim="adamw_torch").train()
    (step,) = recorded(tmp_path)
    parts = full_summary(step).devices[0].peak.by_category
    found = dict(zip(parts.keys, parts.bytes, strict=True))
    weights = sum(parameter.nbytes for parameter in GPT2().parameters())
    assert weights <= found["parameter"] <= weights + models_of_others
    assert 2 * weights <= found["optimizer_state"] < 2 * weights + 1000  # and a step counter each


def test_an_error_in_a_second_training_passes_and_the_step_that_failed_is_written(tmp_path):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(steps=[2, 3]), model=GPT2(fails_at=9))
    trainer.train()
    with pytest.raises(MemoryError, match="the fourth batch is too large"):
        trainer.train()
    assert not is_profiling()
    assert not is_watched(trainer.model)
    assert steps_in(tmp_path) == [2, 3, 2, 3]
    assert vars(Trainer) == AS_IT_WAS


def test_the_trainer_that_we_wrap_looks_as_before():
    callbacks = [MemoryTraceCallback(), MemoryTraceCallback()]
    for name, argument in (("train", "resume_from_checkpoint"), ("evaluate", "metric_key_prefix")):
        method = getattr(Trainer, name)
        assert method.__name__ == name
        assert argument in inspect.signature(method).parameters
        assert not hasattr(method.__wrapped__, "__wrapped__")
    del callbacks[0]
    gc.collect()
    assert hasattr(Trainer.train, "__wrapped__")
    callbacks.clear()
    gc.collect()
    assert vars(Trainer) == AS_IT_WAS


def test_after_the_last_training_the_trainer_is_as_it_was(tmp_path):
    waiting = MemoryTraceCallback()
    trainer = trainer_in(tmp_path / "a", MemoryTraceCallback(steps=[1]), max_steps=2)
    trainer.train()
    assert hasattr(Trainer.train, "__wrapped__")  # the other callback's training may come
    trainer_in(tmp_path / "b", waiting, max_steps=1).train()
    assert vars(Trainer) == AS_IT_WAS


def test_what_another_library_put_around_ours_stays(monkeypatch, tmp_path):
    trainer = trainer_in(tmp_path, MemoryTraceCallback(steps=[1]), max_steps=2)
    ours = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", theirs := lambda *args, **named: ours(*args, **named))
    trainer.train()
    assert Trainer.evaluate is theirs
    monkeypatch.undo()
    trainer.train()
    assert vars(Trainer) == AS_IT_WAS


@pytest.mark.slow
def test_every_rank_writes_its_own(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = (
        "import sys; from tests.callbacks.test_transformers import *\n"
        "trainer_in(sys.argv[1], MemoryTraceCallback(), report_to='tensorboard').train()\n"
    )
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    found = {
        (Path(step.folder).relative_to(tmp_path).as_posix(), step.metadata.step)
        for step in recorded(tmp_path)
    }
    assert found == {(f"runs/memory/rank{rank}", step) for rank in (0, 1) for step in (2, 3, 4)}


def test_without_the_library_it_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None\nimport tb_memplugin.callbacks.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'tb-memplugin[transformers]'" in done.stderr.splitlines()[-1]
