"""The code blocks of the documentation, and how to run each of them.

HTML comments give instructions that readers do not see:

- ``<!-- file: train.py -->`` before a block: the block is this file, in the folder where the
  commands of the page run. A page may show a file twice; the later one replaces the earlier one.
  If the comment itself contains lines, they are a file that readers have, such as their script.
- ``<!-- ranks: 4 -->`` before a Python block: from here on, blocks run on four ranks in
  threads, in a new namespace; ``<!-- ranks: 4 processes -->``: in processes;
  ``<!-- ranks: 0 -->``: outside a world, as in a test.
- ``<!-- given: training.py -->``: this file of `docs/given` runs first, and defines names that
  the block uses.
- ``<!-- raises: ValueError -->`` before a Python block: it raises this error.
- ``<!-- exit: 1 -->`` before a console block: its last command ends with this code.
- ``<!-- slow: reason -->`` before a console block: `make soak` runs it, the tests do not.
- ``<!-- not run: reason -->`` before a block: it cannot run here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"( *)(`{3,})(\w*)[^\n]*\n(.*?)\n?\1\2[ ]*(?=\n|\Z)", re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(file|ranks|given|raises|exit|slow|not run):(.*?)-->", re.DOTALL)


class Block(NamedTuple):
    """A fenced block, or Python from a comment."""

    line: int  #: of its first line on the page
    language: str
    code: str
    marks: dict[str, str]  #: from the comments just before it

    @property
    def file(self) -> str | None:
        return self.marks.get("file")


class Table(NamedTuple):
    """A table of a page."""

    page: Path
    heading: str  #: of the section that it is in
    columns: list[str]
    rows: list[list[str]]

    def column(self, number: int = 0) -> list[str]:
        """Return the cells of a column, without its head."""
        return [row[number] for row in self.rows]


class Command(NamedTuple):
    """A command of a console block, with the output that the page shows."""

    line: int
    text: str
    shown: list[str]
    code: int


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page in order."""
    text = page.read_text()
    found: list[Block] = []
    marks: dict[str, str] = {}
    at = 0
    for match in sorted(
        [*_FENCE.finditer(text), *_COMMENT.finditer(text)], key=lambda match: match.start()
    ):
        if match.start() < at:  # a comment inside a block, or a block inside a comment
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
            given = (ROOT / "docs/given" / match[2].strip()).read_text()
            found.append(Block(line, "python", given, {**marks, "given": ""}))
            marks = {}
        elif match[1] == "file" and "\n" in match[2].strip():
            path, _, own = match[2].strip().partition("\n")
            found.append(Block(line + 1, "text", own, {"file": path}))
        else:
            marks[match[1]] = match[2].strip()
    return found


def tables(page: Path) -> list[Table]:
    """Return the tables of a page in order."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: list[Table] = []
    heading, before = "", ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif re.fullmatch(r"\|[-:| ]+\|", line):
            found.append(Table(page, heading, _cells(before), []))
        elif line.startswith("|") and before.startswith("|"):
            found[-1].rows.append(_cells(line))
        before = line
    return found


def _cells(row: str) -> list[str]:
    """Return the texts between the bars of a row; an escaped bar is none."""
    parts = re.split(r"(?<!\\)\|", row.strip().strip("|"))
    return [part.replace("\\|", "|").strip() for part in parts]


def spans(text: str) -> list[str]:
    """Return what a text shows as code."""
    return re.findall(r"`([^`\n]+)`", text)


def write_files(page: Path, folder: Path, until: int = sys.maxsize) -> None:
    """Write the files that a page has before one of its lines."""
    for block in blocks(page):
        if block.file is not None and block.line < until:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code + "\n")


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
    """Return whether a line of output matches the shown one.

    `...` matches anything. Times, seeds and the width of spaces may differ.
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
    """Return the path of a page relative to the repository."""
    return page.relative_to(ROOT).as_posix()
