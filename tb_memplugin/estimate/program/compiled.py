"""`torch.compile`, flex_attention, `torch.jit.script` and `torch.jit.trace`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.libraries.inductor.compiler import Compiler
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_NOTE = (
    "torch.compile: the uncompiled program is estimated. Compiled code fuses operators, and may keep "
    "fewer activations or recompute them."
)
_FLEX_NOTE = (
    "flex_attention is counted as compiled: one kernel that never stores the scores. Gradients of "
    "tensors that score_mod captures are not counted."
)


class Compiled(Correction):
    """Compiles with Inductor for a GPU; else makes `torch.compile` return its argument, with a note."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.compile`, which `Module.compile` calls, and flex_attention wherever it is."""
        original = flex.flex_attention
        compiler = Compiler(mode, patches, self.target.gpu, self.target.note)
        if "torch._dynamo" in sys.modules:  # for code that was compiled before the block
            stance: Any = torch.compiler.set_stance("force_eager")
            patches.on_undo(lambda: stance.__exit__(None, None, None))

        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001  # torch's name
            if model is None:
                return lambda model: compile(model, **options)
            if model is original or model == self._flex:
                return self._flex
            if options.get("disable"):
                return model
            if self.target.device_type == "cuda" and options.get("backend", "inductor") == "inductor":
                try:
                    return compiler.compile(model, options)
                except (ImportError, AttributeError, TypeError) as error:
                    self.target.note(f"This version of PyTorch is not known: {error}.")
            self.target.note(_NOTE)
            return model

        patches.set(torch, "compile", compile)
        for module in list(sys.modules.values()):
            if vars(module).get("flex_attention") is original:
                patches.set(module, "flex_attention", self._flex)

    def _flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Callable[..., Any] | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        if return_aux is not None:
            raise MemPluginError(
                "flex_attention's return_aux cannot be estimated.",
                where="torch.nn.attention.flex_attention.flex_attention",
                fix="Use return_lse=True instead.",
            )
        self.target.note(_FLEX_NOTE)
        apply: Any = _Flex.apply
        out, lse = apply(query, key, value)
        return (out, lse) if return_lse else out


class _Flex(torch.autograd.Function):
    """Allocates the results and buffers of the fused kernels (torch/_inductor/kernel/flex)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Return the result, laid out like the query, and the log-sum-exp of each row in float32."""
        ctx.set_materialize_grads(False)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        shape = (*query.shape[:-1], value.shape[-1])
        order = [*sorted(range(query.dim() - 1), key=query.stride, reverse=True), query.dim() - 1]
        out = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of query, key and value; a float32 for each row is live meanwhile."""
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return results


_SCRIPTED = (
    "torch.jit: the Python program is estimated. TorchScript may fuse operators, and then allocates less "
    "than is counted."
)


class Scripted(Correction):
    """Makes TorchScript return the Python function or module that it gets, with a note."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the functions of `torch.jit` that compile: they would compile our patches, too."""
        for name in ("script", "trace", "freeze", "optimize_for_inference"):
            patches.set(torch.jit, name, self._replacing(mode, getattr(torch.jit, name)))

    def _replacing(self, mode: CountingFakeMode, original: Any) -> Any:
        def same(program: Any, *args: Any, **options: Any) -> Any:
            if not mode.is_on() or _is_of_torch(program):
                return original(program, *args, **options)
            self.target.note(_SCRIPTED)
            return program

        return same


def _is_of_torch(program: Any) -> bool:
    """Whether a function is torch's own, which needs the graphs of its formulas."""
    return isinstance(program, FunctionType) and program.__module__.startswith("torch.")
