"""Make transformers build attention masks as in a real run, where it omits masks that mask nothing.

For fake tensors, transformers keeps every mask (`is_tracing`, masking_utils.py). Flash attention accepts no
mask, so a fake run would use another kernel. With this correction transformers reads the values as in a real
run; values.py answers that nothing is padded or packed, unless a hint says otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


class AttentionMasks(Correction):
    """Replaces `is_tracing` in the modules that make masks by one that does not look at the tensor."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace it in the modules that are imported now, and in others when a module first runs after."""
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
