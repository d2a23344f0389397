"""Replace attributes of other libraries while an estimate runs; restore them and settings of the process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

_ABSENT = object()


class Patches:
    """The replaced attributes, in order. `undo` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, or add one that does not exist."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._replaced.append((owner, name, old, value))
        self.on_undo(lambda: _restore(owner, name, old))

    def register(self, operator: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
        """Register a kernel of an operator of aten, such as `lstm.input`.

        torch remembers in Python which kernel it found for an operator, and dynamo uses that. It forgets it
        neither when a kernel is added nor when one goes, so a model that is compiled later would run another.
        """
        name, _, overload = operator.partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        library = torch.library.Library("aten", "IMPL")
        kernels = [kernel]  # torch never frees the last function that was registered
        self.on_undo(kernels.clear)
        self.on_undo(op._dispatch_cache.clear)
        self.on_undo(library._destroy)
        library.impl(operator, lambda *args, **kwargs: kernels[0](*args, **kwargs), dispatch_key)
        op._dispatch_cache.clear()

    def on_undo(self, action: Callable[[], object]) -> None:
        """Add another action that `undo` runs."""
        self._undo.append(action)

    @contextmanager
    def put_back(self, *, but: Callable[[Any], bool] = lambda _: False) -> Iterator[None]:
        """Restore the attributes inside this context, but not those of owners for which `but` is true."""
        back = [patch for patch in self._replaced if not but(patch[0])]
        for owner, name, old, _ in reversed(back):
            _restore(owner, name, old)
        try:
            yield
        finally:
            for owner, name, _, new in back:
                setattr(owner, name, new)

    def originals(self) -> frozenset[int]:
        """Return the `id()`s of the replaced functions and values, which these patches keep alive."""
        return frozenset(id(old) for _, _, old, _ in self._replaced) - {id(None), id(True), id(False)}

    def undo(self) -> None:
        """Restore everything that was replaced."""
        while self._undo:
            self._undo.pop()()
        self._replaced.clear()


@contextmanager
def replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes, given as (owner, name, value), and restore them afterwards, the last one first."""
    patches = Patches()
    try:
        for owner, name, value in changes:
            patches.set(owner, name, value)
        yield
    finally:
        patches.undo()


def _restore(owner: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore what a program sets for its whole process: torch's settings, random states and global hooks."""
    settings = [(read, write, read()) for read, write in _settings()]
    hooks = [(hooks, dict(hooks)) for hooks in _global_hooks()]
    random_states = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002
    try:
        yield
    finally:
        for read, write, before in settings:
            if read() != before:
                write(before)
        for now, earlier in hooks:
            now.clear()
            now.update(earlier)
        torch.set_rng_state(random_states[0])
        random.setstate(random_states[1])
        np.random.set_state(random_states[2])  # noqa: NPY002


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Yield how each of torch's settings is read and written."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield _default_device, torch.set_default_device
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.is_grad_enabled, torch._C._set_grad_enabled
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for device in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        yield getattr(cuda, f"{kernel}_sdp_enabled"), getattr(cuda, f"enable_{kernel}_sdp")
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield partial(_readable, partial(getattr, cudnn, name)), partial(setattr, cudnn, name)
    yield partial(_readable, torch.get_float32_matmul_precision), torch.set_float32_matmul_precision
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # the newer way to say both, since PyTorch 2.9
        for of in (("generic", "all"), *product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))):
            read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
            yield partial(read, *of), partial(write, *of)


def _default_device() -> torch.device | None:
    chosen = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return chosen.device if chosen is not None else None


def _readable(read: Callable[[], Any]) -> Any:
    """Return a setting; None where torch refuses to read it, because two ways to write it were mixed."""
    with suppress(RuntimeError):
        return read()
    return None


def _global_hooks() -> Iterator[dict[int, Any]]:
    """Yield the hooks of all modules and of all optimizers, by their handles' numbers."""
    for owner in (torch.nn.Module, torch.optim.Optimizer):
        for name, hooks in vars(sys.modules[owner.__module__]).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                yield hooks


def do_nothing(*_: Any, **__: Any) -> None:
    """Stand for a function that an estimate need not call."""
