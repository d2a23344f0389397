"""Run Python on the stand-in for a GPU (docs/gpu.md): `python -m tests.gpu.standin -m pytest tests/gpu`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tb_memplugin.dryrun.build import stand_in
from tb_memplugin.dryrun.engine import environment
from tb_memplugin.estimate.gpu_spec import GpuSpec

ASKS_CUDNN = os.environ.get("STANDIN_CUDNN_WORKSPACES") == "1"
ASKED = {} if ASKS_CUDNN else {"TB_MEMPLUGIN_CUDNN": "none"}
"""Estimates count workspaces of cuDNN where the stand-in has them."""
RECURRENT = {"STANDIN_RECURRENT_SIZES": str(Path(__file__).with_name("recurrent_sizes.txt"))}


def main() -> None:
    """Run this interpreter with the arguments, as the GPU that STANDIN_GPU names, with STANDIN_BYTES."""
    gpu = GpuSpec.named(os.environ.get("STANDIN_GPU", "h100"))
    if (size := os.environ.get("STANDIN_BYTES")) is not None:
        gpu = gpu.with_memory(int(size))
    devices = int(os.environ.get("STANDIN_DEVICES", "1"))
    with tempfile.TemporaryDirectory(prefix="standin") as folder:
        variables = environment(stand_in(), gpu, Path(folder), devices=devices, asks_cudnn=ASKS_CUDNN)
        variables |= ASKED | RECURRENT
        sys.exit(os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv[1:]], variables))


if __name__ == "__main__":
    main()
