"""Stages: the live bytes at the beginning and at the end of every annotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace

START: Literal["START"] = "START"
END: Literal["END"] = "END"


@dataclass(frozen=True, slots=True)
class Stage:
    """The live bytes of a device at the START or END of an annotation. Epoch nanoseconds.

    `key` is `{name}_{stage}`; from the second time on `{name}_{stage}(1)`, `(2)`, ..., counted separately on
    each device. `event` is the device's last event at or before it, -1 if there is none.
    """

    key: str
    name: str
    stage: Literal["START", "END"]
    device: str
    time_ns: int
    event: int
    bytes: int


def stages(trace: MemoryTrace, names: Collection[str] | None = None) -> tuple[Stage, ...]:
    """Return the live bytes at every START and END of the trace's annotations, in time order.

    Args:
        trace: any trace; without annotations it has no stages.
        names: the full names of the annotations to include; default: all.

    Raises:
        NotRecordedError: no annotation has one of the names.
    """
    _check(trace, names)
    annotations = trace.annotations
    columns = (annotations.name, annotations.ends, annotations.device, annotations.time_ns, annotations.event)
    occurrences: Counter[tuple[int, str]] = Counter()
    rows = []
    for row, ends, device, time_ns, event in zip(*(column.tolist() for column in columns), strict=True):
        name = trace.annotation_names[row]
        if names is not None and name not in names:
            continue
        stage = END if ends else START
        key = f"{name}_{stage}"
        earlier = occurrences[device, key]
        occurrences[device, key] += 1
        rows.append(
            Stage(
                key=f"{key}({earlier})" if earlier else key,
                name=name,
                stage=stage,
                device=trace.devices[device].name,
                time_ns=time_ns,
                event=event,
                bytes=int(trace.live(device)[event + 1]),
            )
        )
    return tuple(rows)


def _check(trace: MemoryTrace, names: Collection[str] | None) -> None:
    absent = [name for name in names or () if name not in trace.annotation_names]
    if absent:
        have = ", ".join(trace.annotation_names[:20])
        raise NotRecordedError(
            f"No annotation is named {absent[0]!r}.",
            where=trace.source,
            fix=f"Choose from: {have}." if have else "The trace has no annotations at all.",
        )
