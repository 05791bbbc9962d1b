"""One rank prepares the text, each rank counts its share of the lines, all get the sum."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncprims import all_gather, main_first, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def prepared(path: Path, download: Callable[[], str]) -> list[str]:
    """Return the lines of the text. One rank downloads it for all."""
    with main_first(name="download"):
        if not path.exists():
            path.write_text(download())
    return path.read_text().splitlines()


def count_words(lines: list[str]) -> Counter[str]:
    """Return how often each word occurs in all lines. All ranks get the same result."""
    own = Counter(word for line in split(lines) for word in line.lower().split())
    total: Counter[str] = Counter()
    for counted in all_gather(own):
        total += counted
    return total
