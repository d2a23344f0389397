"""Private names of torch.compile that a recording needs. They do not load dynamo, which takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch import nn

from tb_memplugin.record.torch_private.table import name, part, private

_IN_GRAPHS = "torch.compile may compile code of a recording that runs within a compiled function"
_STAYS_ON = "patches of a recording stay on while torch.compile traces, and get into its graphs"
_UNCOMPILED = "functions that are first called in a recording stay uncompiled after it"

DISABLED = name(
    "torch._dynamo.eval_frame.DisableContext.__call__:_torchdynamo_disable",
    "marks a function that dynamo neither compiles nor traces",
    _IN_GRAPHS,
)
set_strategy: Callable[[CodeType, Any], None] | None = private(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "keeps dynamo from compiling a function, and what it calls",
    _IN_GRAPHS,
    instead=None,
    since="2.7",
)
FrameAction: Any = private(
    "torch._C._dynamo.eval_frame._FrameAction",
    "what dynamo does with a frame",
    _IN_GRAPHS,
    instead=None,
    since="2.7",
)
FrameStrategy: Any = private(
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "what dynamo does with a frame and those inside it",
    _IN_GRAPHS,
    instead=None,
    since="2.7",
)
skip_code: Callable[[CodeType], None] | None = private(
    "torch._C._dynamo.eval_frame.skip_code",
    "keeps dynamo from compiling a function",
    _IN_GRAPHS,
    instead=None,
    until="2.7",
)
reset_code: Callable[[CodeType], None] | None = private(
    "torch._C._dynamo.eval_frame.reset_code",
    "makes dynamo forget that it has seen a function",
    _UNCOMPILED,
    instead=None,
)
_DYNAMO = part("torch._dynamo", "whether torch.compile is loaded", "compiled modules are watched like others")
_CONVERT_FRAME = part("torch._dynamo.convert_frame", "the functions that dynamo has seen", _UNCOMPILED)
_CALLBACKS = part("torch._dynamo.callback", "hears of the beginning and end of tracing", _STAYS_ON)
_EVAL_FRAME = part("torch._dynamo.eval_frame", "runs compiled code", _STAYS_ON)
ENTRY = name(
    "torch._dynamo.eval_frame._maybe_set_eval_frame",
    "torch calls it where compiled code begins, and where it ends",
    "patches of a recording stay on in compiled code, which may be compiled again for them",
)
STANCE = name(
    "torch._dynamo.eval_frame._stance",
    "what a call of a compiled function does: compile, or run uncompiled",
    "compiled functions that must be one graph raise an error where a tracer records",
)


def is_loaded() -> bool:
    """Whether dynamo is imported."""
    return _DYNAMO in sys.modules


def is_optimized(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    kind = getattr(sys.modules.get(_DYNAMO), "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def code_seen() -> Sequence[Callable[[], CodeType | None]]:
    """Return weak references to the code objects that dynamo was asked to compile, in order."""
    codes = getattr(sys.modules.get(_CONVERT_FRAME), "input_codes", None)
    return getattr(codes, "seen", ())


def callbacks_and_frames() -> tuple[Any, Any] | None:
    """Return dynamo's handler of callbacks, and its module that runs code; None if they are not loaded."""
    handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
    frames = sys.modules.get(_EVAL_FRAME)
    return None if handler is None or frames is None else (handler, frames)


def default_stance() -> Any:
    """Return dynamo's stance if it is to compile; None if it is another, or dynamo is not loaded."""
    stance = getattr(sys.modules.get(_EVAL_FRAME), STANCE, None)
    return stance if getattr(stance, "stance", "") == "default" else None


def replace_stance(before: Any, stance: Any) -> None:
    """Change dynamo's stance if it is the one before, and not None."""
    frames = sys.modules[_EVAL_FRAME]
    if before is not None and getattr(frames, STANCE, None) is before:
        setattr(frames, STANCE, stance)
