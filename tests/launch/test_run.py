"""`tb-memplugin run`: programs that know nothing of us run as they do without, and are recorded."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import zipapp
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tb_memplugin.analysis import peak
from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.launch.start import Settings, _tell, run_name
from tb_memplugin.store.reader import Recordings, full_summary, load_window, read_recordings
from tb_memplugin.trace import Phase

UUID = "d7d5ad99-3d32-4351-99c9-c5d68e1c667b"

TRAINING = """
import sys
import torch

torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(64, width)
        self.second = torch.nn.Linear(width, 8)

    def forward(self, rows):
        return self.second(self.first(rows).relu())

net = Net(int(sys.argv[1]))
optimizer = torch.optim.Adam(net.parameters())
for step in range(int(sys.argv[2])):
    loss = net(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "raise" in sys.argv and step == 5:
        raise ValueError("planned")
    if "interrupt" in sys.argv and step == 5:
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        os.kill(os.getpid(), signal.SIGINT)
    if "signal" in sys.argv and step == 4:
        import os, signal
        os.kill(os.getpid(), signal.SIGUSR1)
print(loss.item().hex(), __name__, sys.argv[1:])
"""

TWO_MODELS = """
import torch

class Generator(torch.nn.Linear): pass
class Critic(torch.nn.Linear): pass

one, other = Generator(8, 64), Critic(64, 1)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (one, other)]
for step in range(6):
    other(one(torch.randn(4, 8))).mean().backward()
    for optimizer in optimizers[step % 4 > 0:]:
        optimizer.step()
        optimizer.zero_grad()
"""

INFERENCE = """
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 128)
        self.second = torch.nn.Linear(128, 8)

    def forward(self, rows):
        if "signal" in sys.argv and len(rows) == 3:
            import os, signal
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.second(self.first(rows).relu())

torch.manual_seed(0)
net, other = Net(), torch.nn.Linear(8, 2)
criterion = torch.nn.MSELoss()
with torch.no_grad():
    for call in range(int(sys.argv[1])):
        result = net(torch.full((call + 1, 64), 0.5))
        criterion(result, torch.zeros_like(result))
if "train" in sys.argv:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        net(torch.randn(4, 64)).mean().backward()
        optimizer.step()
print(result.sum().item().hex(), torch.nn.Module._compiled_call_impl)
"""

OWN_PROFILER = """
import torch
from torch.profiler import profile, schedule

net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
steps = schedule(wait=2, warmup=1, active=2, repeat=1)
with profile(schedule=steps, on_trace_ready=lambda prof: print("steps", prof.step_num)) as prof:
    for step in range(8):
        net(torch.randn(4, 8)).mean().backward()
        optimizer.step()
        prof.step()
"""

SPAWNING = """
import torch

def train(rank):
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        net(torch.randn(4, 8)).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""

FORKING = """
import os
import sys
import torch

def train():
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        net(torch.ones(4, 8)).mean().backward()
        optimizer.step()

train()
child = os.fork()
if child == 0:
    train()
    print("child")
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

DISTRIBUTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    net(torch.randn(32 * (1 + dist.get_rank()), 64)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def python(
    *arguments: object, cwd: Path, source: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TB_MEMPLUGIN")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input=source,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(cwd: Path, *arguments: object, source: str | None = None) -> subprocess.CompletedProcess[str]:
    return python("-m", "tb_memplugin", "run", *arguments, cwd=cwd, source=source)


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text, "utf-8")
    return path


def recorded(folder: Path) -> Recordings:
    return read_recordings(str(folder / "runs"))


def numbers(recordings: Recordings) -> list[int]:
    return [step.metadata.step for step in recordings.steps]


def test_a_training_runs_as_without_us_and_two_steps_and_all_figures_are_recorded(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    alone, with_us = python(path, 128, 7, cwd=tmp_path), run(tmp_path, path, 128, 7)
    assert (with_us.returncode, with_us.stdout) == (0, alone.stdout)
    recordings = recorded(tmp_path)
    assert numbers(recordings) == [2, 3, 4]
    assert recordings.watched[0].figures.steps.tolist() == [1, 2, 3, 4, 5, 6]
    folder = Path(recordings.steps[0].folder).relative_to(tmp_path / "runs")
    assert re.fullmatch(r"train/\d{8}-\d{6}/[^/]+", folder.as_posix())
    trace = load_window(recordings.steps[0].side_file or "", recordings.steps[0].metadata)
    assert trace.phases.phase[-1] == Phase.OPTIMIZER  # whose end is that of the last step
    assert trace.phases.end_ns[-1] > trace.events.time_ns[-1]
    elements = 64 * 128 + 128 + 128 * 8 + 8
    assert f"optimizer_state {(8 * elements + 16) / 1024:.2f} KiB" in with_us.stderr  # and 4 step counters
    assert f"parameter {4 * elements / 1024:.2f} KiB" in with_us.stderr
    assert re.search(r"layers +first ", with_us.stderr)
    lines = re.findall(r"train\.py:(\d+) \(<module>\) ", with_us.stderr)
    ran = [TRAINING.splitlines()[int(line) - 1].strip() for line in lines]
    assert ran[:2] == ["optimizer.step()", "loss.backward()"]
    assert f"tensorboard --logdir {tmp_path / 'runs'}" in with_us.stderr


@pytest.mark.parametrize("shapes", [False, True])
def test_the_shapes_of_activations_are_recorded_on_demand(tmp_path: Path, shapes: bool) -> None:
    """The output of the first layer, before relu, is 32 rows of 128 numbers."""
    done = run(tmp_path, *["--shapes"] * shapes, script(tmp_path, TRAINING), 128, 4)
    assert done.returncode == 0, done.stderr
    step = recorded(tmp_path).steps[0]
    trace = load_window(step.side_file or "", step.metadata)
    assert ("float32 [32, 128]" in map(str, trace.tensors)) is shapes
    assert "float32 [128, 64]" in map(str, trace.tensors)  # the weight of the first layer


@pytest.mark.parametrize("arguments", [("-",), ("-c", TRAINING)], ids=["standard input", "an argument"])
def test_code_without_a_file_runs_as_with_python(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    source = TRAINING if arguments == ("-",) else None
    alone = python(*arguments, 16, 5, cwd=tmp_path, source=source)
    with_us = run(tmp_path, *arguments, 16, 5, source=source)
    launched = python("-m", "tb_memplugin.launch", *arguments, 16, 5, cwd=tmp_path, source=source)
    assert alone.returncode == 0, alone.stderr
    assert with_us.stdout == launched.stdout == alone.stdout
    assert numbers(recorded(tmp_path)) == [2, 3, 4]
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["python"]


def test_a_program_that_looks_for_torch_before_it_imports_it_is_recorded(tmp_path: Path) -> None:
    """As `import transformers` does."""
    looks = "from importlib.util import find_spec\nassert find_spec('torch').loader.name == 'torch'\n"
    done = run(tmp_path, script(tmp_path, looks + TRAINING), 16, 5)
    assert done.returncode == 0, done.stderr
    assert numbers(recorded(tmp_path)) == [2, 3, 4]


@pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a compiler"
)
def test_the_cpus_allocator_is_counted_from_the_start_and_the_end_is_told(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    arguments = ("-m", "tb_memplugin", "run", path, 128, 7)
    done = python(*arguments, cwd=tmp_path, TB_MEMPLUGIN_EXACT_CPU="1")
    assert "  steps      6 steps of" in done.stderr
    (window,) = {step.side_file for step in recorded(tmp_path).steps}
    assert window is not None
    trace = load_window(window)
    assert account_line(accounts(trace, trace.device_row("cpu"))).level == "exact"


LEAK = """
import torch

net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
outputs = []
for step in range(8):
    outputs.append(net(torch.randn(256, 64)))
    outputs[-1].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_step_keeps_is_the_first_advice_with_its_bytes(tmp_path: Path) -> None:
    """Each step keeps 256 x 64 numbers of 4 bytes. The steps that are recorded by default show it."""
    done = run(tmp_path, script(tmp_path, LEAK))
    assert "(<module>) keeps what it allocates in outputs[*]. 64.00 KiB more with every step." in done.stderr


def test_a_second_run_says_what_changed(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    runs = [run(tmp_path, path, width, 5).stderr for width in (128, 128, 1024)]
    assert "changed" not in runs[0]
    assert "nothing since" in runs[1]
    assert re.search(r"changed +\+[\d,.]+ [KM]iB since \d{8}-\d{6}: \w+ \+", runs[2])
    assert re.search(r"layers: first \+[\d,.]+ [KM]iB, ", runs[2])
    assert not re.search(r"[+-]0 B", runs[2])  # what did not change is no change


def test_steps_can_be_chosen_and_a_signal_adds_two(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "1,3:5", "--no-every-step", script(tmp_path, TRAINING), 16, 9, "signal")
    assert done.returncode == 0, done.stderr
    assert numbers(recorded(tmp_path)) == [1, 3, 4, 6, 7]  # the signal came in step 5, after the fifth step
    assert recorded(tmp_path).watched == ()


def test_a_second_optimizer_counts_from_its_first_step_also_for_a_signal(tmp_path: Path) -> None:
    """It counts because the first one is gone: here after seven steps."""
    twice = f"def train():\n{textwrap.indent(TRAINING, '    ')}\ntrain()\ntrain()"
    done = run(tmp_path, script(tmp_path, twice), 16, 8, "signal")
    assert done.returncode == 0, done.stderr
    assert numbers(recorded(tmp_path)) == [2, 3, 4, 6, 7, 10, 11, 12, 14, 15]


def test_the_first_step_can_be_recorded_with_its_layers(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "0", script(tmp_path, TRAINING), 16, 3)
    assert done.returncode == 0, done.stderr
    steps = recorded(tmp_path).steps
    assert [step.metadata.step for step in steps] == [0]
    assert {"first", "second"} <= set(full_summary(steps[0]).modules.keys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1,), [0]),
        ((7,), [0, 1]),
        ((7, "signal"), [0, 1, 3, 4]),  # it comes in step 2, and counting begins again after it
        ((1, "train"), [0, 3, 4, 5]),
    ],
)
def test_without_an_optimizer_the_first_calls_of_the_model_are_recorded(
    tmp_path: Path, arguments: tuple[object, ...], expected: list[int]
) -> None:
    """The loss has no parameters, so it is no model. Afterwards nothing of ours is on the class."""
    path = script(tmp_path, INFERENCE)
    with_us = run(tmp_path, path, *arguments)
    assert with_us.returncode == 0, with_us.stderr
    if arguments != (1,) and "signal" not in arguments:  # else we still wait for a call
        assert with_us.stdout == python(path, *arguments, cwd=tmp_path).stdout
    steps = recorded(tmp_path).steps
    assert [step.metadata.step for step in steps] == expected
    parameters = 4 * (64 * 128 + 128 + 128 * 8 + 8 + 8 * 2 + 2)
    parts = full_summary(steps[0]).devices[0].peak.by_category
    assert dict(zip(parts.keys, parts.bytes, strict=True))["parameter"] == parameters
    assert f"parameter {parameters / 1024:.2f} KiB" in with_us.stderr
    assert {"Net.first", "Net.second"} <= set(full_summary(steps[0]).modules.keys)


def test_calls_of_a_model_can_be_chosen(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "2,4:6", script(tmp_path, INFERENCE), 7)
    assert done.returncode == 0, done.stderr
    assert numbers(recorded(tmp_path)) == [2, 4, 5]


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("interrupt", -signal.SIGINT)])
def test_an_error_of_the_program_is_its_own(tmp_path: Path, how: str, code: int) -> None:
    path = script(tmp_path, TRAINING)
    alone, with_us = python(path, 16, 9, how, cwd=tmp_path), run(tmp_path, path, 16, 9, how)
    assert with_us.returncode == alone.returncode == code
    assert with_us.stderr.startswith(alone.stderr) or alone.stderr in with_us.stderr
    assert numbers(recorded(tmp_path)) == [2, 3, 4]
    assert "  steps      5 steps of" in with_us.stderr


def test_a_request_that_the_host_refuses_is_told_with_its_line(tmp_path: Path) -> None:
    refused = f"{INFERENCE}\ndef widen():\n    return torch.empty(1 << 45, dtype=torch.uint8)\nwiden()\n"
    result = run(tmp_path, script(tmp_path, refused), 3)
    assert result.returncode == 1
    line = refused.splitlines().index("    return torch.empty(1 << 45, dtype=torch.uint8)") + 1
    told = f"  failed     a request of 32.00 TiB on the CPU, at train.py:{line} (widen)\n"
    assert told in result.stderr


def test_the_models_of_all_optimizers_are_known_by_class(tmp_path: Path) -> None:
    assert run(tmp_path, script(tmp_path, TWO_MODELS)).returncode == 0
    steps = recorded(tmp_path).steps
    assert {"Generator", "Critic"} <= {name for step in steps for name in full_summary(step).modules.keys}
    parts = peak(load_window(steps[0].side_file or "", steps[0].metadata)).parts("category")
    sizes = {part.key: part.bytes for part in parts}
    assert sizes["parameter"] == sizes["optimizer_state"] == 4 * (8 * 64 + 64 + 64 + 1)


def test_a_program_keeps_its_own_profiler(tmp_path: Path) -> None:
    path = script(tmp_path, OWN_PROFILER)
    alone, with_us = python(path, cwd=tmp_path), run(tmp_path, path)
    assert (with_us.returncode, with_us.stdout) == (0, alone.stdout)
    assert with_us.stderr.count("Another torch profiler is on") == 1
    assert len(recorded(tmp_path).watched[0].figures) == 7


def test_processes_that_torchrun_starts_are_ranks_of_one_run(tmp_path: Path) -> None:
    path = script(tmp_path, DISTRIBUTED)
    started = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = python(*started, "-m", "tb_memplugin", "run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = {Path(step.folder) for step in recorded(tmp_path).steps}
    assert {folder.name for folder in folders} == {"rank0", "rank1"}
    (run,) = {folder.parent for folder in folders}
    began = datetime.strptime(run.name[:-5], "%Y%m%d-%H%M%S").astimezone()
    assert timedelta(0) <= datetime.now().astimezone() - began < timedelta(minutes=2), run
    assert done.stderr.count("in rank1, the highest of 2") == 1


def test_a_run_of_several_hosts_is_named_after_what_they_share() -> None:
    ranks = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    names = [run_name("train.py", {**ranks, "TORCHELASTIC_RUN_ID": job}) for job in ("mine", "none", UUID)]
    assert names == ["train/mine", "train/10.0.0.1-29500", f"train/{UUID}"]


def test_a_command_is_named_after_the_python_file_that_it_is_given(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"  # by its path, as bin/torchrun may be
    launcher.write_text(f"#!{sys.executable}\nimport os\nprint(os.environ['TB_MEMPLUGIN_RUN'])\n")
    launcher.chmod(0o755)
    for command in (("sh", "-c", "echo $TB_MEMPLUGIN_RUN"), (launcher,)):
        done = run(tmp_path, *command, "sub/train.py", "config.py")
        assert re.fullmatch(r"train/\d{8}-\d{6}\n", done.stdout), done.stderr


@pytest.mark.parametrize("launched", ["torchrun", "variable"])
def test_child_processes_are_recorded(tmp_path: Path, launched: str) -> None:
    """By the start file, which `make setup` installs with the package."""
    if launched == "torchrun":
        path = script(tmp_path, DISTRIBUTED)
        command = ("-m", "tb_memplugin", "run", "torchrun", "--standalone", "--nproc-per-node", 2, path)
        done = python(
            *command, cwd=tmp_path, PATH="/usr/bin:/bin"
        )  # without the folder of this Python's commands
    else:
        done = python(script(tmp_path, SPAWNING), cwd=tmp_path, TB_MEMPLUGIN="runs")
    assert done.returncode == 0, done.stderr
    recordings = recorded(tmp_path)
    assert sorted(numbers(recordings)) == [2, 2, 3, 3, 4, 4]
    assert [len(series.figures) for series in recordings.watched] == [4, 4]
    assert done.stderr.count("tb-memplugin: ") == 1


def test_a_fork_after_recorded_steps_ends_with_its_own_code(tmp_path: Path) -> None:
    """torch alone aborts or hangs where a process forks that has had a profiler."""
    done = run(tmp_path, script(tmp_path, FORKING))
    assert (done.returncode, done.stdout) == (0, "child\n4\n")
    assert numbers(recorded(tmp_path)) == [2, 3, 4, 7, 8, 9]  # the fork counts on


def test_a_program_sees_no_difference_in_its_main_module_options_and_traceback(tmp_path: Path) -> None:
    text = (
        "import sys\nprint(sorted(globals()), __file__, sys.argv, sys.path[0], sys.flags)\nassert 0, 1\n1 / 0"
    )
    path = script(tmp_path, text)
    alone = python("-O", "-u", "train.py", "-m", "x", cwd=tmp_path)
    with_us = python("-O", "-u", "-m", "tb_memplugin", "run", path.name, "-m", "x", cwd=tmp_path)
    assert (with_us.returncode, with_us.stdout) == (alone.returncode, alone.stdout) == (1, alone.stdout)
    assert with_us.stderr.startswith(alone.stderr)
    assert "ZeroDivisionError" in alone.stderr


@pytest.mark.parametrize("start", ["#!/bin/sh", f"#!{sys.executable}"])
def test_an_executable_is_a_script_of_python_or_a_command(tmp_path: Path, start: str) -> None:
    path = tmp_path / "start"
    path.write_text(f'{start}\n""":"\necho shell\nexit\n"""\nprint("python")\n', "utf-8")
    path.chmod(0o755)
    assert run(tmp_path, path).stdout == ("shell\n" if "sh" in start else "python\n")


def test_an_archive_runs_as_with_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, sys.argv)", "utf-8")
    zipapp.create_archive(tmp_path / "package", tmp_path / "app.pyz")
    for program in ("package", "app.pyz"):
        expected = f"__main__ ['{program}', '7']\n"
        assert run(tmp_path, program, 7).stdout == expected
        launched = python("-m", "tb_memplugin.launch", program, 7, cwd=tmp_path)
        assert launched.stdout == expected


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", TRAINING)
    done = run(tmp_path, "-m", "package.train", 16, 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" __main__ ['16', '4']\n")
    assert numbers(recorded(tmp_path)) == [2, 3, 4]
    assert Path(recorded(tmp_path).steps[0].folder).relative_to(tmp_path / "runs").parts[0] == "package.train"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('no torch')", "did not import torch"),
        ("import torch; torch.ones(2)", "no module with parameters was called"),
    ],
)
def test_a_program_without_steps_is_told_why(tmp_path: Path, text: str, why: str) -> None:
    done = run(tmp_path, script(tmp_path, text))
    assert done.returncode == 0
    assert re.search(f"nothing was recorded. .*{why}", done.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--steps", "5:2", "train.py"), "'5:2' names no steps."),
        (("--steps", "some", "train.py"), "'some' names no steps."),
        (("nowhere.py",), "There is no such script"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    script(tmp_path, TRAINING)
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert what in done.stderr


@pytest.mark.parametrize("logdir", ["train.py", "loop", "loop/runs", ""])
def test_a_logdir_that_cannot_be_one_is_refused_before_the_program_starts(
    tmp_path: Path, logdir: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = run(tmp_path, "--logdir", logdir, script(tmp_path, "print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"error: (This is no folder|The path is empty)\.\n  where: ", done.stderr)


def test_a_logdir_that_fails_later_is_told_as_that(tmp_path: Path) -> None:
    done = run(tmp_path, script(tmp_path, "open('runs', 'w')\n" + TRAINING), 16, 5)
    assert done.returncode == 0
    assert "Not a directory" in done.stderr
    assert done.stderr.count("could not be written") == 1
    assert "5 steps were seen, but nothing could be written: see the warning above." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "from tb_memplugin import MemoryMonitor",
        "import tb_memplugin.record.monitor",
        "import tb_memplugin.callbacks.recorder",
    ],
)
def test_a_program_that_imports_us_before_torch_is_recorded(tmp_path: Path, imports: str) -> None:
    run(tmp_path, script(tmp_path, f"{imports}\n{TRAINING}"), 16, 6)
    assert numbers(recorded(tmp_path)) == [2, 3, 4]


def test_where_the_figures_of_steps_cannot_be_read_windows_are_recorded(tmp_path: Path) -> None:
    """As in a container without /proc."""
    without_memory = "counters._STATUS, sys.modules['psutil'] = '/proc/absent', None\n"
    start = "import sys, torch\nfrom tb_memplugin.record.steps import counters\n" + without_memory
    done = run(tmp_path, script(tmp_path, start + TRAINING), 16, 6)
    assert done.stderr.count("The memory of the process cannot be read here.") == 1
    assert numbers(recorded(tmp_path)) == [2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("end", ["", "import os; os.close(2)", "import sys; sys.stderr.close()"])
def test_a_stderr_that_is_full_or_closed_changes_no_exit_code(tmp_path: Path, end: str) -> None:
    path = script(tmp_path, f"import torch\nprint(1)\n{end}")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tb_memplugin", "run", str(path)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if end else full,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_wrong_variable_ends_no_program(tmp_path: Path) -> None:
    variables = {"TB_MEMPLUGIN": "runs", "TB_MEMPLUGIN_STACKS": "yes"}
    done = python(script(tmp_path, "print('ran')"), cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "'yes' is neither 0 nor 1" in done.stderr


def test_a_folder_that_no_file_system_takes_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "--logdir", tmp_path / ("n" * 300), script(tmp_path, "print('no torch')"))
    assert (done.returncode, done.stdout) == (0, "no torch\n")
    assert done.stderr == "tb-memplugin: nothing was recorded. The program did not import torch.\n"


def test_a_folder_that_cannot_be_asked_for_at_the_end_is_left_to_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, b"", b"why\n")
    )
    settings = Settings(str(tmp_path / "link"), "run", os.getpid())
    (tmp_path / "link").symlink_to("link")  # as of an automatic mount that fails: too many links
    _tell(settings, is_told=True)
    assert capsys.readouterr().err == "tb-memplugin: why\n"
