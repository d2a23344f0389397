"""`tb-memplugin estimate`: whether a training step fits a GPU, what uses the memory, and what to change."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import redirect_stdout
from typing import Any

import click

from tb_memplugin.commands.allocator_replay import read_size
from tb_memplugin.commands.estimate_report import Report, report_json, show_more, show_step
from tb_memplugin.commands.paths import PATH
from tb_memplugin.commands.tables import doing, printable
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

MOST = 1 << 20
"""The largest batch size and sequence length that the options accept."""

SCHEDULES = ("1f1b", "gpipe", "interleaved")
DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adamw-fused", "adam", "adam-fused", "adafactor", "momentum", "sgd")

TARGET_HELP = """\b
TARGET is one of
  module:function   a function (also file.py:function) that returns
                    (model, inputs) or (model, inputs, optimizer). It may
                    have parameters batch, seq, dtype, device and mesh.
  a folder          with a config.json of transformers
  a config class    of transformers, such as LlamaConfig

No GPU is needed: tensors are fake, and the allocator is simulated. If the model's output has no loss, the
model is trained on the sum of its output."""


@click.command("estimate", help=f"Whether a training step fits a GPU, and what fills it.\n\n{TARGET_HELP}")
@click.argument("target", type=PATH)
@click.option(
    "--gpu", default="h100", show_default=True, help=f"Name of the GPU: one of {', '.join(GpuSpec.names())}."
)
@click.option("--capacity", metavar="SIZE", help="The GPU's memory, if it has another size: 40GiB, or bytes.")
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
    "--inference", is_flag=True, help="Estimate one forward without gradients instead of training steps."
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes and times in seconds.")
def command(
    target: str,
    gpu: str,
    capacity: str | None,
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
    spec = GpuSpec.named(gpu)
    if capacity is not None:
        spec = spec.with_memory(read_size(capacity))
    try:
        from tb_memplugin.estimate.answer.hints import read_hints
        from tb_memplugin.estimate.answer.step_estimate import StepEstimator
        from tb_memplugin.estimate.answer.targets import read_target
        from tb_memplugin.estimate.answer.workload import Workload
        from tb_memplugin.estimate.ranks.pipeline import Pipelining
    except ModuleNotFoundError as error:
        raise _without(error) from error
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
    with redirect_stdout(sys.stderr), doing() as tell:
        report = Report(
            step,
            estimator.max_batch(step) if find_max_batch else None,
            estimator.changes(step) if changes else None,
        )
    if as_json:
        click.echo(json.dumps(report_json(report), indent=2))
    else:
        show_more(report)
        if logdir is not None:
            click.echo(f"See it in the Memory tab: tensorboard --logdir {printable(shlex.quote(logdir))}")


def _without(error: ModuleNotFoundError) -> Exception:
    """Return an error that explains how to install torch, or `error` itself if another module is missing."""
    if (error.name or "").partition(".")[0] != "torch":
        return error
    return MemPluginError(
        "An estimate runs the model in PyTorch, which is not installed.",
        where="torch",
        fix='Run: pip install "tb-memplugin[torch]". A CPU build is enough.',
    )
