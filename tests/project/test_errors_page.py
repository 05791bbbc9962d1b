"""docs/errors.md has an example of every class of error, with its exact text.

An example is a comment and a block::

    <!-- made by:
    barrier(timeout=0)
    -->
    ```text
    ValueError: timeout=0: it takes seconds above 0, or None for the default
    ```

``made by:`` runs the code in a separate process, ``made by 3 ranks:`` on three ranks in threads,
and ``made by 2 processes:`` on two ranks in processes. The text is that of the lowest rank whose
error has the class that the block names.

``cd tests && python -m project.test_errors_page`` updates the texts. An example that raises another
class than the page shows is left as it is.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import ROOT
from support.pages import matches
from support.rank_environment import clean_environ
from support.rank_worlds import Kind, Ranks

import syncprims
import syncprims.testing
import syncprims.training  # imported once here, not in every forked example

# Some warnings come once per process, and an earlier test may have caused them.
from syncprims._world import runtime
from syncprims.testing.world_spec import WorldSpec
from syncprims.testing.worlds import run_once

PAGE = ROOT / "docs/errors.md"
_EXAMPLE = re.compile(
    r"<!-- made by(?: (?P<ranks>\d) (?P<kind>ranks|processes))?:(?P<code>.*?)-->\n"
    r"```text\n(?P<text>.*?)\n```",
    re.DOTALL,
)


class Example(NamedTuple):
    """An example of the page."""

    match: re.Match[str]
    line: int

    @property
    def text(self) -> str:
        """What the page shows."""
        return self.match["text"]

    @property
    def error(self) -> str:
        """The class at the start of the text."""
        return self.text.partition(":")[0].rpartition(".")[2]

    def __str__(self) -> str:
        return f"line {self.line}"


_page = PAGE.read_text()
EXAMPLES = [Example(m, _page.count("\n", 0, m.start()) + 1) for m in _EXAMPLE.finditer(_page)]


def text_of(example: Example) -> str:
    """Run the example and return its text, with `...` for the parts that differ between runs."""
    public = {n: t for m in (syncprims, syncprims.testing) for n, t in vars(m).items()}
    names = {n: t for n, t in public.items() if not n.startswith("_")}
    names |= {"os": os, "Path": Path, "signal": signal, "environ": os.environ}
    code = textwrap.dedent(example.match["code"]).strip()
    compiled = compile(code, "train.py", "exec", dont_inherit=True)

    def program() -> None:
        exec(compiled, dict(names))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o700)
        patch.chdir(folder)
        if example.match["ranks"] is None:
            errors = [alone(program, folder)]
        else:
            kind: Any = "threads" if example.match["kind"] == "ranks" else "processes"
            run = run_once(WorldSpec(program, int(example.match["ranks"]), kind))
            errors = [o.error for o in run.outcomes if o.error is not None]
        right = [error for error in errors if type(error).__name__ == example.error]
        return masked("\n\n".join(map(shown, right[:1] or errors)), folder)


def alone(program: Any, folder: str) -> Any:
    """Return the error of a program in a process that is not in a world."""

    def body() -> None:
        os.environ.clear()
        os.environ.update(clean_environ(), SYNCPRIMS_DIR=folder, SYNCPRIMS_JOIN_TIMEOUT="1")
        runtime._state.warnings.clear()  # an earlier test may have started a world
        program()

    (outcome,) = Ranks(Kind("single", 1), Path(folder)).outcomes(body, start=False)
    return outcome


def shown(error: BaseException) -> str:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "page") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}: {error}"


def masked(text: str, folder: str) -> str:
    text = text.replace(os.path.realpath(folder), "/scratch").replace(folder, "/scratch")
    # Of a traceback, keep only the frames of the example.
    text = re.sub(r"(?m)^  \| +[~^]+\n", "", text)
    text = re.sub(r'  \| +File "(?!train\.py).*\n(?:  \|     .*\n)*', "", text)
    text = re.sub(r"(pickle says) .*", r"\1 ...", text)  # differs between versions of Python
    text = re.sub(r"(process|pid|thread|syncprims who) \d+", r"\1 ...", text)
    return re.sub(r"(timed out after|busy for|after) \d+\.\d s", r"\1 ... s", text).strip()


def test_every_class_of_error_has_an_example() -> None:
    things = vars(syncprims).values()
    kinds = {t for t in things if isinstance(t, type) and issubclass(t, syncprims.SyncError)}
    # To be evicted takes several hosts: it is tried with the torch backend.
    named = {example.error for example in EXAMPLES} | {"SyncError", "Evicted"}
    assert sorted({kind.__name__ for kind in kinds} - named) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_says_what_the_page_shows(example: Example) -> None:
    lines, said = example.text.splitlines(), text_of(example)
    alike = [matches(*pair) for pair in zip(lines, said.splitlines(), strict=False)]
    assert all(alike), f"docs/errors.md:{example.line} is to show:\n{said}"
    assert len(lines) == len(said.splitlines()), said


if __name__ == "__main__":
    text = _page
    for example in EXAMPLES:
        new = text_of(example)
        if new.partition(":")[0].endswith(example.error):
            text = text.replace(example.match[0], example.match[0].replace(example.text, new))
    PAGE.write_text(text)
