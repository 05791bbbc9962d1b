"""The budgets of the project: what a feature adds, something else gives back.

Each limit is what there is, a little rounded up. Lower it after each cut, until it is the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT
from support.sources import SOURCES, count_code, is_of_core

_NAMED = 8  # of the largest files


def count_words(path: Path) -> int:
    return len(path.read_text().split())


#: By what is counted: its files, how each is counted, and the most of all.
BUDGETS: dict[str, tuple[Iterable[Path], Callable[[Path], int], int]] = {
    # target: 24,800
    "lines of code of the library": (SOURCES.values(), count_code, 26_700),
    # target: 8,500
    "lines of code of the core": (
        [path for module, path in SOURCES.items() if is_of_core(module)], count_code, 9_260,
    ),
    # target: 29,500
    "lines of code of the tests": ((ROOT / "tests").rglob("*.py"), count_code, 32_570),
    # target: 34,000
    "words of the pages": (
        [page for page in PAGES if page.name != "CONTRIBUTING.md"], count_words, 34_970,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BUDGETS)
def test_a_budget_is_kept(what: str) -> None:
    files, count, most = BUDGETS[what]
    counts = {path.relative_to(ROOT): count(path) for path in files}
    largest = sorted(counts.items(), key=lambda pair: -pair[1])[:_NAMED]
    found = sum(counts.values())
    lines = "\n".join(f"  {number:,} {path}" for path, number in largest)
    assert found <= most, f"{found:,} {what}, at most {most:,}: cut elsewhere, as in\n{lines}"
