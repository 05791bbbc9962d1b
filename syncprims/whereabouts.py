"""Who waits where, when ranks wait at different boards.

A missing note at one board says nothing about another: if rank 0 waits in a group's barrier for
rank 1, and rank 1 in the world's for rank 0, both boards only see somebody slow. So a rank that has
waited for a second publishes where it waits and how many rounds it has posted at each board, and
looks at the others' words. Everybody waits for *all* missing members, and a waiting rank posts
nothing, so a cycle of ranks that each lack the next one's note is a deadlock, and stays one.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

from . import errors
from .errors import CollectiveMismatch, SyncError

if TYPE_CHECKING:
    from .interface import Backend


class Waiter(Protocol):
    """The rounds of one board, as far as this module needs them."""

    rank: int
    members: tuple[int, ...]
    posted: int
    collected: int

    def here(self) -> str:
        """Return the call this rank is in."""
        ...


class Whereabouts:
    """This rank's published words, and what it makes of the others'."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._boards: list[Waiter] = []
        self._waits = 0  # tells one wait from the next, so that two looks can be compared
        self._published = False
        self._suspected: list[bytes] = []

    def add(self, board: Waiter) -> None:
        """Count the rounds of `board` among this rank's."""
        self._boards.append(board)

    def moved_on(self) -> None:
        """Take back what :meth:`deadlock` published: the wait is over."""
        if self._published:
            self._published = False
            self._waits += 1
            self._suspected = []
            self._backend.publish(b"")

    def deadlock(self, board: Waiter) -> SyncError | None:
        """Publish that this rank waits at `board`; return an error once a deadlock is certain."""
        if len(self._boards) < 2:
            return None  # one board: nobody can wait elsewhere
        word = {
            "wait": self._waits,
            "at": _key(board),
            "round": board.collected + 1,
            "members": board.members,
            "here": board.here(),
            "posted": {_key(b): b.posted for b in self._boards},
        }
        import json  # slow to import, and only who waits for long needs it

        self._published = True
        self._backend.publish(json.dumps(word).encode())
        cycle = self._cycle(board.rank)
        # Words are read one after another. Only if the same ones stand at a second look did they
        # all stand at one time.
        words = [self._backend.published(rank) for rank in cycle]
        if not cycle or words != self._suspected:
            self._suspected = words
            return None
        return self._report(board, cycle, words)

    def told_deadlock(self, missing: list[int]) -> SyncError | None:
        """Return the verdict of a missing rank that found itself in a deadlock."""
        for rank in missing:
            word = _parse(self._backend.published(rank))
            if "deadlock" in word:
                return errors.load(word["deadlock"].encode())
        return None

    def _cycle(self, start: int) -> list[int]:
        """Return ranks that each wait for a note of the next, from `start` back to it; or none."""
        trail: list[int] = []
        seen: set[int] = set()

        def reaches(rank: int) -> bool:
            word = _parse(self._backend.published(rank))
            if "at" not in word:
                return False
            trail.append(rank)
            for other in word["members"]:
                posted = _parse(self._backend.published(other)).get("posted")
                if posted is None or posted.get(word["at"], 0) >= word["round"]:
                    continue
                if other == start:
                    return True
                if other not in seen:
                    seen.add(other)
                    if reaches(other):
                        return True
            trail.pop()
            return False

        return trail if reaches(start) else []

    def _report(self, board: Waiter, cycle: list[int], words: list[bytes]) -> SyncError:
        parsed = [_parse(word) for word in words]
        lines = "\n".join(
            f"  rank {rank}: {word['here']} in group {word['members']}"
            for rank, word in zip(cycle, parsed, strict=True)
        )
        error = CollectiveMismatch(
            f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
            f"Every rank must make the calls of different groups in the same order.",
            rank=board.rank,
            call=board.here(),
        )
        import json

        # The others may look only after this rank has raised: leave them the verdict.
        self._published = False
        self._backend.publish(json.dumps({"deadlock": errors.dump(error).decode()}).encode())
        return error


def _key(board: Waiter) -> str:
    return f"{zlib.crc32(repr(board.members).encode()):08x}"


def _parse(word: bytes) -> dict[str, Any]:
    import json

    try:
        return dict(json.loads(word)) if word else {}
    except ValueError:  # being rewritten while it was read; the next look finds it whole
        return {}
