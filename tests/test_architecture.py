"""The rules of the house: imports point one way, torch stays where it belongs, functions are short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tb_memplugin"
LONGEST_FUNCTION = 80
LONG_FUNCTIONS = {"_walk_thread"}
"""The loop over the profiler's events: its parts as functions made the walk slower."""

# Which parts of the package each part may import. Every part may import `errors`.
KNOWS = {
    "errors": set[str](),
    "logs": set[str](),
    "temporary": set[str](),
    "threads": set[str](),
    "budget": set[str](),
    "extras": set[str](),
    "proto": set[str](),
    "trace": {"extras"},
    "simulator": {"trace"},
    "analysis": {"trace", "simulator"},
    "read": {"trace", "budget"},
    "store": {"trace", "analysis", "proto", "temporary", "threads", "budget"},
    "exports": {"trace", "analysis", "temporary", "extras"},
    "untrusted": {"trace", "read", "store", "budget"},
    "loading": {"trace", "read", "store", "budget", "untrusted"},
    "record": {"trace", "analysis", "read", "store", "exports", "logs", "temporary", "threads", "extras"},
    "callbacks": {"trace", "analysis", "record", "store", "logs", "temporary"},
    "main_module": set[str](),
    "launch": {"trace", "record", "store", "callbacks", "main_module"},
    "estimate": {"trace", "analysis", "simulator", "read", "record", "store", "logs", "main_module"},
    "dryrun": {"trace", "analysis", "simulator", "record", "store", "estimate", "loading", "temporary"},
    "server": {"trace", "analysis", "simulator", "store", "exports", "proto", "budget", "temporary"},
    "commands": {
        *("trace", "analysis", "simulator", "read", "estimate", "store", "exports", "loading", "proto"),
        "main_module",
        *("dryrun", "budget", "launch", "extras", "temporary"),
    },
    "__main__": {"commands"},
    "notebook": {"trace", "analysis", "exports", "callbacks"},
    "pytest_plugin": {"analysis", "callbacks"},
    "coming_from": {"trace", "analysis", "exports", "loading", "record", "estimate", "logs", "commands"},
}
NUMPY_ALONE = ("trace", "analysis", "simulator")
MAY_IMPORT_TORCH = ("record", "estimate", "dryrun", "callbacks", "launch", "coming_from.memory_profiler")
"""What watches a live training or runs a model on fake tensors; everything else reads what was recorded."""

VAGUE_NAMES = {"utils", "util", "helpers", "common", "manager", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full dotted name, and where the import stands."""

    name: str
    line: int
    types_only: bool

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def dotted(path: Path) -> str:
    """`tb_memplugin/trace/replay.py` -> `tb_memplugin.trace.replay`; a package goes by its folder's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> list[Path]:
    return sorted(path for path in (ROOT / PACKAGE).rglob("*.py") if not path.stem.endswith("_pb2"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_in(node: ast.AST, package: str, types_only: bool = False) -> Iterator[Import]:
    """Every import below a node, those inside functions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, types_only) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            names = [f"{module}.{alias.name}" for alias in child.names] if module == PACKAGE else [module]
            yield from (Import(name, child.lineno, types_only) for name in names)
        else:
            yield from imports_in(child, package, types_only or is_type_checking(child))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    name = dotted(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return tuple(imports_in(ast.parse(path.read_text("utf-8")), package))


def part_of(name: str) -> str:
    """`tb_memplugin.trace.replay` -> `trace`; the package's own root is the empty string."""
    return [*name.split("."), ""][1]


def told(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"


def test_every_part_has_its_place_in_the_rules() -> None:
    parts = {part_of(dotted(path)) for path in modules()} - {""}
    assert parts <= set(KNOWS), f"say in KNOWS what these may import: {sorted(parts - set(KNOWS))}"


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / PACKAGE).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("part", sorted(KNOWS))
def test_imports_point_one_way(part: str) -> None:
    allowed = KNOWS[part] | {part, "errors"}
    broken = [
        told(path, found)
        for path in modules()
        if part_of(dotted(path)) == part
        for found in imports_of(path)
        if found.root == PACKAGE and part_of(found.name) not in allowed
    ]
    assert broken == []


@pytest.mark.parametrize("part", NUMPY_ALONE)
def test_the_core_imports_numpy_and_the_standard_library_alone(part: str) -> None:
    allowed = {PACKAGE, "numpy", *sys.stdlib_module_names}
    broken = [
        told(path, found)
        for path in modules()
        if part_of(dotted(path)) == part
        for found in imports_of(path)
        if found.root not in allowed
    ]
    assert broken == []


def test_torch_is_imported_only_where_training_runs() -> None:
    homes = tuple(f"{PACKAGE}.{home}." for home in MAY_IMPORT_TORCH)
    broken = [
        told(path, found)
        for path in modules()
        for found in imports_of(path)
        if found.root == "torch" and not found.types_only and not f"{dotted(path)}.".startswith(homes)
    ]
    assert broken == []


WITHOUT_TORCH = """
import sys
from argparse import Namespace

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}: torch is blocked", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def run_without_torch(code: str, *arguments: str) -> str:
    """Run code in a process where nothing can import torch; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_big() -> None:
    big = run_without_torch(
        "import tb_memplugin\nprint(*{'torch', 'tensorboard', 'numpy', 'google.protobuf'} & set(sys.modules))"
    )
    assert big == ""


def test_the_tab_loads_on_a_host_without_torch(tmp_path: Path) -> None:
    printed = run_without_torch(
        """
from tensorboard.plugins.base_plugin import TBContext
from tb_memplugin.server.loader import MemoryPluginLoader

plugin = MemoryPluginLoader().load(TBContext(logdir=sys.argv[1], flags=Namespace(logdir=sys.argv[1])))
assert plugin.get_plugin_apps()
print(plugin.frontend_metadata().tab_name)
print(*sorted(name for name in sys.modules if name.startswith("tb_memplugin")))
print(plugin.backend().is_active())
""",
        str(tmp_path),
    )
    assert printed.splitlines() == [
        "Memory",
        "tb_memplugin tb_memplugin.server tb_memplugin.server.loader",  # what TensorBoard's start waits for
        "False",
    ]


def test_the_command_starts_on_a_host_without_torch() -> None:
    assert "peak" in run_without_torch(
        "from tb_memplugin.commands import main\nmain(['--help'], standalone_mode=False)"
    )


def test_a_name_that_needs_torch_says_what_to_install() -> None:
    printed = run_without_torch(
        """
import tb_memplugin

for name in sorted(tb_memplugin.__all__):
    try:
        getattr(tb_memplugin, name)
    except ImportError as error:
        print(error.name, error)
"""
    )
    of_torch = [
        *("IterationReport", "LineTracer", "MemoryEstimator", "MemoryMonitor", "MemoryTracer"),
        *("combine_handlers", "estimate_ranks", "memory_trace_handler", "record_on_oom"),
    ]
    fix = 'needs PyTorch. Run: pip install "tb-memplugin[torch]"'
    assert printed.splitlines() == [f"torch {name} {fix}" for name in of_torch]


def written_by_hand() -> list[Path]:
    folders = (PACKAGE, "build_backend", "benchmarks", "examples", "proto", "tests", "frontend/src")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in {".py", ".ts", ".tsx"} and "_pb2" not in path.name)


def test_no_function_is_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in LONG_FUNCTIONS
        if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]
    assert long == []


def private_names(path: Path) -> Iterator[str]:
    """Torch's private modules and their members that a file names; not those of its objects."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from (name for name in names if re.fullmatch(r"torch(\.\w+)*\._(?!_)[\w.]*", name))


def test_torchs_private_names_stand_in_one_room() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules()
        if not path.is_relative_to(ROOT / PACKAGE / "record" / "torch_private")
        and not path.is_relative_to(ROOT / PACKAGE / "estimate")  # it replaces parts of torch
        for name in private_names(path)
    ]
    assert elsewhere == []


def test_no_file_has_a_vague_name() -> None:
    assert [str(path) for path in written_by_hand() if path.stem.lower() in VAGUE_NAMES] == []


def test_the_map_is_what_the_code_does(tmp_path: Path) -> None:
    draw = [sys.executable, str(ROOT / "docs" / "design" / "map.py"), str(tmp_path / "map.md")]
    subprocess.run(draw, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    assert (tmp_path / "map.md").read_text() == (ROOT / "docs/design/map.md").read_text(), "run: make map"


def test_pages_of_the_design_name_files_that_exist() -> None:
    files = [f"/{path.relative_to(ROOT)}" for path in written_by_hand()]
    missing = [
        f"{page.name}: {name}"
        for page in sorted((ROOT / "docs" / "design").glob("*.md"))
        for name in re.findall(r"`([\w/]+\.(?:py|tsx?))`", page.read_text("utf-8"))
        if not name.startswith("torch/") and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert missing == []
