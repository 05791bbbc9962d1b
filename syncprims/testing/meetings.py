"""The rounds that ranks have met in, and the lines that led them there.

Calls of one kind and name meet, from whichever lines they come. So the barrier of a save may meet
the one that follows it, in silence: only their lines tell them apart. The innermost line does not
suffice: two calls of one helper have it in common.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from syncprims._protocol.call_site import describe_line, users_frames
from syncprims.interface import Label

#: Calls that need a name if they stand on several lines.
_COMPARED = {
    "barrier", "broadcast", "all_gather", "all_reduce", "any_rank", "all_ranks", "trigger"
}  # fmt: skip
Board: TypeAlias = tuple[tuple[int, ...], str]  # its members and its name


class Line(NamedTuple):
    """A line of the user's program."""

    path: str
    number: int
    function: str


class RecordedCall(NamedTuple):
    """One round that a rank came to."""

    members: tuple[int, ...]  #: of the board
    label: Label
    board: str = ""  #: its name
    path: tuple[Line, ...] = ()  #: the lines that lead to it, the outermost first
    world: tuple[int, ...] = ()  #: by rank, the ranks at the start, where `reform` changed them

    @property
    def at(self) -> Board:
        """The board: no other one has these members and this name."""
        return self.members, self.board


def find_path() -> tuple[Line, ...]:
    """Return the lines that lead to this call, from the function of the rank inwards."""
    served = sys.modules.get("syncprims.c10d.torch_internals")
    frames = users_frames(served.BETWEEN if served else (), until="run_program")
    lines = [Line(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
    return _kept(tuple(reversed(lines)))


@functools.lru_cache(4096)
def _kept(path: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return equal paths as one object: a rank makes most calls many times."""
    return path


def iterate_rounds(
    of_ranks: Mapping[int, Sequence[RecordedCall]],
) -> Iterator[tuple[Board, int, dict[int, RecordedCall | None]]]:
    """Yield each round: its board, its number there, and the call of each member.

    The boards of most members come first, and a board ends with the first call that differs.
    """
    boards = {call.at for calls in of_ranks.values() for call in calls}
    for board in sorted(boards, key=lambda at: (-len(at[0]), *at)):
        members = [
            [call for call in of_ranks.get(rank, ()) if call.at == board] for rank in board[0]
        ]
        for number, calls in enumerate(itertools.zip_longest(*members), 1):
            yield board, number, dict(zip(board[0], calls, strict=True))
            if len({call and call.label for call in calls}) > 1:
                break


class Meeting(NamedTuple):
    """A round in which ranks made the same call from different lines."""

    board: Board
    number: int
    calls: dict[int, RecordedCall]  #: of each rank
    depth: int  #: of the outermost lines that differ, in their paths

    @property
    def lines(self) -> dict[int, Line]:
        """Where the path of each rank parts from those of the others."""
        return {rank: call.path[self.depth] for rank, call in self.calls.items()}

    @property
    def places(self) -> dict[str, list[int]]:
        """Which ranks came from where."""
        found: dict[str, list[int]] = {}
        for rank, call in self.calls.items():
            text, (line, *inner) = str(call.label), call.path[self.depth :]
            if inner:
                called_at = describe_line(line.path, line.number)
                text += f" in {inner[0].function}(), called at {called_at}"
            found.setdefault(text, []).append(rank)
        return found

    @property
    def is_doubtful(self) -> bool:
        """Whether these may be different calls: no name says that they are one.

        In torch a call has no name, and the root of one often stands in a branch of its own.
        """
        label = next(iter(self.calls.values())).label
        if not self.board[1].startswith("group "):
            return label.name is None and label.kind in _COMPARED
        others = {line for rank, line in self.lines.items() if rank != label.src}
        return label.kind != "send/recv" and (label.src is None or len(others) > 1)


def find_meetings(of_ranks: Mapping[int, Sequence[RecordedCall]]) -> Iterator[Meeting]:
    """Yield the rounds in which ranks made the same call from different lines."""
    for board, number, found in iterate_rounds(of_ranks):
        calls = {rank: call for rank, call in found.items() if call is not None}
        paths = {call.path for call in calls.values()}
        if len(paths) > 1 and len(calls) == len(found):
            if len({call.label for call in calls.values()}) > 1:
                continue
            for depth, lines in enumerate(zip(*paths, strict=False)):
                if len(set(lines)) > 1:
                    yield Meeting(board, number, calls, depth)
                    break
