"""Kineto traces as their files have them, in a line per event."""

from __future__ import annotations

from typing import Any

from tb_memplugin.read.kineto.trace import trace_from_kineto
from tb_memplugin.trace import Category, Kind, MemoryTrace

NODE = "autograd::engine::evaluate_function: "
CUDA = {"Device Type": 1, "Device Id": 0, "Total Reserved": 1 << 40}


def memory(line: str, thread: int = 1, **more: Any) -> dict[str, Any]:
    """`ts address bytes total`, on the CPU if nothing more is given."""
    ts, address, size, total = (int(word) for word in line.split())
    arguments = {"Addr": address, "Bytes": size, "Total Allocated": total, "Device Type": 0, "Device Id": -1}
    event = {"ph": "i", "name": "[memory]", "pid": 1, "tid": thread, "ts": ts}
    return {**event, "args": {**arguments, **more}}


def ran(
    name: str,
    start: int,
    end: int,
    thread: int = 1,
    category: str = "cpu_op",
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": args or {},
    }


def operator(name: str, start: int, end: int, number: int, thread: int = 1) -> dict[str, Any]:
    """An operator that runs with gradients on."""
    return ran(f"aten::{name}", start, end, thread, args={"Sequence number": number, "Fwd thread id": 0})


def node(name: str, start: int, end: int, number: int, thread: int = 1, made_on: int = 1) -> dict[str, Any]:
    return ran(NODE + name, start, end, thread, args={"Sequence number": number, "Fwd thread id": made_on})


def module(name: str, start: int, end: int) -> dict[str, Any]:
    return ran(f"nn.Module: {name}", start, end, category="python_function")


def function(name: str, start: int, end: int) -> dict[str, Any]:
    return ran(name, start, end, category="python_function")


def annotation(name: str, start: int, end: int) -> dict[str, Any]:
    return ran(name, start, end, category="user_annotation")


def loaded(*events: dict[str, Any]) -> MemoryTrace:
    return trace_from_kineto({"traceEvents": list(events)}, "x")


def owners(trace: MemoryTrace) -> list[str]:
    """The owner of each allocation."""
    rows = trace.events.module[trace.events.kind == Kind.ALLOC]
    return [trace.modules[row].key for row in rows.tolist()]


def categories(trace: MemoryTrace) -> list[Category]:
    """The category of each allocation."""
    return [Category(value) for value in trace.events.category[trace.events.kind == Kind.ALLOC].tolist()]
