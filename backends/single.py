"""A world of one: every round is complete as soon as it is posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from syncprims.errors import ConfigurationError
from syncprims.interface import Backend, Board, Note, Settings, Status, Topology


class SingleBackend(Backend):
    """The only process of its world."""

    name = "single"
    spans_hosts = True
    detects_death = True

    def __init__(self, topology: Topology, settings: Settings) -> None:
        self.check(topology, settings)
        super().__init__(topology, settings)
        self._decisions: dict[str, str] = {}

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse a world of several."""
        if topology.world_size != 1:
            raise ConfigurationError(
                f"backend 'single' is a world of one, and {topology.launcher} says "
                f"world_size={topology.world_size}; choose another backend"
            )

    def board(self, members: Sequence[int], name: str = "") -> SingleBoard:
        """Return a board for this process alone."""
        return SingleBoard(members, name)

    def decide(self, name: str, value: str = "") -> str:
        """Return the decision of this process."""
        return self._decisions.setdefault(name, value) if value else self._decisions.get(name, "")

    def close(self, failure: bytes | None = None) -> None:
        """Leave; there are no other ranks."""


class SingleBoard(Board):
    """A board with one member."""

    def __init__(self, members: Sequence[int], name: str) -> None:
        super().__init__(members, name)
        self._last: Note | None = None
        self._waiting: deque[Note] = deque()

    def post(self, note: Note) -> None:
        """Keep the note for :meth:`collect`."""
        self._last = note
        self._waiting.append(note)
        self.posted += 1

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Return the oldest uncollected note."""
        self.collected += 1
        return (self._waiting.popleft(),)

    def status(self, rank: int) -> Status:
        """Return that this process is alive."""
        return Status(self.posted, self._last.label if self._last else None, "alive")

    def abort(self, verdict: bytes) -> None:
        """Do nothing: a round of one completes when it is posted."""

    def verdict(self) -> bytes | None:
        """Return None: there is never a verdict."""
        return None
