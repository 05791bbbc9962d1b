"""docs/tested.md is generated from the recorded test runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import pytest
from support import recording
from support.recording import PAGE, RECORD, ROOT, Recorder, page, tally

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_is_made_of_the_record() -> None:
    assert PAGE.read_text() == page(), "run `python -m support.recording --page`"


def test_every_recorded_file_is_there() -> None:
    record = json.loads(RECORD.read_text())
    assert [file for file in record if not (ROOT / file).is_file()] == []
    assert len(record) > 40


def test_counts_reach_the_record_and_failures_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(recording, "RECORD", tmp_path / "tested.json")
    tally("trials of the tally", 3)
    said = [value for name, value in request.node.user_properties if name == "tally"]
    request.node.user_properties.clear()
    recorder = Recorder()
    ends: list[tuple[str, Literal["passed", "failed"]]]
    ends = [("good.py", "passed"), ("bad.py", "passed"), ("bad.py", "failed")]
    for file, outcome in ends:
        report = pytest.TestReport(f"{file}::test", (file, 1, "test"), {}, outcome, None, "call")
        report.user_properties = [("tally", value) for value in said]
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not (tmp_path / "tested.json").exists()
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    kept = json.loads((tmp_path / "tested.json").read_text())
    assert list(kept) == ["good.py"]
    assert kept["good.py"]["tests"]["counts"] == {"trials of the tally": 3}
