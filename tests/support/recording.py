"""What the tests tried, and how often: counted as they run, and shown on a page.

A test says what it has done with :func:`tally`. ``pytest --record`` writes down the tests of each
file that ran whole and passed, with these counts; ``python -m support.recording --page`` makes
docs/tested.md of it. Nothing is recorded unless asked for.
"""

from __future__ import annotations

import ast
import collections
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/tested.json"
PAGE = ROOT / "docs/tested.md"

_HEAD = """\
# What we test

Each row is a file of tests: what it holds the library to, how many tests it has, and what they
tried when they were last recorded. A count is of single trials: kills, schedules, flipped bits.

- **How often.** `make test` runs all of the first kind before anything lands. `make soak` runs the
  long loops of the same things, by hand; where it has not been recorded, nothing is claimed.
- **Where from.** `python -m pytest --record -m "not soak"` (or `-m soak`) writes
  `docs/tested.json`, and `python -m support.recording --page` makes this page of it. A test holds
  both together.
- **What is not here.** GPUs and NCCL, and networks of several machines: not yet run. Several hosts
  are network namespaces of one machine.
"""

_running: list[pytest.Item] = []


def tally(what: str, count: int) -> None:
    """Count so many trials for the test that runs."""
    if _running:
        _running[-1].user_properties.append(("tally", [what, count]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Know which test runs."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record``."""
    parser.addoption("--record", action="store_true", help="write docs/tested.json")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that hears of all tests."""
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        if config.getoption("keyword"):
            raise pytest.UsageError("--record is of whole files: leave -k out")
        config.pluginmanager.register(Recorder())


class Recorder:
    """Keeps what a session's tests have tried, by file."""

    def __init__(self) -> None:
        self.passed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failed: set[tuple[str, str]] = set()
        self.counts: dict[tuple[str, str], collections.Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of how a test ended, and of its counts."""
        place = report.nodeid.partition("::")[0], "soak" if "soak" in report.keywords else "tests"
        if report.failed:
            self.failed.add(place)
        if report.when != "call" or not report.passed:
            return
        self.passed[place] += 1
        counts = self.counts.setdefault(place, collections.Counter())
        for name, value in report.user_properties:
            if name == "tally":
                what, count = cast("tuple[str, int]", value)
                counts[what] += count

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write down the files that passed; others keep what they had.

        A session that was broken off has run nothing whole, so nothing is written.
        """
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        for (file, kind), passed in sorted(self.passed.items()):
            if (file, kind) not in self.failed:
                record.setdefault(file, {})[kind] = {
                    "passed": passed,
                    "counts": dict(sorted(self.counts[file, kind].items())),
                    "on": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
                    "where": _where(),
                }
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def _where() -> str:
    return f"{platform.system()}, Python {platform.python_version()}, {os.cpu_count()} processors"


def page() -> str:
    """Return the page of what is recorded."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    lines = [_HEAD, "| what holds | tests | tried by them | in the soak | recorded |"]
    lines.append("|---|---|---|---|---|")
    for file, kinds in sorted(record.items()):
        path = ROOT / file
        text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        about = " ".join(text.split()).replace("|", "\\|")
        tests, soak = kinds.get("tests", {}), kinds.get("soak", {})
        lines.append(
            f"| {about} (`{path.name}`) | {tests.get('passed', '')} | {_shown(tests)} "
            f"| {_soaked(soak)} | {max(kind['on'] for kind in kinds.values())} |"
        )
    total = sum(kinds["tests"]["passed"] for kinds in record.values() if "tests" in kinds)
    where = sorted({kind["where"] for kinds in record.values() for kind in kinds.values()})
    lines += ["", f"{total} tests in {len(record)} files. Recorded on {'; '.join(where)}.", ""]
    return "\n".join(lines)


def _shown(kind: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in kind.get("counts", {}).items())


def _soaked(kind: dict[str, Any]) -> str:
    counts = _shown(kind)
    return f"{kind['passed']} tests" + (f": {counts}" if counts else "") if kind else ""


if __name__ == "__main__":
    if sys.argv[1:] != ["--page"]:
        sys.exit(f"usage: python {Path(__file__).name} --page")
    PAGE.write_text(page())
