"""What a correction is, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.patches import Patches
from tb_memplugin.estimate.plugins.plugin import Plugin


@dataclass(slots=True)
class Target:
    """What an estimate is for: `plugins` are of libraries that it lets run.

    `notes` are sentences on what is modelled or not known, each once.
    """

    device_type: str
    gpu: GpuSpec | None
    has_device: bool
    plugins: Sequence[Plugin] = ()
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Tell the reader of the estimate, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)


class Correction:
    """One thing that fake tensors get wrong. What a correction does not need it leaves as it is here."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def rules(self) -> dict[Any, Rule]:
        """Operators that give something else than FakeTensorMode says."""
        return {}

    def after(self) -> dict[Any, After]:
        """Operators whose kernels take more than their results."""
        return {}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace attributes of libraries while the estimate runs."""

    def refusal(self, func: Any, error: Exception) -> Exception | None:
        """What to say in place of an operator's error; None where it is somebody else's matter."""
        return None


class Corrections:
    """Several corrections as one.

    Args:
        parts: the corrections; none leaves fake tensors as torch has them.
        engine_adds_in_place: whether autograd's engine adds gradients up in place, as it does without modes.
    """

    def __init__(self, parts: Sequence[Correction], *, engine_adds_in_place: bool) -> None:
        self.parts = list(parts)
        self.engine_adds_in_place = engine_adds_in_place
        self.rules: dict[Any, Rule] = {}
        self.after: dict[Any, After] = {}
        self._patches = Patches()
        for part in self.parts:
            self.rules |= part.rules()
            for operator, more in part.after().items():
                known = self.after.get(operator)
                self.after[operator] = more if known is None else _both(known, more)

    def apply(self, mode: CountingFakeMode) -> None:
        """Put every correction in place."""
        for part in self.parts:
            part.apply(mode, self._patches)

    def undo(self) -> None:
        """Put back what `apply` replaced."""
        self._patches.undo()

    def refusal(self, func: Any, error: Exception) -> Exception:
        """What to raise for an operator's error."""
        for part in self.parts:
            told = part.refusal(func, error)
            if told is not None:
                return told
        return error


def _both(first: After, second: After) -> After:
    """Two corrections of one operator."""

    def run(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
        first(mode, func, args, out, place)
        second(mode, func, args, out, place)

    return run
