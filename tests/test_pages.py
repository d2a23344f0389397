"""The pages: first examples run and print what stands there, except for times; no link is broken."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Figure, claims_of, median_interval

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def read(page: str | Path) -> str:
    return (ROOT / page).read_text("utf-8")


def run(code: str, folder: Path) -> str:
    """Run code as `train.py` in a folder; return what it prints."""
    (folder / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "108", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def comparable(text: str, folder: Path) -> list[str]:
    """Return the lines without blank ones, spaces at their ends, times and the script's folder."""
    text = text.replace("/home/me/", "").replace(f"{folder}/", "")
    text = re.sub(r" +[\d,]+\.\d\d │$", " TIME │", text, flags=re.MULTILINE)
    return [
        line.rstrip()
        for line in text.splitlines()
        if line.strip() and not line.startswith(("┏", "┃", "┡", "└"))
    ]


@pytest.mark.parametrize("page", ["tracer.md", "lines.md", "iterations.md"])
def test_the_first_example_prints_what_the_page_shows(page, tmp_path):
    found = re.search(r"```python\n(.*?)```.*?\n```\n(.*?)```", read(f"docs/{page}"), re.DOTALL)
    assert found is not None
    code, output = found.groups()
    assert comparable(run(code, tmp_path), tmp_path) == comparable(output, tmp_path)


MY_MODEL = """
import torch
class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = torch.nn.Embedding(10, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    def forward(self, x):
        return self.blocks[0](self.embedding(x))
"""


@pytest.mark.parametrize(("page", "count"), [("lines.md", 2), ("estimate.md", 2), ("estimate_ranks.md", 1)])
def test_the_first_examples_run_one_after_the_other(page, count, tmp_path):
    run(
        "\n".join([MY_MODEL, *re.findall(r"```python\n(.*?)```", read(f"docs/{page}"), re.DOTALL)[:count]]),
        tmp_path,
    )
    assert list(tmp_path.glob("runs/**/*.tb_memplugin"))  # each page saves what it shows


YOURS = """
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.ones(2, 4)
def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_the_first_example_of_the_readme_records_a_step(tmp_path):
    run(YOURS + read("README.md").partition("```python\n")[2].partition("```")[0], tmp_path)
    assert len(list(tmp_path.glob("runs/first/*/*.tb_memplugin"))) == 1


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", read(page))
    broken = []
    for path, anchor in links:
        target = (ROOT / page.parent / path).resolve() if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.relative_to(ROOT))):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_every_promise_names_tests_that_there_are():
    """Each row of a table of docs/security.md ends with files, each followed by names of tests in it."""
    rows = [
        line
        for line in read("docs/security.md").splitlines()
        if line.startswith("| ") and "held by" not in line
    ]
    assert len(rows) > 10
    for row in rows:
        file, names = None, []
        for word in re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", row.rpartition(" | ")[2]):
            if word.startswith("tests/"):
                file = read(word)
            else:
                names.append(word)
                assert file is not None
                assert f"def {word}(" in file, word
        assert names, row


def test_a_page_that_says_better_than_the_interval_is_contradicted():
    page = "| what | ours | peer | ratio |\n|---|---|---|---|\n| a `b` | 5 ms | `p`: 10 ms | 0.49 |\n"
    claims = claims_of(page)
    assert claims == {("a b", "p"): ("5 ms", "0.49")}
    ours = [5.0, 5.1, 5.2, 5.3, 5.4, 5.5]  # of six values, the least and the largest have the median at 95 %
    assert Figure("a b", "ms", ours, None, [10.0] * 6, "p").contradicted(claims) == (
        "a b: the page says 0.49, measured were 0.5 to 0.55"
    )
    assert Figure("a b", "ms", [4.9, *ours], None, [10.0] * 7, "p").contradicted(claims) is None
    assert Figure("another", "ms", ours, None, [1.0] * 6, "p").contradicted(claims) is None


def test_each_cell_of_another_table_is_the_figure_of_its_column_and_row():
    lines = ("program | handler | end of a window", "---|---|---", "MLP | **9.3** (6 ms) | 1.0 ms", "CNN | |")
    claims = claims_of("".join(f"| {line} |\n" for line in lines))
    assert claims == {
        ("handler: MLP", ""): ("9.3 (6 ms)",) * 2,
        ("end of a window: MLP", ""): ("1.0 ms",) * 2,
    }
    slower, faster = [[18.8], [2.0]], [[18.4], [2.0]]
    assert Figure("handler: MLP", "ms", slower[0], 1.5, slower[1], "a peer").contradicted(claims) == (
        "handler: MLP: the page says 9.3, measured were 9.4 to 9.4"
    )
    assert Figure("handler: MLP", "ms", faster[0], 1.5, faster[1], "a peer").contradicted(claims) is None
    assert Figure("end of a window: MLP", "ms", [1.2]).contradicted(claims) == (
        "end of a window: MLP: the page says 1.0, measured were 1.2 to 1.2"
    )


def test_the_interval_of_a_median_leaves_out_what_is_rarely_beyond_it():
    assert median_interval(range(9)) == (
        1,
        7,
    )  # 2 * (1 + 9) / 2**9 = 3.9 %; one less is 18 %
    assert median_interval([3.0]) == (3.0, 3.0)
