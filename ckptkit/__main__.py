"""`python -m ckptkit` is the command line."""

import sys

from ckptkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
