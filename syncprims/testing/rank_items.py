"""Tests that are written for torchrun: each runs on all ranks of a world of processes."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .outcomes import results_of
from .world_spec import RankOutput, TestContext, WorldSpec, test_context
from .worlds import run_once

_LONGEST = 300.0  # seconds of real time for a test
_RAISED = pytest.StashKey[BaseException]()  # by the test that runs in this process


def run_item(item: pytest.Item, ranks: int) -> list[pytest.TestReport]:
    """Run a test with all its fixtures once per rank, and return its reports.

    They are those of rank 0, or that of the first failure.
    """
    config: Any = item.config

    def program() -> Any:
        _capture_no_more(config)
        reports = runtestprotocol(item, log=False, nextitem=None)
        if any(report.failed for report in reports):
            raise item.stash.get(_RAISED, None) or AssertionError(  # a plugin has made it fail
                "\n".join(str(report.longrepr) for report in reports if report.failed)
            )
        hook = config.hook.pytest_report_to_serializable
        return [hook(config=config, report=report) for report in reports]

    output = RankOutput()
    token = test_context.set(TestContext(None, item.nodeid, lambda: output))
    info: Any = pytest.CallInfo

    def run() -> Any:
        ended = run_once(WorldSpec(program, ranks, "processes", torch=True, timeout=_LONGEST))
        return results_of(ended, "", equal_rounds=False)

    try:
        call = info.from_call(run, "call")
    finally:
        test_context.reset(token)
    if call.excinfo is None:
        reports: list[Any] = call.result[0]
        hook = config.hook.pytest_report_from_serializable
        return [hook(config=config, data=report) for report in reports]
    report = pytest.TestReport.from_item_and_call(item, call)
    for (rank, stream), text in sorted(output.texts.items()):
        if text:
            report.sections.append((f"Captured {stream} rank {rank}", text))
    return [report]


def note_error(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Note what a test has raised first, in the process of its rank."""
    if call.excinfo is not None:
        first: Any = call.excinfo.traceback.cut(path=item.path)[0]  # without the frames of pytest
        item.stash.setdefault(_RAISED, call.excinfo.value.with_traceback(first._rawentry))


def _capture_no_more(config: Any) -> None:
    """End pytest's capture in this process: its file is that of all ranks, which have their own."""
    manager = config.pluginmanager.getplugin("capturemanager")
    streams, fds = (sys.stdout, sys.stderr), [os.dup(fd) for fd in (1, 2)]
    manager.stop_global_capturing()
    manager._method = "no"
    manager.start_global_capturing()
    for fd, kept in enumerate(fds, 1):
        os.dup2(kept, fd)
        os.close(kept)
    sys.stdout, sys.stderr = streams
