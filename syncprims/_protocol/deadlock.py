"""Who waits where, when ranks wait at different boards.

A missing note at one board says nothing about another: if rank 0 waits in a group's barrier for
rank 1, and rank 1 in the world's for rank 0, both boards only see somebody slow. So a rank that has
waited for a second publishes where it waits and how many rounds it has posted at each board, and
looks at the others' words. Everybody waits for *all* missing members, and a waiting rank posts
nothing, so a cycle of ranks that each lack the next one's note is a deadlock, and stays one.
(A rank that uses several threads may post while it waits; it takes no part.)
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from syncprims import errors
from syncprims.errors import CollectiveMismatch, SyncError, format_ranks, name_ranks, parse_ranks

if TYPE_CHECKING:
    from syncprims.interface import Backend

#: Bytes of a verdict that is left for others, in a word of 4 KB at most.
_LONGEST_VERDICT = 2500


class Waiter(Protocol):
    """The rounds of one board, as far as this module needs them."""

    rank: int
    members: tuple[int, ...]
    thread: int  #: that called last, 0 for none

    @property
    def posted(self) -> int:
        """How many rounds this rank has posted to."""
        ...

    @property
    def collected(self) -> int:
        """How many it has collected."""
        ...

    def here(self) -> str:
        """Return the call this rank is in."""
        ...


class Whereabouts:
    """This rank's published words, and what it makes of the others'."""

    def __init__(self, backend: Backend) -> None:
        self.told = False  #: this rank has found a deadlock, and its word still says so
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

    def take_back(self) -> None:
        """Take back the word of a deadlock: this rank has passed a round since."""
        self.told = False
        self._backend.publish(b"")

    def deadlock(self, board: Waiter) -> SyncError | None:
        """Publish that this rank waits at `board`; return an error once a deadlock is certain."""
        if len(self._boards) < 2:
            return None  # one board: nobody can wait elsewhere
        threads = {b.thread for b in self._boards}
        if len(threads - {0}) > 1 or (0 in threads and threading.active_count() > 1):
            return None  # several threads: while one waits, another may post
        self._published = True
        word = {
            "wait": self._waits,
            "at": _wait_of(board),
            "members": format_ranks(board.members),
            "here": board.here(),
            "posted": {name_ranks(b.members): b.posted for b in self._boards},
        }
        self._publish(word)
        cycle = self._cycle(board.rank)
        # Words are read one after another. Only if the same ones stand at a second look did they
        # all stand at one time.
        words = [self._backend.published(rank) for rank in cycle]
        if not cycle or words != self._suspected:
            self._suspected = words
            return None
        return self._report(board, cycle, [_parse(word) for word in words])

    def told_deadlock(self, board: Waiter, missing: list[int]) -> SyncError | None:
        """Return the verdict of a missing rank that has found this very wait in a deadlock."""
        for rank in missing:
            word = _parse(self._backend.published(rank))
            if _wait_of(board) in word.get("waits", ()):
                # Who waits for this rank, and not for that one, has to hear of it, too.
                self._published, self.told = False, True
                self._publish(word)
                return errors.load(word["verdict"].encode())
        return None

    def _cycle(self, start: int) -> list[int]:
        """Return the fewest ranks that each wait for a note of the next, the last for `start`'s."""
        words: dict[int, dict[str, Any]] = {}  # each is read once
        waited_for_by = {start: start}
        queue = [start]

        def word_of(rank: int) -> dict[str, Any]:
            if rank not in words:
                words[rank] = _parse(self._backend.published(rank))
            return words[rank]

        for rank in queue:
            key, number = word_of(rank).get("at", ("", 0))
            for other in parse_ranks(word_of(rank).get("members", "")):
                posted = word_of(other).get("posted")
                if posted is None or posted.get(key, 0) >= number:
                    continue
                if other == start:
                    trail = [rank]
                    while trail[0] != start:
                        trail.insert(0, waited_for_by[trail[0]])
                    return trail
                if other not in waited_for_by:
                    waited_for_by[other] = rank
                    queue.append(other)
        return []

    def _report(self, board: Waiter, cycle: list[int], words: list[dict[str, Any]]) -> SyncError:
        lines = "\n".join(
            f"  rank {rank}: {word['here']} in group {name_ranks(parse_ranks(word['members']))}"
            for rank, word in zip(cycle, words, strict=True)
        )
        error = CollectiveMismatch(
            f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
            f"Every rank must make the calls of different groups in the same order.",
            rank=board.rank,
            call=board.here(),
        )
        # The others may look only after this rank has raised: leave them the verdict.
        self._published, self.told = False, True
        waits = list(dict.fromkeys(tuple(word["at"]) for word in words))
        verdict = errors.dump(error, _LONGEST_VERDICT).decode()
        self._publish({"waits": waits, "verdict": verdict})
        return error

    def _publish(self, word: dict[str, Any]) -> None:
        import json  # slow to import, and only who waits for long needs it

        text = json.dumps(word, ensure_ascii=False)
        self._backend.publish(text.encode(errors="backslashreplace"))


def _wait_of(board: Waiter) -> list[Any]:
    return [name_ranks(board.members), board.collected + 1]


def _parse(word: bytes) -> dict[str, Any]:
    import json

    try:
        return dict(json.loads(word)) if word else {}
    except ValueError:  # being rewritten while it was read; the next look finds it whole
        return {}
