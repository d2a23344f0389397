"""Advice: parameters that are in memory twice: master copies, EMA weights, a second model."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tb_memplugin.analysis.block_origins import Judged, StepBlocks
from tb_memplugin.analysis.findings import Evidence, Fine, NotJudged, Result
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.tables import Bool, Int64, UInt8

LEAST_SHARE = 0.05
"""Least share of the peak that the copies must take for a finding."""

FEWEST, FEWEST_SIZES = 4, 2
"""Fewest blocks, and different sizes among them, that are compared: fewer may be alike by chance."""

ALIKE = 0.98
"""Least share of the bytes of the parameters, and of what the other line allocated, that must be alike."""

WIDTHS = {(1, 1): "in the same dtype", (2, 1): "at twice the bytes", (1, 2): "at half the bytes"}
"""How much larger a copy may be than the parameters, as a fraction, and what to say of it."""

OTHERS = (
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.WORKSPACE,
    Category.COMMUNICATION,
    Category.TEMPORARY,
    Category.AUTOGRAD_DETAIL,
)
"""Categories that have the sizes of parameters for other reasons."""

NEW = {"zeros_like", "zeros", "empty_like", "ones_like", "full_like", "zero_"}
"""Operators of blocks that begin with no values of a parameter, such as an optimizer's state."""

WIDER = (1, 2, 4, 8)
"""How many times as large a weight may be that a module computes: of 16 or 32 bits, from 4 or 8."""

WEIGHTED = {"linear", "conv1d", "conv2d", "conv3d"}
"""Operators that take a weight."""

CLONE = "clone"
"""It calls `empty_like`, and copies the values all the same."""


def parameter_copies(judged: Judged) -> Result:
    """Find memory at the peak that repeats the sizes of the model's parameters.

    Copies are blocks of the category parameter_copy; without any, all blocks that one source line
    allocated (of blocks without a stack, those of one category, with a module's name or without), that are
    alive at the peak, and that have the sizes of the parameters which another line allocated, or twice or
    half these sizes; else those of an earlier model; else weights that modules compute. The finding's bytes
    are by how much the highest step's peak falls without the smaller of the two.
    """
    blocks = judged.blocks
    category = judged.trace.allocations.category[blocks.rows]
    copies = (category == Category.PARAMETER_COPY) & blocks.at_peak
    if copies.any():
        saved = _saved(blocks, copies, category)
        return _result(judged, copies, "that are known to be copies", saved)
    if not ((category == Category.PARAMETER) & blocks.at_peak).any():
        return NotJudged("The recording does not tell parameters apart from other memory.")
    copies, how = _repeated(judged, category)
    if not copies.any():
        copies, saved = _of_earlier_model(judged, category)
        if copies.any():
            how = "of an earlier model: the same lines made others of these sizes since"
            return _result(judged, copies, how, saved)
        copies, how = _computed(blocks, category), "computed in forward, from parameters"
    if not copies.any():
        return Fine("No other line allocated blocks of the sizes of the parameters.")
    return _result(judged, copies, how, _saved(blocks, copies, category))


def _repeated(judged: Judged, category: UInt8) -> tuple[Bool, str]:
    """Return the mask of the copies, and how the largest of them compare with the parameters."""
    blocks, modules = judged.blocks, judged.trace.modules
    numbers: dict[str, int] = {}
    line = np.array([numbers.setdefault(origin.line, len(numbers)) for origin in blocks.origins])
    nameless = numbers.get("", -1)
    is_parameter = category == Category.PARAMETER  # `ema = deepcopy(model.to(device))` has both in one line
    group = 2 * line[blocks.origin] + is_parameter
    is_named = blocks.of(lambda origin: origin.module >= 0 and modules[origin.module].is_module)
    group = np.where(line[blocks.origin] == nameless, -1 - 2 * category.astype(np.int64) - is_named, group)
    candidates = ~np.isin(category, OTHERS)
    candidates &= blocks.of(lambda origin: NEW.isdisjoint(origin.names) or CLONE in origin.names)
    candidates &= blocks.at_peak & (is_parameter | ~blocks.of(lambda origin: origin.in_call))
    parameters = [
        key
        for key in np.unique(group[candidates & is_parameter]).tolist()
        if _is_comparable(blocks.bytes[candidates & (group == key)])
    ]
    all_copies, largest, how = np.zeros(len(group), bool), 0, ""
    for key in parameters:
        own = candidates & (group == key)
        sizes, total = Counter(blocks.bytes[own].tolist()), _total(blocks, own)
        for other in np.unique(group[candidates]).tolist():
            copies = candidates & (group == other)
            is_original = other in parameters and (_total(blocks, copies), other) > (total, key)
            if other == key or is_original:
                continue
            for (numerator, denominator), text in WIDTHS.items():
                chosen = _matching(blocks, copies, sizes, numerator, denominator)
                if chosen is not None:
                    all_copies |= chosen
                    largest, how = max((largest, how), (_total(blocks, chosen), text))
                    break
    return all_copies, how


def _of_earlier_model(judged: Judged, category: UInt8) -> tuple[Bool, int]:
    """Return the mask of parameters at the peak, their gradients and state, that a later model repeats.

    The later model's parameters are those made after the last gradient, or without gradients after the last
    forward: by the same lines, in the same sizes, and no more of each. The bytes are by how much the peak
    falls if each block is freed when its successor is born.
    """
    blocks = judged.blocks
    phase = judged.trace.allocations.phase[blocks.rows]
    ran = blocks.born[category == Category.GRADIENT]
    if not len(ran):
        ran = blocks.born[(phase == Phase.FORWARD) & (blocks.born >= 0)]
    parameters = (category == Category.PARAMETER) & blocks.at_peak
    passed = np.searchsorted(ran, blocks.born)
    later: Bool = parameters & (passed == passed[parameters].max())
    earlier: Bool = parameters & ~later & np.isin(blocks.kinds, blocks.kinds[later])
    counts = Counter(blocks.kinds[later].tolist())
    if not counts <= Counter(blocks.kinds[earlier].tolist()) or not _is_comparable(blocks.bytes[earlier]):
        return np.zeros(len(earlier), bool), 0
    state = (category == Category.OPTIMIZER_STATE) & np.isin(blocks.bytes, blocks.bytes[earlier])
    is_later = blocks.born > blocks.born[later].min()
    counts.update(blocks.kinds[state & blocks.at_peak & is_later].tolist())
    earlier |= state & blocks.at_peak & ~is_later
    made = state | (category == Category.PARAMETER)
    of_kind = {kind: np.flatnonzero(made & (blocks.kinds == kind)).tolist() for kind in counts}
    pairs = [pair for kind, rows in of_kind.items() for pair in zip(rows, rows[counts[kind] :], strict=False)]
    old, new = np.array(pairs, np.int64).T
    gradients = (category == Category.GRADIENT) & blocks.at_peak & ~is_later
    gradients &= np.isin(blocks.bytes, blocks.bytes[earlier])
    old = np.append(old, np.flatnonzero(gradients))
    gone = np.append(blocks.born[new], np.full(int(gradients.sum()), blocks.born[later].min()))
    return earlier | gradients, judged.step.saved(blocks.bytes[old], gone + 1, blocks.freed[old])


def _computed(blocks: StepBlocks, category: UInt8) -> Bool:
    """Return the mask of the weights at the peak that modules compute, such as LoRA's W + B @ A.

    They have the size of a parameter, or one of a wider dtype, but of no layer's result, and a layer's result
    is the next block. There are no more of a size than parameters that it may come from, and one that is
    computed anew before the old one is freed.
    """
    forward = (blocks.born >= 0) & blocks.of(lambda origin: origin.in_call and not origin.is_backward)
    layer = forward & blocks.of_operators(WEIGHTED)
    before_layer = forward & np.append(layer[1:], False) & blocks.at_peak
    most = Counter(np.outer(blocks.bytes[category == Category.PARAMETER], WIDER).ravel().tolist())
    number = Counter(blocks.bytes[before_layer & ~np.isin(blocks.bytes, blocks.bytes[layer])].tolist())
    sizes = [size for size in number if number[size] <= most[size] + 1]
    copies: Bool = before_layer & np.isin(blocks.bytes, sizes)
    return copies if copies.sum() >= FEWEST else np.zeros(len(copies), bool)


def _is_comparable(size: Int64) -> bool:
    return len(size) >= FEWEST and len(np.unique(size)) >= FEWEST_SIZES


def _total(blocks: StepBlocks, chosen: Bool) -> int:
    return int(blocks.bytes[chosen].sum())


def _matching(
    blocks: StepBlocks, copies: Bool, sizes: Counter[int], numerator: int, denominator: int
) -> Bool | None:
    """Return the mask of the blocks with the sizes of parameters times a fraction; None if too few.

    A line may have made several copies, of which the last may replace another just now.
    """
    of_sizes = {size * numerator // denominator: count for size, count in sizes.items()}
    chosen = copies & np.isin(blocks.bytes, list(of_sizes))
    once = sum(size * count for size, count in of_sizes.items())
    times = max(round(_total(blocks, copies) / once), 1)
    found = Counter(blocks.bytes[chosen].tolist())
    matched = sum(size * min(found[size], count * times) for size, count in of_sizes.items())
    alike = matched >= ALIKE * once * times and _total(blocks, chosen) >= ALIKE * _total(blocks, copies)
    return chosen if alike and _is_comparable(blocks.bytes[chosen]) else None


def _saved(blocks: StepBlocks, copies: Bool, category: UInt8) -> int:
    in_all_passes = blocks.alike(np.flatnonzero(copies)) & np.isin(category, category[copies])
    return blocks.saved(copies | in_all_passes)


def _result(judged: Judged, copies: Bool, how: str, saved: int) -> Result:
    blocks = judged.blocks
    size = _total(blocks, copies)
    if saved < LEAST_SHARE * judged.step.peak_bytes:
        return Fine(
            f"Copies of parameters take {size_text(size)}; without them the peak is {size_text(saved)} lower."
        )
    largest = int(np.flatnonzero(copies)[np.argmax(blocks.bytes[copies])])
    named = bool(blocks.origins[blocks.origin[largest]].line)
    lines = line_evidence(judged.trace, blocks.rows[copies], how)
    if not named:
        lines = [
            Evidence("copies of parameters", size, f"{counted(int(copies.sum()), 'block')} {how}", False)
        ]
    name = lines[0].what if named else ""
    by_line = f" by {name}" if name else ""
    return judged.finding(
        "parameter_copies",
        "option",
        f"The parameters are in memory a second time{by_line}.",
        saved,
        (*lines, judged.without("them", saved)),
        "Keep EMA weights and reference models on the CPU, load weights with torch.load(..., mmap=True, "
        'map_location="cpu"), and free the copy that was loaded. Free a model and its optimizer before the '
        "next is made. Master weights are not needed if the optimizer updates bf16 with stochastic rounding. "
        "Let LoRA add to the result, x @ W + x @ A @ B, not to the weight. Keep no reference to weights that "
        "are dequantised in forward, and recompute them in backward.",
        view="allocations",
        state=[("block", str(int(blocks.rows[largest])))],
        subject=name,
        price="transfers to the CPU where the copy is used, or other numerics",
    )
