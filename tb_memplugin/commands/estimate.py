"""`tb-memplugin estimate`: whether a training step fits a GPU, what uses the memory, and what to change."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tb_memplugin.analysis.units import read_size
from tb_memplugin.commands.options import PATH, json_option
from tb_memplugin.commands.tables import NOT_KNOWN, Unit, console, doing, percent, printable, table
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

if TYPE_CHECKING:
    from tb_memplugin.dryrun.engine import Comparison
    from tb_memplugin.estimate.answer.changes import Change, Changes, MaxBatch
    from tb_memplugin.estimate.answer.step_estimate import StepEstimate

MOST = 1 << 20
"""The largest batch size and sequence length that the options accept."""

SCHEDULES = ("1f1b", "gpipe", "interleaved")
DTYPES = ("fp32", "bf16", "fp16")
PROGRAM = "tb_memplugin.program"
"""The key in `Context.meta` of the words after `--`."""

OF_PROGRAMS = (
    *("gpu", "capacity", "torch", "alloc_conf", "hints", "engine", "check", "steps", "limit"),
    *("logdir", "as_json"),
)
"""Parameters of the command that hold for programs, too."""

ENGINES = ("fake", "runtime")

EXIT_CODES = {"does not fit": 1, "may fit": 3}
"""By verdict, the exit code: 0 if the step fits, or if that is not asked. All errors exit with 2."""

OPTIMIZERS = ("adamw", "adamw-fused", "adam", "adam-fused", "adafactor", "momentum", "sgd")

TARGET_HELP = """\b
TARGET is one of
  module:function   a function (also file.py:function) that returns
                    (model, inputs) or (model, inputs, optimizer). It may
                    have parameters batch, seq, dtype, device and mesh.
  a folder          with a config.json of transformers
  a config class    of transformers, such as LlamaConfig
  -- a program      as you start it: -- python train.py --lr 1e-4
                    or -- torchrun --nproc-per-node 8 train.py. It runs
                    unchanged until its optimizer has stepped --steps times.

No GPU is needed: tensors are fake, and the allocator is simulated. If the model's output has no loss, the
model is trained on the sum of its output."""


class EstimateCommand(click.Command):
    """A command whose arguments after `--` are a program's own command line, kept in `Context.meta`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what is before `--`."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM], args = tuple(args[at + 1 :]), args[:at]
        return super().parse_args(ctx, args)


@click.command(
    "estimate",
    cls=EstimateCommand,
    help=(
        f"Whether a training step fits a GPU, and what fills it.\n\n{TARGET_HELP}\n\n"
        "The exit code is 0 if it fits, 3 if it may fit, 1 if it does not."
    ),
)
@click.argument("target", type=PATH, required=False)
@click.option(
    "--gpu", default="h100", show_default=True, help=f"Name of the GPU: one of {', '.join(GpuSpec.names())}."
)
@click.option("--capacity", metavar="SIZE", help="The GPU's memory, if it has another size: 40GiB, or bytes.")
@click.option(
    "--torch",
    metavar="VERSION",
    help="The PyTorch that will run it: 2.11. Default: the installed one's rules.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST),
    help="Number of samples. Default: 1, or the function's own default; in a pipeline the micro-batches.",
)
@click.option(
    "--seq",
    type=click.IntRange(1, MOST),
    help="Tokens per sample. Default: 2048 or the config's limit, or the function's own default.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Type of the parameters. Default: that of the target."
)
@click.option(
    "--autocast",
    type=click.Choice(DTYPES[1:]),
    help="Run forward under torch.autocast; fp16 also uses a GradScaler.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="Optimizer, with torch's defaults. Default: adamw, or the one that the function returns.",
)
@click.option("--checkpointing", is_flag=True, help="Recompute activations in backward.")
@click.option(
    "--free-output",
    is_flag=True,
    help="Delete the model's output before backward, as transformers' Trainer does. Else it lives on.",
)
@click.option(
    "--inference", is_flag=True, help="Estimate one forward without gradients instead of training steps."
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="fake",
    show_default=True,
    help="How a program runs: on fake tensors, or on PyTorch's own CUDA code (its CUDA build, g++).",
)
@click.option("--check", is_flag=True, help="Run a program on both engines, and say where they differ.")
@click.option(
    "--steps", type=click.IntRange(1), help="Optimizer steps after which a program is ended. Default: 3."
)
@click.option(
    "--limit", type=click.IntRange(1), help="Seconds after which it is ended all the same. Default: 600."
)
@click.option("--find-max-batch", is_flag=True, help="Find the largest batch that fits.")
@click.option(
    "--alloc-conf", metavar="TEXT", default="", help="Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF."
)
@click.option(
    "--mesh",
    metavar="TEXT",
    help=(
        "Estimate several ranks, such as fsdp=8 or pp=4,tp=2. A config's model is divided along dp, fsdp, "
        "tp, pp and ep; a function with a parameter named mesh divides its own. pp=4 also divides a "
        "torch.nn.Sequential."
    ),
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    default="1f1b",
    show_default=True,
    help="Schedule of the pipeline.",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(1, MOST),
    help="Number of micro-batches into which a pipeline divides the batch. Default: the number of stages.",
)
@click.option(
    "--hint",
    "hints",
    multiple=True,
    metavar="TEXT",
    help=(
        "A value that only a real run knows: train.py:42=7, share=0.15, truth=False. The estimate says "
        "which it needs."
    ),
)
@click.option(
    "--changes/--no-changes", default=True, help="Also estimate which changes would lower the peak."
)
@click.option("--logdir", type=PATH, help="Write the estimate to this folder as a run for the Memory tab.")
@json_option("Print JSON, with sizes in bytes and times in seconds.")
def command(
    target: str | None,
    engine: str,
    check: bool,
    steps: int | None,
    limit: int | None,
    gpu: str,
    capacity: str | None,
    torch: str | None,
    mesh: str | None,
    schedule: str,
    micro_batches: int | None,
    find_max_batch: bool,
    alloc_conf: str,
    hints: tuple[str, ...],
    changes: bool,
    logdir: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """See the help of the command."""
    spec = _gpu_of(gpu, capacity, torch, runs_installed=check or engine == "runtime")
    try:
        from tb_memplugin.estimate.answer.hints import read_hints
        from tb_memplugin.estimate.answer.script import LIMIT_S, STEPS, read_program
        from tb_memplugin.estimate.answer.step_estimate import StepEstimator, estimate_program
        from tb_memplugin.estimate.answer.targets import read_target
        from tb_memplugin.estimate.answer.workload import Workload
        from tb_memplugin.estimate.ranks.pipeline import Pipelining
    except ModuleNotFoundError as error:
        raise _without(error) from error
    if (words := click.get_current_context().meta.get(PROGRAM)) is not None:
        _refuse_beside_a_program(click.get_current_context())
        options: dict[str, Any] = {"conf": alloc_conf, "hints": read_hints(hints)}
        options |= {"steps": steps or STEPS, "limit_s": limit or LIMIT_S}
        if engine == "runtime":
            from tb_memplugin.dryrun.engine import estimate_program
        with _exit_when_terminated(), _program_streams() as (out, err):
            if check:
                from tb_memplugin.dryrun.engine import compare_engines

                comparison = compare_engines(read_program(words), spec, **options)
                with redirect_stdout(out), redirect_stderr(err):
                    _show_comparison(comparison, as_json=as_json)
                return
            step = estimate_program(read_program(words), spec, logdir=logdir, **options)
            with redirect_stdout(out), redirect_stderr(err):
                if not as_json:
                    show_step(step)
                _show_rest(Report(step, None, None), as_json=as_json, logdir=logdir)
        return
    if target is None:
        raise MemPluginError("There is no target.", where="TARGET", fix="See: tb-memplugin estimate --help")
    with redirect_stdout(sys.stderr), doing() as tell:  # keep the target's output out of ours
        estimator = StepEstimator(
            read_target(target),
            spec,
            alloc_conf,
            mesh,
            Pipelining(schedule, micro_batches),
            read_hints(hints),
            tell=lambda options: tell(f"Trying {options}"),
        )
        if find_max_batch:
            estimator.refuse_without_batch()
        tell(f"Estimating {target}")
        step = estimator.step(Workload(**sizes), logdir=logdir)
    if not as_json:
        show_step(step)  # print it before trying changes, because each change takes as long
    with redirect_stdout(sys.stderr), doing() as tell, _libraries_silent():
        report = Report(
            step,
            estimator.max_batch(step) if find_max_batch else None,
            estimator.changes(step) if changes else None,
        )
    _show_rest(report, as_json=as_json, logdir=logdir)


@contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """Make SIGTERM an exit, so that the run's folders, short files and processes are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from tb_memplugin.estimate.answer.script import TERMINATED

    process = os.getpid()

    def leave(number: int, _: object) -> None:
        if os.getpid() == process:
            sys.exit(TERMINATED)
        signal.signal(number, signal.SIG_DFL)  # a process that the program forked
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _program_streams() -> Iterator[tuple[IO[str], IO[str]]]:
    """Yield stdout and stderr for the report; what a program and its children print goes to stderr.

    So it does at the program's exit, too. The report's streams stay open where the program closes its own. A
    program that crashes prints its stack first.
    """
    out, err = _duplicate(sys.stdout), _duplicate(sys.stderr)
    is_ours = out is not sys.stdout
    if is_ours:
        os.dup2(2, sys.stdout.fileno())
        faulthandler.enable(err, all_threads=False)
    try:
        with redirect_stdout(sys.stderr):
            yield out, err
    finally:
        out.flush()
        if is_ours:
            sys.stdout = sys.stderr = err


def _duplicate(stream: Any) -> Any:
    """Return a stream with a descriptor of its own; the stream itself if it has none."""
    try:
        stream.flush()
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors)
    except (OSError, ValueError):
        return stream


def _gpu_of(gpu: str, capacity: str | None, torch: str | None, *, runs_installed: bool) -> GpuSpec:
    """Return the GPU that is estimated for, with its memory and the rules of its PyTorch."""
    spec = GpuSpec.named(gpu)
    if capacity is not None:
        spec = spec.with_memory(read_size(capacity, "--capacity"))
    if torch is None:
        return spec
    if runs_installed:
        raise MemPluginError(
            "The runtime engine runs the installed PyTorch.",
            where="--torch",
            fix="Leave it out, or use --engine fake without --check.",
        )
    return spec.with_torch(torch)


def _show_comparison(comparison: Comparison, *, as_json: bool) -> None:
    differences = comparison.differences
    if as_json:
        fields: dict[str, Any] = {
            engine: report_json(Report(step, None, None)) for engine, step in comparison.steps.items()
        }
        fields["errors"] = {engine: str(error) for engine, error in comparison.errors.items()}
        fields["differences"] = [asdict(difference) for difference in differences]
        click.echo(json.dumps(fields, indent=2))
        return
    out = console()
    for engine, step in comparison.steps.items():
        reserved, unit = step.estimate.peak_reserved_bytes, _unit(step)
        allocated = unit.text(step.estimate.peak_allocated_bytes)
        out.print(f"{engine}: peak {allocated} allocated, {unit.text(reserved)} reserved", soft_wrap=True)
        for note in step.notes:
            click.echo(f"note: {engine}: {printable(note)}", err=True)
    for engine, error in comparison.errors.items():
        click.echo(f"note: {engine}: {printable(str(error))}", err=True)
    if not differences:
        if not comparison.errors:
            out.print("Both engines agree, to the byte, also in forward, backward and optimizer.")
        return
    unit = Unit.for_bytes([max(each.fake_bytes, each.runtime_bytes) for each in differences])
    rows = [
        (f"{each.kind} {each.name}", *(unit.show(size) for size in (each.fake_bytes, each.runtime_bytes)))
        for each in differences
    ]
    out.print(table(("differs", f"fake ({unit.name})", "runtime"), rows))


@contextmanager
def _libraries_silent() -> Iterator[None]:
    """Leave out the warnings of libraries, which came with the first estimate already."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _refuse_beside_a_program(ctx: click.Context) -> None:
    """Raise for a target, or an option of targets, that is given beside a program."""
    for name in ctx.params:
        if name not in OF_PROGRAMS and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise MemPluginError(
                "A program says this itself.",
                where="TARGET" if name == "target" else f"--{name.replace('_', '-')}",
                fix="Leave it out, or give it to the program, behind the --.",
            )


def _show_rest(report: Report, *, as_json: bool, logdir: str | None) -> None:
    if as_json:
        click.echo(json.dumps(report_json(report), indent=2))
    else:
        show_more(report)
        if logdir is not None:
            click.echo(f"See it in the Memory tab: tensorboard --logdir {printable(shlex.quote(logdir))}")
    click.get_current_context().exit(EXIT_CODES.get(report.step.estimate.verdict or "", 0))


def _without(error: ModuleNotFoundError) -> Exception:
    """Return an error that explains how to install torch, or `error` itself if another module is missing."""
    if (error.name or "").partition(".")[0] != "torch":
        return error
    return MemPluginError(
        "An estimate runs the model in PyTorch, which is not installed.",
        where="torch",
        fix='Run: pip install "tb-memplugin[torch]". A CPU build is enough.',
    )


JUST = "just"


@dataclass(frozen=True, slots=True)
class Report:
    """A step's estimate; the largest batch and the changes are None if they were not asked for."""

    step: StepEstimate
    max_batch: MaxBatch | None
    changes: Changes | None


def report_json(report: Report) -> dict[str, Any]:
    """Return a report for JSON; sizes in bytes, times in seconds."""
    step, estimate = report.step, report.step.estimate
    fields: dict[str, Any] = {
        "target": step.target,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "fits": estimate.fits,
        "verdict": estimate.verdict,
        "gpu": step.gpu.name,
        "memory_bytes": step.gpu.memory_bytes,
        "torch": ".".join(map(str, step.gpu.torch)) if step.gpu.torch is not None else None,
        "margin_bytes": estimate.margin_bytes,
        "margin_bounds_bytes": estimate.margin_bounds_bytes,
        "workspace_bytes": estimate.workspace_bytes,
        "workload": asdict(step.workload),
        "breakdown": [{"key": key, "bytes": size} for key, size in estimate.breakdown],
        "phases": [{"name": name, "peak_bytes": size} for name, size in estimate.phases],
        "seconds": estimate.seconds,
        "notes": list(step.notes),
    }
    if step.ranks is not None:
        fields["mesh"], fields["worst_rank"] = str(step.ranks.mesh), step.ranks.worst.rank
        fields["ranks"] = [
            {
                "rank": rank.rank,
                "coordinate": list(rank.coordinate),
                "peak_allocated_bytes": rank.estimate.peak_allocated_bytes,
                "peak_reserved_bytes": rank.estimate.peak_reserved_bytes,
            }
            for rank in step.ranks.ranks
        ]
    if report.max_batch is not None:
        fields["max_batch"] = {"batch": report.max_batch.batch, "estimates": report.max_batch.estimates}
    if report.changes is not None:
        fields["changes"] = [asdict(change) for change in report.changes.saving]
        fields["impossible"] = [
            {"options": options, "why": why} for options, why in report.changes.impossible
        ]
    return fields


def show_step(step: StepEstimate) -> None:
    """Print whether the step fits, and what uses the memory."""
    out, estimate, unit = console(), step.estimate, _unit(step)
    for line in _headline(step, unit):
        out.print(printable(line), soft_wrap=True)
    rows = [
        (key, unit.show(size), percent(size, estimate.peak_allocated_bytes))
        for key, size in estimate.breakdown
    ]
    total = sum(size for _, size in estimate.breakdown)
    out.print(
        table(
            ("allocated at the peak", unit.name, "%"),
            [*rows, ("total", unit.show(total), percent(total, estimate.peak_allocated_bytes))],
        )
    )
    phases = [(name, unit.show(size)) for name, size in estimate.phases]
    out.print(table(("phase", f"peak ({unit.name})"), phases))


def show_more(report: Report) -> None:
    """Print the changes that would save memory, the largest batch and the notes, after `show_step`."""
    if report.changes is not None:
        _show_changes(report.changes, _unit(report.step), report.step.gpu.usable_bytes)
    if report.max_batch is not None:
        console().print(printable(_max_batch_line(report.step, report.max_batch)), soft_wrap=True)
    for note in report.step.notes:
        click.echo(f"note: {printable(note)}", err=True)


def _unit(step: StepEstimate) -> Unit:
    return Unit.for_bytes([step.estimate.peak_reserved_bytes])


def _headline(step: StepEstimate, unit: Unit) -> Iterator[str]:
    estimate, room = step.estimate, step.gpu.memory_bytes
    kind = "inference" if step.workload.inference else "training"
    yield f"{step.target}: {', '.join((kind, *_sizes(step)))}"
    if step.ranks is not None:
        worst, tried = step.ranks.worst, [rank.rank for rank in step.ranks.ranks]
        yield f"mesh {step.ranks.mesh}: rank {worst.rank} needs the most memory, of ranks {tried}"
    if estimate.verdict is None:
        yield f"{step.gpu.name}: whether it fits is not known"
    else:
        capacity = Unit.for_bytes([room]).text(room)
        yield f"{estimate.verdict} {step.gpu.name} ({capacity}) {estimate.margin_text}"
    yield (
        f"peak {unit.text(estimate.peak_allocated_bytes)} allocated, "
        f"{unit.text(estimate.peak_reserved_bytes)} reserved"
    )
    phases = dict(estimate.phases)
    building = phases.pop("building", 0)
    if phases and building > max(phases.values()):
        then = unit.text(max(phases.values()))
        yield f"building the model peaks at {unit.text(building)} allocated, {kind} at {then}"


def _sizes(step: StepEstimate) -> Iterator[str]:
    work = step.workload
    for name, value in (("batch", work.batch), ("sequence", work.seq)):
        if value is not None:
            yield f"{name} {value:,}"
    if work.dtype is not None:
        yield work.dtype
    if work.autocast is not None:
        yield f"autocast {work.autocast}"
    if not work.inference:
        yield work.optimizer or "its own optimizer"
    if work.checkpointing:
        yield "checkpointing"


def _show_changes(changes: Changes, unit: Unit, usable_bytes: int) -> None:
    out = console()
    for options, why in changes.impossible:
        click.echo(f"note: not tried: {options}: {printable(why)}", err=True)
    if not changes.saving:
        out.print("None of the changes that were tried saves memory.")
        return
    rows = [
        (
            change.label,
            unit.show(change.saved_bytes),
            unit.show(change.peak_reserved_bytes),
            fits_text(change, usable_bytes),
        )
        for change in changes.saving
    ]
    out.print(table(("change first", f"saves ({unit.name})", "reserved then", "fits"), rows))
    for change in changes.saving:
        if change.label == change.what:
            out.print(printable(f"{change.what}: {change.options}"), soft_wrap=True)
    if any(fits_text(change, usable_bytes) == JUST for change in changes.saving):
        click.echo(
            f"note: {JUST}: the step would reserve more than the GPU has. It fits only because the "
            "allocator frees unused segments when memory runs out, which is slow.",
            err=True,
        )


def fits_text(change: Change, usable_bytes: int) -> str:
    """Return one word for whether a step with a change would fit: yes, just, no, or ? if not known."""
    if change.fits is None:
        return NOT_KNOWN
    if not change.fits:
        return "no"
    return "yes" if change.peak_reserved_bytes <= usable_bytes else JUST


def _max_batch_line(step: StepEstimate, largest: MaxBatch) -> str:
    if not largest.batch:
        return f"Not even a batch of 1 fits {step.gpu.name}."
    return f"The largest batch that fits is {largest.batch:,} ({largest.estimates} estimates)."
