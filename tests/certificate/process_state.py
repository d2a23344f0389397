"""What a process holds besides its objects: torch's functions and tables, threads, hooks of Python."""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.certificate.objects import bits, description
from tests.flushing import wait_for_the_disk

WATCHED = (
    "torch",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "tests.certificate.programs",
)
"""The packages whose modules and classes are watched."""

UNWATCHED = (
    "torch.testing",
    "torch._refs",
    "torch._inductor",
    "torch.onnx",
    "torch.ao",
    "torch.utils._sympy",
)
"""Large, and nothing of it runs in a training but what other modules hold."""

_FILLED_WHEN_ASKED = {
    ("torch.utils.hooks", "RemovableHandle", "next_id"),  # how many hooks were ever registered, anywhere
    ("torch.utils._stats", "simple_call_counter"),
    ("torch.jit._builtins", "_builtin_table"),
    ("torch.ops", "_dir"),  # namespaces of operators that Python has met
    ("torch.ops", "c10d"),
}
"""torch's own counters and caches."""

SECONDS_TO_END = 0.5
"""The longest that a thread takes to end in the kernel after Python has joined it."""


class WatchedNames:
    """Every attribute of the watched modules and of their classes, as it is when this is created."""

    def __init__(self) -> None:
        self._namespaces = {path: (names, _snapshot(names)) for path, names in _namespaces()}
        self._kept = [list(names.values()) for names, _ in self._namespaces.values()]  # no id is used again
        self._sizes = [
            (path, key, value, len(value))
            for path, (names, _) in self._namespaces.items()
            for key, value in names.items()
            if type(value) in _SIZED
        ]

    def changed(self) -> list[str]:
        """Return the names that have another value or length than at first, or are new, or gone. Sorted."""
        changed = {(*path, key) for path, key, value, size in self._sizes if len(value) != size}
        for path, (names, before) in self._namespaces.items():
            if list(map(id, names.values())) != list(before.values()):
                now = _snapshot(names)
                changed |= {
                    (*path, key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)
                }
        return sorted(_ADDRESS.sub("ADDRESS", ".".join(key)) for key in changed - _FILLED_WHEN_ASKED)


def _namespaces() -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the dictionary of each watched module and of each class that it defines."""
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if names is None or not f"{name}.".startswith(_WATCHED) or name.startswith(UNWATCHED):
            continue
        yield (name,), names
        for key, value in list(names.items()):
            if issubclass(type(value), type) and type.__getattribute__(value, "__module__") == name:
                yield (name, key), vars(value)


def _snapshot(names: Mapping[str, Any]) -> dict[str, int]:
    return dict(zip(names, map(id, names.values()), strict=True))


_ADDRESS = re.compile(r"\d{9,}|[0-9a-f]{8}(_[0-9a-f]{4}){3}_[0-9a-f]{12}")
"""What differs each time in the names of what dynamo keeps: ids, and random numbers of compiled functions."""
_WATCHED = tuple(f"{package}." for package in WATCHED)
_SIZED = {dict, list, set, OrderedDict}


def python_state() -> dict[str, Any]:
    """Return threads, callbacks and hooks of Python, the random states, and the objects that are alive.

    The thread that flushes recordings may run a little longer than the recording: it is waited for.
    """
    wait_for_the_disk()
    gc.collect()
    alive = Counter(type(thing).__name__ for thing in gc.get_objects() if _counts(type(thing)))
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": _tasks(),
        "gc.callbacks": [description(call) for call in gc.callbacks],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "sys.gettrace": description(sys.gettrace()),
        "sys.getprofile": description(sys.getprofile()),
        "threading.getprofile": [description(threading.getprofile()), description(threading.gettrace())],
        "sys.excepthook": [description(sys.excepthook), description(threading.excepthook)],
        "sys.unraisablehook": description(sys.unraisablehook),
        "sys.meta_path": [description(finder) for finder in sys.meta_path],
        "random": [
            bits(torch.get_rng_state()),
            _gpu_random_state(),
            hash(repr(random.getstate())),
            _numpy_state(),
        ],
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "grad": [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
        "profiling": torch._C._autograd._profiler_enabled(),
        "alive": {name: count for name, count in sorted(alive.items()) if count},
    }


def _tasks() -> int:
    """Return how many threads the system has of this process, after those that Python has joined are gone."""
    deadline = monotonic() + SECONDS_TO_END
    tasks = Path("/proc/self/task")
    while (count := len(list(tasks.iterdir()))) > threading.active_count() and monotonic() < deadline:
        sleep(0.005)
    return count


def _counts(kind: type) -> bool:
    """Whether objects of a class are counted. Fake tensors are dynamo's own, kept with its graphs."""
    return issubclass(kind, torch.Tensor | torch.nn.Module | torch.optim.Optimizer) and kind is not FakeTensor


def _gpu_random_state() -> str:
    return bits(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else ""


def _numpy_state() -> int:
    return hash(repr(np.random.get_state()))  # noqa: NPY002  # for programs that use the old generator


def dynamo_counters() -> dict[str, dict[str, int]]:
    """Return dynamo's own counts: graphs, calls, breaks, frames, recompiles. Empty if it was not loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {}
    return {
        str(name): {str(key): int(count) for key, count in row.items()}
        for name, row in dynamo.counters.items()
        if row
    }
