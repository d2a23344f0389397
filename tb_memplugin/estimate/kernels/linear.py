"""Count the bias of `linear` as added in place where the input is not contiguous.

Under any dispatch mode it is added out of place, which allocates one result too many
(aten/src/ATen/native/Linear.cpp, linear: isTensorSubclassLike). Contiguous inputs use `addmm`, which has no
separate addition.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class BiasInPlace(Correction):
    """Tells the mode when `torch.nn.functional.linear` runs."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap the function that layers call."""
        original: Any = functional.linear

        def linear(*args: Any, **kwargs: Any) -> Any:
            if not mode.is_here or any(
                type(argument) is not FakeTensor for argument in (*args, *kwargs.values())
            ):
                return original(*args, **kwargs)  # a real run also adds out of place for subclasses (DTensor)
            with mode.adding_in_place():
                return original(*args, **kwargs)

        patches.set(functional, "linear", linear)
