"""Run the command line: `python -m ckptkit`."""

import sys

from ckptkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
