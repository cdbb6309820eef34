"""The negative control of the import contracts: a copy of the package with a forbidden import must be refused."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VIOLATIONS = {
    "ckptkit/catalog/box.py": "import ckptkit.storage.store",
    "ckptkit/formats/detect.py": "import ckptkit.offline.convert",
    "ckptkit/checkpoint/manager.py": "import ckptkit.fsdp.strategy",
    "ckptkit/offline/convert.py": "import fsspec",
}


def refused(violation: str, line: str) -> bool:
    """Return whether lint-imports fails on the package with `line` added to the module `violation`."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "ckptkit", Path(folder) / "ckptkit", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        module = Path(folder) / violation
        module.write_text(module.read_text() + f"\n{line}\n")
        command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, check=False
        )
        return done.returncode != 0


def main() -> int:
    missed = [f"{module}: {line}" for module, line in VIOLATIONS.items() if not refused(module, line)]
    print("\n".join(f"the contracts let this through: {item}" for item in missed) or "every uphill import is refused")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
