"""What a world is asked to be: by the caller's arguments, and by the test that runs it."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from syncprims._protocol.validation import require, seconds
from syncprims.errors import BackendUnavailable

from .faults import Fault
from .rank_output import PrefixedOutput, RankOutput
from .scheduler import Seed

Kind = Literal["threads", "processes"]
Start = Literal["fork", "forkserver", "spawn"]


class TestContext(NamedTuple):
    """What the test around a world decides; the pytest plugin sets it."""

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


@dataclass(frozen=True)
class WorldSpec:
    """One world; the fields are the arguments of :func:`syncprims.testing.run_world`.

    :raises TypeError: if `fn` is no function, or an async one, which would not run.
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
    start: Start | None = None
    nodes: int = 1
    torch: bool = False  #: torch.distributed is served
    traced: bool = True  #: as SYNCPRIMS_TRACE says; else not at all

    def __post_init__(self) -> None:
        fn, ranks, nodes = self.fn, self.ranks, self.nodes
        kind_of_ranks = type(ranks).__name__
        if kind_of_ranks != "int":
            raise TypeError(f"ranks is how many there are, and {ranks!r} is a {kind_of_ranks}")
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: a world has at least one")
        if not callable(fn):
            raise TypeError(f"fn={fn!r}: it takes a function, which every rank calls")
        if _is_async(fn) or _is_async(getattr(fn, "__call__", None)):  # noqa: B004
            raise TypeError(
                f"fn={getattr(fn, '__qualname__', fn)} is async: its body would not run. Pass a "
                f"plain function that runs it, as lambda: asyncio.run(...)"
            )
        if self.kind not in ("threads", "processes"):
            raise ValueError(f"kind={self.kind!r}: it takes 'threads' or 'processes'")
        if self.kind == "threads" and self.backend not in (None, "threads"):
            raise ValueError(
                f"backend={self.backend!r} has ranks in processes: say kind='processes'"
            )
        for fault in self.faults:
            require(fault, Fault, "a fault is a Kill, Raise, Delay or Stop")
            if fault.rank >= ranks:
                raise ValueError(f"{fault}: there are ranks 0 to {ranks - 1}")
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
                    f"Install it: pip install 'syncprims[torch]'"
                ) from error

    @property
    def time_limit(self) -> float | None:
        """Seconds of real time after which the world is given up."""
        return seconds(self.timeout)


def _is_async(fn: object) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
