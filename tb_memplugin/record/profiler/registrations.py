"""Name and watch what is put into the models during a window, at the moment when it is put there."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tb_memplugin.record.guard import Failed, call_all, entry
from tb_memplugin.record.modules import ModuleNames, ModuleRecorder


class Newcomers:
    """Listens, from its creation to `remove`, to modules and parameters that modules of the models get.

    Without it, what a new module allocates would be its parent's, and a new parameter would have no owner.
    torch reports neither what is written to `module._modules` directly (as `nn.Sequential.insert` does)
    nor what is put into a compiled or scripted module.

    Args:
        names: the models' modules and the owners of their tensors; new ones are added.
        modules: the recorder of module calls, which watches new modules.
        failed: is told when and why something could not be named, perhaps by an error of a module's own.
    """

    def __init__(self, names: ModuleNames, modules: ModuleRecorder, failed: Failed) -> None:
        self._names, self._modules = names, modules
        self._handles = [
            register_module_module_registration_hook(entry(self._got_module, failed, "adding a module")),
            register_module_parameter_registration_hook(
                entry(self._got_parameter, failed, "adding a parameter")
            ),
        ]

    def remove(self) -> None:
        """Stop listening. Safe to call twice."""
        call_all(*(handle.remove for handle in self._handles))
        self._handles.clear()

    def _got_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and self._watches(parent):
            for tensor, owner in self._names.add(self._below(parent, name), module):
                self._names.owner_of[id(tensor)] = owner
            self._modules.watch(module, self._names)

    def _got_parameter(self, parent: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if self._watches(parent):
            self._names.owner_of[id(parameter)] = self._names.row_of[id(parent)], self._below(parent, name)

    def _watches(self, parent: nn.Module) -> bool:
        return not torch.compiler.is_dynamo_compiling() and self._modules.is_watching(parent)

    def _below(self, parent: nn.Module, name: str) -> str:
        key = self._names.modules[self._names.row_of[id(parent)]].key
        return f"{key}.{name}" if key else name
