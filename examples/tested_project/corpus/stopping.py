"""Read on until one rank has seen enough; then all stop, after the same line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncprims import any_rank, split

if TYPE_CHECKING:
    from collections.abc import Sequence


def until_common(lines: Sequence[str], times: int) -> int:
    """Return after how many lines of each rank one rank has met a word that many times.

    Shares are padded: a rank with a line less would leave the loop while others still ask it.
    """
    seen: Counter[str] = Counter()
    read = 0
    for line in split(list(lines), pad=True):
        seen.update(line.lower().split())
        read += 1
        if any_rank(bool(seen) and max(seen.values()) >= times):
            break
    return read
