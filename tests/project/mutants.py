"""Change the library in one place at a time, and print the changes that no test notices.

``.venv/bin/python tests/project/mutants.py syncprims/_protocol --tests tests/protocol --most 40``
tries 40 changes of the code in files or folders, in copies of the checkout. It is run by hand. The
tests run once, slowly, to see which lines each of them reaches. Then a change costs those tests
that reach its statement, the shortest first, until one fails. A change that survives is a test that
is missing, or code that makes no difference. ``--record`` names a file that keeps what the tests
reach for the next time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
_JOBS = 2
_FOLDER, _CODE = "MUTANTS_FOLDER", "MUTANTS_CODE"  # variables of the run that records
_OPERATORS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
_OPPOSED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


class Change(NamedTuple):
    """A change of a module: where, what, and the act, in a function's statement or outside."""

    line: int
    what: str
    act: Callable[[], None]
    lines: range | None


def changes(tree: ast.Module) -> Generator[Change]:
    """Yield each change of a module, once if two ways lead to it."""
    for node, lines in _code(tree, None, inside=False):
        for line, what, act in _changes_of(node):
            yield Change(line, what, act, lines)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            for at, line in enumerate(block if isinstance(block, list) else ()):
                is_act = isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
                if is_act or isinstance(line, ast.Raise | ast.AugAssign):
                    own = range(line.lineno, (line.end_lineno or line.lineno) + 1)
                    is_inside = lines is not None or isinstance(node, ast.FunctionDef)
                    act = _setter(block, at, ast.Pass())
                    yield Change(line.lineno, "without this line", act, own if is_inside else None)


def _changes_of(node: ast.AST) -> Generator[tuple[int, str, Callable[[], None]]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield node.lineno, "another comparison", _setter(node, "ops", [_other(node.ops[0])])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _OPERATORS:
        yield node.lineno, "another operator", _setter(node, "op", _other(node.op))
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], _OPPOSED)):
            negated = ast.UnaryOp(ast.Not(), test)
            yield node.lineno, "the opposite condition", _setter(node, "test", negated)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node.lineno, f"{node.value + 1}", _setter(node, "value", node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node.lineno, f"{not node.value}", _setter(node, "value", not node.value)


def _code(
    node: ast.AST, lines: range | None, *, inside: bool
) -> Generator[tuple[ast.AST, range | None]]:
    """Yield all nodes that run, and the lines of their statement if it is in a function.

    No annotation is among them, and nothing for the type checkers alone.
    """
    yield node, lines
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        is_inside = inside or (isinstance(node, ast.FunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.AST):
                own = lines
                if is_inside and isinstance(child, ast.stmt):
                    block = getattr(child, "body", None)
                    last = block[0].lineno - 1 if block else child.end_lineno or child.lineno
                    own = range(child.lineno, max(last, child.lineno) + 1)
                yield from _code(child, own, inside=is_inside)


def _other(operator: ast.AST) -> ast.AST:
    other: ast.AST = _OPERATORS[type(operator)]()
    return other


def _setter(owner: object, name: str | int, value: object) -> Callable[[], None]:
    def change() -> None:
        if isinstance(owner, list):
            owner[int(name)] = value
        else:
            setattr(owner, str(name), value)

    return change


# -- which tests reach which lines ----------------------------------------------------------------


class _Recorder:
    """A plugin of pytest: notes in a file which lines each test reaches, in all its processes."""

    def __init__(self) -> None:
        self._file = os.open(
            Path(os.environ[_FOLDER], f"{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._code = tuple(json.loads(os.environ[_CODE]))
        self._seen: set[tuple[str, int]] = set()
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _note(self, *what: object) -> None:
        os.write(self._file, (json.dumps(what) + "\n").encode())

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._code) else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self._seen and self._test:
            self._seen.add(place)
            self._note(self._test, *place)
        return self._line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._seen.clear()
        sys.settrace(self._call)  # a test may have changed it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report.nodeid, report.outcome, report.duration)


def pytest_configure(config: pytest.Config) -> None:
    """Record this process of pytest; this module is the plugin."""
    config.pluginmanager.register(_Recorder())


class Record:
    """Which tests pass, how long each takes, and which lines it reaches."""

    def __init__(self, lines: list[list[Any]]) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        outcomes: dict[str, set[str]] = defaultdict(set)
        for test, what, number in lines:
            if what in ("passed", "failed", "skipped"):
                outcomes[test].add(what)
                self._seconds[test] += number
            else:
                self._tests[what, number].add(test)
        self._good = {test for test, all_of in outcomes.items() if all_of == {"passed"}}
        print(f"{len(self._good)} of {len(outcomes)} tests pass and are used")

    def reaching(self, file: str, lines: range | None, seconds: float) -> list[str]:
        """Return the tests that reach one of these lines, the shortest first, in this time."""
        found = {
            test
            for (name, line), tests in self._tests.items()
            if name == file and (lines is None or line in lines)
            for test in tests & self._good
        }
        chosen: list[str] = []
        for test in sorted(found, key=lambda one: (self._seconds[one], one)):
            seconds -= self._seconds[test]
            if seconds < 0:
                break
            chosen.append(test)
        return chosen


def record(copy: Path, code: list[str], tests: list[str]) -> list[list[Any]]:
    """Run the tests in the copy, and return what they note."""
    names = [name for one in code for name in (one, one.replace("backends", "syncprims/backends"))]
    with tempfile.TemporaryDirectory() as folder:
        environ = _environ(copy) | {_FOLDER: folder}
        environ[_CODE] = json.dumps([str(copy / name) for name in names])
        environ["PYTHONPATH"] += os.pathsep + str(copy / "tests" / "project")
        startup = copy / "tests" / "support" / "startup" / "sitecustomize.py"
        text = startup.read_text()
        extra = (
            "import os\nif 'PYTEST_CURRENT_TEST' in os.environ: import mutants; mutants._Recorder()"
        )
        startup.write_text(f"{text}\n{extra}\n")
        line = [sys.executable, "-m", "pytest", "-q", "-n", str(_JOBS), "-p", "mutants"]
        subprocess.run([*line, *_OPTIONS, *tests], cwd=copy, env=environ, check=False)
        startup.write_text(text)
        found = [
            json.loads(line)
            for file in Path(folder).iterdir()
            for line in file.read_text().splitlines()
        ]
    for one in found:
        if len(one) == 3 and isinstance(one[1], str) and one[1].startswith(str(copy)):
            one[1] = one[1].removeprefix(f"{copy}/").replace("syncprims/backends", "backends")
    return found


_OPTIONS = ["-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not soak and not launchers"]


def _environ(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


# -- one change -----------------------------------------------------------------------------------


class _FirstFailure:
    """A plugin of pytest: keeps the order of the command line, and writes which test fails."""

    def __init__(self, tests: list[str], file: Path) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._file = file

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._order.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write_text(report.nodeid)


def failing(copy: Path, tests: list[str], most: float) -> str:
    """Return which of the tests fails first in the copy; nothing if they pass."""
    result = copy / "failing"
    result.write_text("another end")
    if (child := os.fork()) == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.chdir(copy)
        os.environ.update(_environ(copy))
        sys.path.insert(0, str(copy))
        sys.dont_write_bytecode = True
        plugins = [_FirstFailure(tests, result)]
        line = ["-x", "-q", "-p", "no:xdist", *_OPTIONS, *tests]
        if pytest.main(line, plugins=plugins) == pytest.ExitCode.OK:
            result.write_text("")
        os._exit(0)
    end = time.monotonic() + most
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            result.write_text("the time is over")
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return result.read_text()


def tried(copy: Path, file: str, number: int, known: Record, seconds: float) -> tuple[str, str]:
    """Make one change of a file in the copy; return what it is, and what notices it, if any."""
    place = copy / file
    text = place.read_text()
    tree = ast.parse(text)
    change = list(changes(tree))[number]
    what = f"{file}:{change.line}: {change.what}"
    tests = known.reaching(file, change.lines, seconds)
    if not tests:
        return what, ""
    change.act()
    place.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    try:
        return f"{what} ({len(tests)} tests)", failing(copy, tests, 3 * seconds + 60)
    finally:
        place.write_text(text)


def _copy(folder: Path) -> Path:
    ignore = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=ignore)
    (folder / "syncprims" / "backends").symlink_to("../backends")  # as it is installed
    return folder


def main() -> int:
    """Try the changes that the command line asks for; return how many survive, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("code", nargs="+", help="files, folders, and lines as FILE:LINE,LINE")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--record", type=Path, help="keeps what the tests reach")
    parser.add_argument("--most", type=int, default=20, help="changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each change")
    options = parser.parse_args()
    found = [
        (str(file.relative_to(ROOT)), number)
        for path, _, lines in (one.partition(":") for one in options.code)
        for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])
        for number, change in enumerate(changes(ast.parse(file.read_text())))
        if not lines or str(change.line) in lines.split(",")
    ]
    chosen = random.Random(options.seed).sample(found, min(options.most, len(found)))
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copy(Path(folder, f"checkout{number}")) for number in range(_JOBS)]
        if options.record is None or not options.record.exists():
            code = [path.partition(":")[0] for path in options.code]
            lines = record(copies[0], code, options.tests)
            if options.record is not None:
                options.record.write_text(json.dumps(lines))
        else:
            lines = json.loads(options.record.read_text())
        known = Record(lines)
        importlib.import_module("torch._dynamo")  # before the forks, not in each of them

        def one(task: tuple[str, int]) -> bool:
            copy = copies.pop()
            what, failed = tried(copy, *task, known, options.seconds)
            copies.append(copy)
            print(f"{'is found' if failed else 'SURVIVES'}  {what} {failed}", flush=True)
            return not failed

        with ThreadPoolExecutor(_JOBS) as pool:
            survivors = sum(pool.map(one, chosen))
    print(f"{survivors} of {len(chosen)} changes survive")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
