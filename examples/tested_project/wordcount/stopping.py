"""Read until one rank has seen enough; then all ranks stop after the same line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncprims import any_rank, split

if TYPE_CHECKING:
    from collections.abc import Sequence


def until_common(lines: Sequence[str], times: int) -> int:
    """Return how many lines each rank reads until one rank has seen a word that many times.

    Shares are padded. A rank with one line less would leave the loop while others wait for it.
    """
    seen: Counter[str] = Counter()
    read = 0
    for line in split(list(lines), pad=True):
        seen.update(line.lower().split())
        read += 1
        if any_rank(bool(seen) and max(seen.values()) >= times):
            break
    return read
