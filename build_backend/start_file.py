"""The start file: one line that Python runs whenever it starts, with which TB_MEMPLUGIN records any program.

setuptools cannot place a file beside the packages, so it is added to the wheel that setuptools has built.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

NAME = "tb_memplugin.pth"
LINE = "import os; os.environ.get('TB_MEMPLUGIN') and __import__('tb_memplugin.launch.start')\n"
"""Where the variable is not set, Python pays for one look-up."""


def add_start_file(wheel: Path) -> None:
    """Add the start file to a wheel, and to the wheel's record of its files."""
    with ZipFile(wheel) as built:
        files = [(info, built.read(info)) for info in built.infolist()]
    content = LINE.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    row = f"{NAME},sha256={digest},{len(content)}\n".encode()
    with ZipFile(wheel, "w", ZIP_DEFLATED) as changed:
        changed.writestr(NAME, content)
        for info, old in files:
            changed.writestr(info, old + row if info.filename.endswith(".dist-info/RECORD") else old)
