"""The examples of docs/errors.md: their code runs, and their text is compared.

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

Run it with ``--write`` to update the texts. An example that fails with another class than the page
shows is refused and named. A new example starts as a block with only the class.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import syncprims
import syncprims.testing
import syncprims.training  # imported once here, not in every forked example
from support.rank_environment import clean_environ
from support.rank_worlds import fork
from syncprims._world import runtime
from syncprims.testing.world_spec import Kind, WorldSpec
from syncprims.testing.worlds import run_once

PAGE = Path(__file__).parents[2] / "docs/errors.md"
_EXAMPLE = re.compile(
    r"<!-- (?P<how>made by[^:]*):(?P<code>.*?)-->\n```text\n(?P<text>.*?)\n```",
    re.DOTALL,
)


class Example(NamedTuple):
    """An example of the page."""

    how: str
    code: str
    text: str
    line: int

    @property
    def kind(self) -> str:
        """The class at the start of the text."""
        return self.text.partition(":")[0].rpartition(".")[2]

    def __str__(self) -> str:
        return f"line {self.line}"


def examples() -> list[Example]:
    """Return the examples of the page."""
    page = PAGE.read_text()
    return [
        Example(
            m["how"].strip(),
            textwrap.dedent(m["code"]).strip(),
            m["text"],
            page.count("\n", 0, m.start()) + 1,
        )
        for m in _EXAMPLE.finditer(page)
    ]


def text_of(example: Example) -> str:
    """Run the example and return its text, without the parts that differ between runs."""
    found = re.fullmatch(r"made by(?: (\d) (ranks|processes))?", example.how)
    assert found, example.how
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        said = _alone(example, folder) if found[1] is None else _world(example, folder, found)
    return masked(said, folder)


def masked(text: str, folder: str) -> str:
    """Return the text with `...` in place of the parts that differ between runs."""
    text = text.replace(os.path.realpath(folder), "/scratch").replace(folder, "/scratch")
    # Of a traceback, keep only the frames of the example.
    text = re.sub(r"(?m)^  \| +[~^]+\n", "", text)
    text = re.sub(r'  \| +File "(?!train\.py).*\n(?:  \|     .*\n)*', "", text)
    text = re.sub(r"(pickle says) .*", r"\1 ...", text)  # differs between versions of Python
    text = re.sub(r"(process|pid|thread|syncprims who) \d+", r"\1 ...", text)
    return re.sub(r"(timed out after|busy for|after) \d+\.\d s", r"\1 ... s", text).strip()


def _names() -> dict[str, Any]:
    public = {n: t for m in (syncprims, syncprims.testing) for n, t in vars(m).items()}
    return {n: t for n, t in public.items() if not n.startswith("_")} | {
        "os": os, "Path": Path, "signal": signal, "environ": os.environ,
    }  # fmt: skip


def _shown(error: BaseException) -> str:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "page") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}: {error}"


def _alone(example: Example, folder: str) -> str:
    """Return the error of the code, run in a process that is not in a world."""
    clean = clean_environ()
    reader, writer = os.pipe()

    def body() -> None:
        os.close(reader)
        os.chdir(folder)
        words = "nothing: it raises no error"
        runtime._state.warnings.clear()  # an earlier test may have started a world
        try:
            exec(compile(example.code, "train.py", "exec", dont_inherit=True), _names())
        except BaseException as error:
            words = _shown(error)
            if not isinstance(error, Exception):
                words += traceback.format_exc()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(words)

    pid = fork(body, {**clean, "SYNCPRIMS_DIR": folder, "SYNCPRIMS_JOIN_TIMEOUT": "1"})
    os.close(writer)
    with os.fdopen(reader) as pipe:
        words = pipe.read()
    os.waitpid(pid, 0)
    return words


def _world(example: Example, folder: str, found: re.Match[str]) -> str:
    """Return the error of the lowest rank that raises the class of the example."""
    code = compile(example.code, "train.py", "exec", dont_inherit=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        kind: Kind = "threads" if found[2] == "ranks" else "processes"
        run = run_once(WorldSpec(lambda: exec(code, _names()), int(found[1]), kind))
    finally:
        os.chdir(before)
    errors = [o.error for o in run.outcomes if o.error is not None]
    for error in errors:
        if type(error).__name__ == example.kind:
            return _shown(error)
    return "\n\n".join(map(_shown, errors)) or "nothing: no rank raises"


def write() -> list[str]:
    """Update the texts of the examples, and return the refused ones."""
    page = PAGE.read_text()
    refused: list[str] = []
    for example in examples():
        now = example._replace(text=text_of(example))
        if now.kind != example.kind:
            refused.append(f"{example} is to be {example.kind!r}, and says: {now.text}")
            continue
        page = page.replace(f"{example.code}\n-->\n```text\n{example.text}\n```",
                            f"{example.code}\n-->\n```text\n{now.text}\n```", 1)  # fmt: skip
    PAGE.write_text(page)
    return refused


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m support.error_examples --write")
    with contextlib.redirect_stderr(sys.stdout):
        not_written = write()
    sys.exit("\n".join(["not written:", *not_written]) if not_written else 0)
