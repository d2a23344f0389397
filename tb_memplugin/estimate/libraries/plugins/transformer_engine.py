"""transformer-engine: its own layers run, and only its compiled functions are replaced.

`transformer_engine_kernels.py` has the replacements. What the library keeps between calls (workspaces, FP8
scales, answers about the GPU) is put aside while an estimate runs, so that no fake tensor stays in it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.libraries.plugins.plugin import replaced
from tb_memplugin.estimate.libraries.plugins.transformer_engine_kernels import Kernels

_MODULE = "transformer_engine.pytorch"
_COMPILED = "transformer_engine_torch"

_KEPT: dict[str, Any] = {
    "_cublas_workspace": lambda: None,
    "_multi_stream_cublas_workspace": list,
    "_dummy_wgrads": dict,
    "_cu_seqlens_cache": dict,
    "_default_causal_mask": dict,
}
"""Variables of the library's modules that hold tensors between calls, and what each is at first."""


class TransformerEngine:
    """The plugin for transformer_engine.pytorch, which must be imported before the estimate begins."""

    name = "transformer-engine"

    def applies(self) -> bool:
        """Return whether transformer_engine.pytorch is imported."""
        return _MODULE in sys.modules

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Replace the compiled functions everywhere in the library, and put aside what it keeps.

        Raises:
            MemPluginError: the library is older than version 2.
        """
        compiled: Any = sys.modules.get(_COMPILED)
        _check(compiled)
        constants: Any = importlib.import_module(f"{_MODULE}.constants")
        attention: Any = importlib.import_module(f"{_MODULE}.cpp_extensions.fused_attn")
        all_kernels = Kernels(constants.TE_DType, attention.FusedAttnBackend["F16_arbitrary_seqlen"]).all()
        kernels = {name: new for name, new in all_kernels.items() if hasattr(compiled, name)}
        changes: list[tuple[object, str, object]] = [(compiled, *item) for item in kernels.items()]
        new_of = {id(getattr(compiled, name)): new for name, new in kernels.items()}
        for module in _modules():
            for name, value in list(vars(module).items()):
                if name in _KEPT:
                    changes.append((module, name, _KEPT[name]()))
                elif isinstance(value, functools._lru_cache_wrapper):
                    new_of.setdefault(id(value), functools.lru_cache(maxsize=None)(value.__wrapped__))
                if id(value) in new_of:
                    changes.append((module, name, new_of[id(value)]))
        linear: Any = sys.modules[_MODULE].Linear
        if hasattr(linear, "_prealloc_cublas_workspace"):
            changes.append((linear, "_prealloc_cublas_workspace", _take_workspace))
        with replaced(*changes), _without_fp8_state():
            yield


def _take_workspace(layer: Any) -> None:
    """Allocate the workspace of products when a layer is made: the library leaves fake tensors out."""
    weight = getattr(layer, layer.weight_names[0], None)
    if weight is not None and weight.device.type == "cuda":
        gemm: Any = importlib.import_module(f"{_MODULE}.cpp_extensions.gemm")
        gemm.get_cublas_workspace(weight.device.index, False, False)


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("transformer_engine.")]


def _check(compiled: Any) -> None:
    if not hasattr(compiled, "generic_gemm"):
        raise MemPluginError(
            "This version of transformer-engine is too old for estimates.",
            where="the plugin transformer-engine",
            fix="Install transformer-engine 2.2 or newer, or leave the plugin out with plugins=().",
        )


@contextmanager
def _without_fp8_state() -> Iterator[None]:
    """Give the library's FP8 state its first values inside this context, and restore it afterwards."""
    managers = (getattr(module, "FP8GlobalStateManager", None) for module in _modules())
    manager = next((candidate for candidate in managers if candidate is not None), None)
    if manager is None:
        yield
        return
    before = {name: value for name, value in vars(manager).items() if not _is_method(value)}
    manager.reset()
    try:
        yield
    finally:
        for name, value in before.items():
            if not name.startswith("__"):
                setattr(manager, name, value)


def _is_method(value: object) -> bool:
    return isinstance(value, (classmethod, staticmethod)) or callable(value)
