"""One training step to estimate: what is run, at which size, with which optimizer; and the running of it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.corrections.named_errors import (
    by_name,
    mixes_devices,
    mixes_types,
    names_by_value,
)
from tb_memplugin.estimate.repeated_blocks import checkpoint_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tb_memplugin.estimate.estimator import MemoryEstimator

STEPS = 2
"""Training steps that are run: from the second on, gradients meet an optimizer that has its state."""

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
"""Optimizers by name: the class in `torch.optim`, and what it is given; else its own defaults."""

OWN_CHECKPOINTING = {
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
}
"""Methods of transformers' models that turn it on, the newest first, and what takes options."""

_BY_HAND = "Call torch.utils.checkpoint in the model's forward, and leave the option out."

_OWN = r"tb_memplugin[/\\]estimate[/\\]"
INSIDE = (
    re.compile(rf"{_OWN}|{re.escape(str(Path(torch.__file__).parent))}"),
    re.compile(rf"{_OWN}|torch[/\\](_subclasses|_ops|_prims|utils[/\\]_)"),
)
"""Files that are not where a model went wrong; the second, where nothing but layers of torch is left."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The size and kind of a step. What is None is left to the target.

    `seq` is tokens for each sample; `dtype` that of parameters and floating inputs, `autocast` that in which
    forward computes where torch.autocast says so; both as in `DTYPES`.
    """

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    autocast: str | None = None
    optimizer: str | None = None
    checkpointing: bool = False
    inference: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as torch has it."""
        return None if self.dtype is None else DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Built:
    """A model on the device of the estimate, what its forward takes, and its optimizer if it brings one.

    `is_part` says that the whole model was built first, as no real rank does.
    """

    model: nn.Module
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    notes: tuple[str, ...] = ()
    is_part: bool = False


class Target(Protocol):
    """What can be estimated."""

    @property
    def name(self) -> str:
        """What it is called, for people."""

    @property
    def takes(self) -> frozenset[str]:
        """What it follows, among batch, seq and mesh."""

    def settled(self, workload: Workload) -> Workload:
        """With the sizes that it takes, where none were asked for."""

    def build(self, workload: Workload, mesh: DeviceMesh | None) -> Built:
        """The model and its inputs; called where tensors are fake and on the device, as a rank of a mesh."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was run. `workload` is settled; its optimizer is None where the target brought its own."""

    workload: Workload
    notes: tuple[str, ...]


def run(
    target: Target, workload: Workload, estimator: MemoryEstimator, mesh: DeviceMesh | None = None
) -> Ran:
    """Build a target inside an estimator that was entered, as one rank of a mesh if any, and run its steps.

    Raises:
        MemPluginError: the target does not take the size, cannot be built, or does not run on fake tensors.
    """
    refuse_what_it_does_not_take(target, workload)
    workload = target.settled(workload)
    with told_as_refusal(target.name, "built"), torch.device("cuda"), default_dtype(workload.torch_dtype):
        built = target.build(workload, mesh)
        built.model.train(not workload.inference)
        _refuse_one_elsewhere(built.model, target.name)
        _refuse_another_type(built.model, workload)
        if workload.checkpointing:
            checkpoint_model(built.model)
        if built.is_part:
            estimator.forget_what_is_gone()
    with told_as_refusal(target.name, "run"):
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
    """Outputs live no longer than it takes to have the loss, as in most loops."""
    estimator.watch(built.model, optimizer)
    scaler = torch.amp.GradScaler("cuda", enabled=workload.autocast == "fp16")
    for _ in range(STEPS):
        with estimator.track_phase("forward"), autocast_of(workload):
            loss = loss_of(built.model(*built.arguments, **built.keywords))
        with estimator.track_phase("backward"):
            scaler.scale(loss).backward()
        del loss
        with estimator.track_phase("optimizer"):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        estimator.step()


def autocast_of(workload: Workload) -> torch.autocast:
    """What forward computes under."""
    return torch.autocast("cuda", DTYPES.get(workload.autocast or ""), enabled=workload.autocast is not None)


def loss_of(output: Any) -> torch.Tensor:
    """The loss: `output.loss` if there is one, else the sum of the first tensor with a gradient.

    Raises:
        MemPluginError: no tensor in the output depends on a parameter.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found in (loss, *tree_leaves(output)):
        if isinstance(found, torch.Tensor) and found.requires_grad:
            return found.sum() if found.dim() else found
    raise MemPluginError(
        f"Nothing that the model gave ({type(output).__name__}) has a gradient, so there is no loss.",
        fix="Return a model whose output is a tensor, or has a .loss; or use --inference.",
    )


def optimizer_of(built: Built, workload: Workload) -> tuple[str | None, torch.optim.Optimizer]:
    """The optimizer, and its name in `OPTIMIZERS`; None if it is the target's own."""
    if built.optimizer is not None:
        if workload.optimizer is not None:
            raise MemPluginError(
                f"The target brings its own optimizer, {type(built.optimizer).__name__}.",
                where="--optimizer",
                fix="Leave the option out, or return (model, inputs) alone.",
            )
        return None, built.optimizer
    name = workload.optimizer or "adamw"
    kind, options = OPTIMIZERS[name]
    trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    if not trained:
        raise MemPluginError("The model has no parameter to train.", fix="Use --inference.")
    made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind)
    return name, made(_groups(trained), lr=1e-3, **options)


def _groups(trained: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Sharded parameters and whole ones apart: torch's foreach and fused kernels take no mixture."""
    kinds = {type(parameter) for parameter in trained}
    return [{"params": [one for one in trained if type(one) is kind]} for kind in sorted(kinds, key=str)]


def checkpoint_model(model: nn.Module) -> None:
    """The model's own way, as transformers has it; else torch's around each block that is repeated."""
    for name, keyword in OWN_CHECKPOINTING.items():
        if callable(enable := getattr(model, name, None)):
            try:
                enable(**{keyword: {"use_reentrant": False}})
            except ValueError as error:
                raise MemPluginError(said_by(error), where="--checkpointing", fix=_BY_HAND) from error
            return
    if not checkpoint_blocks(model):
        raise MemPluginError(
            f"{type(model).__name__} has no list of equal blocks, and no way of its own to checkpoint.",
            where="--checkpointing",
            fix=_BY_HAND,
        )


def refuse_what_it_does_not_take(target: Target, workload: Workload) -> None:
    """Let nobody ask for a size in vain, nor for what training alone has.

    Raises:
        MemPluginError: the target does not follow it, or inference has no use for it.
    """
    for name in ("optimizer", "checkpointing"):
        if workload.inference and getattr(workload, name):
            raise MemPluginError(
                f"Inference has no {name}: nothing would change.",
                where=f"--{name}",
                fix="Leave the option out, or --inference.",
            )
    for name in ("batch", "seq"):
        if getattr(workload, name) is not None and name not in target.takes:
            raise MemPluginError(
                f"{target.name} takes no {name}.",
                where=f"--{name}",
                fix=f"Leave the option out, or give the function a parameter named {name}.",
            )


def _refuse_one_elsewhere(model: nn.Module, name: str) -> None:
    """Nothing of it would count."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if devices and "cuda" not in devices:
        raise MemPluginError(
            f"The model is on the device {', '.join(sorted(devices))}: none of it is memory of the GPU.",
            where=name,
            fix="Leave the device out, or build on the function's parameter named device.",
        )


def _refuse_another_type(model: nn.Module, workload: Workload) -> None:
    """A function may make its parameters in a type of its own."""
    found = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if found and workload.torch_dtype is not None and workload.torch_dtype not in found:
        raise MemPluginError(
            f"No parameter of the model is {workload.dtype}: the function makes them "
            f"{', '.join(sorted(str(one).removeprefix('torch.') for one in found))}.",
            where="--dtype",
            fix="Leave the option out, or give the function a parameter named dtype.",
        )


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let tensors of floats be of a type; None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def told_as_refusal(name: str, what: str) -> Iterator[None]:
    """Whatever a stranger's code raises, told in one sentence with the line that raised it."""
    try:
        yield
    except MemPluginError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error.__cause__, MemPluginError):  # ours, that torch's pipelines wrap
            raise error.__cause__ from error
        line = _line_of(error)
        told = (by_name, mixes_types, mixes_devices, names_by_value)
        known = next((found for one in told if (found := one(error)) is not None), None)
        raise MemPluginError(
            known.what
            if known is not None
            else f"The step could not be {what} on fake tensors: {type(error).__name__}: {said_by(error)}",
            where=f"{name}, at {line.filename}:{line.lineno}",
            fix=(known and known.fix)
            or "If it is no fault of the model's own: docs/estimate.md tells what fake tensors cannot do; "
            "a function that returns (model, inputs) can leave that out.",
        ) from error


def said_by(error: BaseException) -> str:
    """The first line with words of a stranger's error, which may fail to tell one."""
    try:
        return next((line for line in str(error).splitlines() if line.strip()), "").strip()[:300]
    except Exception:  # noqa: BLE001  # a stranger's __str__
        return ""


def _line_of(error: BaseException) -> traceback.FrameSummary:
    """The last line of the program before the error came into torch; of torch's layers if there is none."""
    lines = traceback.extract_tb(error.__traceback__)
    outside = (line for inside in INSIDE for line in reversed(lines) if not inside.search(line.filename))
    return next(outside, lines[-1])
