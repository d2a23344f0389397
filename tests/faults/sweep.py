"""Run a recorded training with an error in each function of ours, and compare it with a plain one."""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.faults.injection import Injection, calls_seen, raising
from tests.flushing import wait_for_the_disk

ERRORS: tuple[type[BaseException], ...] = (ValueError, MemoryError, KeyboardInterrupt)
FAILING = 2
"""The windows with an error. Two, so that one warning for each of them would be seen."""

ROW = ("bytes", "category", "module", "phase")

BOUNDARY = ("record/guard.py",)
"""Where what is raised is caught. An error within them has nobody who could catch it."""

THREADS = ("store/disk_sync.py:_run",)
"""Where threads of ours begin, with the `try` that catches all that they call."""


class Training:
    """A tiny training with fixed numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.losses: list[float] = []

    def step(self) -> None:
        x, y = torch.randn(4, 8), torch.randn(4, 4)
        self.optimizer.zero_grad()
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def outcome(self) -> str:
        """Losses, weights and the state of the random generator, as a hash."""
        digest = hashlib.sha256(repr(self.losses).encode())
        for tensor in (*self.model.parameters(), torch.get_rng_state()):
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()


class Session(ABC):
    """A recorder beside a training. What it recorded is in `windows`, one entry for each recorded window."""

    boundary: Sequence[str] = ()
    """Functions that torch or Python calls, and that begin with the `try` that catches all that they call."""

    unobserved: Sequence[str] = ()
    """Functions whose error Python itself reports, since they run in a weak reference or a finalizer."""

    second_warning: Sequence[str] = ()
    """Functions whose error has a consequence of its own that is logged, too."""

    most_warnings = 1

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder, self.training = folder, training
        self.windows: list[Any] = []

    @abstractmethod
    def window(self) -> None:
        """Record one step of the training."""

    @abstractmethod
    def close(self) -> None:
        """End the recording."""


@dataclass
class Messages(logging.Handler):
    """What the package logs as warnings, and what Python reports of errors that nobody can catch."""

    texts: list[str] = field(default_factory=list)
    unraised: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "see it in the Memory tab" not in text:  # which is no error
            self.texts.append(text)

    __hash__ = logging.Handler.__hash__


@contextmanager
def messages() -> Iterator[Messages]:
    """Collect messages instead of showing them."""
    logger, seen = logging.getLogger("tb_memplugin"), Messages()
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda one: seen.unraised.append(repr(one.exc_value))
    threading.excepthook = lambda one: seen.unraised.append(repr(one.exc_value))
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(seen)
    try:
        yield seen
    finally:
        logger.removeHandler(seen)
        logger.propagate = propagate
        sys.unraisablehook, threading.excepthook = hooks


_NAMESPACES: tuple[Any, ...] = (
    torch,
    torch.autograd,
    torch.autograd.graph,
    torch.random,
    torch._tensor_str,
    autograd_profiler,
    torch_modules,
    torch_optimizers,
    nn.Module,
    torch.Tensor,
    torch.UntypedStorage,
    torch.optim.Optimizer,
)


def process_state(training: Training, threads: Set[threading.Thread]) -> dict[str, Any]:
    """What a recorder may change and must give back: torch's functions, hooks, modes, and new threads."""
    state: dict[str, Any] = {}
    for number, namespace in enumerate(_NAMESPACES):
        for name, value in list(vars(namespace).items()):
            if name.startswith("_global_") and hasattr(value, "__len__"):
                state[f"{number}.{name}"] = len(value)
            elif callable(value) or name == "_compiled_call_impl":
                state[f"{number}.{name}"] = id(value)
    modules, parameters = list(training.model.modules()), list(training.model.parameters())
    return state | {
        "hooks of modules": sum(len(v) for m in modules for k, v in vars(m).items() if k.endswith("_hooks")),
        "hooks of tensors": sum(len(p._backward_hooks or {}) for p in parameters),
        "hooks of gradients": [
            len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in parameters
        ],
        "modes": len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack()),
        "threads": sorted(one.name for one in threading.enumerate() if one not in threads),
        "profile functions": [sys.getprofile(), threading.getprofile()],
        "profiler": torch._C._autograd._profiler_enabled(),
        "gc callbacks": len(gc.callbacks),
    }


@dataclass
class Run:
    """A training of four steps: the last three are windows, all but the last perhaps with an error."""

    outcome: str
    windows: list[Any]
    warnings: list[str]
    unraised: list[str]
    left: dict[str, Any]
    fired: bool
    raised: BaseException | None


@contextmanager
def few_objects() -> Iterator[None]:
    """Hide what is there from searches through the program's objects, which are then short."""
    gc.collect()
    gc.freeze()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "get_freeze_count", lambda: 0)  # it visits them all
            yield
    finally:
        gc.unfreeze()


NewSession = Callable[[Path, Training], Session]


def run(
    session: NewSession,
    folder: Path,
    function: str = "",
    error: BaseException | None = None,
    *,
    always: bool = False,
) -> Run:
    """Train with a recorder. An error is raised at a function's first call in each of the first windows.

    Args:
        always: raise it at every call instead, to the end of the recorder.
    """

    def failing() -> AbstractContextManager[Injection]:
        return nullcontext(Injection()) if error is None else raising(function, error, always=always)

    gc.collect()  # what the last run left: a generator that ends later would be a call of its function
    training = Training()
    training.step()
    threads = set(threading.enumerate())  # of tests before this one, which may end meanwhile
    before, raised, fired = process_state(training, threads), None, False
    with messages() as seen:
        recorder = session(folder, training)
        for _ in range(FAILING):
            with failing() as injection:
                try:
                    recorder.window()
                except BaseException as caught:  # noqa: BLE001  # reported
                    raised = caught.with_traceback(None)  # which holds frames, and they the recorder
            fired = fired or injection.fired
        for last in (recorder.window, recorder.close):
            try:
                with failing() if always else nullcontext():
                    last()
            except BaseException as caught:  # noqa: BLE001  # reported
                raised = raised or caught
        windows = recorder.windows
        del recorder, last
        if error is not None:
            error.__traceback__ = error.__context__ = None  # their frames hold the recorder
        wait_for_the_disk()
        left = _difference(before, process_state(training, threads))
        if left:
            gc.collect()
            left = _difference(before, process_state(training, threads))
    return Run(training.outcome(), windows, seen.texts, seen.unraised, left, fired, raised)


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    keys = before.keys() | after.keys()
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def plain() -> str:
    """The outcome of the same training without a recorder."""
    training = Training()
    for _ in range(FAILING + 2):
        training.step()
    return training.outcome()


def functions_called(session: NewSession, folder: Path, *, nested: bool = False) -> list[str]:
    """The functions of ours that a window calls, without those that catch, and those within others."""
    training, counts = Training(), Counter[str]()
    training.step()
    with messages():
        recorder = session(folder, training)
        with calls_seen(counts):
            recorder.window()
        recorder.window()
        recorder.close()
    wait_for_the_disk()
    return sorted(name for name in counts if not name.startswith(BOUNDARY) and (nested or "<" not in name))


PARTS = 4


def sweep(
    session: type[Session],
    folder: Path,
    part: int = 0,
    parts: int = 1,
    *,
    every_error: bool = False,
    always: bool = False,
) -> tuple[int, list[str]]:
    """Raise in each function of a part of them. Return how many errors were raised, and what was wrong then.

    Each function gets one of the errors, or every one. Its name alone says which, and in which part it is:
    what is called besides it differs from run to run.

    Args:
        always: raise at every call of the function: no window need be recorded then.
    """
    run(session, folder / "first")  # loads what is loaded once
    with few_objects():
        return _sweep(session, folder, part, parts, every_error=every_error, always=always)


def _sweep(
    session: type[Session], folder: Path, part: int, parts: int, *, every_error: bool, always: bool
) -> tuple[int, list[str]]:
    healthy, expected = run(session, folder / "healthy"), plain()
    assert healthy.outcome == expected
    before = healthy.warnings, healthy.left, len(healthy.windows)
    assert before == ([], {}, FAILING + 1), before
    fired, problems = 0, []
    for number, function in enumerate(functions_called(session, folder / "seen", nested=always)):
        key = zlib.crc32(_plain_name(function).encode())
        if key % parts != part or _plain_name(function) in (*session.boundary, *THREADS):
            continue
        for kind in ERRORS if every_error else (ERRORS[key // parts % len(ERRORS)],):
            error = kind("injected")
            one = run(session, folder / f"{number} {kind.__name__}", function, error, always=always)
            fired += one.fired
            if _plain_name(function) in session.unobserved:
                one.unraised.clear()
            if _plain_name(function) in session.second_warning:
                del one.warnings[1:2]
            most = session.most_warnings
            if always:
                one.windows = healthy.windows
                most += most > 1  # for the last window, which fails as well
            wrong = _problems(one, error, healthy, expected, most) if one.fired else ""
            if wrong:
                problems.append(f"{kind.__name__} in {function}: {wrong}")
    return fired, problems


def _plain_name(function: str) -> str:
    """`record/guard.py:end` of `record/guard.py:57:end`."""
    path, _, name = function.split(":", 2)
    return f"{path}:{name}"


def _problems(one: Run, error: BaseException, healthy: Run, expected: str, most_warnings: int) -> str:
    wrong = []
    ends = not isinstance(error, Exception)
    is_same = one.raised is error or (
        ends and type(one.raised) is type(error)
    )  # a call's end raises a new one
    if one.raised is not None and not is_same:
        wrong.append(f"later {one.raised!r}")
    if one.raised is error and not ends:
        wrong.append("ended the training")
    if one.raised is None and one.outcome != expected:
        wrong.append("the training differs")
    if one.left:
        wrong.append(f"left {one.left}")
    if len(one.warnings) > most_warnings:
        wrong.append(f"many warnings {one.warnings}")
    if not ends and len(one.windows) < len(healthy.windows) and not one.warnings:
        wrong.append("no warning")
    if one.unraised:
        wrong.append(f"unraised {one.unraised}")
    if not one.windows:
        wrong.append("the next window is not recorded")
    elif one.windows[-1] != healthy.windows[-1]:
        wrong.append("the next window differs")
    return "; ".join(wrong)
