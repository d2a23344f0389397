"""Write the golden files of the present format version: `python -m tests.store.golden.make`.

Golden files are what a version wrote, kept for ever: readers of later versions must read them. A file
that exists is never written again; a new version gets new files.
"""

from __future__ import annotations

from pathlib import Path

from tb_memplugin.store import step_records
from tb_memplugin.store.blob import SCHEMA_VERSION, pack
from tb_memplugin.store.envelope import VERSION
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.windows import write_window
from tb_memplugin.trace import MemoryTrace, Note
from tb_memplugin.trace.step_figures import StepFigures
from tests.step_figures import figures
from tests.traces import trace

FOLDER = Path(__file__).parent


def golden_trace() -> MemoryTrace:
    """Some of everything: devices, categories, phases, calls, names, two steps."""
    return trace(
        "start 400 w category=parameter module=net.layer label=net.layer.weight",
        "start 90 unknown",
        "step 5",
        "alloc 100 a module=net.layer category=activation phase=forward operator=aten::mm",
        "alloc 64 k device=cuda:0 reserved=2048 category=workspace phase=forward",
        "alloc 60 g module=net.layer category=gradient phase=backward operator=aten::mm",
        "free a phase=backward",
        "step 6",
        "alloc 7 s module=net category=optimizer_state phase=optimizer operator=größe<script>",
        calls=[("net", 0, 1, "forward"), ("net.layer", 0, 0, "forward"), ("net.layer", 2, 3, "backward")],
        notes=(Note("2 bytes are not exact."),),
        properties={"torch": "2.13.0"},
        stacks=(("train.py:1", "model.py:2"), ()),
    )


def golden_figures() -> StepFigures:
    """Steps of a device with a reserve, and two phases of which one does not run in each step."""
    return figures([500, 700, 600], first=5, phases={"forward": [400, 700, 0], "größe<script>": [1, 2, 3]})


def main() -> None:
    """Write what is not there yet."""
    summaries = WindowSummaries(golden_trace(), Window("rank0", "0" * 32, 0, "window-000000.mem"))
    window = FOLDER / f"window-v{VERSION}.mem"
    if not window.exists():
        with window.open("xb") as stream:
            write_window(stream, golden_trace())
    for name, content in {
        f"step-v{SCHEMA_VERSION}.blob": pack(summaries.summary(0)),
        f"figures-v{step_records.VERSION}.record": step_records.pack_figures(golden_figures()),
        f"step-v{SCHEMA_VERSION}.metadata": summaries.metadata(0).SerializeToString(),
    }.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
