"""`tb-memplugin estimate`: whether a training step would fit a GPU, what fills it, and what to change."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

import click

from tb_memplugin.commands.allocator_replay import read_size
from tb_memplugin.commands.estimate_report import Report, report_json, show_more, show_step
from tb_memplugin.commands.tables import doing
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

MOST = 1 << 20
"""The largest batch and sequence that can be asked for."""

SCHEDULES = ("1f1b", "gpipe", "interleaved")
DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adamw-fused", "adam", "adam-fused", "adafactor", "momentum", "sgd")

TARGET_HELP = """\b
TARGET is one of
  module:function   (or file.py:function) that returns (model, inputs) or
                    (model, inputs, optimizer). It gets batch, seq, dtype,
                    device and mesh where it has parameters of these names.
  a folder          with a config.json of transformers
  a config class    of transformers: LlamaConfig

No GPU is needed: tensors are fake, the allocator is simulated. Without a loss of its own, the model is
trained on the sum of its output."""


@click.command("estimate", help=f"Whether a training step fits a GPU, and what fills it.\n\n{TARGET_HELP}")
@click.argument("target")
@click.option("--gpu", default="h100", show_default=True, help=f"One of {', '.join(GpuSpec.names())}.")
@click.option("--capacity", metavar="SIZE", help="The GPU's memory, if it has another size: 40GiB, or bytes.")
@click.option("--batch", type=click.IntRange(1, MOST), help="Samples. Default: 1, or as the function says.")
@click.option(
    "--seq",
    type=click.IntRange(1, MOST),
    help="Tokens a sample. Default: 2048 or what the config allows, or as the function says.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of parameters. Default: as the target says.")
@click.option(
    "--autocast",
    type=click.Choice(DTYPES[1:]),
    help="Forward under torch.autocast; fp16 with a GradScaler.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="With torch's own defaults otherwise. Default: adamw, or the function's own.",
)
@click.option("--checkpointing", is_flag=True, help="Recompute activations in backward.")
@click.option("--inference", is_flag=True, help="One forward without gradients instead of training steps.")
@click.option("--find-max-batch", is_flag=True, help="The largest batch that fits.")
@click.option("--alloc-conf", metavar="TEXT", default="", help="As in PYTORCH_CUDA_ALLOC_CONF.")
@click.option(
    "--mesh",
    metavar="TEXT",
    help="Several ranks, such as fsdp=8 or pp=4,tp=2. A config's model is divided along dp, fsdp, tp, pp and "
    "ep; a function shards its own with a parameter named mesh. pp=4 divides a torch.nn.Sequential, too.",
)
@click.option(
    "--schedule", type=click.Choice(SCHEDULES), default="1f1b", show_default=True, help="Of the pipeline."
)
@click.option(
    "--micro-batches",
    type=click.IntRange(1, MOST),
    help="Into which a pipeline divides the batch. Default: as many as it has stages.",
)
@click.option(
    "--hint",
    "hints",
    multiple=True,
    metavar="TEXT",
    help="What only a real run knows: train.py:42=7, share=0.15, truth=False. An estimate asks for it.",
)
@click.option("--changes/--no-changes", default=True, help="Estimate also what would lower the peak.")
@click.option("--logdir", help="Write the estimate there as a run, for the Memory tab.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and seconds, for programs.")
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
        from tb_memplugin.estimate.hints import read_hints
        from tb_memplugin.estimate.ranks.pipeline import Pipelining
        from tb_memplugin.estimate.step_estimate import StepEstimator
        from tb_memplugin.estimate.targets import read_target
        from tb_memplugin.estimate.workload import Workload
    except ModuleNotFoundError as error:
        raise _without(error) from error
    with redirect_stdout(sys.stderr), doing() as tell:  # what the target prints is no part of the answer
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
        show_step(step)  # before the changes: each of them takes as long
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


def _without(error: ModuleNotFoundError) -> Exception:
    """What to say where torch is missing; any other module is a fault of ours."""
    if (error.name or "").partition(".")[0] != "torch":
        return error
    return MemPluginError(
        "An estimate runs the model in PyTorch, which is not installed.",
        where="torch",
        fix='pip install "tb-memplugin[torch]"; a build for the CPU is enough.',
    )
