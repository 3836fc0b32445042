"""``python -m spool``, for where the command is not on the path."""

import sys

from spool.cli import main

if __name__ == "__main__":
    sys.exit(main())
