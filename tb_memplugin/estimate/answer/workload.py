"""Describe a step to estimate, its sizes and its optimizer, and run it inside an estimator."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import BUILDING
from tb_memplugin.estimate.program.refusals import by_name, mixes_devices, mixes_types, names_by_value

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tb_memplugin.estimate.answer.estimator import MemoryEstimator

STEPS = 2
"""Number of training steps to run: from the second on, backward runs beside the optimizer's state."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adam": ("Adam", {}),
    "adam-fused": ("Adam", {"fused": True}),
    "adafactor": ("Adafactor", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "sgd": ("SGD", {}),
}
"""Optimizers by name: the class in `torch.optim`, and the arguments that differ from its defaults."""

OWN_CHECKPOINTING = {
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
}
"""Methods of transformers models that turn checkpointing on, the newest first, and their options argument."""

_BY_HAND = "Call torch.utils.checkpoint in the model's forward, and leave the option out."

_OF_A_FUNCTION = (
    "If the model itself is correct, see docs/estimate.md for what an estimate cannot do. A function that "
    "returns (model, inputs) can leave that part out."
)

_OWN = r"tb_memplugin[/\\]estimate[/\\]"
INSIDE = (
    re.compile(rf"{_OWN}|{re.escape(str(Path(torch.__file__).parent))}"),
    re.compile(rf"{_OWN}|torch[/\\](_subclasses|_ops|_prims|utils[/\\]_)"),
)
"""Files to skip when looking for the line of the program that failed.

The second pattern skips less of torch. It applies where the first one leaves no line.
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """The size and kind of a step. The target chooses values that are None.

    `seq` is the number of tokens for each sample. `dtype` is that of parameters and floating-point inputs,
    `autocast` the one of torch.autocast in forward; both are keys of `DTYPES`. `free_output` deletes the
    model's output once the loss is computed; without it, it lives until the next forward has replaced it.
    """

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    autocast: str | None = None
    optimizer: str | None = None
    checkpointing: bool = False
    free_output: bool = False
    inference: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as a torch.dtype."""
        return None if self.dtype is None else DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Built:
    """A model on the estimated device, the arguments of its forward, and the target's own optimizer if any.

    `is_part` is True if the whole model was built first and then divided, which no real rank does.
    """

    model: nn.Module
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    notes: tuple[str, ...] = ()
    is_part: bool = False


class Target(Protocol):
    """Something that can be estimated: it builds a model and its inputs."""

    @property
    def name(self) -> str:
        """The name for reports and errors."""

    @property
    def takes(self) -> frozenset[str]:
        """The options that it can follow, out of batch, seq and mesh."""

    def settled(self, workload: Workload) -> Workload:
        """Return the workload with the target's own values for sizes that are not given."""

    def build(self, workload: Workload, mesh: DeviceMesh | None) -> Built:
        """Build the model and its inputs on the estimated device, for one rank if there is a mesh.

        It is called where tensors are fake.
        """


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was run, with all sizes of `workload` filled in.

    The workload's optimizer is None for inference and where the target brought its own.
    """

    workload: Workload
    notes: tuple[str, ...]


def run(
    target: Target, workload: Workload, estimator: MemoryEstimator, mesh: DeviceMesh | None = None
) -> Ran:
    """Build a target inside an entered estimator, as one rank if there is a mesh, and run its steps.

    Raises:
        MemPluginError: the target has no parameter for a given size, cannot be built, or does not run on
            fake tensors.
    """
    refuse_what_it_does_not_take(target, workload)
    workload = target.settled(workload)
    with (
        errors_as_refusals(target.name, "built"),
        default_dtype(workload.torch_dtype),
        estimator.track_phase(BUILDING),
    ):
        built = target.build(workload, mesh)
        built.model.train(not workload.inference)
        _refuse_one_elsewhere(built.model, target.name)
        _refuse_another_type(built.model, workload)
        if workload.checkpointing:
            checkpoint_model(built.model)
        if built.is_part:
            estimator.forget_what_is_gone()
    with errors_as_refusals(target.name, "run"):
        if workload.inference:
            _infer(built, workload, estimator)
            return Ran(replace(workload, optimizer=None), built.notes)
        name, optimizer = optimizer_of(built, workload)
        _train(built, optimizer, workload, estimator)
    return Ran(replace(workload, optimizer=name), built.notes)


def _infer(built: Built, workload: Workload, estimator: MemoryEstimator) -> None:
    estimator.watch(built.model, None)
    with torch.no_grad(), estimator.track_phase("forward"), autocast_of(workload):
        built.model(*built.arguments, **built.keywords)
    estimator.step()


def _train(
    built: Built, optimizer: torch.optim.Optimizer, workload: Workload, estimator: MemoryEstimator
) -> None:
    """Run the training steps, as the loop `out = model(x); out.loss.backward(); optimizer.step()` does."""
    estimator.watch(built.model, optimizer)
    scaler = torch.amp.GradScaler("cuda", enabled=workload.autocast == "fp16")
    for _ in range(STEPS):
        with estimator.track_phase("forward"), autocast_of(workload):
            output = built.model(*built.arguments, **built.keywords)
            loss = loss_of(output)
        if workload.free_output:
            output = None
        with estimator.track_phase("backward"):
            scaler.scale(loss).backward()
        with estimator.track_phase("optimizer"):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        estimator.step()


def autocast_of(workload: Workload) -> torch.autocast:
    """Return the autocast context for forward; it is disabled if no dtype is given."""
    return torch.autocast("cuda", DTYPES.get(workload.autocast or ""), enabled=workload.autocast is not None)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss: `output.loss` if there is one, else the sum of the first tensor that requires grad.

    Raises:
        MemPluginError: no tensor in the output depends on a parameter.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for leaf in (loss, *tree_leaves(output)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.sum() if leaf.dim() else leaf
    raise MemPluginError(
        f"Nothing in the model's output ({type(output).__name__}) has a gradient, so there is no loss.",
        fix="Use a model whose output is a tensor or has a .loss; or add --inference.",
    )


def optimizer_of(built: Built, workload: Workload) -> tuple[str | None, torch.optim.Optimizer]:
    """Return the name in `OPTIMIZERS`, None for the target's own, and the optimizer.

    Raises:
        MemPluginError: an optimizer is requested though the target returns its own, or no parameter requires
            grad.
    """
    if built.optimizer is not None:
        if workload.optimizer is not None:
            raise MemPluginError(
                f"The target returns its own optimizer, {type(built.optimizer).__name__}.",
                where="--optimizer",
                fix="Leave the option out, or return only (model, inputs).",
            )
        return None, built.optimizer
    name = workload.optimizer or "adamw"
    kind, options = OPTIMIZERS[name]
    trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    if not trained:
        raise MemPluginError("The model has no parameter to train.", fix="Use --inference.")
    factory: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind)
    return name, factory(_groups(trained), lr=1e-3, **options)


def _groups(trained: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters by type: torch's foreach and fused kernels do not mix sharded and whole ones."""
    kinds = {type(parameter) for parameter in trained}
    return [
        {"params": [parameter for parameter in trained if type(parameter) is kind]}
        for kind in sorted(kinds, key=str)
    ]


def checkpoint_model(model: nn.Module) -> None:
    """Turn activation checkpointing on: by the model's own method, or else around each repeated block.

    Raises:
        MemPluginError: the model's method refuses, or the model has neither a method nor repeated blocks.
    """
    for name, keyword in OWN_CHECKPOINTING.items():
        if callable(enable := getattr(model, name, None)):
            try:
                enable(**{keyword: {"use_reentrant": False}})
            except ValueError as error:
                raise MemPluginError(text_of(error), where="--checkpointing", fix=_BY_HAND) from error
            return
    if not checkpoint_blocks(model):
        raise MemPluginError(
            f"{type(model).__name__} has no list of equal blocks, and no checkpointing method of its own.",
            where="--checkpointing",
            fix=_BY_HAND,
        )


def refuse_what_it_does_not_take(target: Target, workload: Workload) -> None:
    """Raise if an option would have no effect.

    Raises:
        MemPluginError: the target has no parameter for a size, inference does not use the option, or two
            options exclude each other.
    """
    for name in ("optimizer", "checkpointing", "free_output"):
        if workload.inference and getattr(workload, name):
            raise MemPluginError(
                f"Inference does not use {name}, so nothing would change.",
                where=f"--{name.replace('_', '-')}",
                fix="Leave out this option or --inference.",
            )
    if workload.autocast == "fp16" and workload.dtype == "fp16" and not workload.inference:
        raise MemPluginError(
            "A GradScaler, which fp16 autocast needs, does not take gradients in fp16.",
            where="--autocast",
            fix="Use --dtype fp32 with --autocast fp16: the parameters stay in fp32.",
        )
    for name in ("batch", "seq"):
        if getattr(workload, name) is not None and name not in target.takes:
            raise MemPluginError(
                f"{target.name} has no parameter named {name}.",
                where=f"--{name}",
                fix=f"Leave the option out, or give the function a parameter named {name}.",
            )


def _refuse_one_elsewhere(model: nn.Module, name: str) -> None:
    """Raise if no tensor of a model is on the estimated device: nothing of it would be counted."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if devices and "cuda" not in devices:
        raise MemPluginError(
            f"The model is on the device {', '.join(sorted(devices))}, so none of it uses memory of the GPU.",
            where=name,
            fix=(
                "Create the model inside the function. Set no device there, or use the function's parameter "
                "named device."
            ),
        )


def _refuse_another_type(model: nn.Module, workload: Workload) -> None:
    """Raise if a dtype is requested but the function creates its parameters in others."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if dtypes and workload.torch_dtype is not None and workload.torch_dtype not in dtypes:
        raise MemPluginError(
            f"No parameter of the model is {workload.dtype}: the function creates them as "
            f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}.",
            where="--dtype",
            fix="Leave the option out, or give the function a parameter named dtype.",
        )


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype inside the context; None keeps it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def errors_as_refusals(
    name: str, action: str, where: str = "on fake tensors", fix: str = _OF_A_FUNCTION
) -> Iterator[None]:
    """Convert any error of the target's code into a MemPluginError that names the line that raised it.

    `fix` is what to do about an error whose cause is not known.
    """
    try:
        yield
    except MemPluginError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error.__cause__, MemPluginError):  # our own error, wrapped by torch's pipelines
            raise error.__cause__ from error
        line = _line_of(error)
        recognisers = (by_name, mixes_types, mixes_devices, names_by_value)
        refusal = next((match for recognise in recognisers if (match := recognise(error)) is not None), None)
        raise MemPluginError(
            refusal.what
            if refusal is not None
            else f"It could not be {action} {where}: {type(error).__name__}: {text_of(error)}",
            where=f"{name}, at {line.filename}:{line.lineno}",
            fix=(refusal and refusal.fix) or fix,
        ) from error


def text_of(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, "" if the message cannot be read.

    A line that announces the next one (`Error(s) in loading state_dict for GPT:`) has that behind it.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:300]
    except Exception:  # noqa: BLE001  # __str__ of another library's error
        return ""


def _line_of(error: BaseException) -> traceback.FrameSummary:
    """Return the last line outside torch, or if there is none, the last outside torch's operator layers."""
    if isinstance(error, SyntaxError) and error.filename:
        return traceback.FrameSummary(error.filename, error.lineno, "")
    lines = traceback.extract_tb(error.__traceback__)
    outside = (line for inside in INSIDE for line in reversed(lines) if not inside.search(line.filename))
    return next(outside, lines[-1])


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every repeated block. The names of modules do not change.

    Returns:
        The number of blocks.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = _checkpointed(block.forward)
    return len(blocks)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return every block that shares an `nn.ModuleList` or `nn.Sequential` with another of its class.

    Blocks have submodules. Blocks nested inside a returned block are not returned themselves.
    """
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = Counter(map(type, children))
        repeated = [child for child in children if kinds[type(child)] > 1 and any(child.children())]
        if repeated:
            return repeated
    return [block for child in children for block in repeated_blocks(child)]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    return recomputed
