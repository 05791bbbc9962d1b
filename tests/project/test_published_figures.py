"""The pages of figures show the stored measurements, and mark missed aims."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import ROOT

BENCH = ROOT / "bench"
STATE = {"commit": "abc", "machine": "a machine", "versions": "Python 3"}


@pytest.fixture(autouse=True)
def bench_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def seen(*figures: tuple[int, str, str, list[float]]) -> Any:
    found = import_module("table").Seen()
    for ranks, library, operation, times in figures:
        found.add(ranks, library, {operation: times})
    return found


def barriers(ours: float, pthread: float = 10.0, mpich: float = 20.0, gloo: float = 900.0) -> Any:
    times = {"syncprims": ours, "pthread": pthread, "MPICH": mpich, "Gloo": gloo}
    return seen(*((2, library, "barrier", [time]) for library, time in times.items()))


def sections(**data: Any) -> dict[str, Any]:
    return {name: {**STATE, "seconds": 60, "data": each} for name, each in data.items()}


def cells(lines: list[str], start: str) -> list[list[str]]:
    """Return the cells of the line that begins so, and of those that go on from it."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    first = next(i for i, line in enumerate(table) if line[0] == start)
    after = (i for i in range(first + 1, len(table)) if table[i][0] != '"')
    return table[first : next(after)]


def test_the_published_pages_say_what_is_stored(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes((BENCH / "results.json").read_bytes())
    command = [sys.executable, str(BENCH / "measure.py"), "--render", "--into", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for page in ("RESULTS.md", "TORCH.md"):
        made = (tmp_path / page).read_text().replace("](./", "](../docs/assets/")
        assert made == (BENCH / page).read_text(), f"run: python bench/measure.py --render ({page})"
    for picture in ("latency.svg", "arrays.svg"):
        published = (ROOT / "docs" / "assets" / picture).read_text()
        assert (tmp_path / picture).read_text() == published


def test_the_first_table_has_every_promise_measured_or_not() -> None:
    summary, catalogue = import_module("summary"), import_module("catalogue")
    lines = summary.table({})
    assert len(lines) == 3 + sum(len(promise.aims) for promise in catalogue.ROWS)
    assert all("not measured" in line for line in lines[3:])
    assert "yes" not in "".join(lines)


def test_an_aim_is_reached_or_missed_by_the_medians() -> None:
    summary = import_module("summary")
    good = summary.table(sections(control=barriers(9.0).stored()))
    assert [line[6:8] for line in cells(good, "barrier, `file`")] == [
        ["0.90", "yes"], ["2.22", "yes"], ["100", "yes"],
    ]  # fmt: skip
    bad = summary.table(sections(control=barriers(50.0).stored()))
    assert [line[6:8] for line in cells(bad, "barrier, `file`")] == [
        ["5.00", "**missed**"], ["0.40", "**missed**"], ["18.0", "**missed**"],
    ]  # fmt: skip


def test_what_a_peer_does_better_is_listed() -> None:
    summary = import_module("summary")
    assert summary.lost(sections(control=barriers(9.0).stored())) == []
    lost = summary.lost(sections(control=barriers(30.0).stored()))
    assert len(lost) == 2
    assert "pthread_barrier_wait" in lost[0]
    assert "3.00 x at 2 ranks" in lost[0]
    assert "MPICH" in lost[1]
    loads = seen(
        (1, "load_checkpoint_in_model", "of safetensors", [1.5]),
        (1, "safetensors", "of safetensors", [1.0]),
        (1, "Accelerate", "of safetensors", [5.2]),
    )
    (line,) = summary.lost(sections(checkpoints=loads.stored()))
    assert (
        line == "- safetensors, against load into a model in use, 1 GiB, over safetensors: 1.50 x"
    )


def test_an_absent_peer_is_told_and_no_comparison_is_made() -> None:
    summary = import_module("summary")
    found = barriers(9.0)
    found._figures.pop((2, "MPICH", "barrier"))
    found.lack(2, "MPICH", ["barrier"], "not installed: mpi4py")
    assert found.failed == []
    line = cells(summary.table(sections(control=found.stored())), "barrier, `file`")[1]
    assert "MPICH not installed: mpi4py" in line[4]
    assert line[7] == ""
    found.lack(2, "MPICH", ["barrier"], "failed with exit code 1")
    assert found.failed == ["MPICH at 2 ranks: failed with exit code 1"]


def test_figures_are_kept_as_least_median_and_most() -> None:
    table = import_module("table")
    stored = json.loads(json.dumps(seen((4, "Gloo", "flag", [5.0, 1.0, 2.0, 9.0, 3.0])).stored()))
    assert stored["figures"] == {"4": {"Gloo": {"flag": [1.0, 3.0, 9.0]}}}
    again = table.Seen.restored(stored)
    assert again.median(4, "Gloo", "flag") == 3.0
    assert again.stored() == stored


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = import_module("measure")
    asked: list[str] = []

    def measured(name: str, scale: Any) -> dict[str, Any]:
        asked.append(name)
        if name == "data":
            raise KeyboardInterrupt
        return {"figures": {}, "lacking": {}, "failed": ["it broke"] if name == "kills" else []}

    monkeypatch.setattr(measure, "measured", measured)
    monkeypatch.setattr(measure.machine, "state", lambda: dict(STATE))
    with pytest.raises(KeyboardInterrupt):
        measure.run(["alone", "kills", "data", "worlds"], tmp_path, measure.QUICK, resume=True)
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"alone", "kills"}
    # What failed is measured again, what is there is not, unless the library has changed.
    assert measure.run(["alone", "kills"], tmp_path, measure.QUICK, resume=True) == ["it broke"]
    monkeypatch.setattr(measure.machine, "state", lambda: {**STATE, "commit": "def"})
    measure.run(["alone"], tmp_path, measure.QUICK, resume=True)
    assert asked == ["alone", "kills", "data", "kills", "alone"]


def test_a_section_that_fails_leaves_the_older_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = import_module("measure")
    results = [{"figures": {}, "failed": []}, {"failed": ["it crashed"]}]
    monkeypatch.setattr(measure, "measured", lambda name, scale: results.pop(0))
    assert measure.run(["alone"], tmp_path, measure.QUICK, resume=False) == []
    before = (tmp_path / "results.json").read_text()
    assert measure.run(["alone"], tmp_path, measure.QUICK, resume=False) == ["it crashed"]
    assert (tmp_path / "results.json").read_text() == before


def test_a_section_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "measure.py"), "--quick", "--only", "forecast"]
    done = subprocess.run(
        [*command, "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "## Forecast" in (tmp_path / "TORCH.md").read_text()
    refused = subprocess.run(
        [*command[:-1], "nothing"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "no section nothing; there are alone, control" in refused.stderr


@pytest.mark.parametrize("data", [{}, {"control": None, "data": None}], ids=["empty", "measured"])
def test_pictures_name_every_line_and_are_sound(data: dict[str, Any]) -> None:
    plots = import_module("plots")
    if data:
        sizes = [
            (2, library, f"{operation} {size}", [size * time])
            for operation in ("broadcast", "all_reduce")
            for library, time in (("syncprims", 0.1), ("Gloo", 0.9))
            for size in (4, 65536)
        ]
        data = sections(control=barriers(9.0).stored(), data=seen(*sizes).stored())
    for picture in (plots.latency(data), plots.arrays(data)):
        texts = [text.text for text in ElementTree.fromstring(picture).iter() if text.text]
        if data:
            assert {"syncprims", "Gloo"} <= set(texts)
        else:
            assert "not measured yet" in texts


def test_names_at_the_ends_of_lines_do_not_lie_upon_each_other() -> None:
    plots = import_module("plots")
    ends = {"a": 100.0, "b": 101.0, "c": 103.0, "d": plots.BOTTOM - 1.0, "e": float(plots.BOTTOM)}
    placed = plots._apart(ends)
    assert sorted(placed, key=lambda name: placed[name]) == list(ends)
    heights = sorted(placed.values())
    gaps = [below - above for above, below in itertools.pairwise(heights)]
    assert min(gaps) >= plots.NAME_HEIGHT
    assert heights[-1] <= plots.BOTTOM
