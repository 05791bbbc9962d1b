"""Deadlocks: the search for ranks that wait for each other, and its error.

A missing note at one board says nothing about another: if rank 0 waits in a group's barrier for
rank 1, and rank 1 in the world's for rank 0, each board only shows a slow rank. So a rank that has
waited for a second publishes where each of its threads waits and how many rounds it has posted at
each board, and reads what the others have published.

A thread that waits in a round needs the notes of *all* missing members. A thread that waits for the
first of several notes (of a store) needs *any* of these ranks. A rank posts
nothing while all its threads wait. So the largest set of ranks in which each wait lacks a note that
only ranks of the set could post never continues. A rank with another thread that may make a call
takes no part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from syncprims import errors
from syncprims.errors import CollectiveMismatch, SyncError, name_ranks, parse_ranks
from syncprims.interface import Awaited, Backend, Board

from .threads import threads_that_may_call

DEADLOCK_SEARCH = 1.0  #: seconds of a wait after which boards are compared
_SEARCH_IN_TEST = 0.03  # the same, in a test
#: Bytes of a verdict that is published for others, in a statement of 4 KB at most.
_LONGEST_VERDICT = 2500
_CLOSED = "", "", int  # what is known of a board that another thread has closed


class Wait(NamedTuple):
    """The wait of one thread of a rank."""

    call: str  #: that it waits in, as messages show it
    group: str  #: whose round it waits for, as messages show it
    missing: Collection[int]  #: ranks that have not posted
    any: bool = False  #: a note of any of them ends the wait, and not only those of all

    def __str__(self) -> str:
        return f"{self.call} in group {self.group}" if self.group else self.call

    def is_over_without(self, stuck: set[int]) -> bool:
        """Return whether it may end if the ranks of `stuck` post nothing."""
        if self.any:
            return not stuck.issuperset(self.missing)
        return stuck.isdisjoint(self.missing)


def find_stuck(waits: Mapping[int, Sequence[Wait]]) -> set[int]:
    """Return the ranks that can never continue, given the waits of each rank's threads.

    All other ranks count as able to continue.
    """
    stuck = {rank for rank, threads in waits.items() if threads}
    while free := {
        rank for rank in stuck if any(wait.is_over_without(stuck) for wait in waits[rank])
    }:
        stuck -= free
    return stuck


def find_cycle(
    start: int, waits: Mapping[int, Sequence[Wait]], stuck: Collection[int]
) -> list[int]:
    """Return the shortest cycle of stuck ranks that begins with `start`; empty if there is none.

    Each rank of it lacks the note of the next one, and the last that of `start`.
    """
    waited_for_by = {start: start}
    queue = [start]
    for rank in queue:
        for other in sorted({other for wait in waits[rank] for other in wait.missing}):
            if other == start:
                cycle = [rank]
                while cycle[0] != start:
                    cycle.insert(0, waited_for_by[cycle[0]])
                return cycle
            if other in stuck and other not in waited_for_by:
                waited_for_by[other] = rank
                queue.append(other)
    return []


def deadlock_error(waits: Mapping[int, Sequence[Wait]], rank: int) -> CollectiveMismatch:
    """Return the error that `rank`, one of these ranks, raises; it shows every wait.

    Its `missing` are these ranks. No other mismatch has that.
    """
    lines = "\n".join(
        f"  rank {waiting}: " + ", and another thread: ".join(map(str, threads))
        for waiting, threads in waits.items()
    )
    return CollectiveMismatch(
        f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
        f"Every rank must make the calls of different groups in the same order.",
        rank=rank,
        call=waits[rank][0].call,
        missing=sorted(waits),
    )


class DeadlockDetector:
    """Publishes where this rank waits, and looks for a deadlock in what all have published."""

    def __init__(self, backend: Backend) -> None:
        #: This rank has found a deadlock, and still publishes that.
        self.holds_verdict: bool = False
        self._backend = backend
        # Of each: the group and its members as messages and statements show them.
        self._boards: dict[Board, tuple[str, str, Callable[[], int]]] = {}
        self._waits: dict[int, dict[str, Any]] = {}  # by thread, as they are published
        self._ended = 0  # waits; distinguishes one wait from the next
        self._looks = 0  # for the first of several notes, in vain
        self._published = b""
        self._suspected: dict[int, dict[str, Any]] = {}  # statements of ranks that seem stuck
        self._suspected_looks: dict[int, int] = {}  # of those that wait for any note

    def add(self, board: Board, promised: Callable[[], int] = int) -> None:
        """Count the rounds at `board`, and those that this rank has promised to post there."""
        group = describe_group(board.members, board.name)
        about = group, errors.format_ranks(board.members), promised
        self._boards = {**self._boards, board: about}  # another thread may go through them

    def remove(self, board: Board) -> None:
        """Forget `board`, which is closed."""
        self._boards = {b: about for b, about in self._boards.items() if b is not board}

    def end_wait(self) -> None:
        """Withdraw what this thread has published: its wait is over."""
        if self._waits.pop(get_ident(), None) is not None:
            self._ended += 1
            self._publish({})

    def withdraw_verdict(self) -> None:
        """Withdraw the verdict of a deadlock: this rank has passed a round since."""
        self.holds_verdict = False
        self._publish({})

    def search(self, board: Board, call: str, missing: Collection[int]) -> SyncError | None:
        """Publish that `call` waits at `board`; return an error once a deadlock is certain."""
        group, members, _ = self._boards.get(board, _CLOSED)
        at = [group, board.collected + 1]
        return self._search({"call": call, "at": at, "members": members}, missing)

    def breaks(self, awaited: Awaited) -> bool:
        """Publish a wait for the first note at any of these boards, as :meth:`search`.

        Return whether they are broken, since it is in a deadlock. Call this after each look for
        such a note, and within none.
        """
        self._looks += 1
        me, boards = self._backend.topology.rank, awaited.boards
        states = {rank: board.status(rank).state for board in boards for rank in board.members}
        others = [r for r, state in states.items() if state in ("alive", "unknown") and r != me]
        at = [me, self._ended]
        wait = {"call": awaited.call, "at": at, "any": errors.format_ranks(others)}
        error = self._verdict_about(at, others) or self._search(wait, others)
        if error is not None:
            for board in boards:
                board.abort(errors.dump(error))
        return error is not None

    def _search(self, wait: dict[str, Any], awaited: Collection[int]) -> SyncError | None:
        me = self._backend.topology.rank
        if self.holds_verdict:
            return self._verdict_about(wait["at"], [me])  # that another thread has found
        self._waits[get_ident()] = wait
        alone = len(sys._current_frames()) == 1  # pyright: ignore[reportPrivateUsage]
        if not alone and threads_that_may_call() - self._waits.keys():
            self._publish({})  # while this thread waits, another may post
            return None
        mine, boards = [*self._waits.copy().values()], self._boards
        statement = {
            "ended": self._ended,
            "waits": mine,
            "posted": {group: b.posted + promised() for b, (group, _, promised) in boards.items()},
        }
        if any("any" in thread for thread in mine):
            statement["looks"] = self._looks
        self._publish(statement)
        if not any(map(self._read, awaited)):  # none of them waits
            self._suspected = {}
            return None
        statement_of = functools.cache(self._read)
        waits = {me: _waits_in(me, statement_of)}
        queue = [me]
        for rank in queue:
            for other in {other for wait in waits[rank] for other in wait.missing} - waits.keys():
                waits[other] = _waits_in(other, statement_of)
                queue.append(other)
        stuck = find_stuck(waits)
        cycle = find_cycle(me, waits, stuck) if me in stuck else []
        if not self._is_certain({rank: statement_of(rank) for rank in stuck}) or not cycle:
            return None
        error = deadlock_error({rank: waits[rank] for rank in cycle}, me)
        # The others may look only after this rank has raised: the verdict stays published.
        verdict = errors.dump(error, _LONGEST_VERDICT).decode()
        places = [wait["at"] for rank in cycle for wait in statement_of(rank)["waits"]]
        self._publish_verdict({"about": places, "verdict": verdict})
        return error

    def _is_certain(self, statements: dict[int, dict[str, Any]]) -> bool:
        """Return whether ranks have published these statements, and all were true at one time.

        They are read one after another. They were true at one time if the same ones are read at a
        second look. A rank that waits for any note may not have seen one that was there already.
        But its next look but one has begun after all these statements were published.
        """
        looks = {
            rank: statement.pop("looks")
            for rank, statement in statements.items()
            if "looks" in statement
        }
        if statements != self._suspected:
            self._suspected = statements
            self._suspected_looks = {rank: self._read(rank).get("looks", 0) for rank in looks}
            return False
        return all(count >= self._suspected_looks[rank] + 2 for rank, count in looks.items())

    def verdict_for(self, board: Board, missing: Collection[int]) -> SyncError | None:
        """Return the verdict of a missing rank that has found this very wait in a deadlock."""
        group, _, _ = self._boards.get(board, _CLOSED)
        return self._verdict_about([group, board.collected + 1], missing)

    def _verdict_about(self, at: list[Any], ranks: Collection[int]) -> SyncError | None:
        for rank in ranks:
            statement = self._read(rank)
            if at in statement.get("about", ()):
                # A rank that waits for this one, and not for that one, needs it, too.
                self._publish_verdict(statement)
                return errors.load(statement["verdict"].encode())
        return None

    def _publish_verdict(self, statement: dict[str, Any]) -> None:
        self.holds_verdict = True
        self._waits.clear()
        self._ended += 1
        self._publish(statement)

    def _publish(self, statement: dict[str, Any]) -> None:
        import json  # slow to import, and only a long wait needs it

        text = json.dumps(statement, ensure_ascii=False) if statement else ""
        data = text.encode(errors="backslashreplace")
        if data != self._published:
            self._published = data
            self._backend.publish("waits", data)

    def _read(self, rank: int) -> dict[str, Any]:
        import json

        statement = self._backend.published("waits", self._backend.members[rank])
        try:
            return dict(json.loads(statement)) if statement else {}
        except ValueError:  # it was read while being rewritten; the next look finds it whole
            return {}


def _waits_in(rank: int, statement_of: Callable[[int], dict[str, Any]]) -> list[Wait]:
    """Return the waits that `rank` has published."""
    waits: list[Wait] = []
    for wait in statement_of(rank).get("waits", ()):
        if "any" in wait:
            ranks = parse_ranks(wait["any"])
            waits.append(Wait(wait["call"], name_ranks(ranks), ranks, any=True))
            continue
        group, number = wait["at"]
        missing = [
            member
            for member in parse_ranks(wait["members"])
            if statement_of(member).get("posted", {group: number}).get(group, 0) < number
        ]
        waits.append(Wait(wait["call"], group, missing))
    return waits


def search_after(board: Board) -> float:
    """Return after how many seconds of a wait boards are compared: soon in a test."""
    return _SEARCH_IN_TEST if board.observed else DEADLOCK_SEARCH


def describe_group(members: Sequence[int], board: str) -> str:
    """Return a group as messages show it: its ranks, and the name of its board if it has one."""
    ranks = name_ranks(members)
    return f"{ranks} {board!r}" if board else ranks
