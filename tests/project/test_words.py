"""Pages and code use no word that the glossary of CONTRIBUTING.md has replaced."""

from __future__ import annotations

import re

import pytest
from support.pages import PAGES, ROOT, name

#: Each with what is said in its place.
RETIRED = {
    r"in step(?! \d)": "shared, of a failure",
    r"in vain": "forever, or nothing",
    r"whoever|lest|thereof": "today's words",
}
#: The same in the library's code.
RETIRED_IN_CODE = {
    r"in_step|(are|still|longer|stay|rank is) in step": "shared, of an error",
    r"liveness slots?|\w+\.slots?|count_slots|local_slots": "entry, or the number of a process",
    r"wait_any": "Background.wait",
}


@pytest.mark.parametrize("word", RETIRED_IN_CODE)
def test_a_name_that_was_replaced_does_not_come_back(word: str) -> None:
    retired = re.compile(rf"\b({word})\b")
    files = [file for folder in ("syncprims", "backends") for file in (ROOT / folder).rglob("*.py")]
    found = [str(file) for file in files if retired.search(file.read_text())]
    assert not found, f"say instead: {RETIRED_IN_CODE[word]}"


@pytest.mark.parametrize("word", RETIRED)
def test_a_word_that_was_replaced_does_not_come_back(word: str) -> None:
    retired = re.compile(rf"\b({word})\b".replace(" ", r"\s+"), re.IGNORECASE)
    found = [name(page) for page in PAGES if retired.search(page.read_text())]
    assert not found, f"say instead: {RETIRED[word]}"
