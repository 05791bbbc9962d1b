"""Which release this is."""

from __future__ import annotations

import functools


@functools.cache  # reading it takes as long as a hundred barriers
def version() -> str:
    """Return the installed release, as ranks compare it when they meet."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import: not at start

    try:
        return version("syncprims")
    except PackageNotFoundError:  # a bare checkout on the path
        return "unknown"
