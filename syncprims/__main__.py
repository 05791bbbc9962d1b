"""``python -m syncprims``: the console script by another name."""

from __future__ import annotations

import sys

from syncprims.cli import main

if __name__ == "__main__":
    sys.exit(main())
