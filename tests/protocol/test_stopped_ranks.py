"""Stopped ranks are slow and not lost; timeouts of the other ranks still work."""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_worlds import PATIENCE, Kind, Ranks, fork

import syncprims as sp

TRIO = Kind("file", 3)
DEADLINE = 0.7  # seconds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")


def large_array() -> Any:
    return sp.all_reduce(np.full(500_000, 1.0))[-1]


CALLS: list[Callable[[], object]] = [
    lambda: sp.barrier("load"),
    lambda: sp.all_gather(1),
    lambda: len(sp.broadcast(b"x" * 1_000_000, src=1)),
    large_array,
]


class Listener(logging.Handler):
    """Does something with the first line that is logged."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 1:
            self._act()


@pytest.mark.parametrize("call", CALLS, ids=["barrier", "all_gather", "broadcast", "all_reduce"])
def test_a_stopped_rank_is_waited_for(call: Callable[[], object], meeting_place: Path) -> None:
    """It goes on when another has waited for long enough to say so."""

    def program() -> list[str]:
        pids = sp.all_gather(os.getpid())
        listener = Listener(lambda: os.kill(pids[1], signal.SIGCONT))
        if sp.get_rank() == 0:
            logging.getLogger("syncprims").addHandler(listener)
            os.kill(pids[1], signal.SIGSTOP)
        answers = sp.all_gather(call())
        assert answers == answers[:1] * 3
        for number in range(50):
            assert sp.all_gather(number) == [number] * 3
        return listener.lines

    said, *others = Ranks(TRIO, meeting_place).run(program, SYNCPRIMS_WARN_AFTER="0.2")
    assert others == [[], []]
    assert said
    assert "lost" not in said[0]
    assert not any(meeting_place.iterdir())


def stopped_anywhere(seed: int, directory: Path) -> bool:
    """Stop one rank of three at a random moment; the others name it and need nothing of it.

    False if the machine was so busy that a healthy rank was late before that moment came.
    """
    dice = random.Random(seed)
    victim, moment = dice.randrange(3), dice.uniform(0, 0.03)
    stopper, other = (victim + 1) % 3, (victim + 2) % 3
    done, told = os.pipe()

    def steps() -> None:
        mixed = random.Random(seed)
        while True:
            kind = mixed.randrange(4)
            if kind == 0:
                sp.barrier(timeout=DEADLINE)
            elif kind == 1:
                sp.any_rank(False, timeout=DEADLINE)
            elif kind == 2:
                src = mixed.randrange(3)
                large = b"x" * 300_000 if sp.get_rank() == src else None
                sp.broadcast(large, src, timeout=DEADLINE)
            else:
                assert sp.all_reduce(np.full(100_000, 1.0), timeout=DEADLINE)[-1] == 3

    def program() -> Any:
        pids = sp.all_gather(os.getpid())
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            os.kill(pids[victim], signal.SIGSTOP)

        timer = threading.Timer(moment, stop)
        if sp.get_rank() == stopper:
            timer.start()
        try:
            steps()
        except sp.SyncTimeout as error:
            said = error.missing, str(error)
        finally:
            if sp.get_rank() == other:
                os.write(told, b"!")
            if sp.get_rank() == stopper:
                timer.cancel()
                timer.join()
                # The other has been told as well, while the victim could do nothing.
                in_time = select.select([done], [], [], PATIENCE - 20)[0]
                os.kill(pids[victim], signal.SIGCONT)
                assert in_time
        return said if stopped.is_set() or sp.get_rank() != stopper else None

    begin = time.monotonic()
    try:
        outcomes = Ranks(TRIO, directory).outcomes(program)
    finally:
        os.close(done)
        os.close(told)
    if outcomes[stopper] is None:
        return False
    shown = f"seed {seed}, rank {victim} after {moment * 1e3:.1f} ms, in {time.monotonic() - begin}"
    for outcome in outcomes:
        assert isinstance(outcome, tuple), f"{shown}: {outcome!r}"
    if outcomes == outcomes[:1] * 3 and victim not in outcomes[0][0]:
        return False  # another one was late by itself
    for outcome in outcomes:
        assert victim in outcome[0], f"{shown}: {outcomes}"
    assert outcomes == outcomes[:1] * 3, f"{shown}: {outcomes}"  # one verdict for all
    return True


def lane(seeds: range, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    for seed in seeds:
        assert any(stopped_anywhere(seed, directory) for _ in range(5)), "too busy a machine"
        assert not any(directory.iterdir())


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_a_rank_stopped_anywhere_holds_nobody_up(rounds: int, meeting_place: Path) -> None:
    """Four lanes of worlds at once, since each waits for its deadline most of the time."""
    seeds = [range(first, first + rounds) for first in range(0, 4 * rounds, rounds)]
    lanes = [
        fork(partial(lane, some, meeting_place / f"{some.start}"), os.environ.copy())
        for some in seeds
    ]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in lanes] == [0] * 4
