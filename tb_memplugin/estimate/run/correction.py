"""The base class of corrections, and a collection that applies several of them as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import ANY_GPU, Kernel
from tb_memplugin.estimate.libraries.plugins import Plugin
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.simulator.allocator_settings import AllocatorSettings


@dataclass(slots=True)
class Target:
    """What is estimated for: the device, its allocator's settings, and the library plugins in use.

    `notes` are sentences on what is modelled or not known; each appears once. `not_counted_bytes` is by how
    much that might raise the peak, where this is known.
    """

    device_type: str
    gpu: GpuSpec | None
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    plugins: Sequence[Plugin] = ()
    notes: list[str] = field(default_factory=list)
    not_counted_bytes: int = 0

    def note(self, sentence: str) -> None:
        """Add a note for the reader of the estimate, unless it is there already."""
        if sentence not in self.notes:
            self.notes.append(sentence)


class Correction:
    """Corrects one thing that fake tensors get wrong. Subclasses override only the methods that they need."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def rules(self) -> dict[Any, Rule]:
        """Return rules for operators whose results FakeTensorMode gets wrong."""
        return {}

    def after(self) -> dict[Any, After]:
        """Return functions for operators whose kernels allocate more than their results."""
        return {}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace attributes of libraries while the estimate runs."""

    def refusal(self, func: Any, error: Exception) -> Exception | None:
        """Return the error to raise in place of an operator's error; None if this correction has none."""
        return None


class Libraries(Correction):
    """Enters the patch of every plugin that applies."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Enter the plugins' patches; the last one is exited first."""
        for plugin in self.target.plugins:
            if plugin.applies():
                patch = plugin.patch()
                patch.__enter__()
                patches.on_undo(lambda patch=patch: patch.__exit__(None, None, None))  # type: ignore[misc]


class Corrections:
    """Several corrections as one.

    Args:
        parts: the corrections; without any, fake tensors behave as in torch.
        kernels: by operator, what kernels allocate.
        gpu: the GPU whose kernels they are; None for no particular one.
        engine_adds_in_place: whether gradients that autograd's engine sums are counted as summed in place,
            as without modes.

    Raises:
        ValueError: two parts have a rule for one operator, or a part and a kernel.
    """

    def __init__(
        self,
        parts: Sequence[Correction],
        kernels: Mapping[Any, Kernel] = MappingProxyType({}),
        *,
        gpu: GpuSpec | None = None,
        engine_adds_in_place: bool,
    ) -> None:
        self.parts, self.kernels, self.gpu = list(parts), kernels, gpu or ANY_GPU
        self.engine_adds_in_place = engine_adds_in_place
        self.rules: dict[Any, Rule] = {
            operator: kernel.results for operator, kernel in kernels.items() if kernel.results is not None
        }
        self.after: dict[Any, After] = {}
        self._patches = Patches()
        for part in self.parts:
            rules = part.rules()
            if twice := self.rules.keys() & rules.keys():
                raise ValueError(f"{type(part).__name__} has a second rule for {', '.join(map(str, twice))}")
            self.rules |= rules
            for operator, more in part.after().items():
                earlier = self.after.get(operator)
                self.after[operator] = more if earlier is None else _both(earlier, more)

    def apply(self, mode: CountingFakeMode) -> None:
        """Apply every correction."""
        for part in self.parts:
            part.apply(mode, self._patches)

    def undo(self) -> None:
        """Restore what `apply` replaced."""
        self._patches.undo()

    def refusal(self, func: Any, error: Exception) -> Exception | None:
        """Return the error to raise in place of an operator's error; None if no part has one."""
        refusals = (part.refusal(func, error) for part in self.parts)
        return next((refusal for refusal in refusals if refusal is not None), None)


def _both(first: After, second: After) -> After:
    """Return a function that runs two corrections of one operator."""

    def run(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
        first(mode, func, args, out, scope)
        second(mode, func, args, out, scope)

    return run
