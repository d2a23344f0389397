"""`torch.compile` inside an estimate: dynamo and Inductor compile, and their code runs on fake tensors.

Everything that decides memory is PyTorch's own: what is captured, what autograd keeps and recomputes, which
operators are fused, when buffers are allocated, reused and freed. Only kernels are missing (wrapper_code.py),
and Inductor compiles for a GPU that is not there, without Triton.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import ANY_GPU
from tb_memplugin.estimate.libraries.inductor.wrapper_code import CompiledCodeError, FakeModule
from tb_memplugin.estimate.run.fake_cuda import properties_of
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.torch_private.dispatch import without_modes

_CPU = torch.device("cpu")


class _OnTheCpu(TorchDispatchMode):
    """Creates tensors on the CPU, whatever device the operator names."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if keywords.get("device") is not None:
            keywords["device"] = _CPU
        return func(
            *(_CPU if isinstance(argument, torch.device) else argument for argument in args), **keywords
        )


@contextmanager
def _with_values() -> Iterator[None]:
    """Compute with the values of constants, on the CPU."""
    with unset_fake_temporarily(), _OnTheCpu():  # type: ignore[no-untyped-call]
        yield


def describe_gpu(patches: Patches, gpu: GpuSpec | None) -> None:
    """Make Inductor see the target GPU, and let it work where there is neither a GPU nor Triton."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils import _triton

    spec = gpu or ANY_GPU
    major, minor = spec.compute_capability
    properties = properties_of(spec)
    _forget_devices()
    patches.on_undo(_forget_devices)
    patches.set(CudaInterface, "get_device_properties", staticmethod(lambda *_: properties))
    patches.set(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties))
    patches.set(CudaInterface, "get_compute_capability", staticmethod(lambda *_: major * 10 + minor))
    for name in ("current_device", "exchange_device", "maybe_exchange_device", "get_raw_stream"):
        patches.set(CudaInterface, name, staticmethod(lambda *_: 0))
    for name in ("set_device", "synchronize"):
        patches.set(CudaInterface, name, staticmethod(lambda *_: None))
    patches.set(CudaInterface, "device_count", staticmethod(lambda: 1))
    patches.set(CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: major >= 8))
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda _: True))
    patches.set(scheduler, "has_triton", lambda *_: True)
    patches.set(_triton, "triton_hash_with_backend", lambda: "none")
    patches.set(proxy_tensor, "unset_fake_temporarily", _with_values)
    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_the_cpu(folder: Any, node: Any) -> Any:
        with _OnTheCpu():  # type: ignore[no-untyped-call]
            return deduce(folder, node)

    patches.set(UniformValueConstantFolder, "_deduce_value", deduce_on_the_cpu)


def _forget_devices() -> None:
    """Clear what Inductor remembers about devices: it is of another GPU."""
    from torch._inductor import utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    functions = [DeviceProperties.create, *vars(utils).values(), *vars(_triton).values()]
    for function in functions:
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()


_PACKAGE = str(Path(__file__).parents[3])
_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_pre_hooks_with_kwargs",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)

_SETTINGS = {
    "fx_graph_cache": False,  # code in the cache was made for a real device
    "compile_threads": 1,
    "shape_padding": False,  # it is decided by timing kernels
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""Inductor's settings in an estimate, because nothing can be timed and no kernel is made."""

_AUTOGRAD_SETTINGS = {
    "enable_autograd_cache": False,  # as above
    "force_non_lazy_backward_lowering": True,  # what cannot be compiled is known before forward runs
}

_NOTE = (
    "torch.compile: Inductor's own code runs, without its kernels. What depends on timing kernels is left "
    "out: padding of matrices (shape_padding) and autotuning."
)
_GRAPHS_NOTE = (
    "CUDA graphs (torch.compile with mode='reduce-overhead' or 'max-autotune') are not modelled. They keep "
    "the memory of a whole graph in a pool of their own, and copies of its inputs."
)


class Compiler:
    """Compiles for the estimated device while an estimate runs.

    Args:
        patches: the estimate's patches; dynamo must not see them.
        gpu: the target; None for no particular GPU.
    """

    def __init__(
        self, mode: CountingFakeMode, patches: Patches, gpu: GpuSpec | None, note: Callable[[str], None]
    ) -> None:
        self._mode, self._patches, self._gpu, self._note = mode, patches, gpu, note
        self._torch_compile = torch.compile
        self._backends: set[Any] = set()
        self._codes: set[CodeType] = set()
        self._own = Patches()
        self._compile_fx: Any = None
        self._ready = self._failed = self._ended = False
        patches.on_undo(self._stop)

    def compile(self, model: Any, options: dict[str, Any]) -> Any:
        """Return what `torch.compile` returns for a model or function, with its arguments as `options`.

        Raises:
            Exception: this version of PyTorch is not the one that this file knows, or `options` are wrong.
        """
        self._start()
        settings = self._settings(options)

        def backend(graph: Any, inputs: Any, **_: Any) -> Any:
            self._note(_NOTE)
            compiled = self._compile_fx(graph, inputs, config_patches=settings)

            def run(*args: Any) -> Any:
                try:
                    return compiled(*args)
                except CompiledCodeError as error:
                    self._note(f"{error.what} It is estimated uncompiled.")
                return graph(*args)

            return run

        self._backends.add(backend)
        kept = {name: options[name] for name in ("fullgraph", "dynamic") if name in options}
        guards: dict[str, Any] = {"guard_filter_fn": self._guards}
        with self._patches.put_back():
            return self._torch_compile(model, backend=backend, options=guards, **kept)

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return Inductor's settings for the arguments of `torch.compile`."""
        with self._patches.put_back():
            wrapper = torch._TorchCompileInductorWrapper(
                options.get("mode"), options.get("options"), options.get("dynamic")
            )
        if wrapper.config.get("triton.cudagraphs"):
            self._note(_GRAPHS_NOTE)
        return {**wrapper.config, **_SETTINGS}

    def _guards(self, entries: Any) -> list[bool]:
        """Return which guards dynamo keeps: none that compares what this estimate replaces meanwhile."""
        originals = self._patches.originals()
        return [
            id(entry.value) not in originals and not any(h in entry.name for h in _HOOKS) for entry in entries
        ]

    def _start(self) -> None:
        """Load dynamo and Inductor as if there were no estimate, then make them work inside one."""
        if self._ready:
            return
        with self._patches.put_back(), without_modes():
            import torch._dynamo.convert_frame as frames
            import torch._dynamo.eval_frame as evaluation
            import torch._dynamo.pgo as sizes_seen
            import torch._functorch.config as functorch
            import torch._inductor.config as inductor
            from torch._inductor.compile_fx import compile_fx
            from torch._inductor.graph import GraphLowering

            evaluation.TorchPatcher.patch()  # once in a process: it keeps what it finds in optimizers
        self._compile_fx = compile_fx
        original, stance = frames.CatchErrorsWrapper.__call__, evaluation._callback_from_stance
        none: Any = vars(frames)["ConvertFrameReturn"]

        def convert(wrapper: Any, frame: Any, *rest: Any) -> Any:
            if not self._mode.is_here:
                return original(wrapper, frame, *rest)
            if self._failed or frame.f_code.co_filename.startswith(_PACKAGE):
                return none()
            self._codes.add(frame.f_code)
            try:
                with self._aside():
                    return original(wrapper, frame, *rest)
            except Exception as error:  # noqa: BLE001  # the program runs uncompiled there
                self._failed = True
                self._note(_uncompiled(frame.f_code, error))
                return none()

        def callback_of(callback: Any) -> Any:
            if callable(callback):
                backend = evaluation.innermost_backend(callback)
                if getattr(backend, "compiler_fn", backend) in self._backends:
                    return callback
            return stance(callback)

        own = self._own
        own.set(frames.CatchErrorsWrapper, "__call__", convert)
        own.set(evaluation, "_callback_from_stance", callback_of)
        for name in ("_CODE_STATE", "_INIT_CODE_STATE"):  # other sizes there make sizes dynamic
            own.set(sizes_seen, name, None)
        own.on_undo(self._forget)
        self._initialise_inside(own)
        own.set(GraphLowering, "_compile_to_module_lines", lambda graph, code: self._load(graph, code))
        settings = contextlib.ExitStack()
        settings.enter_context(inductor.patch(_SETTINGS))
        settings.enter_context(functorch.patch(_AUTOGRAD_SETTINGS))
        own.on_undo(settings.close)
        warnings.filterwarnings("ignore", "Using `torch.compile.*global hooks")  # these are ours
        describe_gpu(own, self._gpu)
        self._ready = True

    def _stop(self) -> None:
        self._ended = True
        self._own.undo()

    def _forget(self) -> None:
        """Make dynamo forget what it compiled here: a later run of the same code is another program."""
        from torch._C._dynamo.eval_frame import reset_code

        for code in self._codes:
            reset_code(code)

    def _initialise_inside(self, own: Patches) -> None:
        """Create optimizer states inside the estimate: dynamo runs `_init_group` while it compiles a step."""
        for kind in _kinds_of_optimizers():
            original = vars(kind)["_init_group"]

            def init(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if self._ended or not self._mode.is_here or self._mode.is_on():
                    return _original(*args, **kwargs)
                with self._mode:
                    return _original(*args, **kwargs)

            own.set(kind, "_init_group", init)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Hide the estimate from dynamo and Inductor: its mode, its hooks, and what it replaced."""
        saved = {}
        for name in _HOOKS:
            hooks = getattr(module_hooks, name, {})
            saved[name] = [(key, hook) for key, hook in hooks.items()]
            hooks.clear()
        try:
            with self._patches.put_back(but=_is_a_device), without_modes():
                yield
        finally:
            for name, hooks in saved.items():
                getattr(module_hooks, name, {}).update(hooks)

    def _load(self, graph: Any, code: Any) -> Any:
        """Return the module of a compiled graph; replaces Inductor's method that loads its code.

        The code is tried first, without records: an error here leaves the program uncompiled.
        """
        from torch._inductor.codecache import PyCodeCache

        graph.cache_key, graph.cache_path = PyCodeCache.write(code.value)
        graph.cache_linemap = []
        module = FakeModule(graph, code.value, self._mode)
        with self._mode.running(recorded=False):
            module.run_on_samples()
        return module.module


def _kinds_of_optimizers() -> list[type]:
    """Return the optimizers that have an `_init_group` of their own."""
    todo: list[type] = [torch.optim.Optimizer]
    for kind in todo:
        todo += kind.__subclasses__()
    return [kind for kind in set(todo) if "_init_group" in vars(kind)]


def _uncompiled(code: CodeType, error: Exception) -> str:
    name = (
        f"{getattr(code, 'co_qualname', code.co_name)} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    )
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
    return (
        f"torch.compile: {name[:200]} could not be compiled here ({type(error).__name__}: {words}). It is "
        "estimated uncompiled. Compiled code may keep fewer activations or recompute them."
    )


def _is_a_device(owner: Any) -> bool:
    """Whether a replaced attribute belongs to what describes the device, which compilers ask too."""
    name = getattr(owner, "__name__", "")
    parts = ("torch.cuda", "torch.accelerator", "torch.backends", "torch._C")
    return name.startswith(parts) or owner is fake_tensor
