"""The specification of a world: the caller's arguments, and the settings of the test.

The test also decides where ranks print: what they print is separated by rank.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from syncprims._protocol.validation import require, seconds
from syncprims.errors import BackendUnavailable, install

from .faults import Fault, Join
from .rank_threads import Replacement
from .scheduler import Schedule, Seed

Kind = Literal["threads", "processes"]

# -- what ranks print ------------------------------------------------------------------------------

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
        streams = {name: getattr(sys, name) for name in _STREAMS}
        self._targets = {name: getattr(of, "replaced", of) for name, of in streams.items()}

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
current_writer: ContextVar[tuple[RankOutput, int] | None] = ContextVar(
    "syncprims_output", default=None
)


class _RankStream:
    """Replaces ``sys.stdout``: text from a rank goes to the output of its world."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.replaced = getattr(sys, name)

    def write(self, text: str) -> int:
        writer = current_writer.get()
        if writer is None:
            return int(self.replaced.write(text))
        writer[0].write(writer[1], self._name, text)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)


#: While worlds of threads run.
capture_ranks: Replacement = Replacement(
    lambda: [(sys, name, _RankStream(name)) for name in _STREAMS]
)


# -- what the test decides -------------------------------------------------------------------------


class TestContext(NamedTuple):
    """The settings of the test around a world; the pytest plugin makes them."""

    seed: str | None = None  #: from the command line
    test: str | None = None  #: its node id
    make_output: Callable[[], RankOutput | None] = PrefixedOutput

    def replay(self, seed: Seed | None) -> str:
        """Return how to repeat a run with this seed; "" without one."""
        if seed is None:
            return ""
        if self.test is None:
            return f"replay: seed={str(seed)!r}"
        return f"replay: pytest {self.test!r} --world-seed={seed}"


test_context: ContextVar[TestContext] = ContextVar(
    "syncprims_test_context", default=TestContext()  # noqa: B039 - it is immutable
)  # fmt: skip


def choose_seed(seed: int | str | None = None) -> Seed:
    """Return `seed` if given, else that of the command line, else a random one."""
    given = test_context.get().seed if seed is None else seed
    if given is None:
        return Seed(random.SystemRandom().randrange(2**32))
    return Seed.read(given)


# -- what the caller decides -----------------------------------------------------------------------


@dataclass(frozen=True)
class WorldSpec:
    """One world; the fields are the arguments of :func:`syncprims.testing.run_world`.

    :raises TypeError: if `fn` is not a function, or an async one, which would not run.
    :raises ValueError: if there is no such world.
    :raises BackendUnavailable: if it asks for torch, which is not installed.
    """

    fn: Callable[[], Any]
    ranks: int = 4
    kind: Kind = "threads"
    backend: str | None = None
    seed: Seed = field(default_factory=choose_seed)
    faults: Sequence[Fault] = ()
    timeout: float | timedelta | None = 60
    nodes: int = 1
    torch: bool = False  #: torch.distributed is served
    replicas: bool = False  #: they are compared at each step; only with torch
    traced: bool = True  #: as SYNCPRIMS_TRACE says; else not at all
    schedule: Schedule | None = None  #: instead of that of the seed

    def __post_init__(self) -> None:
        fn, ranks, nodes = self.fn, self.ranks, self.nodes
        kind_of_ranks = type(ranks).__name__
        if kind_of_ranks != "int":
            raise TypeError(f"ranks is the number of ranks, and {ranks!r} is a {kind_of_ranks}")
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: a world has at least one rank")
        if not callable(fn):
            raise TypeError(f"fn={fn!r}: it takes a function, which every rank calls")
        if _is_async(fn) or _is_async(getattr(fn, "__call__", None)):  # noqa: B004
            raise TypeError(
                f"fn={getattr(fn, '__qualname__', fn)} is async: its body would not run. Pass a "
                f"plain function that runs it, as lambda: asyncio.run(...)"
            )
        if self.kind not in ("threads", "processes"):
            raise ValueError(f"kind={self.kind!r}: it takes 'threads' or 'processes'")
        if self.kind == "processes" and sys.platform == "win32":
            raise BackendUnavailable("Windows cannot fork a world of processes: use threads")
        if self.kind == "threads" and self.backend not in (None, "threads"):
            raise ValueError(
                f"backend={self.backend!r} has ranks in processes: say kind='processes'"
            )
        for fault in self.faults:
            require(fault, Fault, "a fault is a Kill, Raise, Delay, Join or Stop")
            if fault.rank >= ranks:
                raise ValueError(f"{fault}: there are ranks 0 to {ranks - 1}")
            if isinstance(fault, Join) and self.kind != "threads":
                raise ValueError(f"{fault}: ranks join in worlds of threads; say kind='threads'")
        if nodes < 1 or ranks % nodes:
            raise ValueError(f"nodes={nodes}: {ranks} ranks cannot be divided equally among them")
        if nodes > 1 and self.kind != "threads":
            raise ValueError(f"nodes={nodes}: processes are on this machine; say kind='threads'")
        seconds(self.timeout)
        if self.torch:
            try:
                importlib.import_module("torch.distributed")
            except ImportError as error:
                raise BackendUnavailable(
                    f"torch=True serves torch.distributed, which cannot be imported: {error}. "
                    f"Install it: {install('torch')}"
                ) from error

    @property
    def time_limit(self) -> float | None:
        """Seconds of real time after which the world is given up."""
        return seconds(self.timeout)


def _is_async(fn: object) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
