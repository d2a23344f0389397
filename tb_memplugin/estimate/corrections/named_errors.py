"""What torch says in its own words where something cannot be done on fake tensors, said by name."""

from __future__ import annotations

from tb_memplugin.errors import MemPluginError

_FUNCTION = "Leave that part out of the estimate, or write it with plain tensors and operators."

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "Cannot access storage of SparseTensorImpl",
        "Sparse tensors",
        "Use dense ones (nn.Embedding(sparse=False)).",
    ),
    ("self.shape_env must not be None", "Nested tensors (torch.jagged)", "Pad the sequences instead."),
    (
        "is already associated to a python object of type FakeTensor",
        "A subclass of torch.Tensor made of a plain tensor (as_subclass, lazy modules)",
        "Use plain tensors; give lazy modules their sizes (nn.Linear in place of nn.LazyLinear).",
    ),
    ("dummy base class CUDAGraph", "CUDA graphs", "Leave the capture out: run what is captured."),
    (
        "dummy base class MemPool",
        "torch.cuda.MemPool",
        "Leave the pool out: its memory is the same, elsewhere.",
    ),
    (
        "has no attribute '_scatter'",
        "nn.DataParallel",
        "Use DistributedDataParallel in estimate_ranks: docs/estimate_ranks.md.",
    ),
    ("no rule registered for HigherOrderOperator", "Control flow such as torch.cond", _FUNCTION),
    (
        "no fake impl registered",
        "An operator of your own without a fake rule",
        "Register one: register_fake.",
    ),
    ("Cannot get CUDA generator", "torch.Generator on the GPU", "Make the generator on the CPU."),
    (
        "Pinned memory requires CUDA",
        "Pinned memory made by hand",
        "Leave pin_memory out: it is memory of the host.",
    ),
    (
        "'_cuda_record_memory_history'",
        "torch.cuda.memory's own recording",
        "Leave it out: trace_result() and save() give the recording.",
    ),
    (
        "'WeakValueDictionary.__init__",
        "torch.save of fake tensors",
        "Leave the saving out: there are no values.",
    ),
)
"""What torch's message has in it, what that is, and what to do."""


def by_name(error: BaseException) -> MemPluginError | None:
    """Our error for one of torch's own, None where it is somebody else's."""
    if not isinstance(error, (RuntimeError, AssertionError, AttributeError)):  # NotImplementedError is one
        return None
    said = str(error)[:2000]
    for part, what, fix in _KNOWN:
        if part in said:
            return MemPluginError(f"{what} cannot be estimated: fake tensors do not follow it.", fix=fix)
    return None


_MIXED = ("expected scalar type", "to have the same dtype", "Unsupported dtype")
"""What torch says where an operator meets two types, or one that it does not compute in."""


def mixes_types(error: BaseException) -> MemPluginError | None:
    """Our error where a model's own code does not run in a type, None for any other."""
    said = str(error).strip()[:300]
    if not isinstance(error, RuntimeError) or not any(part in said for part in _MIXED):
        return None
    return MemPluginError(
        f"The model does not run in this type: {said.splitlines()[0]}. Real tensors should fail there, too.",
        fix="Use --dtype fp32, with --autocast bf16 for a forward in half precision.",
    )


def mixes_devices(error: BaseException) -> MemPluginError | None:
    """Our error where a model's own code computes with tensors of two devices, None for any other."""
    said = str(error).strip()[:300]
    if "on the same device" not in said:
        return None
    return MemPluginError(
        f"The model computes with tensors of two devices: {said.splitlines()[0]} "
        "Real tensors should fail there, too.",
        fix="Move the model, and tensors that it makes itself, to the function's parameter named device: "
        "model.to(device). torch.FloatTensor and the like do not follow torch.device.",
    )


def names_by_value(error: BaseException) -> MemPluginError | None:
    """Our error where a model looks something up under a tensor's value, None for any other."""
    if not isinstance(error, (KeyError, AttributeError)) or "FakeTensor(" not in str(error):
        return None
    return MemPluginError(
        "The model looks something up under a tensor's value, which fake tensors do not have: "
        f"{str(error)[:80]}.",
        fix="Only a real run knows which (such as which experts are chosen): write that part so that it runs "
        "all of them, or give module:function with a model that does.",
    )
