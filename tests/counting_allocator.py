"""An allocator's counters, where no GPU is: they count what they are told, as torch's count what happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tb_memplugin.record.steps.counters import AcceleratorHandle, Doors


class CountingAllocator:
    """Counters of one device in the shape of torch.cuda's, behind functions as those of torch._C."""

    def __init__(self) -> None:
        self.levels = {"allocated_bytes": [0, 0, 0], "reserved_bytes": [0, 0, 0], "allocation": [0, 0, 0]}
        self.retries = self.ooms = self.resets = 0
        self.broken = False
        self.module = SimpleNamespace(read=self.stats, reset=self.reset, other_read=self.stats)

    @property
    def doors(self) -> Doors:
        return Doors(self.module, ("read", "other_read"), ("reset", "absent"))

    def allocate(self, size: int) -> None:
        """Negative sizes free. The reserve grows with what is allocated, and stays."""
        self._add("allocated_bytes", size)
        self._add("allocation", 1 if size > 0 else -1)
        missing = self.levels["allocated_bytes"][0] - self.levels["reserved_bytes"][0]
        if missing > 0:
            self._add("reserved_bytes", missing)

    def briefly(self, size: int) -> None:
        self.allocate(size)
        self.allocate(-size)

    def stats(self, _: int) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("the driver is gone")
        names = ("current", "peak", "allocated")
        counters = {key: {"all": dict(zip(names, row, strict=True))} for key, row in self.levels.items()}
        return {**counters, "num_alloc_retries": self.retries, "num_ooms": self.ooms}

    def reset(self, _: int) -> None:
        self.resets += 1
        for row in self.levels.values():
            row[1] = row[0]

    def user_peak(self) -> int:
        """What `torch.cuda.max_memory_allocated` would say: through the functions as they are now."""
        return int(self.module.read(0)["allocated_bytes"]["all"]["peak"])

    def user_resets(self) -> None:
        self.module.reset(0)

    def _add(self, key: str, size: int) -> None:
        row = self.levels[key]
        row[0] += size
        row[1] = max(row[1], row[0])
        row[2] += max(size, 0)


class Handle(AcceleratorHandle):
    """The device of such an allocator."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda:0"))
        self.used = True

    def in_use(self) -> bool:
        return self.used

    def free(self, index: int) -> tuple[int, int] | None:
        return 60_000, 100_000

    def resolve(self) -> tuple[int, str, str, int | None]:
        return 0, "cuda:0", "A Card", 1000
