"""Advice: optimizer state that takes a large part of the peak, by dtype."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from tb_memplugin.analysis.autograd_graphs import Backwards
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, share
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import part_text, size_text
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64

LEAST_SHARE = 0.25
"""Least share of the peak that must be optimizer state for a finding."""

DTYPE_BYTES = "dtype_bytes."
"""Prefix of trace properties with the bytes of storages by dtype: `dtype_bytes.CATEGORY.DEVICE.DTYPE`."""

WHAT_TO_DO = (
    "Try an optimizer with 8-bit state (bitsandbytes, torchao) or with less state (Adafactor, Lion, SGD), or "
    "shard the state over ranks (FSDP, ZeroRedundancyOptimizer)."
)
PRICE = "different numerics: check that the loss still falls as before"

_BITS = re.compile(r"\d+")
_STATE = re.compile(r"\(([^()]{1,80})\)$")


def optimizer_state(judged: Judged) -> Result:
    """Report optimizer state of 4 or more bytes per element if it makes up a quarter of the peak or more.

    The finding's bytes are the saving with 1 byte per element, as in 8-bit optimizers (whose scales, about
    2 % of that, are not counted). Where the recording lacks dtypes, they are a lower bound: see
    `_finding_by_size`.
    """
    trace, device, step = judged.trace, judged.device, judged.step
    blocks = trace.allocations
    if not ((blocks.category == Category.OPTIMIZER_STATE) & (blocks.device == device)).any():
        return NotJudged(
            "No optimizer state was found: there is none, or the recording does not identify it."
        )
    alive = blocks.alive_at(step.peak_event, device)
    state = alive[blocks.category[alive] == Category.OPTIMIZER_STATE]
    if isinstance(replaced := _replaced(judged), Finding):
        return replaced
    state_bytes = int(blocks.bytes[state].sum())
    dtypes = _dtypes(trace, Category.OPTIMIZER_STATE, judged.name)
    if state_bytes < LEAST_SHARE * step.peak_bytes:
        by_dtype = f" ({_listed(dtypes)})" if dtypes else ""
        part = f"{share(state_bytes, step.peak_bytes)} of the peak of step {step.number}"
        return Fine(f"Optimizer state takes {size_text(state_bytes)}{by_dtype}, {part}.")
    if not dtypes:
        return _finding_by_size(judged, state)
    wide = sum(size for dtype, size in dtypes.items() if element_bytes(dtype) >= 4)
    saved = sum(
        size - size // element_bytes(dtype) for dtype, size in dtypes.items() if element_bytes(dtype) >= 4
    )
    if wide < LEAST_SHARE * step.peak_bytes:
        return Fine(f"It is {_listed(dtypes)}: little of it could use a narrower dtype.")
    parameters = _dtypes(trace, Category.PARAMETER, judged.name)
    beside = f"; parameters are {_listed(parameters)}" if parameters else ""
    part = f"{share(state_bytes, step.peak_bytes)} of the peak"
    return judged.finding(
        "optimizer_state",
        "option",
        f"Optimizer state takes {part}: {_listed(dtypes)}{beside}.",
        saved,
        (
            *(_of_dtype(dtype, size) for dtype, size in dtypes.items()),
            *_by_state(trace, state),
            Evidence(f"peak of step {step.number}", step.peak_bytes, "as recorded", False),
        ),
        WHAT_TO_DO,
        view="modules",
        state=[("sort", "optimizer")],
        measure="less with 8-bit state",
        price=PRICE,
    )


def _replaced(judged: Judged) -> Result:
    """Find state of which one line of an optimizer made more blocks than there are parameters of their size.

    The oldest are those of an optimizer that another replaced, if a backward ran in between: a checkpoint is
    loaded by one line, too. The finding's bytes are by how much the highest step's peak falls if each is
    freed when its successor is born.
    """
    trace, blocks = judged.trace, judged.blocks
    category = trace.allocations.category[blocks.rows]
    parameters = Counter(blocks.bytes[(category == Category.PARAMETER) & blocks.at_peak].tolist())
    of_line: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero((category == Category.OPTIMIZER_STATE) & blocks.at_peak).tolist():
        stack = trace.stack(blocks.origins[blocks.origin[index]].stack)
        line, size = next(filter(_is_python, stack), ""), int(blocks.bytes[index])
        if line and parameters[size]:
            of_line.setdefault((line, size), []).append(index)
    pairs = [
        pair
        for (_, size), made in of_line.items()
        for pair in zip(made, made[parameters[size] :], strict=False)
    ]
    old, new = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    first = judged.result(Backwards.of).first
    is_replaced = np.searchsorted(first, blocks.born[old]) < np.searchsorted(first, blocks.born[new])
    old, new = old[is_replaced], new[is_replaced]
    return judged.avoidable(
        "optimizer_state",
        "problem",
        old,
        "The state of an optimizer stays after another took its place: {name}.",
        "No optimizer took the place of another",
        "Before the first step of the new optimizer, free the old one and what else holds it, such as a "
        "scheduler; or change the param_groups of the old one.",
        gone=blocks.born[new],
        without="the old state",
    )


def _is_python(text: str) -> bool:
    return read_frame(text).is_python


def _finding_by_size(judged: Judged, state: Int64) -> Finding:
    """Report state of unknown dtype: 2 bytes per element at least, 4 if twice as wide as parameters."""
    blocks, step = judged.trace.allocations, judged.step
    alive = blocks.alive_at(step.peak_event, judged.device)
    parameter = blocks.bytes[alive[blocks.category[alive] == Category.PARAMETER]]
    size = blocks.bytes[state]
    is_wide = np.isin(size, 2 * parameter) & ~np.isin(size, parameter)
    state_bytes, wide_bytes = int(size.sum()), int(size[is_wide].sum())
    saved = state_bytes - wide_bytes - (state_bytes - wide_bytes) // 2 + wide_bytes - wide_bytes // 4
    beside = wide_bytes > state_bytes // 2
    return judged.finding(
        "optimizer_state",
        "option",
        f"Optimizer state takes {share(state_bytes, step.peak_bytes)} of the peak"
        + (", at twice the bytes per element of the parameters." if beside else "."),
        saved,
        (
            Evidence("optimizer state", state_bytes, f"{len(state):,} blocks", False),
            *(
                [Evidence("twice the size of a parameter", wide_bytes, "4 bytes per element or more", False)]
                if wide_bytes
                else []
            ),
            Evidence("parameters", int(parameter.sum()), f"{len(parameter):,} blocks", False),
            Evidence(
                "with 8-bit state, if all of it is float32",
                state_bytes // 4,
                "the recording does not contain dtypes; 2 bytes per element are the least for training",
                False,
            ),
        ),
        WHAT_TO_DO,
        view="modules",
        state=[("sort", "optimizer")],
        measure="less with 8-bit state, at least",
        price=PRICE,
    )


def element_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype name: "float32" 4, "float8_e4m3fn" 1, without a number 1."""
    bits = _BITS.search(dtype)
    return max(int(bits.group()[:4]) // 8, 1) if bits else 1


def _dtypes(trace: MemoryTrace, category: Category, device: str) -> dict[str, int]:
    """Return the bytes by dtype that the source recorded for a category, largest first."""
    beginning = f"{DTYPE_BYTES}{category.key}.{device}."
    sizes = {
        key.removeprefix(beginning): int(value)
        for key, value in trace.properties.items()
        if key.startswith(beginning) and value.isascii() and value.isdigit() and len(value) < 19
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _listed(dtypes: dict[str, int]) -> str:
    if len(dtypes) == 1:
        return f"all {next(iter(dtypes))}"
    return ", ".join(f"{dtype} {size_text(size)}" for dtype, size in list(dtypes.items())[:3])


def _of_dtype(dtype: str, size: int) -> Evidence:
    narrow = size // element_bytes(dtype)
    return Evidence(
        dtype, size, f"{element_bytes(dtype)} bytes per element; {part_text(narrow, size)} with 1 byte"
    )


def _by_state(trace: MemoryTrace, rows: Int64) -> list[Evidence]:
    """Sum bytes by the name of the entry in the optimizer's state: `exp_avg`, `momentum_buffer`, ..."""
    names: dict[str, int] = {}
    matches = [_STATE.search(label) for label in trace.labels]
    numbers = [names.setdefault(match.group(1) if match else "", len(names)) for match in matches]
    none = names.setdefault("", len(names))
    code = np.array([*numbers, none], np.int64)[trace.allocations.label[rows]]
    size = sums(code, trace.allocations.bytes[rows], len(names))
    count = np.bincount(code, minlength=len(names))
    largest = sorted(((int(size[row]), int(count[row]), name) for name, row in names.items()), reverse=True)
    return [
        Evidence(name, bytes_, f"{tensors:,} tensors")
        for bytes_, tensors, name in largest[:4]
        if name and bytes_
    ]
