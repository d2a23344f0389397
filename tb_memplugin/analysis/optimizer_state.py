"""Advice: optimizer state that takes a large part of the peak, by dtype."""

from __future__ import annotations

import re

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words, share
from tb_memplugin.analysis.highest_step import highest_step
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.tables import Int64

LEAST_SHARE = 0.25
"""Of the peak that is optimizer state."""

DTYPE_BYTES = "dtype_bytes."
"""What a property begins with that tells bytes of storages by dtype: `dtype_bytes.CATEGORY.DEVICE.DTYPE`."""

_BITS = re.compile(r"\d+")
_STATE = re.compile(r"\(([^()]{1,80})\)$")


def optimizer_state(trace: MemoryTrace, device: int) -> Result:
    """Optimizer state of 4 bytes an element or more that makes a quarter of the peak.

    Its bytes are what it would take less with 1 byte an element, as 8-bit optimizers keep it (their
    scales, some 2 % of that, not counted).
    """
    name = trace.devices[device].name
    blocks = trace.allocations
    if not ((blocks.category == Category.OPTIMIZER_STATE) & (blocks.device == device)).any():
        return NotJudged("No optimizer state is known: there is none, or the recording does not tell it.")
    step = highest_step(trace, device)
    alive = blocks.alive_at(step.peak_event, device)
    state = alive[blocks.category[alive] == Category.OPTIMIZER_STATE]
    held = int(blocks.bytes[state].sum())
    dtypes = _dtypes(trace, Category.OPTIMIZER_STATE, name)
    if held < LEAST_SHARE * step.peak_bytes:
        told = f" ({_listed(dtypes)})" if dtypes else ""
        part = f"{share(held, step.peak_bytes)} of the peak of step {step.number}"
        return Fine(f"Optimizer state takes {in_words(held)}{told}, {part}.")
    if not dtypes:
        return NotJudged(
            f"The recording does not tell the dtypes of its {in_words(held)} of optimizer state: "
            "torch.profiler with memory_trace_handler does, and so does MemoryTracer."
        )
    wide = sum(size for dtype, size in dtypes.items() if element_bytes(dtype) >= 4)
    saved = sum(
        size - size // element_bytes(dtype) for dtype, size in dtypes.items() if element_bytes(dtype) >= 4
    )
    if wide < LEAST_SHARE * step.peak_bytes:
        return Fine(f"It is {_listed(dtypes)}: little of it could be narrower.")
    parameters = _dtypes(trace, Category.PARAMETER, name)
    beside = f", beside parameters that are {_listed(parameters)}" if parameters else ""
    part = f"{share(held, step.peak_bytes)} of the peak"
    return Finding(
        kind="optimizer_state",
        level="option",
        device=name,
        step=step.number,
        title=f"Optimizer state makes {part}, {_listed(dtypes)}{beside}.",
        subject="",
        bytes=saved,
        measure="less with 8-bit state",
        of_bytes=step.peak_bytes,
        evidence=(
            *(_of_dtype(dtype, size) for dtype, size in dtypes.items()),
            *_by_state(trace, state),
            Evidence(f"peak of step {step.number}", step.peak_bytes, "as recorded", False),
        ),
        where=Where("modules", (("step", str(step.number)), ("sort", "optimizer"))),
        what_to_do="Try an optimizer with 8-bit state (bitsandbytes, torchao), one that keeps less of it "
        "(Adafactor, Lion, SGD), or shard it over ranks (FSDP, ZeroRedundancyOptimizer).",
        price="other numerics: check that the loss still falls as before",
    )


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype by its name: "float32" has 4, "float8_e4m3fn" 1; without a number 1."""
    bits = _BITS.search(dtype)
    return max(int(bits.group()[:4]) // 8, 1) if bits else 1


def _dtypes(trace: MemoryTrace, category: Category, device: str) -> dict[str, int]:
    """Bytes by dtype, largest first, as the source noted them."""
    beginning = f"{DTYPE_BYTES}{category.key}.{device}."
    found = {
        key.removeprefix(beginning): int(value)
        for key, value in trace.properties.items()
        if key.startswith(beginning) and value.isascii() and value.isdigit() and len(value) < 19
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _listed(dtypes: dict[str, int]) -> str:
    if len(dtypes) == 1:
        return f"all {next(iter(dtypes))}"
    return ", ".join(f"{dtype} {in_words(size)}" for dtype, size in list(dtypes.items())[:3])


def _of_dtype(dtype: str, size: int) -> Evidence:
    narrow = size // element_bytes(dtype)
    return Evidence(dtype, size, f"{element_bytes(dtype)} bytes an element; {in_words(narrow)} with one")


def _by_state(trace: MemoryTrace, rows: Int64) -> list[Evidence]:
    """Bytes by the name within the optimizer's state: `exp_avg`, `momentum_buffer`, ..."""
    names: dict[str, int] = {}
    found = [_STATE.search(label) for label in trace.labels]
    place = [names.setdefault(match.group(1) if match else "", len(names)) for match in found]
    none = names.setdefault("", len(names))
    code = np.array([*place, none], np.int64)[trace.allocations.label[rows]]
    size, count = (
        sums(code, trace.allocations.bytes[rows], len(names)),
        np.bincount(code, minlength=len(names)),
    )
    told = sorted(((int(size[row]), int(count[row]), name) for name, row in names.items()), reverse=True)
    return [
        Evidence(name, bytes_, f"{blocks:,} tensors") for bytes_, blocks, name in told[:4] if name and bytes_
    ]
