"""Whether somebody watches calls of modules, in modules or in torch."""

from __future__ import annotations

from torch import nn

_GLOBAL = tuple(name for name in vars(nn.modules.module) if name.startswith("_global_") and "hook" in name)

_PLAIN = vars(nn.Module)["_call_impl"], None


def has_hooks(*models: nn.Module) -> bool:
    """Whether a module of the models has hooks, or all modules have."""
    modules = [module for model in models for module in model.modules()]
    own = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return own or any(getattr(nn.modules.module, name) for name in _GLOBAL)


def is_watched(*models: nn.Module) -> bool:
    """Whether calls of modules are watched, by hooks or from the class."""
    own = vars(nn.Module)
    return has_hooks(*models) or (own["_call_impl"], own["_compiled_call_impl"]) != _PLAIN
