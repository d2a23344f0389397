"""`linear` of rows that do not lie one after the other: the bias is added into the product.

Under any mode it is added out of place, one result too many (aten/src/ATen/native/Linear.cpp, linear:
isTensorSubclassLike). Rows that do lie one after the other go to `addmm`, which adds nothing afterwards.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches


class BiasInPlace(Correction):
    """Tells the mode while `torch.nn.functional.linear` runs."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Around the function, as layers call it."""
        original: Any = functional.linear

        def linear(*args: Any, **kwargs: Any) -> Any:
            if not mode.is_here or any(type(one) is not FakeTensor for one in (*args, *kwargs.values())):
                return original(*args, **kwargs)  # of subclasses (DTensor) a real run adds out of place, too
            mode.adds_bias = True
            try:
                return original(*args, **kwargs)
            finally:
                mode.adds_bias = False

        patches.set(functional, "linear", linear)
