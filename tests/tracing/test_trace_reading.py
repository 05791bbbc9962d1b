"""`syncprims trace`: analysis of a run, and of damaged trace files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import SECOND, Planted, command, recorder_of

from syncprims.cli.console import Style
from syncprims.cli.trace import report
from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.tracing import pictures
from syncprims.tracing.analysis import Analysis, analyse
from syncprims.tracing.pictures import LATE, WAITS, draw_image
from syncprims.tracing.reading import find_runs, read_run
from syncprims.tracing.recorder import ENTRY

Plant = Callable[..., Planted]


AT = 1000 * SECOND


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return a function that makes a run of so many ranks."""
    return partial(Planted, tmp_path / "trace", monkeypatch)


@pytest.fixture
def planted(plant: Plant) -> Planted:
    """A run of four ranks: rank 2 is a second late to each of ten barriers, rank 0 once."""
    run = plant(4)
    run.round(1, [AT] * 4, kind="init", site="train.py:1")
    for step in range(10):
        base = AT + (2 * step + 1) * SECOND
        run.round(step + 2, [base, base, base + SECOND, base], name="epoch end")
    base = AT + 30 * SECOND
    run.round(12, [base + SECOND // 2, base, base, base], kind="all_reduce", site="train.py:9")
    run.leave(AT + 40 * SECOND)
    return run


def analysis_of(planted: Planted) -> Analysis:
    (folder,) = find_runs(planted.directory)
    return analyse(read_run(folder))


def test_waiting_is_laid_on_who_came_last(planted: Planted) -> None:
    found = analysis_of(planted)
    worst, other = found.late_arrivals
    assert (worst.late, str(worst.call)) == (2, "barrier 'epoch end' (train.py:7)")
    assert worst.times == 10
    assert worst.waited == pytest.approx(30.0)
    assert worst.longest == pytest.approx(1.0)
    assert sorted(worst.waiting) == [0, 1, 3]
    assert (other.late, other.call.call) == (0, "all_reduce")
    assert other.waited == pytest.approx(1.5)
    assert found.stragglers == [2]
    assert found.conclusion == (
        "Rank 2 is the straggler: the others waited 30 s for it in all, 95% of all waiting for a "
        "rank, mostly at barrier 'epoch end' (train.py:7)."
    )
    waited_for = [one.waited_for for one in found.summaries]
    assert waited_for == pytest.approx([1.5, 0, 30.0, 0])
    assert found.summaries[0].span == pytest.approx(40.0)
    assert found.summaries[0].waiting == pytest.approx(10.0, rel=1e-3)
    assert {one.end for one in found.summaries} == {"well"}


@pytest.mark.parametrize(
    ("late", "stragglers", "conclusion"),
    [
        ([0, 1, 2, 3], [], "No rank is the straggler: ranks waited 24 s for each other"),
        ([1, 3, 1, 3], [1, 3], "Ranks 1 and 3 are the stragglers"),
    ],
)
def test_up_to_half_of_the_ranks_may_be_stragglers(
    late: list[int], stragglers: list[int], conclusion: str, plant: Plant
) -> None:
    run = plant(4)
    for step in range(8):
        arrivals = [AT + 2 * step * SECOND] * 4
        arrivals[late[step % 4]] += SECOND
        run.round(step + 1, arrivals)
    run.leave(AT + 20 * SECOND)
    found = analysis_of(run)
    assert found.stragglers == stragglers
    assert found.conclusion.startswith(conclusion)


def test_a_rank_that_never_comes_is_to_blame(plant: Plant) -> None:
    run = plant(3)
    run.round(1, [AT] * 3)
    run.round(2, [AT + SECOND, None, AT + SECOND], name="save", costs=5 * SECOND)
    run.leave(AT + 20 * SECOND, ranks=[0, 2])
    found = analysis_of(run)
    (row,) = [row for row in found.late_arrivals if row.late == 1]
    assert row.call.call == "barrier 'save'"
    assert row.waited == pytest.approx(5.0 + 15.0)
    assert found.summaries[1].end == "killed, or still running"
    assert found.stragglers == [1]


@pytest.fixture
def hanging(plant: Plant) -> Planted:
    """A run of four ranks: rank 3 is 5 ms late once, and rank 2 never comes to the last barrier."""
    run = plant(4)
    run.round(1, [AT] * 4, kind="init", site="train.py:1")
    run.round(2, [AT + SECOND] * 3 + [AT + SECOND + SECOND // 200], site="spin.py:5")
    late = AT + 2 * SECOND
    run.waits(3, [late, late, None, late], late + 20 * SECOND, name="end", site="spin.py:8")
    return run


def test_a_hang_is_laid_on_the_rank_that_has_not_come(hanging: Planted) -> None:
    hanging.leave(0, ranks=[])
    found = analysis_of(hanging)
    assert found.conclusion == (
        "Rank 2 has not come to barrier 'end' (spin.py:8); 3 ranks have waited 20 s."
    )
    assert found.stragglers == [2]
    worst = found.late_arrivals[0]
    assert (worst.late, str(worst.call)) == (2, "barrier 'end' (spin.py:8)")
    assert worst.waited == pytest.approx(60)
    assert sorted(worst.waiting) == [0, 1, 3]
    assert found.summaries[2].waited_for == pytest.approx(60)
    assert found.summaries[0].waiting == pytest.approx(20, rel=1e-2)
    assert found.summaries[0].end == (
        "killed, or still running: waits at barrier 'end' (spin.py:8)"
    )


def test_a_hang_after_long_waits_does_not_hide_them(plant: Plant) -> None:
    run = plant(4)
    for step in range(10):
        base = AT + 20 * step * SECOND
        run.round(step + 1, [base, base, base, base + 10 * SECOND], site="train.py:5")
    late = AT + 200 * SECOND
    run.waits(11, [late, None, None, late], late + 2 * SECOND, name="end", site="train.py:8")
    run.leave(0, ranks=[])
    found = analysis_of(run)
    assert found.conclusion.startswith(
        "Ranks 1 and 2 have not come to barrier 'end' (train.py:8); 2 ranks have waited 2 s. "
        "In all: Rank 3 is the straggler"
    )


def test_a_wait_that_others_have_survived_is_no_hang(hanging: Planted) -> None:
    """Rank 0 was killed as it waited; the others met again, or reported it, and ended."""
    hanging.leave(AT + 60 * SECOND, ranks=[1, 2, 3])
    assert "has not come to" not in analysis_of(hanging).conclusion


def test_clocks_of_hosts_are_aligned_by_the_rounds(plant: Plant) -> None:
    ahead = 12_345 * SECOND
    run = plant(4, ahead=[0, 0, ahead, ahead])
    rng = np.random.default_rng(0)
    arrivals: list[list[int]] = []
    for step in range(2000):
        base = AT + step * SECOND
        # Now this host is last, now that one: so both sides are bound, to about 10 us.
        came = [base + int(jitter) for jitter in rng.uniform(0, SECOND / 2, 4)]
        arrivals.append(came)
        run.round(step + 1, came, costs=10_000, drift=20e-6)
    run.leave(AT + 2001 * SECOND)
    found = analysis_of(run)
    assert found.alignment.hosts == [os.uname().nodename]
    assert not found.alignment.guessed
    # Between the middles of two windows the clock has drifted by 200 us; it is found to half of it.
    assert found.alignment.error < 2e-4
    (rounds,) = found.groups
    off = rounds.posted - np.array(arrivals)
    off -= off[:, :1]
    assert np.abs(off).max() < 3e5
    late = [int(np.argmax(came)) for came in arrivals]
    assert (rounds.late == late).mean() > 0.99


def test_hosts_that_share_no_round_are_set_by_the_calendar(plant: Plant) -> None:
    run = plant(2, ahead=[0, 1])
    run.round(1, [AT, None])
    run.leave(AT + SECOND)
    done = command(run.directory)
    assert done.returncode == 0
    assert "share no round with the first rank: aligned by the calendar" in done.stderr


def test_a_file_cut_off_anywhere_gives_what_is_left(planted: Planted) -> None:
    path = next(planted.directory.glob("*/rank-1.trace"))
    whole = path.read_bytes()
    rounds = []
    for length in range(0, len(whole) + 1, 97):
        path.write_bytes(whole[:length])
        (folder,) = find_runs(planted.directory)
        run = read_run(folder)
        found = [len(trace.rounds) for trace in run.ranks if trace.rank == 1]
        rounds.append(found[0] if found else 0)
        if not found:
            assert "rank-1.trace is no trace, or is damaged or cut off at its start" in "\n".join(
                run.complaints
            )
        analyse(run)
    assert rounds == sorted(rounds)
    assert rounds[-1] in (11, 12)


def test_damage_is_told_and_the_rest_is_shown(planted: Planted) -> None:
    path = next(planted.directory.glob("*/rank-1.trace"))
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        (folder,) = find_runs(planted.directory)
        analyse(read_run(folder))  # whatever it says, it says it
    data = bytearray(whole)
    data[-2 * ENTRY.size + 32] = 77  # the kind of an entry
    path.write_bytes(data)
    (folder,) = find_runs(planted.directory)
    assert "1 entries are damaged" in read_run(folder).complaints[0]


@pytest.mark.parametrize("foreign", [True, False])
def test_an_unreadable_file_is_named_and_hides_nothing(planted: Planted, foreign: bool) -> None:
    path = next(planted.directory.iterdir()) / "rank-3.trace"
    path.unlink()
    if foreign:
        path.write_text("a love letter\n" * 100)
    else:
        path.symlink_to("absent")
    path.with_name("notes.txt").write_text("not ours")
    done = command(planted.directory)
    assert done.returncode == 0
    told = "is no trace, or is damaged" if foreign else "[Errno 2]"
    assert "syncprims: rank-3.trace" in done.stderr
    assert told in done.stderr
    assert "syncprims: no trace of rank 3 can be read" in done.stderr
    assert "Rank 2 is the straggler" in done.stdout


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"syncprims: {tmp_path} holds no trace: a run with SYNCPRIMS_TRACE={tmp_path} records one\n"
    )
    assert "is no directory" in command(tmp_path / "absent").stderr
    folder = tmp_path / "run"
    folder.mkdir()
    folder.joinpath("rank-0.trace").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigurationError, match=r"nothing in .* can be read"):
        read_run(folder)


def test_a_run_that_is_not_there_names_those_that_are(planted: Planted) -> None:
    done = command(planted.directory, "--run", "yesterday")
    assert done.returncode == 2
    assert "has no such run; it has planted" in done.stderr


def test_without_a_terminal_nothing_is_cut_off_or_coloured(plant: Plant) -> None:
    run = plant(2)
    name, site = "n" * 180, "folder/" * 20 + "train.py:7"
    run.round(1, [AT, AT + SECOND], name=name, site=site)
    run.leave(AT + 2 * SECOND)
    out = command(run.directory, COLUMNS="40", FORCE_COLOR="1").stdout
    assert f"barrier '{name}'" in out
    assert site in out
    assert "\x1b" not in out


def test_the_chrome_trace_is_as_its_format_says(planted: Planted) -> None:
    assert command(planted.directory).returncode == 0
    data = json.loads(planted.directory.joinpath("trace.json").read_text())
    assert data["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = data["traceEvents"]
    host = os.uname().nodename
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} ({host})" for rank in range(4)}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "MXi"
        if event["ph"] != "M":
            assert event["ts"] >= 0
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 4 * 12
    assert all(e["dur"] >= 0 and e["name"] and e["cat"] for e in slices)
    late = [e for e in slices if e["pid"] == 0 and e["name"] == "barrier 'epoch end'"]
    assert [e["dur"] for e in late] == pytest.approx([1e6 + 1] * 10)
    assert {e["args"]["last to come"] for e in late} == {"rank 2"}  # whom they waited for


def test_groups_of_the_same_ranks_have_other_names_in_the_chrome_trace(plant: Plant) -> None:
    run = plant(2)
    run.round(1, [AT, AT])
    run.round(1, [AT, AT], board="group 0")
    run.leave(AT + SECOND)
    path = run.directory / "trace.json"
    pictures.write_chrome_trace(analysis_of(run), path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"all ranks", "all ranks 'group 0'"}


def test_a_long_trace(planted: Planted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pictures, "MOST_SLICES", 30)
    path = tmp_path / "short.json"
    assert pictures.write_chrome_trace(analysis_of(planted), path) == 18
    slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] > 9e5 for e in slices) == 30


@pytest.mark.parametrize("ranks", [2, pytest.param(64, marks=pytest.mark.soak)])
def test_the_picture_shows_the_straggler(ranks: int, tmp_path: Path, plant: Plant) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    run = plant(ranks)
    for step in range(50):
        came = [AT + 2 * step * SECOND] * ranks
        came[1] += SECOND
        run.round(step + 1, came, name="epoch end")
    run.leave(AT + 100 * SECOND)
    path = tmp_path / "timeline.png"
    done = command(run.directory, "--png", path)
    assert done.returncode == 0
    assert f"{path}: the timeline" in done.stdout
    image = imread(path)
    assert not image[:3, :, 3].any()  # on a dark page, no white box
    image = image[:, :, :3]

    def pixels(colour: str) -> Any:
        near = np.abs(image - np.array(to_rgb(colour))).max(axis=2) < 0.02
        return near[:, : int(image.shape[1] * 0.75)]

    waits, late = pixels(WAITS).sum(axis=1), pixels(LATE).sum(axis=1)
    wide = image.shape[1] // 4  # about half of a row, which is two thirds of the picture
    rows_waiting, rows_late = waits > wide, late > wide
    assert rows_late.any()
    assert not (rows_waiting & rows_late).any()
    bands = np.diff(np.append(0, rows_late.astype(int))) == 1
    assert bands.sum() == 1  # one row, as high as every other
    assert rows_late.sum() == pytest.approx((rows_waiting | rows_late).sum() / ranks, rel=0.35)


def test_no_matplotlib(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailable, match=r"pip install '\.\[trace\]'.*trace\.json"):
        draw_image(analysis_of(planted), tmp_path / "no.png")


def test_a_picture_has_the_name_that_was_given(planted: Planted, tmp_path: Path) -> None:
    (where := tmp_path / "pictures").mkdir()
    done = command(planted.directory, "--png", where / "run.v2")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in where.iterdir()] == ["run.v2"]
    assert (where / "run.v2").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["", "absent/timeline.png"])  # the first one is a directory
def test_a_picture_that_cannot_be_drawn_hides_nothing(
    planted: Planted, tmp_path: Path, name: str
) -> None:
    (where := tmp_path / "pictures").mkdir()
    done = command(planted.directory, "--png", where / name)
    assert (done.returncode, "syncprims: cannot write " in done.stderr) == (1, True), done.stderr
    assert "Rank 2 is the straggler" in done.stdout
    assert [*where.iterdir()] == []


def test_a_reader_who_has_gone_costs_no_file(planted: Planted, tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    line = [sys.executable, "-u", "-m", "syncprims", "trace", str(planted.directory)]
    line += ["--png", str(tmp_path / "t.png")]
    with os.fdopen(pipe, "w") as gone:
        done = subprocess.run(line, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "t.png").exists()
    assert (planted.directory / "trace.json").exists()


def test_long_tables_are_cut_off_on_a_terminal_only(plant: Plant) -> None:
    run = plant(2)
    for number in range(30):
        base = AT + number * SECOND
        run.round(number + 1, [base, base + SECOND // 2], name=f"step {number}")
    run.leave(AT + 60 * SECOND)
    analysis = analysis_of(run)
    style = Style(io.StringIO(), {})
    assert "step 29" in "\n".join(report(analysis, style))
    style.is_terminal = True
    shown = report(analysis, style)
    assert "10 more rows: `| cat` shows them" in shown
    assert sum("'step " in line for line in shown) == 21  # with the conclusion


def test_a_recorder_survives_threads(tmp_path: Path) -> None:
    """Entries of several threads are all there, whole, over several files."""
    import threading

    from syncprims.interface import Label

    recorder = recorder_of(0, 1, tmp_path, 5 << 20)
    recorder.open("run")
    each = 15_000

    def work(thread: int) -> None:
        label = Label("barrier", f"of thread {thread}", site="train.py:1")
        for number in range(1, each + 1):
            recorder.record(f"0 {thread}", label, number, number, number, number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close(None, each)
    run = read_run(tmp_path / "run")
    assert run.complaints == []
    (trace,) = run.ranks
    for group in range(4):
        rounds = trace.rounds[trace.rounds["group"] == group]
        assert rounds["number"].tolist() == list(range(1, each + 1))
