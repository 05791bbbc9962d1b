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
from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

from syncprims._protocol.call_site import describe_line, users_frames
from syncprims.interface import Label

#: Calls that need a name if they stand on several lines.
_COMPARED = {
    "barrier", "broadcast", "all_gather", "all_reduce", "any_rank", "all_ranks", "trigger"
}  # fmt: skip
_MOST_PATHS = 4096
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
    stack: list[int] = []
    codes: list[CodeType] = []
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and (code := frame.f_code).co_name != "run_program":
        codes.append(code)
        stack += id(code), frame.f_lasti
        frame = frame.f_back
    paths, key = _known_paths(), tuple(stack)
    known = paths.get(key)
    if known is None:
        served = sys.modules.get("syncprims.c10d.torch_internals")
        frames = users_frames(served.BETWEEN if served else (), until="run_program")
        lines = [Line(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
        if len(paths) > _MOST_PATHS:
            paths.clear()
        # The code objects are kept, so that no other ones get their ids.
        known = paths[key] = tuple(reversed(lines)), codes
    return known[0]


@functools.cache
def _known_paths() -> dict[tuple[int, ...], tuple[tuple[Line, ...], list[CodeType]]]:
    """Return the paths found so far, by the instructions on the stack."""
    return {}


def iterate_rounds(
    of_ranks: Mapping[int, Sequence[RecordedCall]],
) -> Iterator[tuple[Board, int, dict[int, RecordedCall | None]]]:
    """Yield each round: its board, its number there, and the call of each member.

    The boards of most members come first, and a board ends with the first call that differs.
    """
    for board, members in group_calls(of_ranks):
        for number, met in enumerate(itertools.zip_longest(*members), 1):
            yield board, number, dict(zip(board[0], met, strict=True))
            if len({call and call.label for call in met}) > 1:
                break


def group_calls(
    of_ranks: Mapping[int, Sequence[RecordedCall]],
) -> list[tuple[Board, list[Sequence[RecordedCall]]]]:
    """Return the calls of each member at each board, and the boards of most members first."""
    found: dict[Board, dict[int, list[RecordedCall]]] = {}
    for rank, calls in of_ranks.items():
        for call in calls:
            found.setdefault(call.at, {}).setdefault(rank, []).append(call)
    boards = sorted(found, key=lambda at: (-len(at[0]), *at))
    return [(board, [found[board].get(rank, ()) for rank in board[0]]) for board in boards]


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

        In torch a call has no name, and the root of one often stands in a branch of its own. A send
        and its receive have lines of their own, which their sites say; so has the end of a `Join`.
        """
        label = next(iter(self.calls.values())).label
        if not self.board[1].startswith("group "):
            return label.name is None and label.kind in _COMPARED
        others = {line for rank, line in self.lines.items() if rank != label.src}
        own_lines = any(" at " in call.label.site for call in self.calls.values())
        return not own_lines and (label.src is None or len(others) > 1)


def find_meetings(of_ranks: Mapping[int, Sequence[RecordedCall]]) -> Iterator[Meeting]:
    """Yield the rounds in which ranks made the same call from different lines."""
    for board, members in group_calls(of_ranks):
        first, *others = ([call.path for call in calls] for calls in members)
        if all(paths == first for paths in others):  # the usual case
            continue
        for number, met in enumerate(zip(*members, strict=False), 1):
            if len({call.label for call in met}) > 1:
                break
            for depth, lines in enumerate(zip(*(call.path for call in met), strict=False)):
                if len(set(lines)) > 1:
                    calls = dict(zip(board[0], met, strict=True))
                    yield Meeting(board, number, calls, depth)
                    break
