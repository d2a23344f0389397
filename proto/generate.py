"""Generate `tb_memplugin/proto` from the schemas beside this file.

    python proto/generate.py           writes the modules
    python proto/generate.py --check   fails where they are not what the schemas say

The generator is pinned: what grpcio-tools 1.76.0 emits loads on every protobuf runtime that TensorBoard
allows, and what newer ones emit does not.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SCHEMAS = Path(__file__).parent
GENERATED = SCHEMAS.parent / "tb_memplugin" / "proto"
GENERATOR = "1.76.0"

PACKAGE = '''"""Generated from proto/tb_memplugin/v1 by proto/generate.py. Do not edit."""
'''


def generated() -> dict[str, str]:
    """The files of the package, by name."""
    from grpc_tools import protoc

    if version("grpcio-tools") != GENERATOR:
        sys.exit(f"grpcio-tools {version('grpcio-tools')} is installed; the schemas need {GENERATOR}.")
    include = Path(protoc.__file__).parent / "_proto"
    files = {"__init__.py": PACKAGE}
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path.relative_to(SCHEMAS)) for path in sorted(SCHEMAS.glob("tb_memplugin/v1/*.proto"))]
        options = ["protoc", f"-I{SCHEMAS}", f"-I{include}", f"--python_out={folder}", f"--pyi_out={folder}"]
        if protoc.main(options + sources):
            sys.exit("protoc refused the schemas.")
        for path in sorted(Path(folder).rglob("*_pb2.py*")):
            files[path.name] = ours(path.read_text())
    return files


def ours(text: str) -> str:
    """Without the numbers of fields, which nothing uses: fields go by name."""
    return re.sub(r"^ +\w+_FIELD_NUMBER: _ClassVar\[int\]\n", "", text, flags=re.MULTILINE)


def main(check: bool) -> None:
    """Write the package, or compare it with what would be written."""
    files = generated()
    present = {path.name for path in GENERATED.glob("*.py*") if path.is_file()}
    if not check:
        GENERATED.mkdir(exist_ok=True)
        for name in present - files.keys():
            (GENERATED / name).unlink()
        for name, text in files.items():
            (GENERATED / name).write_text(text)
        return
    stale = sorted(
        name
        for name in present | files.keys()
        if name not in present or name not in files or (GENERATED / name).read_text() != files[name]
    )
    if stale:
        sys.exit(f"Not what the schemas say: {', '.join(stale)}. Run: python proto/generate.py")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
