"""Lines that hold memory, by a dispatch mode of its own: nothing of tb_memplugin's is used.

It follows the storages of operators' results alone, so it fits models whose kernels take nothing for
themselves at the peak. In a backward it asks torch's anomaly mode for the forward call.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MINE = str(Path(__file__).parent)
ENGINE = "_engine_run_backward"
CALLS = re.compile(r'File "(.+)", line (\d+), in (.+)')


class LineOracle(TorchDispatchMode):
    """Bytes by `file:line (function)` when most were alive, of storages born in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[str, int]] = {}
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.anomalies = torch.autograd.set_detect_anomaly(True, check_nan=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(one): one.untyped_storage() for one in tree_leaves((args, kwargs or {})) if is_plain(one)}
        known = {storage._cdata for storage in given.values()}
        out = func(*args, **(kwargs or {}))
        for one in filter(is_plain, tree_leaves(out)):
            storage = one.untyped_storage()
            if storage._cdata not in known | self.alive.keys() and storage.nbytes():
                self.alive[storage._cdata] = line(), storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        if (now := sum(size for _, size in self.alive.values())) > self.peak:
            self.peak, self.at_peak = now, Counter()
            for where, size in self.alive.values():
                self.at_peak[where] += size
        return out

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self.anomalies.__exit__()


def is_plain(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.layout is torch.strided


def line() -> str:
    """The innermost line of the tests' code that runs, or, in a backward, that made the node."""
    frame: Any = sys._getframe(2)
    node: Any = torch._C._current_autograd_node()
    while frame is not None and not frame.f_code.co_filename.startswith(MINE):
        if frame.f_code.co_name == ENGINE and node is not None and "Backward" in node.name():
            calls = CALLS.findall("".join(node.metadata["traceback_"]))
            return told(*next(call for call in reversed(calls) if call[0].startswith(MINE)))
        frame = frame.f_back
    return told(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def told(file: str, number: Any, function: str) -> str:
    return f"{file}:{number} ({function.strip()})"
