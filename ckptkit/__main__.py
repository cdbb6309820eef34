"""Starts the command line."""

import sys
from typing import Any


def main() -> Any:
    """Run the command line. Ctrl-C ends it without a traceback, even while modules are being imported."""
    try:
        from ckptkit.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. Nothing was changed.\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
