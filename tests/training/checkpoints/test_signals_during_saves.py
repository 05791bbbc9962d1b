"""Signals during a save: it completes, or leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import Counter as Tally
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from support.file_faults import NEW, NONE, OLD, SETUPS, Trial, nothing, watched

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

CODE = 143
#: (setup, over an older save?, every how many-th call): in the tests of every day, and at length.
SHORT = [
    ("state-behind-1", False, 4), ("state-behind-1", True, 3), ("state-behind-2", True, 11),
    ("state-1", True, 7), ("shards-2", True, 9),
]  # fmt: skip
LONG = [
    (f"{name}-{ranks}", overwrite, 1)
    for name in ("state-behind", "state", "single", "shards", "to-shards", "from-shards")
    for ranks in (1, 2, 4)
    for overwrite in (False, True)
]


def leave(number: int, frame: object) -> NoReturn:
    """End the program, as a handler of SIGTERM may."""
    sys.exit(CODE)


@contextlib.contextmanager
def leaving_on_sigterm() -> Generator[None]:
    """End the block on SIGTERM as a program ends: once its threads have."""
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for thread in threading.enumerate():
            if thread.name == "syncprims-save":
                thread.join()


def told_at(point: int) -> Callable[[int, str, tuple[Any, ...]], object]:
    """Send SIGTERM to this process before a call, in whatever thread."""

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGTERM)

    return at


def interrupt_everywhere(
    name: str, overwrite: bool, stride: int, folder: Path
) -> Tally[tuple[int, bool]]:
    """Return how often which version was found, and whether something was left beside it."""
    trial = Trial(SETUPS[name], folder, overwrite=overwrite)
    before, standing = OLD if overwrite else NONE, trial.stands
    trial.save(0, nothing)
    complete = len(trial.listing())
    seen: Tally[tuple[int, bool]] = Tally()
    every = [(victim, call) for victim, count in enumerate(trial.counts) for call in range(count)]
    for victim, call in every[::stride]:
        trial.reset()

        def program(victim: int = victim, call: int = call) -> None:
            at = told_at(call) if sp.get_rank() == victim else nothing
            with leaving_on_sigterm(), watched(at):
                trial.setup.save(str(trial.path), NEW)

        outcomes = trial._ranks.outcomes(program, start=True)
        assert not isinstance(outcomes[victim], Exception), (victim, call, outcomes)
        left = trial.listing()
        found = trial.versions()
        assert set(found) in ({before}, {NEW}), (victim, call, found, left)
        clean = left == standing if found[0] == before else len(left) == complete
        seen[found[0], clean] += 1
        # Behind the training the thread goes on to its end. Else what the new one has replaced may
        # still be there, for the next save to remove; but nothing of one that has not come to be.
        assert clean or (found[0] == NEW and "behind" not in name), (victim, call, found, left)
        assert not [one for one in left if ".tmp-" in one], (victim, call, left)
        if not clean:
            trial.save_again()
            assert len(trial.listing()) == complete
    return seen


@pytest.mark.parametrize(("name", "overwrite", "stride"), SHORT)
def test_told_to_end_anywhere_it_is_the_old_or_the_new(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    seen = interrupt_everywhere(name, overwrite, stride, tmp_path)
    assert seen.total() > 3
    assert seen[OLD if overwrite else NONE, True] > 0


@pytest.mark.soak
@pytest.mark.parametrize(("name", "overwrite", "stride"), LONG)
def test_told_to_end_at_every_call_of_every_rank(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    seen = interrupt_everywhere(name, overwrite, stride, tmp_path)
    assert seen[OLD if overwrite else NONE, True] > 0
    print(f"told to end: {name} overwrite={overwrite}: {dict(seen)}")
