"""Tables of the pages against the program: flags, keys, variables, exit codes, states and errors.

Each is compared both ways: what a page names is there, and what is there is on the page.
"""

from __future__ import annotations

import builtins
import inspect
import json
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from support.observed import running
from support.pages import PAGES, ROOT, Table, blocks, commands, name, spans, tables
from support.rank_environment import run_python
from support.rank_worlds import Kind
from support.sources import SOURCES
from support.traces import SECOND, Planted
from support.traces import command as trace

import syncprims
import syncprims.testing
from syncprims import barrier, interface
from syncprims.cli import COMMANDS, main
from syncprims.cli import parser as make_parser
from syncprims.cli.options import OPTIONS, flag_of
from syncprims.testing import run_world
from syncprims.who import Finding, RankReport

COMMAND_LINE = ROOT / "docs/command-line.md"
NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]
#: The tables that a test below compares, by their page and the head of their first column. A table
#: with one of these heads on another page needs a test, too.
COMPARED = {
    ("README.md", "what happens on one rank"),
    ("docs/backends.md", "ability"),
    ("docs/command-line.md", "argument"),
    ("docs/command-line.md", "code"),
    ("docs/command-line.md", "command"),
    ("docs/command-line.md", "flag, and key of the file"),
    ("docs/command-line.md", "key"),
    ("docs/how-to/hanging-job.md", "state"),
    ("docs/reference.md", "keyword"),
    ("docs/reference.md", "variable"),
    ("docs/testing.md", "fault"),
    ("docs/testing.md", "what the program does"),
    ("docs/trace.md", "column"),
}
EXCEPTIONS = {
    thing
    for module in (syncprims, syncprims.testing)
    for thing in vars(module).values()
    if isinstance(thing, type) and issubclass(thing, BaseException)
}


def table(page: str, head: str) -> Table:
    (found,) = [one for one in tables(ROOT / page) if one.columns[0] == head]
    return found


def section(page: Path, heading: str) -> str:
    """Return the text below a heading of the second level."""
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    text: str = found
    return text


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    return capsys.readouterr().out


def flags_in(cells: Iterable[str]) -> set[str]:
    return {flag for cell in cells for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", cell)}


def codes_in(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\b\d+\b", text)}


def test_no_table_of_these_kinds_is_without_a_test() -> None:
    heads = {head for _, head in COMPARED}
    there = {(name(page), one.columns[0]) for page in PAGES for one in tables(page)}
    assert {one for one in there if one[1] in heads} == COMPARED


# -- the command line --------------------------------------------------------------------------


def test_commands_and_their_sections() -> None:
    shown = [spans(cell)[0] for cell in table("docs/command-line.md", "command").column()]
    assert shown == [f"syncprims {one}" for one in NAMES]
    for one in NAMES:
        assert section(COMMAND_LINE, one)


@pytest.mark.parametrize("command", NAMES)
def test_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"(?m)^  (-\S.*?)(?:  |$)", help_of(command, capsys))
    there = flags_in(lines) - {"-h", "--help"}
    said = section(COMMAND_LINE, command)
    if command == "run":
        said = "".join(table("docs/command-line.md", "flag, and key of the file").column())
    assert flags_in(spans(said)) == there


def test_keys_of_a_file() -> None:
    rows = [
        spans(cell) for cell in table("docs/command-line.md", "flag, and key of the file").column()
    ]
    keys = {word for row in rows for word in row if not word.startswith("-")}
    assert keys == OPTIONS.keys()
    for row in rows:
        for flag in [word for word in row if word.startswith("--") and word != "--config"]:
            assert flag_of(row[-1]) == flag
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml" and "script:" in block.code:
                yaml = pytest.importorskip("yaml")
                assert yaml.safe_load(block.code).keys() <= OPTIONS.keys()


def shown_commands() -> list[Any]:
    """Return the lines on pages that begin with the command, as a reader would type them."""
    lines = {
        (page, line)
        for page in PAGES
        for line in [
            *(c.text for b in blocks(page) if b.language == "console" for c in commands(b)),
            *spans(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)),
        ]
        if re.match(rf"syncprims ({'|'.join(NAMES)}) ", line)
    }
    return [pytest.param(line, id=f"{name(page)}: {line}") for page, line in sorted(lines)]


@pytest.mark.parametrize("line", shown_commands())
def test_commands_on_pages_are_understood(line: str) -> None:
    words = shlex.split(re.split(r" (?:&|\||>)", line)[0], comments=True)
    values = {"N": "1", "K": "1", "S": "1", "SECONDS": "1", "...": "1"}
    make_parser().parse_args([values.get(word, word) for word in words[1:]])


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("docs/command-line.md", "code").rows
    for command in NAMES:
        of = {"all", f"`{command}`", "" if command == "run" else "all but `run`"}
        said = codes_in(" ".join(code for code, whose, _ in rows if whose in of))
        there = codes_in(help_of(command, capsys).partition("exit code:")[2])
        if command != "run":
            there |= codes_in(str(main.__doc__))
        assert said == there, command


def test_keys_of_lines_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('here')\n")
    done = run_python("-m", "syncprims", "run", "-n", "1", "--json", "job.py", cwd=tmp_path)
    rows = table("docs/command-line.md", "flag, and key of the file").rows
    (meaning,) = [row[1] for row in rows if row[0].startswith("`--json`")]
    assert spans(meaning) == [*json.loads(done.stdout)]


def test_keys_of_env(capsys: pytest.CaptureFixture[str]) -> None:
    main(["env", "--json"])
    said = section(COMMAND_LINE, "env").partition("an object with the")[2]
    assert spans(said) == [*json.loads(capsys.readouterr().out)]


# -- a running world ---------------------------------------------------------------------------


def paths(value: object, before: str = "") -> set[str]:
    """Return the paths to all values in an object of JSON, with `[]` for each item of a list."""
    if isinstance(value, dict):
        items: dict[str, object] = dict(value)
        return {path for key, one in items.items() for path in paths(one, f"{before}.{key}")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return paths(value[0], f"{before}[]")
    return {before.removeprefix(".")}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_keys_of_who(meeting_place: Path) -> None:
    def program() -> None:
        barrier("start")
        (meeting_place / f"ready-{syncprims.get_rank()}").touch()

    with running(Kind("file", 2), meeting_place, program):
        while len([*meeting_place.glob("ready-*")]) < 2:
            time.sleep(0.005)
        done = run_python("-m", "syncprims", "who", "--json", meeting_place)
    assert done.returncode == 0, done.stderr
    said = [key for cell in table("docs/command-line.md", "key").column() for key in spans(cell)]
    assert len(said) == len(set(said))
    assert set(said) == paths(json.loads(done.stdout))


def test_states_and_findings_of_who() -> None:
    states, kinds = (
        list(get_args(get_type_hints(report)[field]))
        for report, field in ((RankReport, "state"), (Finding, "kind"))
    )
    assert states
    meanings = {row[0]: spans(row[1]) for row in table("docs/command-line.md", "key").rows}
    assert meanings["`ranks[].state`"] == states
    assert meanings["`finding.kind`"] == kinds
    explained = ", ".join(table("docs/how-to/hanging-job.md", "state").column()).split(", ")
    assert sorted(explained) == sorted(states)


# -- variables ---------------------------------------------------------------------------------


def table_of_variables() -> list[str]:
    """Return the variables of the table; `_RANK` behind `SYNCPRIMS_...` is short."""
    found: list[str] = []
    for cell in table("docs/reference.md", "variable").column():
        found += [f"SYNCPRIMS{one}" if one.startswith("_") else one for one in spans(cell)]
    return found


def test_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = [one for one in table_of_variables() if one.startswith("SYNCPRIMS_")]
    assert len(said) == len(set(said))
    code = "".join(path.read_text() for path in SOURCES.values())
    assert set(said) == set(re.findall(r"\bSYNCPRIMS_[A-Z_]*[A-Z]\b", code))
    for variable in said:
        monkeypatch.setenv(variable, "")
    main(["env", "--json"])
    assert json.loads(capsys.readouterr().out)["misspelt"] == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_no_other_variable(page: Path) -> None:
    named = set(re.findall(r"\bSYNCPRIMS_[A-Z_]*[A-Z]\b", page.read_text()))
    assert named - {*table_of_variables(), "SYNCPRIMS_TIMOUT"} == set()


# -- errors ------------------------------------------------------------------------------------


def test_the_page_of_errors_has_every_class_and_its_parents() -> None:
    text = re.sub(r"```.*?```|<!--.*?-->", "", (ROOT / "docs/errors.md").read_text(), flags=re.S)
    named = set(re.findall(r"\b[A-Z]\w+", text))
    assert sorted({kind.__name__ for kind in EXCEPTIONS} - named) == []
    for heads, first in re.findall(r"^## (.*)\n\n(.*)", text, re.MULTILINE):
        kinds = [kind for kind in EXCEPTIONS if kind.__name__ in heads.split(", ")]
        parent = re.match(r"(?:An?|Each is a) `(\w+)`", first)
        if kinds:
            assert parent, f"{heads}: the first sentence names the builtin parent"
            assert all(issubclass(kind, getattr(builtins, parent[1])) for kind in kinds), heads
    facts = re.search(r"`((?:\.\w+ ?)+)`", text)
    assert facts is not None
    assert facts[1].replace(".", "").split() == [*syncprims.SyncError().facts()]


def test_errors_in_tables_are_classes() -> None:
    known = {kind.__name__ for kind in EXCEPTIONS} | set(vars(builtins))
    for page, head in (
        ("README.md", "what happens on one rank"),
        ("docs/testing.md", "what the program does"),
    ):
        for cell in table(page, head).column(1):
            assert {word for word in spans(cell) if word[0].isupper()} <= known, cell


def test_what_a_test_gets_is_complete() -> None:
    of_tests = {kind.__name__ for kind in EXCEPTIONS if kind.__module__ == "syncprims.testing"}
    assert of_tests <= set(re.findall(r"\w+", (ROOT / "docs/testing.md").read_text()))


# -- tables of other names ---------------------------------------------------------------------


def test_faults() -> None:
    there = {thing for thing in vars(syncprims.testing).values() if is_fault(thing)}
    said = {spans(cell)[0] for cell in table("docs/testing.md", "fault").column()}
    for one in said:
        fault, arguments = re.match(r"(\w+)\((.*)\)", one).groups()  # type: ignore[union-attr]
        names = [part.partition("=")[0].strip() for part in arguments.split(",")]
        fields = inspect.signature(getattr(syncprims.testing, fault)).parameters
        assert names == [*fields], one
    assert {one.partition("(")[0] for one in said} == {kind.__name__ for kind in there}


def is_fault(thing: object) -> bool:
    fault = syncprims.testing.Fault
    return isinstance(thing, type) and issubclass(thing, fault) and thing is not fault


def test_keywords_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    said = [spans(cell)[0] for cell in table("docs/reference.md", "keyword").column()]
    log = syncprims.get_logger("tables", "INFO")
    assert sorted(said) == sorted(re.findall(r"``(\w+=True)``", str(type(log).__doc__)))

    def program() -> None:
        for keyword in said:
            log.info("%s", keyword, **{keyword.partition("=")[0]: True})  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO):
        run_world(program, 1, kind="threads")
    assert len(caplog.records) == len(said)


def test_columns_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted(tmp_path / "trace", monkeypatch, 2)
    planted.round(1, [SECOND, 2 * SECOND])
    planted.leave(3 * SECOND)
    lines = trace(planted.directory).stdout.splitlines()
    heads = [line for line in lines if re.match("late |rank +host ", line)]
    plain = {"rank", "host", "rounds", "time"}
    there = {column for head in heads for column in re.split(r"\s{2,}", head.strip())} - plain
    said = ", ".join(table("docs/trace.md", "column").column()).split(", ")
    assert sorted(said) == sorted(there)


def test_abilities_of_a_backend() -> None:
    for cell in table("docs/backends.md", "ability").column(1):
        names: Sequence[str] = [word.removesuffix("()") for word in spans(cell)]
        owner = getattr(interface, names[0].partition(".")[0])
        for one in names:
            assert hasattr(owner, one.rpartition(".")[2]), one
