"""Many schedules of one program, and many places for one fault."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from syncprims._protocol.validation import require

from .ambient import ambient
from .errors import StallError, UncontrolledError
from .faults import Delay, Fault, Kill, Raise, Stop, kind_of
from .runs import is_consequence
from .schedules import Seed
from .verdict import conclude, refuse_missed
from .worlds import run_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from .runs import Run
    from .worlds import Kind

_FURTHER = 100  # schedules to try after a failure, in search of a shorter one


class Explored(NamedTuple):
    """What :func:`explore` has seen."""

    schedules: int  #: tried
    distinct: int  #: different orders in which ranks posted
    steps: int  #: of the longest


def explore(
    fn: Callable[[], Any],
    ranks: int = 4,
    *,
    schedules: int = 1000,
    strategy: Literal["random", "pct"] = "random",
    depth: int = 2,
    seed: int | str | None = None,
    faults: Iterable[Fault] = (),
    timeout: float | timedelta | None = 60,
    nodes: int = 1,
    check: Callable[[list[Any]], object] | None = None,
) -> Explored:
    """Return only if ``fn()`` is right under that many schedules, in worlds of threads.

    If one fails, the failing one with the fewest steps is raised, as by :func:`run_world`, with the
    seed that replays it. The first schedule is run twice: what is not decided by the seed (a clock,
    a random number, the order of a set) would make a replay worthless.

    :param strategy: "random", or "pct": probabilistic concurrency testing, which finds a bug of
        `depth` orderings with a probability of at least 1 / (ranks * steps ** (depth - 1)) in each
        schedule (Burckhardt et al., ASPLOS 2010).
    :param check: called with each world's results; what it raises is a failure of that schedule.
    :raises UncontrolledError: if the same schedule gives two different runs.
    :raises FaultMissed: if a fault never struck under any of them.
    """
    __tracebackhide__ = True
    if strategy not in ("random", "pct"):
        raise ValueError(f"strategy={strategy!r}: it takes 'random' or 'pct'")
    if schedules < 1 or depth < 1:
        raise ValueError(f"schedules={schedules}, depth={depth}: at least 1 of each")
    search = _Search(fn, ranks, nodes, [*faults], timeout, check)
    around = ambient.get()
    first = Seed.read(seed) if seed is not None else around.seed or Seed.fresh()
    first = search.prepare(first, strategy, depth)
    until = schedules
    for number in range(schedules):
        if number == until:
            break
        search.try_one(first.plus(number), twice=number == 0)
        if search.failures and until == schedules:
            until = number + 1 + _FURTHER
    search.raise_shortest()
    search.refuse_missed()
    return Explored(search.tried, len(search.paths), search.steps)


class _Search:
    """The schedules tried so far."""

    def __init__(
        self,
        fn: Callable[[], Any],
        ranks: int,
        nodes: int,
        faults: list[Fault],
        timeout: float | timedelta | None,
        check: Callable[[list[Any]], object] | None,
    ) -> None:
        self._fn = fn
        self._ranks = ranks
        self._nodes = nodes
        self._faults = faults
        self._timeout = timeout
        self._check = check
        self._shortest: tuple[int, BaseException] | None = None
        self.tried = 0
        self.failures = 0
        self.steps = 0
        self.paths: set[int] = set()
        self._missed = faults  # in every schedule so far
        self._last: Run | None = None

    def prepare(self, seed: Seed, strategy: str, depth: int) -> Seed:
        """Return the first seed; PCT wants to know how many steps there are."""
        if strategy == "random" or seed.depth:
            return seed
        return seed._replace(depth=depth, steps=self._run(seed).steps)

    def try_one(self, seed: Seed, *, twice: bool) -> None:
        """Run one schedule, and see what it comes to."""
        run = self._run(seed)
        if twice:
            _compare(run, self._run(seed))
        self.tried += 1
        self.steps = max(self.steps, run.steps)
        self.paths.add(hash(tuple(run.path())))
        self._last, self._missed = run, [fault for fault in self._missed if fault in run.missed]
        try:
            results = conclude(run, ambient.get().replay(seed))
            if self._check is not None:
                self._checked(results, seed)
        except Exception as error:
            self.failures += 1
            if self._shortest is None or run.steps < self._shortest[0]:
                self._shortest = run.steps, error

    def _checked(self, results: list[Any], seed: Seed) -> None:
        assert self._check is not None
        try:
            self._check(results)
        except Exception as error:
            error.add_note(ambient.get().replay(seed))
            raise

    def raise_shortest(self) -> None:
        """Raise the failure with the fewest steps, if there is one."""
        __tracebackhide__ = True
        if self._shortest is not None:
            steps, error = self._shortest
            error.add_note(
                f"{self.failures} of {self.tried} schedules fail; this is the shortest, of {steps} "
                f"steps"
            )
            raise error

    def refuse_missed(self) -> None:
        """Raise if a fault has struck under no schedule."""
        __tracebackhide__ = True
        assert self._last is not None
        refuse_missed(self._last, self._missed)

    def _run(self, seed: Seed) -> Run:
        return run_once(
            self._fn,
            self._ranks,
            nodes=self._nodes,
            kind="threads",
            backend=None,
            seed=seed,
            faults=self._faults,
            timeout=self._timeout,
            traced=False,  # a thousand runs are nothing to look at
        )


def _compare(one: Run, other: Run) -> None:
    """Raise if two runs of one seed have differed."""
    __tracebackhide__ = True
    a, b = one.path(), other.path()
    if a == b:
        return
    number = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )

    def shown(run: Run) -> str:
        if number >= len(run.trace):
            return "had ended"
        rank, seen = run.trace[number]
        return f"rank {rank} came to {seen.label}"

    raise UncontrolledError(
        f"two runs with seed {one.seed} differ from post {number + 1} on: in one, {shown(one)}; in "
        f"the other, {shown(other)}. Something that the seed does not decide steers the calls: a "
        f"clock, a random number without a seed of its own, the order of a set, or what an earlier "
        f"run has left in a global"
    )


class Point(NamedTuple):
    """What came of a fault at one place."""

    fault: Fault
    results: list[Any] | None  #: by rank, if the world ended well; None from a killed rank
    error: BaseException | None  #: else what it ended with


def every_point(
    fn: Callable[[], Any],
    fault: Fault,
    ranks: int = 4,
    *,
    check: Callable[[Point], object] | None = None,
    kind: Kind = "threads",
    backend: str | None = None,
    seed: int | str | None = None,
    timeout: float | timedelta | None = 60,
    most: int = 10_000,
) -> list[Point]:
    """Return what came of `fault` at each round of its rank in turn, from the first to the last.

    It ends with the world that the fault does not meet any more. That the other ranks are told
    (`PeerLost`, `PeerFailed`, `SyncTimeout`), or that they wait for a stopped rank, is what a fault
    does, and is in the point; everything else is raised: a deadlock, a failure of somebody else.

    :param fault: its `at` does not count: ``every_point(fn, Kill(rank=1))``.
    :param check: called with every point, to see what the fault has left behind.
    """
    __tracebackhide__ = True
    require(fault, Fault, "a fault is a Kill, Raise, Delay or Stop")
    chosen = Seed.read(seed) if seed is not None else ambient.get().seed or Seed.fresh()
    points: list[Point] = []
    for at in range(1, most + 1):
        here = dataclasses.replace(fault, at=at)
        run = run_once(
            fn, ranks, kind=kind, backend=backend, seed=chosen, faults=[here], timeout=timeout
        )
        point = _point(here, run)
        if check is not None and run.struck:
            check(point)
        if not run.struck:
            return points
        points.append(point)
    raise ValueError(f"{fault} still met a round after {most} worlds; allow more: most=")


def _point(fault: Fault, run: Run) -> Point:
    __tracebackhide__ = True
    try:
        return Point(fault, conclude(run, ambient.get().replay(run.seed)), None)
    except BaseException as error:
        if run.struck and _is_expected(fault, error):
            return Point(fault, None, error)
        error.add_note(f"with {fault}" if run.struck else "without a fault")
        raise


def _is_expected(fault: Fault, error: BaseException) -> bool:
    """Tell whether an error is what such a fault does."""
    if isinstance(fault, Raise):
        return isinstance(error, kind_of(fault.error))
    if isinstance(fault, Stop) and isinstance(error, StallError):
        return True
    return isinstance(fault, Kill | Stop | Delay) and is_consequence(error)
