"""Make `device='cuda'` work without a GPU: PyTorch knows a device, and `torch.cuda` answers for it."""

from __future__ import annotations

import torch

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
        """Make `torch.cuda` describe the target; without a GPU, also switch the shim and stand-ins on."""
        if self.target.device_type != "cuda":
            return
        fake_cuda.describe(patches, self.target.gpu)
        CudaMemory(mode, self.target.gpu, self.target.settings, self.target.note).apply(patches)
        if self.target.has_device:
            device = torch.cuda.current_device()
            mode.ledger.stream = lambda: torch._C._cuda_getCurrentRawStream(device)
            return
        cuda_shim.switch(True)
        patches.on_undo(lambda: cuda_shim.switch(False))
        fake_cuda.stand_in(patches, mode, self.target.gpu, self.target.note)
