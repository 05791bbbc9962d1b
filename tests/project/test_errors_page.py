"""docs/errors.md has an example of every class of error, with its exact text."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")  # the errors of checkpoints are among them
from support.error_examples import Example, examples, text_of
from support.pages import matches

import syncprims

KINDS = {
    name
    for name, thing in vars(syncprims).items()
    if isinstance(thing, type) and issubclass(thing, syncprims.SyncError)
}
EXAMPLES = examples()


def test_every_class_of_error_has_an_example() -> None:
    assert sorted(KINDS - {example.kind for example in EXAMPLES} - {"SyncError"}) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_says_what_the_page_shows(example: Example) -> None:
    shown, said = example.text.splitlines(), text_of(example).splitlines()
    assert len(shown) == len(said), "\n".join(said)
    for one, other in zip(shown, said, strict=True):
        assert matches(one, other), (
            f"docs/errors.md:{example.line} shows {one!r}, and it is {other!r}; "
            "run `python -m support.error_examples --write`"
        )
