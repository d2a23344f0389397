"""The GPUs that an estimate can target, with the properties that decide a step's memory and whether it fits.

The source of every number is in docs/gpus.md. All sizes are bytes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from tb_memplugin.errors import MemPluginError
from tb_memplugin.read.cublas import LARGE_WORKSPACE, WORKSPACE, Version

MIB = 1 << 20

LARGE_WORKSPACE_MAJORS = (9, 10, 12)
"""Major compute capabilities with the large cuBLAS workspace; Blackwell since PyTorch 2.12 (PR 175344)."""

LARGE_ON_BLACKWELL_FROM = (2, 12)
"""The first version of PyTorch with the large workspace on Blackwell."""

CUDNN_FIRST_FROM = (2, 11)
"""The first version of PyTorch whose wheels have a cuDNN that `scaled_dot_product_attention` tries first."""

KNOWN_VERSIONS = ((2, 6), (2, 15))
"""The lowest and the highest version of PyTorch whose rules were seen (docs/gpus.md)."""

CUDNN_FIRST_MAJORS = (9, 10)
"""Major compute capabilities on which `scaled_dot_product_attention` tries cuDNN first.

It does so if cuDNN is newer than 9.15.0 (sdp_utils.cpp).
"""

FIRST_WITH_FLASH = (8, 0)
"""The lowest compute capability on which PyTorch's flash attention runs (sdp_utils.cpp)."""

SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (9, 0): 227, (10, 0): 227}
"""Shared memory of a block by compute capability; 99 on all others in the table (CUDA programming guide)."""

BEHIND_A_VENDOR = ("nvidia", "geforce", "tesla", "quadro")
"""Words in the driver's name of a device that names in `GPUS` leave out."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        name: a name from `GpuSpec.names()`.
        memory_bytes: the total memory that a process can use: the lowest value that drivers reported.
        compute_capability: (major, minor).
        torch: the version of PyTorch whose rules apply; None for that of the process that estimates.
        context_bytes: the part of it that the CUDA context takes, outside PyTorch's allocator: the lowest
            value measured, since it grows with the kernels that a program loads; None if not known.
        driver: its name by NVIDIA's driver, which programs compare, if not `name`; the SXM form of several.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    context_bytes: int | None = None
    processors: int = 108
    torch: Version | None = None
    driver: str = ""

    @classmethod
    def named(cls, name: str) -> GpuSpec:
        """Return the GPU with a name. Case, spaces, dashes and vendor words are ignored: `NVIDIA A100-80GB`.

        Raises:
            MemPluginError: no GPU of the table has this name, or it is one of AMD's.
        """
        key = _key(name)
        if (gpu := _BY_KEY.get(key)) is not None:
            return gpu
        if key.startswith(("amd", "instinct", "radeon")) or key in OF_AMD:
            raise MemPluginError(
                f"{name[:80]!r} is a GPU of AMD: what PyTorch's kernels allocate there is not known.",
                where="gpu",
                fix="Choose a GPU of NVIDIA.",
            )
        near = [_BY_KEY[match].name for match in difflib.get_close_matches(key[:80], _BY_KEY, 3)]
        meant = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
        raise MemPluginError(
            f"{name[:80]!r} is not the name of a GPU.",
            where="gpu",
            fix=f"{meant}Use one of {', '.join(cls.names())}; or one of these with another size of memory.",
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return every name, the oldest generation first."""
        return tuple(spec.name for spec in GPUS)

    def with_memory(self, memory_bytes: int) -> GpuSpec:
        """Return this GPU with another memory size in bytes, such as what other programs leave free.

        Raises:
            MemPluginError: the size is not positive.
        """
        if memory_bytes <= 0:
            raise MemPluginError(f"A GPU cannot have a memory of {memory_bytes} bytes.", where=self.name)
        return replace(self, memory_bytes=memory_bytes)

    def with_torch(self, version: str) -> GpuSpec:
        """Return this GPU under the rules of a version of PyTorch, such as `2.11` or `2.11.0+cu128`.

        Raises:
            MemPluginError: that is no version, or one whose rules were not seen.
        """
        parts = re.match(r"(\d{1,4})\.(\d{1,4})(?![\d])", version)
        lowest, highest = KNOWN_VERSIONS
        capability = (int(parts[1]), int(parts[2])) if parts else None
        if capability is None or not lowest <= capability <= highest:
            raise MemPluginError(
                f"The rules of PyTorch {version[:40]!r} are not known.",
                where="--torch",
                fix="Give a version from 2.6 to 2.15, such as 2.11.",
            )
        return replace(self, torch=capability)

    @property
    def usable_bytes(self) -> int:
        """Bytes that PyTorch's allocator can reserve: all but the CUDA context, where its size is known."""
        return max(self.memory_bytes - (self.context_bytes or 0), 0)

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of a cuBLAS workspace, without CUBLAS_WORKSPACE_CONFIG (CublasHandlePool.cpp).

        PyTorch allocates it once for each handle (one per thread) and stream; since 2.15, for each product.
        """
        major = self.compute_capability[0]
        if major >= 10 and self.torch is not None and self.torch < LARGE_ON_BLACKWELL_FROM:
            return WORKSPACE
        return LARGE_WORKSPACE if major in LARGE_WORKSPACE_MAJORS else WORKSPACE

    @property
    def driver_name(self) -> str:
        """What `torch.cuda.get_device_name` returns."""
        return self.driver or self.name

    @property
    def threads(self) -> int:
        """How many threads a multiprocessor runs at once (CUDA programming guide, technical data)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.compute_capability, 2048)

    @property
    def blocks(self) -> int:
        """How many blocks a multiprocessor runs at once (CUDA programming guide, technical data)."""
        return {(7, 5): 16, (8, 6): 16, (8, 9): 24, (12, 0): 24}.get(self.compute_capability, 32)

    @property
    def shared_bytes(self) -> int:
        """The most bytes of shared memory that a block of threads can have (sharedMemPerBlockOptin)."""
        return SHARED_KIB.get(self.compute_capability, 99) << 10

    @property
    def sdpa_order(self) -> tuple[str, ...]:
        """Kernels that `scaled_dot_product_attention` tries, in order; "math" accepts all inputs.

        The others each have limits on dtypes and shapes. cuDNN comes first since PyTorch 2.11, with the cuDNN
        of its wheels (sdp_utils.cpp: priority_order, check_prefer_cudnn_attention, check_sm_version).
        """
        if self.compute_capability < FIRST_WITH_FLASH:
            return ("efficient", "math")
        older = self.torch is not None and self.torch < CUDNN_FIRST_FROM
        if self.compute_capability[0] in CUDNN_FIRST_MAJORS and not older:
            return ("cudnn", "flash", "efficient", "math")
        return ("flash", "efficient", "math")


GPUS = (
    GpuSpec("v100-16gb", 16_130 * MIB, (7, 0), processors=80, driver="Tesla V100-SXM2-16GB"),
    GpuSpec("v100-32gb", 32_510 * MIB, (7, 0), processors=80, driver="Tesla V100-SXM2-32GB"),
    GpuSpec("t4", 14_930 * MIB, (7, 5), 100 * MIB, processors=40, driver="Tesla T4"),
    GpuSpec("a100-40gb", 40_448 * MIB, (8, 0), 414 * MIB, processors=108, driver="NVIDIA A100-SXM4-40GB"),
    GpuSpec("a100-80gb", 81_152 * MIB, (8, 0), processors=108, driver="NVIDIA A100-SXM4-80GB"),
    GpuSpec("a800", 81_228 * MIB, (8, 0), 522 * MIB, processors=108, driver="NVIDIA A800-SXM4-80GB"),
    GpuSpec("a10", 22_517 * MIB, (8, 6), processors=72, driver="NVIDIA A10"),
    GpuSpec("a10g", 22_587 * MIB, (8, 6), processors=80, driver="NVIDIA A10G"),
    GpuSpec("rtx3090", 24_259 * MIB, (8, 6), 256 * MIB, processors=82, driver="NVIDIA GeForce RTX 3090"),
    GpuSpec("rtxa6000", 48_676 * MIB, (8, 6), processors=84, driver="NVIDIA RTX A6000"),
    GpuSpec("l4", 22_558 * MIB, (8, 9), 236 * MIB, processors=58, driver="NVIDIA L4"),
    GpuSpec("l20", 45_593 * MIB, (8, 9), processors=92, driver="NVIDIA L20"),
    GpuSpec("l40s", 45_589 * MIB, (8, 9), processors=142, driver="NVIDIA L40S"),
    GpuSpec("rtx4090", 24_084 * MIB, (8, 9), 473 * MIB, processors=128, driver="NVIDIA GeForce RTX 4090"),
    GpuSpec("h100", 81_008 * MIB, (9, 0), processors=132, driver="NVIDIA H100 80GB HBM3"),
    GpuSpec("h100-nvl", 95_232 * MIB, (9, 0), processors=132, driver="NVIDIA H100 NVL"),
    GpuSpec("h20", 97_285 * MIB, (9, 0), processors=78, driver="NVIDIA H20"),
    GpuSpec("h200", 143_156 * MIB, (9, 0), processors=132, driver="NVIDIA H200"),
    GpuSpec("b200", 182_631 * MIB, (10, 0), 711 * MIB, processors=148, driver="NVIDIA B200"),
    GpuSpec("rtx5090", 32_112 * MIB, (12, 0), 595 * MIB, processors=170, driver="NVIDIA GeForce RTX 5090"),
    GpuSpec(
        "rtxpro6000",
        97_249 * MIB,
        (12, 0),
        processors=188,
        driver="NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ),
)
"""The source of each number is in docs/gpus.md."""

OTHER_NAMES = {
    "v100": "v100-32gb",
    "v100-16": "v100-16gb",
    "v100-32": "v100-32gb",
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100-80gb": "h100",
    "h100-80gb-hbm3": "h100",
    "a6000": "rtxa6000",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "a800-80gb": "a800",
    "rtx-pro-6000-blackwell": "rtxpro6000",
    "rtx-pro-6000-blackwell-server-edition": "rtxpro6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtxpro6000",
    "rtx-pro-6000-blackwell-max-q-workstation-edition": "rtxpro6000",
}
"""Other names in use. A name that stands for several memory sizes means the largest."""

OF_AMD = ("mi210", "mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x")
"""Keys of GPUs that are refused by name: cuBLAS, cuDNN and the kernels that were read are NVIDIA's."""


def _key(name: str) -> str:
    """Return a name without case, signs, form factor and vendor: `NVIDIA A100-SXM4-80GB` is `a10080gb`."""
    words = "".join(char if char.isalnum() else " " for char in name.casefold()).split()
    kept = [word for word in words if word not in BEHIND_A_VENDOR and not word.startswith(("sxm", "pcie"))]
    return "".join(kept)


_BY_KEY = {_key(spec.name): spec for spec in GPUS}
_BY_KEY |= {_key(other): _BY_KEY[_key(name)] for other, name in OTHER_NAMES.items()}
