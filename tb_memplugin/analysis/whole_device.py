"""What fills a whole device, in words: the bar of the Overview, and the lines of `peak` and `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tb_memplugin.analysis.account import MOMENTS
from tb_memplugin.analysis.units import part_text, size_text
from tb_memplugin.trace import DevicePart, MemoryTrace, Moment, WholeDevice
from tb_memplugin.trace.counters import parts_of

if TYPE_CHECKING:
    from tb_memplugin.trace.step_figures import DeviceFigures

PARTS = {
    DevicePart.REQUESTED: "allocated by PyTorch",
    DevicePart.ROUNDING: "added by rounding",
    DevicePart.ALLOCATED: "allocated by PyTorch, with rounding",
    DevicePart.CACHED: "reserved by PyTorch, not allocated",
    DevicePart.PRIVATE_POOLS: "reserved in private pools (CUDA graphs), not allocated",
    DevicePart.CONTEXT: "CUDA context and libraries",
    DevicePart.OUTSIDE: "NCCL, CUDA graphs and libraries since the first reading",
    DevicePart.OTHER_PROCESSES: "other processes",
    DevicePart.DRIVER: "driver",
    DevicePart.FREE: "free",
    DevicePart.RESIDENT: "resident in this process",
    DevicePart.PROCESS: "this process",
    DevicePart.CHILDREN: "its children",
    DevicePart.FILES: "files in memory",
}


def whole_of(trace: MemoryTrace, device: int) -> tuple[WholeDevice, ...]:
    """Return what filled a whole device, in the order of the moments; () if nothing was read."""
    return tuple(reading for reading in trace.whole_devices if reading.device == device)


def whole_of_step(device: DeviceFigures, row: int) -> WholeDevice | None:
    """Return what filled a whole device when a step ended that `MemoryMonitor` watched; None if not known.

    Args:
        row: the step's row in them.
    """
    if device.whole_free is None or device.whole_total is None or device.whole_total[row] < 0:
        return None
    end, sizes = int(device.end[row]), {DevicePart.FREE: int(device.whole_free[row])}
    if device.end_reserved is None:
        sizes[DevicePart.RESIDENT] = end
    else:
        sizes[DevicePart.CACHED] = int(device.end_reserved[row]) - end
        requested = None if device.end_requested is None else int(device.end_requested[row])
        if requested is None or requested < 0:
            sizes[DevicePart.ALLOCATED] = end
        else:
            sizes |= {DevicePart.REQUESTED: requested, DevicePart.ROUNDING: end - requested}
    return WholeDevice(0, Moment.END, Moment.END, parts_of(int(device.whole_total[row]), sizes))


def part_name(part: DevicePart, reading: WholeDevice) -> str:
    """Return a part in words. What is not known is named with what it may be."""
    if part is not DevicePart.UNKNOWN:
        return PARTS[part]
    parts = dict(reading.parts)
    if parts[part] < 0:
        return "counted twice, because not all was read at one instant"
    if DevicePart.RESIDENT in parts:
        others = "children, other processes, files in memory, the system"
        return f"not known: {others if DevicePart.FREE in parts else 'all other memory'}"
    if DevicePart.PROCESS in parts:
        children = "" if DevicePart.CHILDREN in parts else "children, "
        return f"not known: {children}other processes and the system"
    if DevicePart.CONTEXT in parts:
        return "not known"
    return "not known: CUDA context, NCCL, CUDA graphs, other processes"


def whole_name(reading: WholeDevice, device: str) -> str:
    """Return what the whole is, in words."""
    if device == "process":
        return "the machine's memory or its cgroup's limit"
    if device != "cpu":
        return "the whole device"
    return "the cgroup's limit" if reading.is_limit else "the machine's memory"


def moment_text(reading: WholeDevice) -> str:
    """Return when it was, in words; for parts that were read at another moment, also that one."""
    text = MOMENTS[reading.moment]
    if reading.read_at is not reading.moment:
        return f"{text} (what is not PyTorch's: {MOMENTS[reading.read_at]})"
    return text


def whole_line(of_device: Sequence[WholeDevice], device: str) -> str | None:
    """Return what fills a device at the peak, else at the last moment that was read; None if nothing was."""
    if not of_device:
        return None
    peak = next((reading for reading in of_device if reading.moment is Moment.PEAK), None)
    resident = dict(peak.parts).get(DevicePart.RESIDENT) if peak is not None else None
    reading = peak if peak is not None and resident is None else of_device[-1]
    parts = ", ".join(
        f"{part_text(size, reading.total)} {part_name(part, reading)}" for part, size in reading.parts
    )
    most = "" if resident is None else f"; the most resident in this process was {size_text(resident)}"
    return f"{whole_name(reading, device)} {moment_text(reading)}, {size_text(reading.total)}: {parts}{most}"
