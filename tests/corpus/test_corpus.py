"""Each bug that people reported is named, with rank and line, and its mended twin passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bugs import BUGS, Bug, Kind, found, report, run_bug
from support import ROOT

every_bug = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
both_kinds = pytest.mark.parametrize("kind", ["threads", "processes"])


@both_kinds
@every_bug
def test_a_bug_is_named(bug: type[Bug], kind: Kind, tmp_path: Path) -> None:
    error = found(bug, tmp_path, kind)
    assert error is not None
    assert not report(bug, error)


@both_kinds
@every_bug
def test_its_mended_twin_passes(bug: type[Bug], kind: Kind, tmp_path: Path) -> None:
    run_bug(bug, bug.mended, tmp_path, kind=kind)


def test_there_are_fifty_of_nine_kinds() -> None:
    kinds = [bug.kind() for bug in BUGS]
    assert len(kinds) == 50
    assert min(map(kinds.count, kinds)) >= 4


def test_the_page_and_the_readme_have_the_results() -> None:
    page = (ROOT / "docs" / "bugs.md").read_text()
    assert re.findall(r"\[(\S+#\d+)\]", page) == [bug.source for bug in BUGS]
    ours, gloo, detail, monitored, accelerate = re.findall(r"\*\*(\d+)\*\*", page)
    assert int(ours) == len(BUGS)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"such tests name {ours} with rank and line" in readme
    for words in (
        f"Gloo names {gloo},", f"DETAIL` {detail} of", f"`monitored_barrier` {monitored},",
        f"debug mode {accelerate}.",
    ):  # fmt: skip
        assert words in readme
