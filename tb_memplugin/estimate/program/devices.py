"""Make `device='cuda'` work without a GPU: PyTorch knows a device, and `torch.cuda` answers for it."""

from __future__ import annotations

from tb_memplugin.estimate.run import cuda_shim, fake_cuda
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.cuda_memory import CudaMemory
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class Devices(Correction):
    """Provides a CUDA device.

    It also keeps autocast and GradScaler on, which switch themselves off where `torch.cuda.is_available`
    returns False.
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Make `torch.cuda` describe the target; a GPU of this machine is not asked."""
        if self.target.device_type != "cuda":
            return
        fake_cuda.describe(patches, self.target.gpu)
        CudaMemory(mode, self.target.gpu, self.target.settings, self.target.note).apply(patches)
        cuda_shim.switch(True)
        patches.on_undo(lambda: cuda_shim.switch(False))
        fake_cuda.stand_in(patches, mode, self.target.gpu, self.target.note)
