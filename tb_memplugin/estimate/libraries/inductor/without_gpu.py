"""Let Inductor compile for a GPU that is not there, and without Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_cuda import properties_of
from tb_memplugin.estimate.run.patches import Patches

_ANY = GpuSpec.named("a100")
"""The GPU whose properties are used if none is named."""

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


def describe(patches: Patches, gpu: GpuSpec | None) -> None:
    """Make Inductor see the target GPU, and let it work where there is neither a GPU nor Triton."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils import _triton

    spec = gpu or _ANY
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
