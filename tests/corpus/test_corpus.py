"""What test worlds find of each bug is what the page says, and its twin passes."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from difflib import ndiff
from pathlib import Path

import pytest
from bugs import BUGS, CHECKED, FIFTY, KINDS, Bug, Kind, outcome
from bugs.classes import programs
from support import ROOT

RESULTS = json.loads((ROOT / "bench" / "corpus.json").read_text())


CASES = [
    pytest.param(
        bug, kind, id=f"{bug.name} in {kind}",
        marks=[pytest.mark.soak] * bool(bug.check and kind == "processes"),
    )
    for bug in BUGS for kind in bug.kinds
]  # fmt: skip


@pytest.mark.parametrize(("bug", "kind"), CASES)
def test_a_bug_is_found_as_recorded_and_its_twin_passes(
    bug: Bug, kind: Kind, tmp_path: Path
) -> None:
    """If a bug is found now that was not, run bench/corpus.py with `threads processes`."""
    result, said = outcome(bug, bug.bug, tmp_path, kind)
    if kind not in bug.chance:
        assert result == ("named" if bug.check else RESULTS["bugs"][bug.name][kind]), said
    if kind == bug.kinds[0]:
        assert outcome(bug, bug.twin, tmp_path, kind)[0] == "silent"


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_twin_passes_in_processes(bug: Bug, tmp_path: Path) -> None:
    assert outcome(bug, bug.twin, tmp_path, "processes")[0] == "silent"


def test_there_are_fifty_and_each_differs_from_its_twin_by_the_bug() -> None:
    kinds = [bug.scope["__name__"] for bug in BUGS]
    assert len(FIFTY) == 50
    assert min(map(kinds.count, {*kinds})) >= 3
    assert len({*kinds}) == len(KINDS)
    for bug in BUGS:
        assert bug.check or len(bug.places) == 1 + (bug.name == "order_of_a_set"), bug.name
        assert bug.text.count(bug.mend[0]) == 1, bug.name
        twin = bug.text.replace(*bug.mend)
        signs = Counter(line[0] for line in ndiff(bug.text.splitlines(), twin.splitlines()))
        assert max(signs["-"], signs["+"]) <= 4, bug.name


def test_a_sample_of_the_programs_by_rule_is_found_and_their_twins_pass(tmp_path: Path) -> None:
    look_at(random.Random(7).sample(programs(), 10), tmp_path)


@pytest.mark.soak
def test_all_programs_by_rule(tmp_path: Path) -> None:
    counts = look_at(programs(), tmp_path)
    for kind, count in RESULTS["classes"].items():
        assert counts[kind]["named"] >= count["threads"].get("named", 0), kind


def look_at(bugs: list[Bug], folder: Path) -> dict[str, Counter[str]]:
    """Count what is found by class; no twin may fail, and no class found whole be missed."""
    counts = defaultdict[str, Counter[str]](Counter)
    for n, bug in enumerate(bugs):
        (own := folder / str(n)).mkdir()
        result, said = outcome(bug, bug.bug, own)
        counts[bug.source][result] += 1
        recorded = RESULTS["classes"][bug.source]["threads"]
        assert result == "named" or recorded.get("named", 0) < recorded["programs"], said
        assert outcome(bug, bug.twin, own)[0] == "silent", bug.text
    return counts


def test_the_readme_has_the_results() -> None:
    def count(tool: str, *words: str, bugs: list[Bug] = FIFTY) -> int:
        return sum(RESULTS["bugs"][bug.name].get(tool) in words for bug in bugs)

    tools = {*RESULTS["bugs"]["metric_on_rank_0"]} - {"threads", "processes"}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"name {count('threads', 'named')} with rank and line, and in processes "
        f"{count('processes', 'named')}. Gloo names {count('gloo', 'named')} at once, with "
        f"`TORCH_DISTRIBUTED_DEBUG=DETAIL` {count('DETAIL', 'named')}; after a timeout, no tool "
        f"names more than {max(count(tool, 'named', 'late') for tool in tools)}."
    ) in readme
    assert count("gloo", "named", bugs=CHECKED) == len(CHECKED)
