"""One rank after another: ``main_first`` and ``in_turn``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncprims.interface import Note

if TYPE_CHECKING:
    from types import TracebackType

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Label


class MainFirst:
    """The block runs on the group's first rank, then on the others.

    One round: main posts its note after its body, the others post theirs on arrival and wait. If
    main's body raises, its note says so, and no other body runs.
    """

    def __init__(self, rounds: Rounds, name: str | None, timeout: float | None) -> None:
        self._rounds = rounds
        self._name = name
        # Preparing data takes as long as it takes: the default timeout does not apply.
        self._timeout = math.inf if timeout is None else timeout
        self._label: Label | None = None

    @property
    def _goes_first(self) -> bool:
        return self._rounds.rank == self._rounds.members[0]

    def __enter__(self) -> None:
        rounds = self._rounds
        # While main is in its block, the others wait in theirs: an inner one would pair with an
        # outer one, so that they have different names.
        kind = "main_first" if not rounds.inside_main_first else "main_first inside of main_first"
        self._label = rounds.note(kind, self._name).label
        if self._goes_first:
            rounds.inside_main_first += 1
        else:
            rounds.meet(Note(self._label), self._timeout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._goes_first or self._label is None:
            return
        self._rounds.inside_main_first -= 1
        if error is not None and not isinstance(error, GeneratorExit):
            self._rounds.fail(self._label, error)
        else:
            self._rounds.meet(Note(self._label), self._timeout)


class InTurn:
    """The block runs on one rank after another, in rank order.

    One round per member: the member whose turn it is posts its note after its body. All leave
    together, after the last. If a body raises, no later one runs, and all ranks raise.
    """

    def __init__(self, rounds: Rounds, timeout: float | None) -> None:
        self._rounds = rounds
        self._timeout = timeout
        self._labels: list[Label] = []

    def __enter__(self) -> None:
        rounds = self._rounds
        self._labels = [rounds.note("in_turn", src=member).label for member in rounds.members]
        for label in self._labels[: rounds.members.index(rounds.rank)]:
            rounds.meet(Note(label), self._timeout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rounds = self._rounds
        mine = rounds.members.index(rounds.rank)
        if error is not None and not isinstance(error, GeneratorExit):
            rounds.fail(self._labels[mine], error)
            return
        for label in self._labels[mine:]:
            rounds.meet(Note(label), self._timeout)
