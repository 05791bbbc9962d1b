"""What ranks print, told apart by rank."""

from __future__ import annotations

import contextlib
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_STREAMS = ("stdout", "stderr")


class Sink(Protocol):
    """Takes what ranks print."""

    def write(self, rank: int, stream: str, text: str) -> None:
        """Take some text of a rank's ``stdout`` or ``stderr``."""
        ...

    def close(self) -> None:
        """Take no more: what is incomplete is complete now."""
        ...


class Prefixed:
    """Passes each line on, with the rank in front."""

    def __init__(self) -> None:
        self._targets: dict[str, TextIO] = {name: getattr(sys, name) for name in _STREAMS}
        self._begun: dict[tuple[int, str], str] = {}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Pass on what are whole lines."""
        *whole, rest = (self._begun.pop((rank, stream), "") + text).split("\n")
        for line in whole:
            self._targets[stream].write(f"[rank {rank}] {line}\n")
        if rest:
            self._begun[rank, stream] = rest

    def close(self) -> None:
        """Pass on what is left."""
        for rank, stream in [*self._begun]:
            self.write(rank, stream, "\n")


class Collected:
    """Keeps it, by rank and stream."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, str], list[str]] = {}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Keep some text."""
        self.texts.setdefault((rank, stream), []).append(text)

    def close(self) -> None:
        """Do nothing."""


def by_rank(worlds: Sequence[Collected]) -> list[tuple[int, str, str]]:
    """Return rank, stream and all text of it, over all these worlds."""
    texts: dict[tuple[int, str], str] = {}
    for world in worlds:
        for key, parts in world.texts.items():
            texts[key] = texts.get(key, "") + "".join(parts)
    return [(rank, stream, text) for (rank, stream), text in sorted(texts.items())]


class _RankStream:
    """Stands where ``sys.stdout`` was: what ranks of this world write goes to the sink."""

    def __init__(self, name: str, sink: Sink, mark: ContextVar[tuple[object, int] | None]) -> None:
        self._name = name
        self._sink = sink
        self._mark = mark
        self.under: Any = getattr(sys, name)
        self.closed_world = False

    def write(self, text: str) -> int:
        mark = self._mark.get()
        if mark is None or mark[0] is not self._sink:
            return int(self.under.write(text))
        self._sink.write(mark[1], self._name, text)
        return len(text)

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)


_mark: ContextVar[tuple[object, int] | None] = ContextVar("syncprims_output", default=None)


def mark(sink: Sink | None, rank: int) -> None:
    """From now on, what this thread prints is of `rank`."""
    _mark.set((sink, rank) if sink is not None else None)


@contextlib.contextmanager
def told_apart(sink: Sink | None) -> Generator[None]:
    """Within, what marked threads print goes to `sink`; with None, nothing is done."""
    if sink is None:
        yield
        return
    streams = {name: _RankStream(name, sink, _mark) for name in _STREAMS}
    for name, stream in streams.items():
        setattr(sys, name, cast("TextIO", stream))
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.closed_world = True
            top = getattr(sys, name)
            while isinstance(top, _RankStream) and top.closed_world:  # worlds may overlap
                top = top.under
            setattr(sys, name, top)
        sink.close()
