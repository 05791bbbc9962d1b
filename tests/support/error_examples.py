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
error has the class that the block names. ``as in tests/test_x.py:`` is for errors that need more
than a few lines: that file causes the error, and the text is compared with the messages in the
code. ``command("run train.py")`` in an example is a command line, and the text is what it writes to
stderr.

Run it with ``--write`` to update the texts. An example that fails with another class than the page
shows is refused and named. A new example starts as a block with only the class.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
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
from syncprims.cli import main
from syncprims.testing.world_spec import Kind, WorldSpec
from syncprims.testing.worlds import run_once

PAGE = Path(__file__).parents[2] / "docs/errors.md"
_EXAMPLE = re.compile(
    r"<!-- (?P<how>made by|as in)(?P<what>[^:]*):(?P<code>.*?)-->\n```text\n(?P<text>.*?)\n```",
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
        """The class at the start of the text; ``warning`` for a log record."""
        return self.text.partition(":")[0].rpartition(".")[2]

    def __str__(self) -> str:
        return f"line {self.line}"


def examples() -> list[Example]:
    """Return the examples of the page."""
    page = PAGE.read_text()
    return [
        Example(
            (m["how"] + m["what"]).strip(),
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
    # Messages of Python differ between versions.
    text = re.sub(r"(pickle says|are not an encoded object:|made here:) .*", r"\1 ...", text)
    text = re.sub(r"(starts a new Python:) .*?\. (?=Define)", r"\1 .... ", text)
    text = re.sub(r"(is not valid toml:) .*", r"\1 ...", text)
    text = re.sub(r"(torch) \d\S+ (?=has no)", r"\1 ... ", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d-]+-[0-9a-f]{6}\b", "...", text)  # a traced run
    text = re.sub(r"<function <lambda> at 0x[0-9a-f]+>", "<function <lambda> at ...>", text)
    text = re.sub(r"\b[0-9a-f]{12,}\b", "...", text)
    text = re.sub(r"(process|user|pid|thread|port:|syncprims who) \d+", r"\1 ...", text)
    text = re.sub(r"(?<=[:=-])\d{5}\b", "...", text)
    text = re.sub(r"(?<=ranks on )\d+(?= processor)|(?<=Start at most )\d+", "...", text)
    return re.sub(r"(timed out after|busy for|after) \d+\.\d s", r"\1 ... s", text).strip()


def _names() -> dict[str, Any]:
    public = {n: t for m in (syncprims, syncprims.testing) for n, t in vars(m).items()}
    return {n: t for n, t in public.items() if not n.startswith("_")} | {
        "os": os, "sys": sys, "Path": Path, "signal": signal, "environ": os.environ,
        "command": _command,
    }  # fmt: skip


class _Complaint(Exception):
    """The text that a command line wrote to stderr."""


def _command(line: str) -> None:
    words = io.StringIO()
    with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
        try:
            code: object = main(shlex.split(line))
        except SystemExit as end:  # raised by argparse
            code = end.code
    raise _Complaint(words.getvalue() if code == 2 else f"nothing: it ends with {code}")


def _shown(error: BaseException) -> str:
    if isinstance(error, _Complaint):
        return str(error)
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
        runtime._state.checked_names = False  # an earlier test may have started a world
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
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("syncprims")
    logger.addHandler(handler)
    before = Path.cwd()
    os.chdir(folder)
    try:
        kind: Kind = "threads" if found[2] == "ranks" else "processes"
        run = run_once(WorldSpec(lambda: exec(code, _names()), int(found[1]), kind))
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
    if example.kind == "warning":
        return f"warning: {logged[0]}" if logged else "nothing: no warning"
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
        if example.how.startswith("made by"):
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
