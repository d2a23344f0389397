"""transformers' attention masks: built as for a real run, which leaves masks out that mask nothing.

transformers asks whether a tensor is fake, and then keeps every mask (`is_tracing`, masking_utils.py): flash
attention takes none, so that fake runs would get another kernel. Here it looks at the values as in a real
run; values.py answers that nothing is padded or packed, unless a hint says otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches

_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


class AttentionMasks(Correction):
    """`is_tracing` of the modules that make masks does not look at the tensor."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Now, and for what is imported inside the block when a module first runs after that."""
        missing = set(_MODULES)

        def replace(*_: object) -> None:
            for name in missing & sys.modules.keys():
                missing.discard(name)
                _replace(sys.modules[name], patches)

        replace()
        patches.on_undo(register_module_forward_pre_hook(replace).remove)


def _replace(module: Any, patches: Patches) -> None:
    original = getattr(module, "is_tracing", None)
    if original is not None:
        patches.set(module, "is_tracing", lambda tensor=None: original())
