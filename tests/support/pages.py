"""The pages of the documentation, taken apart: their blocks of code, and how each is to be tried.

Comments of a page say what its reader need not see:

- ``<!-- file: train.py -->`` before a block: it is this file, in a folder of the page's own, where
  the page's commands run. A page may have the same file twice: the later one is the mended one.
  With lines of its own in the comment it stands for a file that readers have: their own script.
- ``<!-- ranks: 4 -->`` before a Python block: from here on blocks run on four ranks, which are
  threads, in a fresh namespace; ``<!-- ranks: 4 processes -->``: in processes;
  ``<!-- ranks: 0 -->``: outside of any world, as in a test.
- ``<!-- given: ... -->``: Python that runs first, for names that a block takes as known.
- ``<!-- raises: ValueError -->`` before a Python block: it ends with this error.
- ``<!-- exit: 1 -->`` before a console block: its last command ends with this code.
- ``<!-- slow: reason -->`` before a console block: `make soak` runs it, the tests do not.
- ``<!-- not run: reason -->`` before a block: it cannot run here. Few may say so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"( *)(`{3,})(\w*)[^\n]*\n(.*?)\n?\1\2[ ]*(?=\n|\Z)", re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(file|ranks|given|raises|exit|slow|not run):(.*?)-->", re.DOTALL)


class Block(NamedTuple):
    """A fenced block, or Python that a comment gives."""

    line: int  #: of its first line in the page
    language: str
    code: str
    marks: dict[str, str]  #: what the comments just before it say

    @property
    def file(self) -> str | None:
        return self.marks.get("file")


class Command(NamedTuple):
    """One command of a console block, with the output that the page shows."""

    line: int
    text: str
    shown: list[str]
    code: int


def blocks(page: Path) -> list[Block]:
    """Return what a page has of code, in its order."""
    text = page.read_text()
    found: list[Block] = []
    marks: dict[str, str] = {}
    at = 0
    for match in sorted(
        [*_FENCE.finditer(text), *_COMMENT.finditer(text)], key=lambda match: match.start()
    ):
        if match.start() < at:  # a comment inside of a block, or a block inside of a comment
            continue
        between = text[at : match.start()].strip()
        marks = {} if between else marks
        at = match.end()
        line = text.count("\n", 0, match.start()) + 1
        if match.re is _FENCE:
            indent = len(match[1])
            code = "\n".join(row[indent:] for row in match[4].split("\n"))
            found.append(Block(line + 1, match[3], code, marks))
            marks = {}
        elif match[1] == "given":
            given = match[2]
            found.append(Block(line, "python", given.strip("\n"), {**marks, "given": ""}))
            marks = {}
        elif match[1] == "file" and "\n" in match[2].strip():
            path, _, own = match[2].strip().partition("\n")
            found.append(Block(line + 1, "text", own, {"file": path}))
        else:
            marks[match[1]] = match[2].strip()
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block, each with the output shown after it."""
    found: list[Command] = []
    lines = iter(enumerate(block.code.split("\n"), block.line))
    for number, line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line = line[:-1].rstrip() + " " + next(lines)[1].lstrip(" >")
            found.append(Command(number, line[2:], [], 0))
        elif found:
            found[-1].shown.append(line)
    if found and "exit" in block.marks:
        found[-1] = found[-1]._replace(code=int(block.marks["exit"]))
    return found


def matches(shown: str, said: str) -> bool:
    """Tell whether a line of output is as the page shows it.

    `...` is anything; times, seeds and the width of spaces may differ.
    """
    shown, said = " ".join(shown.split()), " ".join(said.split())
    pattern = "".join(
        ".*" if part == "..." else r"\d+(\.\d+)?" if re.fullmatch(r"\d+\.\d+", part)
        else r"\d+" if re.fullmatch(r"\d{4,}", part) else re.escape(part)
        for part in re.split(r"(\.\.\.|(?<![\w.])\d+\.\d+(?!\.?\d)|(?<=world-seed=)\d+)", shown)
        if part
    )  # fmt: skip
    return re.fullmatch(pattern, said) is not None


def name(page: Path) -> str:
    """Return a page's name from the top of the repository."""
    return page.relative_to(ROOT).as_posix()
