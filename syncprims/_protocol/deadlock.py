"""Deadlocks between groups: the search for ranks that wait for each other, and its error.

A missing note at one board says nothing about another: if rank 0 waits in a group's barrier for
rank 1, and rank 1 in the world's for rank 0, each board only shows a slow rank. So a rank that has
waited for a second publishes where it waits and how many rounds it has posted at each board, and
reads what the others published. A rank waits for *all* missing members and posts nothing until it
has their notes, so a cycle of ranks that each lack the next one's note never resolves.
(A rank with another thread that may make a call may post while it waits; it takes no part.)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import errors
from syncprims.errors import CollectiveMismatch, SyncError, name_ranks, parse_ranks

from .threads import threads_that_may_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncprims.interface import Backend, Board

#: Bytes of a verdict that is published for others, in a word of 4 KB at most.
_LONGEST_VERDICT = 2500


class Wait(NamedTuple):
    """Where one rank waits."""

    call: str  #: that it waits in, as messages show it
    group: str  #: whose round it waits for, as messages show it
    missing: Iterable[int]  #: members that have not posted to this round


def find_cycle(start: int, wait_of: Callable[[int], Wait | None]) -> list[int]:
    """Return the shortest cycle of waiting ranks that begins with `start`; empty if there is none.

    Each rank of it lacks the note of the next one, and the last that of `start`. `wait_of` returns
    None for a rank that does not wait. It is called at most once per rank, and only for ranks that
    `start` waits for directly or indirectly; each `missing` is iterated once.
    """
    waited_for_by = {start: start}
    queue = [start]
    for rank in queue:
        wait = wait_of(rank)
        for other in () if wait is None else wait.missing:
            if other == start:
                cycle = [rank]
                while cycle[0] != start:
                    cycle.insert(0, waited_for_by[cycle[0]])
                return cycle
            if other not in waited_for_by:
                waited_for_by[other] = rank
                queue.append(other)
    return []


def find_any_cycle(waits: Mapping[int, Wait]) -> list[int]:
    """Return a cycle among these waits, beginning with the lowest rank in any; empty if none."""
    for rank in sorted(waits):
        if cycle := find_cycle(rank, waits.get):
            return cycle
    return []


def deadlock_error(cycle: Mapping[int, Wait], rank: int) -> CollectiveMismatch:
    """Return the error that `rank`, one of this cycle, raises; it shows every rank of the cycle."""
    lines = "\n".join(
        f"  rank {waiting}: {wait.call} in group {wait.group}" for waiting, wait in cycle.items()
    )
    return CollectiveMismatch(
        f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
        f"Every rank must make the calls of different groups in the same order.",
        rank=rank,
        call=cycle[rank].call,
    )


class DeadlockDetector:
    """Publishes where this rank waits, and looks for a cycle in what all ranks have published."""

    def __init__(self, backend: Backend) -> None:
        self.holds_verdict = False  #: this rank has found a deadlock, and still publishes that
        self._backend = backend
        self._boards: list[Board] = []
        self._waits = 0  # distinguishes one wait from the next, so that two looks can be compared
        self._published = False
        self._suspected: list[dict[str, Any]] = []

    def add(self, board: Board) -> None:
        """Count the rounds at `board`."""
        self._boards.append(board)

    def remove(self, board: Board) -> None:
        """Forget `board`, which is closed."""
        self._boards = [one for one in self._boards if one is not board]

    def end_wait(self) -> None:
        """Withdraw what :meth:`search` has published: the wait is over."""
        if self._published:
            self._published = False
            self._waits += 1
            self._suspected = []
            self._backend.publish(b"")

    def withdraw_verdict(self) -> None:
        """Withdraw the verdict of a deadlock: this rank has passed a round since."""
        self.holds_verdict = False
        self._backend.publish(b"")

    def search(self, board: Board, call: str) -> SyncError | None:
        """Publish that this rank waits at `board`; return an error once a deadlock is certain."""
        if len(self._boards) < 2:
            return None  # no rank can wait elsewhere
        if threads_that_may_call():
            return None  # while this thread waits, another may post
        self._published = True
        self._publish(
            {
                "wait": self._waits,
                "at": _place(board),
                "members": errors.format_ranks(board.members),
                "here": call,
                "posted": {_group(b): b.posted + b.promised for b in self._boards},
            }
        )
        word_of = functools.cache(self._read)
        waits: dict[int, Wait] = {}

        def has_posted(rank: int, group: str, number: int) -> bool:
            posted = word_of(rank).get("posted")
            return posted is None or posted.get(group, 0) >= number

        def wait_of(rank: int) -> Wait | None:
            word = word_of(rank)
            if "at" not in word:
                return None
            group, number = word["at"]
            members = parse_ranks(word["members"])
            missing = (other for other in members if not has_posted(other, group, number))
            waits[rank] = Wait(word["here"], group, missing)
            return waits[rank]

        rank = self._backend.topology.rank
        cycle = find_cycle(rank, wait_of)
        # Words are read one after another. Only if the same ones are read at a second look were all
        # of them true at one time.
        found = [word_of(waiting) for waiting in cycle]
        if not cycle or found != self._suspected:
            self._suspected = found
            return None
        error = deadlock_error({waiting: waits[waiting] for waiting in cycle}, rank)
        # The others may look only after this rank has raised: the verdict stays published.
        verdict = errors.dump(error, _LONGEST_VERDICT).decode()
        self._publish_verdict({"waits": [word["at"] for word in found], "verdict": verdict})
        return error

    def verdict_for(self, board: Board, missing: list[int]) -> SyncError | None:
        """Return the verdict of a missing rank that has found this very wait in a deadlock."""
        for rank in missing:
            word = self._read(rank)
            if _place(board) in word.get("waits", ()):
                # A rank that waits for this one, and not for that one, needs it, too.
                self._publish_verdict(word)
                return errors.load(word["verdict"].encode())
        return None

    def _publish_verdict(self, word: dict[str, Any]) -> None:
        self._published, self.holds_verdict = False, True
        self._publish(word)

    def _publish(self, word: dict[str, Any]) -> None:
        import json  # slow to import, and only a rank that waits for long needs it

        text = json.dumps(word, ensure_ascii=False)
        self._backend.publish(text.encode(errors="backslashreplace"))

    def _read(self, rank: int) -> dict[str, Any]:
        import json

        word = self._backend.published(rank)
        try:
            return dict(json.loads(word)) if word else {}
        except ValueError:  # it was read while being rewritten; the next look finds it whole
            return {}


def describe_group(members: Sequence[int], board: str) -> str:
    """Return a group as messages show it: its ranks, and the name of its board if it has one."""
    ranks = name_ranks(members)
    return f"{ranks} {board!r}" if board else ranks


def _group(board: Board) -> str:
    return describe_group(board.members, board.name)


def _place(board: Board) -> list[Any]:
    return [_group(board), board.collected + 1]
