"""What the test around a world decides: set by the pytest plugin, and else left at its default."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from .output import Prefixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from .output import Sink
    from .schedules import Seed


class Ambient(NamedTuple):
    """The surroundings of a world."""

    seed: Seed | None = None  #: asked for on the command line
    test: str | None = None  #: its node id
    sink: Callable[[], Sink | None] = Prefixed  #: makes what takes the output

    def replay(self, seed: Seed | None) -> str:
        """Return how to see a run again."""
        if seed is None:
            return ""
        if self.test is None:
            return f"replay: seed={str(seed)!r}"
        return f"replay: pytest {self.test!r} --world-seed={seed}"


ambient: ContextVar[Ambient] = ContextVar("syncprims_ambient", default=Ambient())  # noqa: B039
