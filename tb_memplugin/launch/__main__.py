"""Run and record a program without the start file: `python -m tb_memplugin.launch SCRIPT` or `-m MODULE`."""

from __future__ import annotations

import sys

import tb_memplugin.launch.start  # noqa: F401  # begins to record, if this process has not
from tb_memplugin.main_module import run_as_main


def main() -> None:
    """Run the program in `sys.argv`, in this process, as its main module."""
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    program, *arguments = words[1:] if is_module else words
    run_as_main(program, arguments, is_module=is_module)


if __name__ == "__main__":
    main()
