"""Private names of torch's way from Python to kernels: dispatch modes, operators, and the frames between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tb_memplugin.record.torch_private.table import Absent, name, part, private

_TRACER = "MemoryTracer, the line tracer and estimates do not start, with a warning"

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = private(
        "torch.utils._python_dispatch.TorchDispatchMode", "intercepts every operator", _TRACER
    )
    OpOverload = private(
        "torch._ops.OpOverload", "tells operators from higher-order operators, in estimates", "estimates fail"
    )

push_mode: Callable[[TorchDispatchMode], None] = private(
    "torch.utils._python_dispatch._push_mode", "turns a dispatch mode on for this thread", _TRACER
)
pop_mode: Callable[[], TorchDispatchMode] = private(
    "torch.utils._python_dispatch._pop_mode", "turns this thread's innermost mode off", _TRACER
)
if not TYPE_CHECKING and isinstance(pop_mode, Absent):
    TorchDispatchMode = pop_mode  # there is no mode that cannot be turned off
current_mode: Callable[[], TorchDispatchMode | None] = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode", "this thread's innermost mode", _TRACER
)
current_modes: Callable[[], Sequence[TorchDispatchMode]] = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "this thread's modes, outermost first",
    _TRACER,
)
without_modes: Callable[[], AbstractContextManager[Any]] = private(
    "torch.utils._python_dispatch._disable_current_modes",
    "runs code of an estimate on real tensors",
    "estimates fail",
)
without_torch_functions: Callable[[], AbstractContextManager[None]] = private(
    "torch._C.DisableTorchFunction",
    "looks at tensors without running a `__torch_function__`, of their classes or of a mode",
    "a program's `__torch_function__` is called for what a recording reads of tensors",
    instead=nullcontext,
)
"""Whatever calls this package begins with it: hooks, patches, and the starts and ends of recordings."""


CallOperator = Callable[[Any, tuple[()], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function, its first argument, with the last two as its arguments."""


def call_plainly(function: Any, _: tuple[()], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


call_in_dispatch: CallOperator = private(
    "torch._C._skip_one_hop_torch_function",
    "runs an operator that reached a dispatch mode from C++ without calling the program's "
    "`__torch_function__`, which what the operator calls still does",
    "under a tracer, a program's `__torch_function__` sees operators that autograd and torch's own code call",
    since="2.13",
    instead=call_plainly,
)
tracing_state: Callable[[], object] = private(
    "torch._C._get_tracing_state",
    "whether `torch.jit.trace` runs, whose tensors must not be looked at",
    "`torch.jit.trace` within a recording may warn of what a recording reads",
    instead=lambda: None,
)
_SCHEMA = name(
    "torch._ops.OpOverload.__init__:_schema",
    "the name and the arguments of an operator",
    "operators have no names, so that rules which know one by its name do not hold",
)


class HiddenFromDynamo:
    """A base class of dispatch modes: dynamo compiles nothing that runs inside such a mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True


name(
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    "torch asks a mode by this method whether dynamo leaves it alone",
    "torch.compile may try to compile a tracer's own code, where it can mark no functions (before 2.7)",
)

_FILES = {
    "torch._compile": "_compile.py",
    "torch._ops": "_ops.py",
    "torch.utils._device": "utils/_device.py",
    "torch.utils._python_dispatch": "utils/_python_dispatch.py",
}
OPERATOR_FILE = str(Path(torch.__file__).parent / _FILES["torch._ops"])
"""The file whose functions pass the arguments of operators on."""
DISPATCH_FILES = frozenset(
    str(Path(torch.__file__).parent / file)
    for file in (*_FILES.values(), "_dynamo/eval_frame.py", "overrides.py")
)
"""Files of torch's dispatch from Python to kernels, whose frames are left out of stacks."""
for _path in _FILES:
    part(
        _path, "a file of torch's dispatch, left out of stacks", "stacks have frames of torch's own dispatch"
    )


def schema_of(operator: Any) -> Any:
    """Return an operator's schema, None if it has none."""
    return getattr(operator, _SCHEMA, None)
