"""Targets of `tb-memplugin estimate TARGET`: a function that builds a model, or a transformers config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.config_target import (
    SEQ,
    ConfigTarget,
    config_of_class,
    config_of_folder,
    nearest_configs,
)
from tb_memplugin.estimate.answer.workload import Built, Target, Workload, text_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMS = (
    "Use module:function or file.py:function, a folder with transformers' config.json, or the name of "
    "a config class such as LlamaConfig."
)
GIVEN = ("batch", "seq", "dtype", "device", "mesh")
"""Parameters that a function may have; `dtype`, `device` and `mesh` are of torch's own types."""

RETURNS = "(model, inputs) or (model, inputs, optimizer)"


def read_target(text: str) -> Target:
    """Return the target that a TARGET on the command line names.

    Raises:
        MemPluginError: the text has none of the known forms, or the module, function, folder or class that
            it names does not exist.
    """
    path = Path(text)
    if path.is_dir() or (path.suffix == ".json" and path.is_file()):
        return ConfigTarget(config_of_folder(path))
    module, colon, function = text.rpartition(":")
    if colon and module and function:
        return FunctionTarget(text, _function(module, function))
    if text.isidentifier() and text.endswith("Config"):
        return ConfigTarget(config_of_class(text))
    if path.suffix == ".py":
        raise MemPluginError(
            "A file alone does not say which function to call.", where="TARGET", fix=f"Give {text}:FUNCTION."
        )
    if path.suffix == ".json" or len(path.parts) > 1:
        raise MemPluginError(
            "There is no such file or folder.", where=text[:200], fix=f"Nothing is downloaded. {FORMS}"
        )
    near = nearest_configs(text) if text.isidentifier() else ()
    raise MemPluginError(
        f"{text[:200]!r} is not something that can be estimated.",
        where="TARGET",
        fix=(f"Did you mean {', '.join(near)}? " if near else "Nothing is downloaded. ") + FORMS,
    )


@dataclass(frozen=True, slots=True)
class FunctionTarget:
    """A function that returns (model, inputs[, optimizer]); it is called again for every estimate.

    Inputs are a tensor, a tuple or list of arguments of the model's forward, or a dict of its keyword
    arguments. The function gets those of `GIVEN` that it has parameters for. Its tensors are fake. A model
    and inputs that it builds on the CPU are moved to the estimated device; with a mesh, that is the default.
    """

    name: str
    function: Callable[..., Any]

    @property
    def takes(self) -> frozenset[str]:
        """The sizes for which the function has parameters."""
        return frozenset({"batch", "seq", "mesh"} & set(_parameters(self.function)))

    def settled(self, workload: Workload) -> Workload:
        """Fill in sizes that are not given, by the function's defaults, or else one sample of 2048 tokens."""
        batch = (workload.batch or self._usual("batch", 1)) if "batch" in self.takes else None
        seq = (workload.seq or self._usual("seq", SEQ)) if "seq" in self.takes else None
        return replace(workload, batch=batch, seq=seq)

    def _needs(self, name: str) -> bool:
        return inspect.signature(self.function).parameters[name].default is inspect.Parameter.empty

    def _usual(self, name: str, other: int) -> int:
        """Return a parameter's own default if it is a positive int, else `other`."""
        default = inspect.signature(self.function).parameters[name].default
        return default if isinstance(default, int) and default > 0 else other

    def build(self, workload: Workload, mesh: DeviceMesh | None = None) -> Built:
        """Call the function and unpack what it returns.

        Raises:
            MemPluginError: it needs a mesh and none is given, or it returns something else.
        """
        arguments = {
            "batch": workload.batch,
            "seq": workload.seq,
            "dtype": workload.torch_dtype,
            "device": torch.device("cuda"),
            "mesh": mesh,
        }
        wanted = _parameters(self.function)
        if mesh is None and "mesh" in wanted and self._needs("mesh"):
            raise MemPluginError("The function needs a mesh.", where=self.name, fix="Add --mesh dp=8.")
        given = {name: arguments[name] for name in wanted if arguments.get(name) is not None}
        if mesh is not None:
            with torch.device("cuda"):
                return self._unpacked(self.function(**given))
        return _on_gpu(self._unpacked(self.function(**given)))

    def _unpacked(self, result: Any) -> Built:
        if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
            raise self._wrong(f"returned {_described(result)}")
        model, inputs, optimizer = (*result, None)[:3]
        if not isinstance(model, nn.Module):
            raise self._wrong(f"returned {_described(model)} as the model, which is not a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise self._wrong(f"returned {_described(optimizer)} as the optimizer")
        if isinstance(inputs, Mapping):
            return Built(model, (), dict(inputs), optimizer)
        arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        return Built(model, arguments, {}, optimizer)

    def _wrong(self, problem: str) -> MemPluginError:
        return MemPluginError(f"The function {problem}.", where=self.name, fix=f"Return {RETURNS}.")


def _on_gpu(built: Built) -> Built:
    """Move what a function built on the CPU, as training scripts do with `model.to(device)`."""
    if {tensor.device.type for tensor in (*built.model.parameters(), *built.model.buffers())} == {"cpu"}:
        built.model.to("cuda")
    moved = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to("cuda") if tensor.device.type == "cpu" else tensor,
        (built.arguments, dict(built.keywords)),
    )
    return replace(built, arguments=moved[0], keywords=moved[1])


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values ({', '.join(type(part).__name__ for part in value[:5])})"
    return f"a {type(value).__name__}" if value is not None else "nothing"


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that can be passed by keyword."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_name)


def _function(module: str, function: str) -> Callable[..., Any]:
    name = f"{module}:{function}"
    value: Any = _module(module)
    for part in function.split("."):
        if not hasattr(value, part):
            raise MemPluginError(f"{module} has no {function!r}.", where=name, fix=FORMS)
        value = getattr(value, part)
    if not callable(value):
        raise MemPluginError(
            f"{function!r} is a {type(value).__name__}, not a function.", where=name, fix=FORMS
        )
    for parameter in inspect.signature(value).parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if needed and parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in GIVEN:
            raise MemPluginError(
                f"The function has a parameter {parameter.name!r}, which the command cannot give.",
                where=name,
                fix=f"Give the parameter a default value. The command can give: {', '.join(GIVEN)}.",
            )
    return value  # type: ignore[no-any-return]  # callable() was checked above


def _module(name: str) -> Any:
    """Import a module by its name, also from the current folder, or by its file.

    Raises:
        MemPluginError: the module does not exist, or importing it fails.
    """
    try:
        if name.endswith(".py"):
            return _module_of_file(Path(name))
        if not all(part.isidentifier() for part in name.split(".")):
            raise MemPluginError(f"{name[:200]!r} is not a module name.", where="TARGET", fix=FORMS)
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(name)
    except MemPluginError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and name.startswith(f"{error.name}"):
            raise MemPluginError(f"There is no module {name!r}.", where="TARGET", fix=FORMS) from error
        raise MemPluginError(
            f"Importing the module failed: {type(error).__name__}: {text_of(error)}", where=name
        ) from error


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise MemPluginError(f"There is no file {str(path)!r}.", where="TARGET", fix=FORMS)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
