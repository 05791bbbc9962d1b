"""Cleanup: successive and concurrent worlds leave nothing behind for the next run."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.rank_worlds import PATIENCE, Kind, Ranks, environment, fork

import syncprims as sp

PAIR = Kind("file", 2)
PHASES = b"jbrl"  # about to join, broadcast, reduce, and leave
LONGEST = 0.012  # seconds from a phase's begin to the kill; on most machines, each takes as long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds and /proc")


def exit_codes(pids: Sequence[int]) -> list[int]:
    """Wait for the ends of all, and kill those that hang."""
    deadline = time.monotonic() + PATIENCE
    codes: list[int] = []
    for pid in pids:
        eye = os.pidfd_open(pid)
        if not select.select([eye], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(eye)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


class Run(NamedTuple):
    """A run on its way: its ranks, and where they say what they are about to do."""

    pids: list[int]
    phases: int

    def kill(self, phase: int, delay: float) -> None:
        """Kill all ranks, `delay` seconds after the first has come to `phase`."""
        heard = b""
        while phase not in heard:
            assert select.select([self.phases], [], [], PATIENCE)[0], f"hangs after {heard!r}"
            chunk = os.read(self.phases, 100)
            assert chunk, f"ended after {heard!r}"
            heard += chunk
        time.sleep(delay)  # the moment under test
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def ends(self) -> list[int]:
        """Return the exit codes of all ranks, once they have ended."""
        os.close(self.phases)
        return exit_codes(self.pids)


def work(number: int, phases: int) -> None:
    """Go through all that a run does, and see no payload but this run's."""
    with contextlib.suppress(sp.PeerLost):  # the other one was killed a moment earlier
        os.write(phases, PHASES[0:1])
        with sp.init():
            assert sp.all_gather((number, sp.get_rank())) == [(number, 0), (number, 1)]
            large = number.to_bytes(4, "big") * 500_000
            os.write(phases, PHASES[1:2])
            assert sp.broadcast(large if sp.is_main() else None) == large
            os.write(phases, PHASES[2:3])
            total = sp.all_reduce(np.full(500_000, float(number)))
            assert (total == 2.0 * number).all()
            os.write(phases, PHASES[3:4])


def start(number: int, directory: Path) -> Run:
    """Start run `number`; all have one id."""
    reader, writer = os.pipe()
    pids = [
        fork(lambda: work(number, writer), environment(PAIR, rank, directory, "same"))
        for rank in range(2)
    ]
    os.close(writer)
    return Run(pids, reader)


def killed_runs(count: int, directory: Path, seed: int) -> None:
    """Kill `count` runs as a whole, each somewhere else; now and then one is let live."""
    dice = random.Random(seed)
    for number in range(1, count + 1):
        run = start(number, directory)
        run.kill(dice.choice(PHASES), dice.uniform(0, LONGEST))
        # While a rank is still dying it sits there, and one that comes might sit down beside it.
        assert set(run.ends()) <= {0, -signal.SIGKILL}, f"seed {seed}, run {number}"
        if number % 10 == 0:
            assert start(0, directory).ends() == [0, 0], f"seed {seed}, after run {number}"
            assert not any(directory.iterdir()), f"seed {seed}, after run {number}"


def test_runs_killed_anywhere_leave_the_next_a_clean_start(meeting_place: Path) -> None:
    killed_runs(50, meeting_place, seed=1)


class Footprint(NamedTuple):
    """What this process holds of the machine."""

    descriptors: int
    threads: int
    mappings: int  # of files where the ranks meet
    blocks: int  # of Python's memory
    kilobytes: int

    @classmethod
    def now(cls, directory: Path) -> Footprint:
        gc.collect()
        own = Path("/proc/self")
        return cls(
            len(list((own / "fd").iterdir())),
            len(list((own / "task").iterdir())),
            (own / "maps").read_text().count(f" {directory}/"),
            sys.getallocatedblocks(),
            int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
        )


def one_world(number: int) -> None:
    """Start a world, use all that it can hold on to, and end it."""
    with sp.init():
        assert sp.all_gather(number) == [number] * 2
        if number % 10 == 0:
            assert sp.broadcast(b"%d" % number * 20_000) == b"%d" % number * 20_000
            assert sp.all_reduce(np.full(20_000, number))[-1] == 2 * number
            both = [sp.group([0]), sp.group([1])]
            assert both[sp.get_rank()].any_rank(True)


def worlds_in_one_process(count: int, directory: Path, fresh: bool) -> list[list[Footprint]]:
    """Return what each of two ranks held after a fifth of `count` worlds, and after all."""

    def program() -> list[Footprint]:
        held: list[Footprint] = []
        for number in range(count):
            if fresh:
                os.environ["SYNCPRIMS_RUN_ID"] = f"run {number}"
            one_world(number)
            if number + 1 in (count // 5, count):
                held.append(Footprint.now(directory))
        with sp.init():
            assert Footprint.now(directory).mappings
        return held

    found: list[list[Footprint]] = Ranks(PAIR, directory).run_alone(program)
    assert not any(directory.iterdir())
    return found


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh ids", "one id"])
@pytest.mark.parametrize("count", [200, pytest.param(2500, marks=pytest.mark.soak)])
def test_worlds_leave_nothing_in_a_process(meeting_place: Path, fresh: bool, count: int) -> None:
    for early, late in worlds_in_one_process(count, meeting_place, fresh):
        assert (late[:2], late.mappings) == (early[:2], 0)
        # Python's own caches fill, ever more slowly; what is kept of each world shows.
        names = 3 * count if sys.version_info[:2] == (3, 12) else 0  # its pathlib keeps them all
        assert late.blocks - early.blocks < 400 + count / 20 + names
        # Python's table of names grows by megabytes at once, somewhere on the way, and only once.
        assert late.kilobytes - early.kilobytes < 4096


def many_worlds(name: str, count: int) -> None:
    """Start and end worlds in which everybody is called `name`."""
    for number in range(count):
        with sp.init():
            assert sp.all_gather((name, number)) == [(name, number)] * 2
            large = f"{name} {number} ".encode() * 2000
            assert sp.broadcast(large if sp.is_last() else None, src=1) == large
            assert sp.group([0, 1]).all_gather(name) == [name] * 2


def started(name: str, count: int, directory: Path) -> list[int]:
    """Start the ranks of run `name`."""
    return [
        fork(lambda: many_worlds(name, count), environment(PAIR, rank, directory, name))
        for rank in range(2)
    ]


def test_a_run_goes_on_while_others_beside_it_are_killed(meeting_place: Path) -> None:
    """Its ranks clear away what the others left, and never what these still need.

    The names of the two that go on look alike as file names.
    """
    dice = random.Random(5)
    steady = [started(name, 40, meeting_place) for name in ("a b", "a_b")]
    for number in range(12):
        run = start(number, meeting_place)
        run.kill(dice.choice(PHASES), dice.uniform(0, LONGEST))
        assert set(run.ends()) <= {0, -signal.SIGKILL}
    assert [exit_codes(run) for run in steady] == [[0, 0]] * 2
    assert exit_codes(started("the last", 1, meeting_place)) == [0, 0]
    assert not any(meeting_place.iterdir())
