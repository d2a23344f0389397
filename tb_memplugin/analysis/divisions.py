"""Live memory divided into parts that sum to the whole, and the divisions for which a trace has data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.module_groups import ModuleGroups
from tb_memplugin.analysis.pool_names import NOT_KNOWN, pool_key, stream_key
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import STACKING_ORDER, Category, MemoryTrace, Phase
from tb_memplugin.trace.labels import fields_of
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import NO_OPERATOR, NOT_NAMED, Int64, Rows, code_mask


@dataclass(frozen=True, slots=True)
class LabelKey:
    """A key of labels that are JSON objects. Its values are the parts."""

    name: str

    def rows(self, trace: MemoryTrace) -> tuple[Int64, tuple[str, ...]]:
        """Return the part of each of the trace's labels, and last of "no label": int64; and the parts.

        Raises:
            MemPluginError: no label has the key.
        """
        fields = [fields_of(label) for label in trace.labels]
        parts = {NONE: 0}
        for values in fields:
            if self.name in values:
                parts.setdefault(values[self.name], len(parts))
        if len(parts) == 1:
            raise MemPluginError(
                f"No label has the key {self.name[:80]!r}.", where="label:KEY", fix=_choices(fields)
            )
        rows = [parts[values.get(self.name, NONE)] for values in fields]
        return np.array([*rows, 0], np.int64), tuple(parts)


def _choices(fields: Sequence[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for values in fields for name in values))
    return f"Choose one of: {', '.join(names[:20])}." if names else "Its labels are not JSON objects."


@dataclass(frozen=True, slots=True)
class Subcategories:
    """A part for each allocation: `activation: logits`, or the category alone where nothing more is known.

    Attributes:
        part: indices in `keys`, int64, shape (allocations,).
        keys: the names of the parts. The first are those of all categories, in stacking order.
    """

    part: Int64
    keys: tuple[str, ...]


By = Literal[
    "category",
    "module",
    "operator",
    "phase",
    "stack",
    "line",
    "context",
    "pool",
    "stream",
    "annotation",
    "dtype",
    "label",
    "subcategory",
]
ALL_DIVISIONS: tuple[By, ...] = get_args(By)
DIVISIONS: tuple[By, ...] = ALL_DIVISIONS[:4]
"""The divisions that every recorded summary contains."""

BEFORE_WINDOW = "(before the window)"
"""Operator, context and annotation key of blocks allocated before the window, for which none is known."""

NONE = "(none)"
"""Key of blocks allocated in the window outside any annotation, or without a compile context, a label, or the
key of labels that is asked for."""

Chosen = By | Rules | LabelKey
"""What a user may divide memory by."""

Divided = Chosen | ModuleGroups | Subcategories
"""Everything that memory can be divided by."""

_CATEGORY_KEYS = tuple(category.key for category in STACKING_ORDER)
_CATEGORY_POSITION = np.argsort(STACKING_ORDER)
_PHASES = sorted(Phase, key=lambda phase: phase is not Phase.BEFORE)
_PHASE_KEYS = tuple(phase.key for phase in _PHASES)
_PHASE_POSITION = np.argsort(_PHASES)
"""Of each phase, in the order in which phases are stacked: what was there before lies below what comes."""

ChosenRows = Rows | slice
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part(AnalysisResult):
    """One part: `bytes` in `count` blocks. `categories` holds the bytes by category (modules only)."""

    key: str
    bytes: int
    count: int
    categories: dict[str, int] = field(default_factory=dict)


def codes(trace: MemoryTrace, by: Divided, rows: ChosenRows = _ALL) -> tuple[Int64, tuple[str, ...]]:
    """Return the part to which each allocation belongs.

    Returns:
        Indices into a tuple of keys, one per chosen allocation, int64; and that tuple. It may leave out
        keys that no chosen allocation has, and may contain a key twice.

    Raises:
        MemPluginError: `by` is none of `ALL_DIVISIONS`.
    """
    if isinstance(by, Rules):
        return by.rows(trace)[trace.allocations.stack[rows]], by.keys
    if isinstance(by, LabelKey):
        part, values = by.rows(trace)
        return part[trace.allocations.label[rows]], values
    if isinstance(by, ModuleGroups):
        return by.part[_row_or_none(trace.allocations.module[rows])], by.keys
    if isinstance(by, Subcategories):
        return by.part[rows], by.keys
    if by not in ALL_DIVISIONS:
        choices = ", ".join(ALL_DIVISIONS)
        raise MemPluginError(f"Cannot divide memory by {by!r}.", where="by", fix=f"Choose one of: {choices}.")
    blocks = trace.allocations
    match by:
        case "category":
            return _CATEGORY_POSITION[blocks.category[rows]], _CATEGORY_KEYS
        case "phase":
            return _PHASE_POSITION[blocks.phase[rows]], _PHASE_KEYS
        case "module" | "pool" | "stream" | "dtype" | "label":
            column, keys = _in_table(trace, by)
            return _row_or_none(column[rows]), keys
        case "subcategory":
            from tb_memplugin.analysis.subcategories import subcategories  # large, and rarely asked for

            return codes(trace, subcategories(trace), rows)
        case "operator":
            return _from_birth(trace, rows, blocks.operator[rows], (NO_OPERATOR, *trace.operators))
        case "context":
            return _from_birth(trace, rows, blocks.context[rows], (NONE, *trace.contexts))
        case "annotation":
            from tb_memplugin.analysis.annotations import innermost_at_birth

            names = (NONE, *trace.annotation_names)
            return _from_birth(trace, rows, innermost_at_birth(trace, rows), names)
        case "stack" | "line":
            from tb_memplugin.analysis.source_lines import NO_STACK, lines_of, stacks_in_use

            part, stacks = stacks_in_use(trace, blocks.stack[rows])
            if by == "stack":
                return part, tuple("\n".join(trace.stack(row)) if row >= 0 else NO_STACK for row in stacks)
            line, keys = lines_of([trace.stack(row) for row in stacks])
            return line[part], keys


Column = npt.NDArray[np.signedinteger]


def _in_table(
    trace: MemoryTrace, by: Literal["module", "pool", "stream", "dtype", "label"]
) -> tuple[Column, tuple[str, ...]]:
    """Return the rows of all allocations in the table of a division, and its keys behind that of row -1."""
    blocks = trace.allocations
    match by:
        case "module":
            return blocks.module, (NOT_NAMED, *(module.key for module in trace.modules))
        case "pool":
            return blocks.pool, (NOT_KNOWN, *map(pool_key, trace.pools))
        case "stream":
            return blocks.stream, (NOT_KNOWN, *map(stream_key, trace.streams))
        case "dtype":
            return blocks.tensor, (NOT_KNOWN, *(tensor.dtype for tensor in trace.tensors))
        case "label":
            return blocks.label, (NONE, *trace.labels)


def _row_or_none(row: Column) -> Int64:
    """Return rows of a table as indices into its keys behind a first key, which stands for row -1: none."""
    return row.astype(np.int64) + 1


def _from_birth(
    trace: MemoryTrace, rows: ChosenRows, row: Column, keys: tuple[str, ...]
) -> tuple[Int64, tuple[str, ...]]:
    """Return `_row_or_none` and the keys, with `BEFORE_WINDOW` first for blocks from before the window."""
    before = trace.allocations.born[rows] < 0
    return np.where(before, 0, _row_or_none(row) + 1), (BEFORE_WINDOW, *keys)


def breakdown(trace: MemoryTrace, device: int, event: int, by: Divided) -> ResultTable[Part]:
    """Divide the live bytes on a device after an event into parts that sum to them, largest first.

    Args:
        event: index of an event; -1 is the moment before the first.

    Raises:
        MemPluginError: `by` is none of `ALL_DIVISIONS`.
    """
    return parts_of(trace, trace.allocations.alive_at(event, device), by)


def parts_of(trace: MemoryTrace, rows: Rows, by: Divided) -> ResultTable[Part]:
    """Divide the bytes of some allocations (rows of `trace.allocations`) into parts, largest first.

    Raises:
        MemPluginError: `by` is none of `ALL_DIVISIONS`.
    """
    part, keys = codes(trace, by, rows)
    size = trace.allocations.bytes[rows]
    count = np.bincount(part, minlength=len(keys))
    total = sums(part, size, len(keys))
    used = np.flatnonzero(count)
    used = used[np.argsort(-total[used], kind="stable")]
    inner: list[dict[str, int]] = [{}] * len(used)
    if by == "module":
        table = sums(part * len(Category) + trace.allocations.category[rows], size, len(keys) * len(Category))
        inner = [_named(row) for row in table.reshape(-1, len(Category))[used][:, STACKING_ORDER].tolist()]
    columns = (total[used].tolist(), count[used].tolist(), inner)
    parts: dict[str, Part] = {}
    for row, bytes_, blocks, categories in zip(used.tolist(), *columns, strict=True):
        new = Part(keys[row], bytes_, blocks, categories)
        parts[new.key] = merged(parts[new.key], new) if new.key in parts else new
    if len(parts) == len(used):
        return ResultTable(parts.values())
    return ResultTable(sorted(parts.values(), key=lambda item: -item.bytes))


def shortened(parts: Sequence[Part], most: int, rest_key: str) -> ResultTable[Part]:
    """Return the first `most` parts, and all others as one part under `rest_key`; the sums stay the same."""
    shown, rest = parts[:most], parts[most:]
    if not rest:
        return ResultTable(shown)
    last = Part(rest_key, sum(part.bytes for part in rest), sum(part.count for part in rest))
    return ResultTable((*shown, last))


def _named(row: list[int]) -> dict[str, int]:
    return {key: size for key, size in zip(_CATEGORY_KEYS, row, strict=True) if size}


def merged(a: Part, b: Part) -> Part:
    """Add two parts that have the same key; a trace's tables may contain a name twice."""
    categories = {
        key: a.categories.get(key, 0) + b.categories.get(key, 0) for key in {**a.categories, **b.categories}
    }
    return Part(a.key, a.bytes + b.bytes, a.count + b.count, categories)


_PARTS_OF_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def informative(trace: MemoryTrace, device: int, among: Collection[By] = ()) -> tuple[By, ...]:
    """Return the divisions for which a trace has data, all or some, in the order in which to offer them."""
    from tb_memplugin.analysis.subcategories import has_subcategories

    blocks = trace.allocations
    is_own = blocks.device == device
    own = slice(None) if is_own.all() else is_own
    modules = np.array([*(module.is_module for module in trace.modules), False])  # index -1 reads the last
    stacks = bool((blocks.stack[own] >= 0).any())
    available: dict[By, Callable[[], bool]] = {
        "category": lambda: True,
        "module": lambda: bool(modules[blocks.module[own]].any()),
        "subcategory": lambda: has_subcategories(trace),
        "phase": lambda: bool(code_mask(_PARTS_OF_A_STEP)[blocks.phase[own]].any()),
        "operator": lambda: bool((blocks.operator[own] >= 0).any()),
        "dtype": lambda: bool((blocks.tensor[own] >= 0).any()),
        "line": lambda: stacks,
        "stack": lambda: stacks,
        "label": lambda: bool((blocks.label[own] >= 0).any()),
        "annotation": lambda: bool((trace.annotations.device == device).any()),
        "pool": lambda: bool((blocks.pool[own] != blocks.pool[own][:1]).any()),
        "stream": lambda: bool((blocks.stream[own] != blocks.stream[own][:1]).any()),
        "context": lambda: bool((blocks.context[own] >= 0).any()),
    }
    return tuple(by for by, has_data in available.items() if (by in among or not among) and has_data())
