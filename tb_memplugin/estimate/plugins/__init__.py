"""Libraries that need help to run on fake tensors: one plugin a file, all on by default."""

from tb_memplugin.estimate.plugins.device_mesh import DeviceMeshes
from tb_memplugin.estimate.plugins.fully_sharded import FullySharded
from tb_memplugin.estimate.plugins.plugin import Plugin, replaced

PLUGINS: list[Plugin] = [DeviceMeshes(), FullySharded()]
"""What every estimate uses. Append your own, or remove one, before the estimate begins."""

__all__ = ["PLUGINS", "DeviceMeshes", "FullySharded", "Plugin", "replaced"]
