import os
import subprocess
import sys
from random import Random

import pytest
from rich.table import Table

from tb_memplugin.commands.tables import MOST_LAID_OUT, console, show_table, table


def rows(count):
    return [(f"step{number}_START", f"{number:,}") for number in range(count)]


def test_a_long_table_is_a_line_a_row_and_is_not_laid_out(capsys):
    assert isinstance(table(("stage", "B"), rows(MOST_LAID_OUT)), Table)
    console().print(table(("stage", "B"), rows(MOST_LAID_OUT + 1)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_LAID_OUT + 2
    assert lines[0] == "stage               B"
    assert lines[1] == "step0_START         0"
    assert lines[-1] == "step1000_START  1,000"


def test_a_long_table_has_no_text_that_could_steer_a_terminal(capsys):
    console().print(table(("stage", "B"), [("\x1b[2J[red]", "1")] * (MOST_LAID_OUT + 1)))
    assert capsys.readouterr().out.splitlines()[1] == "\\x1b[2J[red]  1"


CELLS = ("forward", "a longer name of a part", "1,021", "0.0", "", "(rest)", "=", "x" * 45)


@pytest.mark.parametrize("seed", range(20))
def test_a_small_table_looks_the_same_without_rich(seed, capsys):
    random = Random(seed)
    columns = random.randint(2, 4)
    drawn = [random.choices(CELLS, k=columns) for _ in range(random.randint(1, 5))]
    show_table(CELLS[:columns], drawn)
    plain = capsys.readouterr().out
    console().print(table(CELLS[:columns], drawn))
    assert plain == capsys.readouterr().out


def test_a_small_table_needs_no_rich_and_one_with_other_letters_does():
    code = (
        "import sys\nfrom tb_memplugin.commands.tables import show_table\n"
        "show_table(('part', 'B'), [('a', '1')]); print('rich' in sys.modules)\n"
        "show_table(('part', 'B'), [('日本', '1')]); print('rich' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    answers = [line for line in out.stdout.decode().splitlines() if line in ("True", "False")]
    assert answers == ["False", "True"]


def test_texts_among_the_numbers_cut_no_number(capsys):
    """Rows that do not fit are not folded, so that 322.1 does not become 322."""
    name = "ip-10-24-117-203.us-west-2.compute.internal_1234567.23"
    console().print(table(("rank", "MiB", "above the median"), [(name, "322.1", f"+0.1 % ({name})")] * 2))
    assert capsys.readouterr().out.splitlines()[1] == f"{name}  322.1  +0.1 % ({name})"
