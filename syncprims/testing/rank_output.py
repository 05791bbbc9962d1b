"""What ranks print, separated by rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from typing import Any, TextIO, cast

_STREAMS = ("stdout", "stderr")


class RankOutput:
    """Keeps what ranks print, by rank and stream."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, str], str] = {}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Take text that `rank` has written to its ``stdout`` or ``stderr``."""
        self.texts[rank, stream] = self.texts.get((rank, stream), "") + text

    def close(self) -> None:
        """End the output of a world: what is incomplete stays so."""


class PrefixedOutput(RankOutput):
    """Prints each line with its rank in front."""

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[str, TextIO] = {name: getattr(sys, name) for name in _STREAMS}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Print the lines that are complete."""
        *lines, rest = (self.texts.pop((rank, stream), "") + text).split("\n")
        for line in lines:
            self._targets[stream].write(f"[rank {rank}] {line}\n")
        if rest:
            self.texts[rank, stream] = rest

    def close(self) -> None:
        """Print the lines that are incomplete."""
        for rank, stream in [*self.texts]:
            self.write(rank, stream, "\n")


#: The rank that runs in this context, and the output of its world.
_writer: ContextVar[tuple[RankOutput, int] | None] = ContextVar("syncprims_output", default=None)


class _RankStream:
    """Replaces ``sys.stdout``: text from ranks of one world goes to the world's output."""

    def __init__(self, name: str, output: RankOutput) -> None:
        self._name = name
        self._output = output
        self.replaced: Any = getattr(sys, name)
        self.closed_world = False

    def write(self, text: str) -> int:
        writer = _writer.get()
        if writer is None or writer[0] is not self._output:
            return int(self.replaced.write(text))
        self._output.write(writer[1], self._name, text)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)


def set_writer(output: RankOutput | None, rank: int) -> None:
    """Send what this context prints from now on to `output` as text of `rank`; None undoes it."""
    _writer.set((output, rank) if output is not None else None)


@contextlib.contextmanager
def capture_ranks(output: RankOutput | None) -> Generator[None]:
    """Return a context in which text from ranks goes to `output`; with None, nothing is done."""
    if output is None:
        yield
        return
    streams = {name: _RankStream(name, output) for name in _STREAMS}
    for name, stream in streams.items():
        setattr(sys, name, cast("TextIO", stream))
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.closed_world = True
            top = getattr(sys, name)
            while isinstance(top, _RankStream) and top.closed_world:  # worlds may overlap
                top = top.replaced
            setattr(sys, name, top)
        output.close()
