"""A record of what the tests tried, and how often; shown in docs/tested.md.

A test counts its trials with :func:`tally`. ``pytest --record`` stores these counts for each test
file that ran completely and passed. ``python -m support.recording --page`` makes docs/tested.md
from them. Without the option, nothing is recorded.
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

Each row is a file of tests: its subject, its number of tests, and what they tried when they were
last recorded. A count is a number of single trials: kills, schedules, flipped bits.

- **How often.** `make test` runs the tests of the second column before every merge. `make soak`
  runs long loops of the same kind by hand, and `make launchers` real jobs under SLURM and Open MPI:
  both are in the column of the soak. An empty cell means that no such run was recorded.
- **Source.** `python -m pytest --record -m "not soak and not launchers"` (or `-m soak`) writes
  `docs/tested.json`, and `python -m support.recording --page` makes this page from it. `make
  launchers` does both for its own. A test compares both.
- **Not tested yet.** A Kubernetes cluster, GPUs and NCCL, and networks of several machines. Several
  hosts are network namespaces of one machine.
"""

_running: list[pytest.Item] = []


def tally(what: str, count: int) -> None:
    """Add this number of trials to the running test."""
    if _running:
        _running[-1].user_properties.append(("tally", [what, count]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record which test runs."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record``."""
    parser.addoption("--record", action="store_true", help="write docs/tested.json")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that gets the reports of all tests."""
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        if config.getoption("keyword"):
            raise pytest.UsageError("--record needs whole files: leave out -k")
        config.pluginmanager.register(Recorder())


class Recorder:
    """The trials of the tests of a session, by file."""

    def __init__(self) -> None:
        self.passed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failed: set[tuple[str, str]] = set()
        self.counts: dict[tuple[str, str], collections.Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the outcome of a test and its counts."""
        by_hand = {"soak", "launchers"} & set(report.keywords)
        place = report.nodeid.partition("::")[0], "soak" if by_hand else "tests"
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
        """Store the files that passed. The others keep their old record.

        An interrupted session has no complete files, so nothing is stored.
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
    """Return the page made from the record."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    lines = [_HEAD, "| subject | tests | trials | trials in the soak | recorded |"]
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
