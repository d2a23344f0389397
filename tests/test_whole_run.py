"""`python -m tests`: what it runs, and what it says at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import __main__ as whole_run

ROOT = Path(__file__).parent.parent


def test_each_file_of_tests_is_run_by_one_folder() -> None:
    paths = [Path(path) for paths in whole_run._folders().values() for path in paths]
    for file in (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")):
        assert sum(path in (file, *file.parents) for path in paths) <= 1, file
        assert any(path in (file, *file.parents) for path in [*paths, *map(Path, whole_run.SWEEPS)]), file
    assert all((ROOT / path).exists() for path in whole_run.SWEEPS)


def test_the_end_names_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test_bad(): assert 1 == 2\n")
    folders = {name: [str(tmp_path / f"test_{name}.py")] for name in ("bad", "good")}
    monkeypatch.setattr(whole_run, "_folders", lambda: folders)
    monkeypatch.setattr(whole_run, "end_with_this_process", lambda: None)
    assert whole_run.main(["-ra", "-p", "no:cacheprovider"]) == 1
    end = capsys.readouterr().out.splitlines()[-3:]
    assert end[0] == "FAILED test_bad::test_bad: assert 1 == 2"
    assert end[1] == "bad: pytest ended with exit status 1"
    assert end[2].startswith("FAILED: 2 folders in ")
    assert whole_run.main(["-ra", "-p", "no:cacheprovider", "-k", "good"]) == 0
