"""Make `one_hot` as a real run does: zeros, and a one scattered into each row.

Fake tensors compare with all classes instead, which takes a mask of the same shape
(aten/src/ATen/native/Onehot.cpp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class OneHot(Correction):
    """Replaces the function where the number of classes is given."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap `torch.nn.functional.one_hot`."""
        original: Any = functional.one_hot

        def one_hot(tensor: Any, num_classes: int = -1) -> Any:
            if type(tensor) is not FakeTensor or not mode.is_here or num_classes <= 0:
                return original(tensor, num_classes)
            rows = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
            return rows.scatter_(-1, tensor.unsqueeze(-1), 1)

        patches.set(functional, "one_hot", one_hot)
