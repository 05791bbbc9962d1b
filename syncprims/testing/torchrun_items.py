"""``--syncprims-worlds-ranks``: a test that is written for torchrun runs with its fixtures."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from . import world_spec
from .outcomes import results_of
from .private_names import NAMES
from .worlds import run_once

_RAISED = pytest.StashKey[BaseException]()  # by the test, on this rank
_LONGEST = 300.0  # seconds of real time for a test


class TorchrunItems:
    """Runs each test and its fixtures on each rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run the test and its fixtures on each rank."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Note what a test has raised first, in the process of its rank."""
        if call.excinfo is not None:
            first: Any = call.excinfo.traceback.cut(path=item.path)[0]  # without frames of pytest
            item.stash.setdefault(
                _RAISED,
                call.excinfo.value.with_traceback(NAMES.of(first, "TracebackEntry._rawentry")),
            )

    def _run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Run a test with all its fixtures once per rank, and return its reports.

        They are those of rank 0, or that of the first failure.
        """
        config: Any = item.config

        def program() -> Any:
            _capture_no_more(config)
            reports = NAMES["runtestprotocol"](item, log=False, nextitem=None)
            if any(report.failed for report in reports):
                raise item.stash.get(_RAISED, None) or AssertionError(  # a plugin made it fail
                    "\n".join(str(report.longrepr) for report in reports if report.failed)
                )
            hook = config.hook.pytest_report_to_serializable
            return [hook(config=config, report=report) for report in reports]

        output = world_spec.RankOutput()
        context = world_spec.TestContext(None, item.nodeid, lambda: output)
        token = world_spec.test_context.set(context)
        spec = world_spec.WorldSpec(program, self._ranks, "processes", torch=True, timeout=_LONGEST)
        run: Any = pytest.CallInfo.from_call
        try:
            call = run(lambda: results_of(run_once(spec), "", equal_rounds=False), "call")
        finally:
            world_spec.test_context.reset(token)
        if call.excinfo is None:
            hook = config.hook.pytest_report_from_serializable
            return [hook(config=config, data=report) for report in call.result[0]]
        report = pytest.TestReport.from_item_and_call(item, call)
        for (rank, stream), text in sorted(output.texts.items()):
            if text:
                report.sections.append((f"Captured {stream} rank {rank}", text))
        return [report]


def _capture_no_more(config: Any) -> None:
    """End pytest's capture in this process: its file is that of all ranks, which have their own."""
    manager = config.pluginmanager.getplugin("capturemanager")
    streams, fds = (sys.stdout, sys.stderr), [os.dup(fd) for fd in (1, 2)]
    manager.stop_global_capturing()
    NAMES.set(manager, "CaptureManager._method", "no")
    manager.start_global_capturing()
    for fd, kept in enumerate(fds, 1):
        os.dup2(kept, fd)
        os.close(kept)
    sys.stdout, sys.stderr = streams
