"""The plugins of libraries, put in place while an estimate runs."""

from __future__ import annotations

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches
from tb_memplugin.estimate.plugins import PLUGINS


class Libraries(Correction):
    """Every plugin whose library is there, and that is not switched off."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Enter the plugins; the last is left first."""
        for plugin in PLUGINS:
            if plugin.applies():
                patch = plugin.patch()
                patch.__enter__()
                patches.on_undo(lambda patch=patch: patch.__exit__(None, None, None))  # type: ignore[misc]
