"""One rank after another: ``main_first`` and ``in_turn``."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
import time

from syncprims._protocol.rounds import Rounds, RoundSequence
from syncprims.interface import Label, Note

_LONGEST_DELIVERY = 0.2  # seconds


class MainFirst:
    """The block runs on the group's first rank, then on the others.

    One round: main posts its note after its block, the others post theirs on arrival and wait. If
    main's block raises, its note says so, and no other block runs.
    """

    def __init__(self, rounds: Rounds, name: str | None, timeout: float | None) -> None:
        self._rounds = rounds
        self._name = name
        # Preparing data takes as long as it takes: the default timeout does not apply.
        self._timeout = math.inf if timeout is None else timeout
        self._leads = rounds.rank == rounds.members[0]
        self._label: Label | None = None

    def __enter__(self) -> None:
        rounds = self._rounds
        # While main is in its block, the others wait in theirs. An inner block must not be paired
        # with an outer one, so it has another name.
        kind = "main_first" if not rounds.inside_main_first else "main_first inside of main_first"
        self._label = rounds.note(kind, self._name).label
        if self._leads:
            rounds.inside_main_first += 1
        else:
            rounds.meet(Note(self._label), self._timeout)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._leads or self._label is None:
            return
        self._rounds.inside_main_first -= 1
        if error is not None:
            self._rounds.fail(self._label, error)
        else:
            _deliver_output(self._rounds)
            self._rounds.meet(Note(self._label), self._timeout)


class InTurn:
    """The block runs on one rank after another, in rank order.

    One round per member, which posts its note after its block. All leave together, after the
    last. If a block raises, no later one runs, and all ranks raise.
    """

    def __init__(self, rounds: Rounds, name: str | None, timeout: float | None) -> None:
        self._rounds = rounds
        self._name = name
        self._timeout = timeout
        self._labels: list[Label] = []

    def __enter__(self) -> None:
        rounds = self._rounds
        self._labels = [
            rounds.note("in_turn", self._name, member).label for member in rounds.members
        ]
        self._pass(self._labels[: rounds.index])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        rounds = self._rounds
        if error is not None:
            rounds.fail(self._labels[rounds.index], error)
        else:
            _deliver_output(rounds)
            self._pass(self._labels[rounds.index :])

    def _pass(self, labels: list[Label]) -> None:
        def meet_each(sequence: RoundSequence) -> None:
            for label in labels:
                sequence.meet(Note(label))

        if labels:
            RoundSequence.run(self._rounds, Note(labels[0]), self._timeout, meet_each)


def _deliver_output(rounds: Rounds) -> None:
    """Return when all that this rank has printed has been read, at the latest after a moment.

    A launcher reads each rank's output from a pipe of its own. If two pipes hold text at the same
    time, it cannot know which was printed first.
    """
    if rounds.board.virtual_time:
        return  # ranks are threads, which share their output
    deadline = time.monotonic() + _LONGEST_DELIVERY
    for stream in (sys.stdout, sys.stderr):
        # There may be no stream, or one without a descriptor; and its reader may have gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
            pipe = stream.fileno()
            while _unread(pipe) and time.monotonic() < deadline:
                time.sleep(0.0002)


def _unread(fd: int) -> int:
    """Return how many bytes of a pipe have not been read; 0 for all else."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode) or sys.platform == "win32":
        return 0
    import fcntl  # neither is needed before, nor exists on Windows
    import termios

    count = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)
