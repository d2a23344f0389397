"""The example in docs/advice.md gives what stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.commands.files import run
from tests.commands.test_docs import trimmed

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "advice.md").read_text("utf-8")
(PROGRAM,) = [code for code in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL) if "profile(" in code]
((ARGUMENTS, OUTPUT),) = re.findall(r"```console\n\$ tb-memplugin ([^\n]*)\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=120)
    assert trimmed(run(*ARGUMENTS.split()).stdout) == trimmed(OUTPUT)
