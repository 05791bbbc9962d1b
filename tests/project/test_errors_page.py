"""docs/errors.md shows every error with its exact text."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("torch")  # errors of the training helpers are among them
from support import error_examples
from support.error_examples import PAGE, Example, examples, text_of
from support.pages import ROOT, matches

import syncprims
import syncprims.testing
import syncprims.training

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

SOURCES = sorted([*ROOT.glob("syncprims/**/*.py"), *ROOT.glob("backends/**/*.py")])
KINDS = {
    name
    for module in (syncprims, syncprims.testing)
    for name, thing in vars(module).items()
    if isinstance(thing, type) and issubclass(thing, syncprims.SyncError)
}
EXAMPLES = examples()
MADE = [example for example in EXAMPLES if example.how.startswith("made by")]


def test_every_class_of_error_has_an_example() -> None:
    shown = {example.kind for example in EXAMPLES}
    assert sorted(KINDS - shown - {"SyncError"}) == []


@pytest.mark.parametrize("example", MADE, ids=str)
def test_an_example_says_what_the_page_shows(example: Example) -> None:
    shown, said = example.text.splitlines(), text_of(example).splitlines()
    assert len(shown) == len(said), "\n".join(said)
    for one, other in zip(shown, said, strict=True):
        assert matches(one, other), (
            f"docs/errors.md:{example.line} shows {one!r}, and it is {other!r}"
        )


def test_what_is_not_made_here_is_made_by_the_test_it_names() -> None:
    others = [example for example in EXAMPLES if example not in MADE]
    assert len(others) <= 41
    for example in others:
        path = ROOT / example.how.removeprefix("as in ")
        assert path.is_file(), example
        assert example.kind in path.read_text(), example


class Site(NamedTuple):
    """A place in the code that makes an error."""

    path: Path
    line: int
    words: list[str]  #: the fixed parts of its message, in order

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {' ... '.join(self.words)}"


def sites() -> Generator[Site]:
    """Give every place that makes an error of ours with words of its own."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [part for part in fixed_parts(node.args[0]) if len(part.strip()) > 2]
            if name in KINDS and words:
                yield Site(path, node.lineno, words)


def fixed_parts(message: ast.expr) -> list[str]:
    if isinstance(message, ast.JoinedStr):
        return [str(part.value) for part in message.values if isinstance(part, ast.Constant)]
    return [str(message.value)] if isinstance(message, ast.Constant) else []


def test_every_message_in_the_code_is_on_the_page() -> None:
    texts = [re.sub(r"\s+", " ", example.text) for example in EXAMPLES]
    absent = []
    for site in sites():
        pattern = ".*?".join(re.escape(" ".join(words.split())) for words in site.words)
        if not any(re.search(pattern, text) for text in texts):
            absent.append(str(site))
    assert absent == [], "\nnot in docs/errors.md, or with other words:\n" + "\n".join(absent)


def test_every_example_says_what_to_do() -> None:
    """In its own words, or in the page's after it."""
    page = PAGE.read_text()
    assert "```text\n?" not in page
    assert not re.search(r"^nothing: ", page, re.MULTILINE)


WRONG = """\
<!-- made by:
raise KeyError("a slip in the example")
-->
```text
syncprims.PeerLost: rank 1 was lost
```

<!-- made by:
raise ValueError("new words")
-->
```text
ValueError
```
"""


def test_what_fails_in_another_way_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "errors.md"
    page.write_text(WRONG)
    monkeypatch.setattr(error_examples, "PAGE", page)
    [refused] = error_examples.write()
    assert refused.startswith("line 1 is to be 'PeerLost', and says: KeyError: ")
    assert page.read_text() == WRONG.replace("\nValueError\n", "\nValueError: new words\n")
