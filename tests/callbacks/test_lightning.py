"""The callback in a real Lightning Trainer, under both names of the library, on a model of two layers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")
pytest.importorskip("pytorch_lightning")

from tb_memplugin.callbacks.lightning import MemoryTraceCallback
from tb_memplugin.callbacks.recorder import is_profiling
from tests.callbacks.plain import PlainProfiler, counted_peaks, recorded, stats_in, steps_in
from tests.watched import is_watched

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def library(request):
    """The library by both of its names: two copies of every class."""
    return import_module(request.param)


@pytest.fixture
def pl():
    return import_module("lightning.pytorch")


def data():
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 8, generator=made), torch.randint(0, 2, (64,), generator=made))


def network(library, *, fails_at=None, automatic=True):
    """Takes 16 MiB in every validation, and may fail in one training step; two optimizers by hand."""

    class Network(library.LightningModule):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
            self.losses, self.validated_bytes = [], 0
            self.automatic_optimization = automatic

        def training_step(self, batch, index):
            if len(self.losses) == fails_at:
                raise MemoryError("the fourth batch is too large")
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            if not automatic:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def validation_step(self, batch, index):
            self.validated_bytes += torch.ones(1 << 22).nbytes
            self.log("loss", self.losses[-1] if self.losses else 1.0)

        def configure_optimizers(self):
            if automatic:
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return [torch.optim.SGD(self.net[at].parameters(), lr=0.01) for at in (0, 2)]

    return Network()


def trainer_in(library, folder, *callbacks, **options):
    gc.collect()  # an earlier training's garbage would be given back inside a window
    library.seed_everything(0, verbose=False)
    options = {"max_steps": 6, "logger": False, "enable_checkpointing": False, "devices": 1, **options}
    return library.Trainer(
        accelerator="cpu",
        default_root_dir=str(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        log_every_n_steps=1,
        **options,
    )


def fit(trainer, module, **options):
    """Fit on eight batches of eight."""
    loaders = [DataLoader(data(), batch_size=8) for _ in "ab"]
    trainer.fit(module, *loaders, **options)
    return module


def stepping(library, plain):
    """As the documentation of torch.profiler has it: `prof.step()` after each step."""

    class Stepping(library.Callback):  # type: ignore[name-defined]
        def on_train_start(self, *_):
            plain.profile.start()

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step != self.before:
                plain.profile.step()

        def on_train_batch_start(self, trainer, *_):
            self.before = trainer.global_step

        def on_train_end(self, *_):
            plain.profile.stop()

    return Stepping()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_and_peaks_are_those_of_a_plain_profiler(tmp_path, library, micro_batches):
    plain = PlainProfiler(steps=3)
    options = {"accumulate_grad_batches": micro_batches, "limit_val_batches": 0}
    fit(trainer_in(library, tmp_path, stepping(library, plain), **options), network(library))
    callback = MemoryTraceCallback(tmp_path / "ours", steps=[0, 1, 2])
    fit(trainer_in(library, tmp_path, callback, **options), network(library))
    assert counted_peaks(tmp_path / "ours") == plain.peaks
    assert list(plain.peaks) == [0, 1, 2]


def test_training_is_bit_for_bit_the_same(tmp_path, library):
    def run(*callbacks):
        trainer = trainer_in(library, tmp_path, *callbacks)
        module = fit(trainer, network(library))
        return module.losses, list(module.parameters())

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
def test_the_chosen_steps_are_recorded(tmp_path, pl, steps, expected):
    fit(trainer_in(pl, tmp_path, MemoryTraceCallback(steps=steps)), network(pl))
    assert steps_in(tmp_path) == expected


class TestTheFolder:
    def folders(self, folder):
        return {Path(step.folder).parent.relative_to(folder).as_posix() for step in recorded(folder)}

    def test_is_the_tensorboard_loggers_among_others(self, tmp_path, library):
        loggers = [
            library.loggers.CSVLogger(tmp_path / "csv"),
            library.loggers.TensorBoardLogger(tmp_path / "board"),
        ]
        fit(trainer_in(library, tmp_path, MemoryTraceCallback(), logger=loggers), network(library))
        assert self.folders(tmp_path) == {"board/lightning_logs/version_0"}
        assert list(tmp_path.glob("board/lightning_logs/version_0/events.out.tfevents.*"))

    def test_is_another_loggers_where_there_is_no_tensorboard(self, tmp_path, pl):
        logger = pl.loggers.CSVLogger(tmp_path, name="run")
        fit(trainer_in(pl, tmp_path, MemoryTraceCallback(), logger=logger), network(pl))
        assert self.folders(tmp_path) == {"run/version_0"}

    def test_is_the_root_without_a_logger(self, tmp_path, pl):
        fit(trainer_in(pl, tmp_path, MemoryTraceCallback()), network(pl))
        assert self.folders(tmp_path) == {"."}

    def test_is_the_one_given(self, tmp_path, pl):
        callback = MemoryTraceCallback(tmp_path / "mine", worker_name="me")
        fit(trainer_in(pl, tmp_path, callback, logger=pl.loggers.TensorBoardLogger(tmp_path)), network(pl))
        assert {Path(step.folder) for step in recorded(tmp_path)} == {tmp_path / "mine" / "me"}


@pytest.mark.parametrize(
    "options",
    [{"val_check_interval": 1}, {"val_check_interval": 3}, {"num_sanity_val_steps": 2}],
    ids=["each step", "within a window", "each epoch"],
)
def test_validation_is_in_no_step(tmp_path, pl, options):
    chosen = [0, 1, 2, 3, 7, 8]
    trainer = trainer_in(pl, tmp_path, MemoryTraceCallback(steps=chosen), max_steps=10, **options)
    module = fit(trainer, network(pl))
    assert module.validated_bytes >= 16 << 20
    assert steps_in(tmp_path) == chosen
    assert max(stats.peak_bytes for stats in stats_in(tmp_path).values()) < 1 << 20


@pytest.mark.parametrize("before", [True, False], ids=["told before us", "told after us"])
def test_a_training_that_stops_early_is_as_without_us(tmp_path, pl, before):
    def run(*ours):
        callbacks = pl.callbacks
        stopping = callbacks.EarlyStopping("loss", patience=1, mode="max", check_on_train_epoch_end=False)
        keeping = callbacks.ModelCheckpoint(tmp_path / f"{len(ours)}", monitor="loss", mode="min")
        order = (stopping, *ours, keeping) if before else (*ours, stopping, keeping)
        options = {"max_steps": -1, "val_check_interval": 2, "enable_checkpointing": True}
        trainer = trainer_in(pl, tmp_path, *order, **options)
        module = fit(trainer, network(pl))
        return trainer.global_step, module.losses, list(module.parameters())

    steps, losses, weights = run()
    our_steps, ours, our_weights = run(MemoryTraceCallback(tmp_path / "memory", steps=range(1, steps + 9)))
    assert (our_steps, ours) == (steps, losses)
    assert all(torch.equal(one, other) for one, other in zip(weights, our_weights, strict=True))
    assert steps_in(tmp_path / "memory") == list(range(1, steps))
    assert not is_profiling()


def test_validation_outside_a_training_records_nothing(tmp_path, pl):
    trainer = trainer_in(pl, tmp_path, MemoryTraceCallback(steps=[0]))
    trainer.validate(network(pl), DataLoader(data()), verbose=False)
    assert not is_profiling()
    assert steps_in(tmp_path) == []


def test_a_batch_in_which_two_optimizers_step_is_one_step(tmp_path, pl):
    trainer = trainer_in(pl, tmp_path, MemoryTraceCallback(steps=[1, 2]), max_steps=8)
    module = fit(trainer, network(pl, automatic=False))
    assert (trainer.global_step, len(module.losses)) == (8, 4)
    assert steps_in(tmp_path) == [1, 2]


def test_a_resumed_training_goes_on_counting(tmp_path, pl):
    first = trainer_in(pl, tmp_path, max_steps=3)
    fit(first, network(pl))
    first.save_checkpoint(tmp_path / "three.ckpt")
    callback = MemoryTraceCallback(tmp_path / "memory", steps=[1, 4])
    fit(
        trainer_in(pl, tmp_path, callback),
        network(pl),
        ckpt_path=str(tmp_path / "three.ckpt"),
        weights_only=True,
    )
    assert steps_in(tmp_path / "memory") == [4]


def test_an_error_in_training_passes_and_the_step_that_failed_is_written(tmp_path, library):
    module = network(library, fails_at=3)
    with pytest.raises(MemoryError, match="the fourth batch is too large") as raised:
        fit(trainer_in(library, tmp_path, MemoryTraceCallback(steps=[2, 3])), module)
    assert raised.value.__cause__ is None
    assert not is_profiling()
    assert not is_watched(module)
    assert steps_in(tmp_path) == [2, 3]


def test_fitting_twice_gives_two_workers(tmp_path, pl, caplog):
    trainer = trainer_in(pl, tmp_path, MemoryTraceCallback(worker_name="w"))
    module = fit(trainer, network(pl))
    trainer.fit_loop.epoch_loop.max_steps = 12
    fit(trainer, module)
    assert [(step.metadata.worker, step.metadata.step) for step in recorded(tmp_path)] == [
        ("w", 2),
        ("w", 3),
        ("w", 4),
        ("w_training2", 8),
        ("w_training2", 9),
        ("w_training2", 10),
    ]
    assert "tb_memplugin" not in {record.name for record in caplog.records}


def test_beside_the_trainers_own_torch_profiler(tmp_path, library, caplog):
    profiler = library.profilers.PyTorchProfiler(dirpath=tmp_path, filename="theirs", export_to_chrome=False)
    module = fit(trainer_in(library, tmp_path, MemoryTraceCallback(), profiler=profiler), network(library))
    assert len(module.losses) == 6
    assert caplog.text.count("The Trainer's own PyTorchProfiler is on") == 1
    assert list(tmp_path.glob("*theirs*"))
    assert steps_in(tmp_path) == []


def test_beside_a_profiler_of_the_users_own(tmp_path, pl, caplog):
    with profile(profile_memory=True) as other:
        fit(trainer_in(pl, tmp_path, MemoryTraceCallback()), network(pl))
    assert caplog.text.count("Another torch profiler is on") == 1
    assert any(event.key == "aten::addmm" for event in other.key_averages())
    assert steps_in(tmp_path) == []


def test_lightnings_other_profilers_are_no_hindrance(tmp_path, pl):
    fit(trainer_in(pl, tmp_path, MemoryTraceCallback(), profiler="simple"), network(pl))
    assert steps_in(tmp_path) == [2, 3, 4]


@pytest.mark.slow
def test_every_rank_writes_its_own(tmp_path):
    code = (
        "import sys\nfrom tests.callbacks.test_lightning import *\nimport lightning.pytorch as pl\n"
        "board = pl.loggers.TensorBoardLogger(sys.argv[1])\n"
        "ranks = {'strategy': 'ddp_fork', 'devices': 2, 'max_steps': 4}\n"
        "fit(trainer_in(pl, sys.argv[1], MemoryTraceCallback(), logger=board, **ranks), network(pl))\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    found = {
        (Path(step.folder).relative_to(tmp_path).as_posix(), step.metadata.step)
        for step in recorded(tmp_path)
    }
    assert found == {(f"lightning_logs/version_0/rank{rank}", step) for rank in (0, 1) for step in (2, 3)}


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_copy_that_the_program_uses_is_the_only_one_imported(name):
    code = (
        f"import sys, {name}; from tb_memplugin.callbacks.lightning import MemoryTraceCallback as ours\n"
        f"assert issubclass(ours, {name}.Callback)\n"
        "print(*{'lightning.pytorch', 'pytorch_lightning'} & set(sys.modules))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name]


def test_without_the_library_it_says_what_to_install():
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import tb_memplugin.callbacks.lightning"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'tb-memplugin[lightning]'" in done.stderr.splitlines()[-1]
