"""Recognise torch's errors for what fake tensors cannot do, and name the cause instead."""

from __future__ import annotations

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.program.assumed_counts import not_taken

_FUNCTION = "Leave that part out of the estimate, or write it with plain tensors and operators."

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "Cannot access storage of SparseTensorImpl",
        "Sparse tensors",
        "Use dense gradients (nn.Embedding(sparse=False)).",
    ),
    ("self.shape_env must not be None", "Nested tensors (torch.jagged)", "Pad the sequences instead."),
    (
        "is already associated to a python object of type FakeTensor",
        "A subclass of torch.Tensor made of a plain tensor (as_subclass)",
        "Use plain tensors.",
    ),
    (
        "WeakValueDictionary.__init__.<locals>.remove",
        "Tensors that are pickled, as for another process,",
        "Leave that part out. torch.save writes nothing in an estimate.",
    ),
    ("no rule registered for HigherOrderOperator", "Control flow such as torch.cond", _FUNCTION),
    (
        "Pinned memory requires CUDA",
        "Pinned memory made by hand",
        "Leave pin_memory out: it is host memory, which is not estimated.",
    ),
    (
        "'torch._C' has no attribute '_c",  # _cuda_..., _cudart, _cudnn
        "Functions of PyTorch's CUDA builds that this build does not have",
        "Install a CUDA build of PyTorch, which needs no GPU here; or leave that part out.",
    ),
    (
        "but its data is not allocated yet",
        "A kernel of an extension that is not an operator of PyTorch",
        "Make it one with torch.library.custom_op, and give it a fake implementation with register_fake.",
    ),
    (
        "FloatTensor not available",
        "Constructors such as torch.cuda.FloatTensor",
        "Use torch.empty(..., device='cuda').",
    ),
    (
        "from the 'CUDA' backend. This could be because",
        "Tensors that another thread puts on the GPU",
        "Put them there on the estimate's thread; for from_pretrained of transformers, use from_config.",
    ),
)
"""(part of torch's message, the unsupported feature, the fix)."""


def by_name(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError for a known error of torch, None for any other error."""
    if not isinstance(error, (RuntimeError, AssertionError, AttributeError, TypeError)):
        return None
    if (refused := not_taken(error)) is not None:
        return refused
    text = str(error)[:2000]
    for part, cause, fix in _KNOWN:
        if part in text:
            return MemPluginError(f"{cause} cannot be estimated on fake tensors.", fix=fix)
    return None


_MIXED = ("expected scalar type", "to have the same dtype", "type (c10::", "Unsupported dtype")
"""Parts of torch's messages where an operator gets two dtypes, or a dtype that it does not support."""


def mixes_types(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model's code does not run in its dtype, None for any other error."""
    text = str(error).strip()[:300]
    if not isinstance(error, RuntimeError) or not any(part in text for part in _MIXED):
        return None
    return MemPluginError(
        f"The model does not run in this dtype: {text.splitlines()[0]}. Real tensors are expected to "
        "fail there too.",
        fix=(
            "Use --dtype fp32; add --autocast bf16 for a forward in half precision. Or create the inputs in "
            "the model's dtype, which a function gets by a parameter named dtype."
        ),
    )


def mixes_devices(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model's code mixes tensors of two devices, None for any other error."""
    text = str(error).strip()[:300]
    if "on the same device" not in text:
        return None
    return MemPluginError(
        f"The model mixes tensors of two devices: {text.splitlines()[0]} Real tensors are expected to "
        "fail there too.",
        fix=(
            "Give the function a parameter named device, and create the model and all its tensors there: "
            "model.to(device). torch.FloatTensor and similar constructors ignore torch.device."
        ),
    )


def names_by_value(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model uses a tensor's value as a key or name, None for any other error."""
    if not isinstance(error, (KeyError, AttributeError)) or "FakeTensor(" not in str(error):
        return None
    return MemPluginError(
        "The model uses a tensor's value as a key or name, but fake tensors have no values: "
        f"{str(error)[:80]}.",
        fix=(
            "Only a real run knows the value (for example, which experts are chosen). Write that part so "
            "that it runs all of them, or use module:function with a model that does."
        ),
    )
