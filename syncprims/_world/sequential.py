"""One rank after another: ``main_first`` and ``in_turn``."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

from syncprims._protocol.rounds import Rounds, RoundSequence
from syncprims.errors import PeerFailed
from syncprims.interface import Label, Note

_LONGEST_DELIVERY = 0.2  # seconds


class MainFirst:
    """The block runs on the group's first rank, then on the others.

    One round: main posts its note after its block, the others post theirs on arrival and wait. If
    main's block raises, its note says so, and no other block runs.

    Blocks may be nested. While main is in a block, the others wait in it, and come to an inner one
    later. So main keeps its note of an inner block until it leaves the outer one. If the outer
    block is of a node and the inner one of several nodes, their first ranks are in their outer
    blocks now: they run the inner one at once, among themselves.
    """

    def __init__(
        self,
        rounds: Rounds,
        name: str | None,
        timeout: float | None,
        first_of_parts: Callable[[set[int]], Rounds | None] | None = None,
    ) -> None:
        """With `first_of_parts`, the group is a part of the world, such as a node.

        It returns the rounds of the first ranks of all parts that ranks are made of, if they are.
        """
        self._rounds = rounds
        self.members: tuple[int, ...] = rounds.members
        self._name = name
        # Preparing data takes as long as it takes: the default timeout does not apply.
        self._timeout = math.inf if timeout is None else timeout
        self._first_of_parts = first_of_parts
        self._leads = rounds.rank == rounds.members[0]
        self._label: Label | None = None
        self._among_first: Rounds | None = None  # the inner block, now
        self._kept: list[tuple[Rounds, Note, float]] = []  # for rounds that come after this block

    def __enter__(self) -> None:
        rounds = self._rounds
        self._label = rounds.note("main_first", self._name).label
        self._among_first, self._kept = None, []
        note, outer, members = Note(self._label), waited_for_by(rounds), set(rounds.members)
        if outer is not None and outer._first_of_parts and members > set(outer.members):
            self._among_first = outer._first_of_parts(members)
        if self._leads:
            _leading.set((*_leading.get(), self))
        elif outer is not None and self._among_first is not None:
            outer._kept.append((rounds, note, self._timeout))
            self._among_first.meet(note, self._timeout)
        else:
            rounds.meet(note, self._timeout)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        rounds, label, among_first = self._rounds, self._label, self._among_first
        if not self._leads or label is None:
            return
        _leading.set(tuple(block for block in _leading.get() if block is not self))
        outer = waited_for_by(rounds)
        if error is not None:
            if among_first is not None:
                among_first.fail(label, error)
            if outer is not None:
                outer._kept.append((rounds, rounds.failure_note(label, error), self._timeout))
            else:
                rounds.fail(label, error)
            return  # without its own notes: no other rank comes to the blocks inside
        _deliver_output(rounds)
        if among_first is not None:
            among_first.meet(Note(label), self._timeout)
        *earlier, last = (rounds, Note(label), self._timeout), *self._kept
        for kept in earlier:
            self._post_or_keep(*kept)
        self._post_or_keep(*last)  # not in a loop, where a handler could raise after the last round

    @staticmethod
    def _post_or_keep(rounds: Rounds, note: Note, timeout: float) -> None:
        """Meet the others, or leave that to the block that they wait in."""
        if (outer := waited_for_by(rounds)) is not None:
            outer._kept.append((rounds, note, timeout))
            return
        try:
            rounds.meet(note, timeout)
        except PeerFailed as failed:
            # That main has failed in an inner block, this rank has raised there.
            if failed is not rounds.shared_error or failed.rank != rounds.members[0]:
                raise


#: The blocks that this code runs in as their first rank, the innermost last.
_leading: ContextVar[tuple[MainFirst, ...]] = ContextVar("syncprims_main_first", default=())


def waited_for_by(rounds: Rounds) -> MainFirst | None:
    """Return the innermost block that other members of these rounds wait in for this rank."""
    for block in reversed(_leading.get()):
        if set(block.members).intersection(rounds.members) - {rounds.rank}:
            return block
    return None


class InTurn:
    """The block runs on one rank after another, in rank order.

    One round per member, which posts its note after its block. All leave together, after the
    last. If a block raises, no later one runs, and all ranks raise.
    """

    def __init__(self, rounds: Rounds, name: str | None, timeout: float | None) -> None:
        self._rounds = rounds
        self._index = rounds.index
        self._name = name
        self._timeout = timeout
        self._labels: list[Label] = []

    def __enter__(self) -> None:
        rounds = self._rounds
        self._labels = [
            rounds.note("in_turn", self._name, member).label for member in rounds.members
        ]
        self._pass(self._labels[: self._index])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        rounds = self._rounds
        if error is not None:
            rounds.fail(self._labels[self._index], error)
        else:
            _deliver_output(rounds)
            self._pass(self._labels[self._index :])

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
