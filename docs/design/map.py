"""Draws `map.md` from the code: which room imports which, and what two walks through them call.

`python docs/design/map.py` writes the page, or another file that is named; `make map` calls it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tb_memplugin"
PAGE = Path(__file__).with_suffix(".md")

HEAD = """# The house, drawn from the code

`make map` writes this page. An arrow says that files of one room import files of another. It is left out
where arrows by way of a third room say so already.

"""
PICKLE = """
## One pickle to `peak --json`

Each file that `tb-memplugin peak snapshot.pickle --json` calls, in the order of the first call, and
the function that is called first.

"""
EVENT = """
## One event to its pixel

The same for a profiled step of one layer: the handler records it, and the tab asks for its curve, which
`frontend/src/views/timeline/chart.tsx` draws.

"""


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), "utf-8")


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + _plan() + PICKLE + _listed(_pickle_to_peak()) + EVENT + _listed(_event_to_curve())


def _plan() -> str:
    """Return the rooms' imports as a Mermaid flow chart, without arrows that others imply."""
    knows: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        knows.setdefault(room, set()).update(_imported_rooms(path) - {room})
    rooms = {room for room in knows if (PACKAGE / room).is_dir()}
    knows = {room: knows[room] & rooms for room in sorted(rooms)}
    lines = ["```mermaid", "flowchart TD"]
    for room, imported in knows.items():
        implied = set().union(*(_reached(other, knows) for other in imported))
        lines += [f"    {room} --> {other}" for other in sorted(imported - implied)]
    return "\n".join([*lines, "```", ""])


def _imported_rooms(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[1] for name in names if name.startswith("tb_memplugin.")}


def _reached(room: str, knows: dict[str, set[str]]) -> set[str]:
    """Return the rooms that a room imports, by way of others, too."""
    return knows[room].union(*(_reached(other, knows) for other in knows[room]))


@contextlib.contextmanager
def _called() -> Iterator[dict[str, str]]:
    """Yield the files of the package that are called within the block, each with the first function."""
    called: dict[str, str] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(str(PACKAGE)):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            called.setdefault(file, code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def _walk(program: Callable[[Path], None]) -> dict[str, str]:
    """Return what a program calls that has run once before, so that imports are over."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            (Path(folder) / name).mkdir()
        program(Path(folder) / "first")
        gc.collect()
        gc.disable()
        with _called() as called:
            program(Path(folder) / "second")
    return called


def _pickle_to_peak() -> dict[str, str]:
    from tb_memplugin.commands import main as command
    from tests.snapshots import block, entries, segment, snapshot

    def program(folder: Path) -> None:
        content = snapshot([segment(block(0x1000, 512))], entries("alloc 1000 512"))
        (folder / "snapshot.pickle").write_bytes(pickle.dumps(content))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            command(["peak", str(folder / "snapshot.pickle"), "--json"], standalone_mode=False)

    return _walk(program)


def _event_to_curve() -> dict[str, str]:
    import torch

    from tb_memplugin import memory_trace_handler
    from tests.server.tab import Tab

    def program(folder: Path) -> None:
        model = torch.nn.Linear(4, 4)
        handler = memory_trace_handler(str(folder), "worker", model=model)
        with torch.profiler.profile(profile_memory=True, on_trace_ready=handler) as profiler:
            model(torch.ones(2, 4)).sum().backward()
            profiler.step()
        tab = Tab(folder)
        run = tab.get("runs")["runs"][0]
        step = run["workers"][0]["steps"]["step"][0]
        tab.get("curve", run=run["run"], worker="worker", step=step, device="cpu")

    return _walk(program)


def _listed(called: dict[str, str]) -> str:
    return (
        "\n".join(f"{row}. `{file}`: `{name}`" for row, (file, name) in enumerate(called.items(), 1)) + "\n"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
