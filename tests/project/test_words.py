"""Pages use no word that the glossary of CONTRIBUTING.md has replaced."""

from __future__ import annotations

import re

import pytest
from support.pages import PAGES, name

#: Each with what is said in its place.
RETIRED = {
    r"in step(?! \d)": "shared, of a failure",
    r"in vain": "forever, or nothing",
    r"whoever|lest|thereof": "today's words",
}


@pytest.mark.parametrize("word", RETIRED)
def test_a_word_that_was_replaced_does_not_come_back(word: str) -> None:
    retired = re.compile(rf"\b({word})\b".replace(" ", r"\s+"), re.IGNORECASE)
    found = [name(page) for page in PAGES if retired.search(page.read_text())]
    assert not found, f"say instead: {RETIRED[word]}"
