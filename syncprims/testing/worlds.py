"""The three ways to run worlds: once, under many schedules, and with a fault at each round."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from syncprims._protocol.validation import require
from syncprims.errors import is_consequence
from syncprims.interface import Label

from .errors import StallError, UncontrolledError
from .faults import Fault, Join, Raise, Stop, exception_type
from .orders import find_orders
from .outcomes import WorldRun, add_note, check_faults_struck, results_of
from .private_names import NAMES
from .scheduler import Seed
from .thread_world import run_threads
from .world_spec import Kind, WorldSpec, choose_seed, test_context

_FURTHER = 100  # schedules to try after a failure, to find a shorter one


def run_world(
    fn: Callable[[], Any],
    ranks: int = 4,
    *,
    kind: Kind = "threads",
    backend: str | None = None,
    seed: int | str | None = None,
    faults: Iterable[Fault] = (),
    timeout: float | timedelta | None = 60,
    nodes: int = 1,
    torch: bool = False,
    replicas: bool = False,
) -> list[Any]:
    """Run ``fn()`` on each rank of a new world; return the results in rank order.

    In a world of threads one rank runs at a time and the turn passes at rounds, as `seed` decides;
    module globals, ``os.environ`` and the working directory are shared. In one of processes every
    rank is a process of its own, on `backend` (default "file").

    The world runs before `fn` begins: an `init` in `fn` finds it running, and its arguments have no
    effect.

    If one rank raises, this call raises that very exception (from a process, one of equal type and
    text). A note says which rank it was and how the others ended. A rank that a fault kills has the
    result None.

    :param nodes: how many machines the ranks of a world of threads seem to be on, equally many on
        each.
    :param torch: ``torch.distributed`` is served in `fn`: ``init_process_group`` opens a group of
        this world, whatever backend it names. In threads, each rank then has its own ``os.environ``
        and random states.
    :param replicas: at each step of an optimizer, compare its models, and the tensors that it keeps
        for them, between ranks; a difference is a `RankMismatch`. Not what is different by design:
        shards, what DDP ignores by request, and buffers that DDP is about to copy. Implies `torch`.
    :param timeout: seconds of real time after which a world that still runs is given up.
    :raises DeadlockError: if ranks wait for notes that can never come.
    :raises UnequalRounds: if all ended without an error, but with different numbers of calls.
    :raises StallError: when `timeout` has passed, or all wait for a rank that a fault has stopped.
    :raises ExceptionGroup: if ranks raised exceptions of several types that are no consequences.
    :raises FaultMissed: if a fault never struck, though nothing ended the world early.
    :raises TypeError: if `fn` is not a function, or an async one, which would not run.
    :raises ValueError: if there is no such kind of world, or a fault's rank is not in it.
    :raises BackendUnavailable: with `torch`, if that is not installed.
    """
    __tracebackhide__ = True
    chosen = choose_seed(seed)
    torch = torch or replicas
    run = run_once(
        WorldSpec(fn, ranks, kind, backend, chosen, [*faults], timeout, nodes, torch, replicas)
    )
    results = results_of(run, test_context.get().replay(run.seed))
    check_faults_struck(run, run.missed)
    return results


def run_once(spec: WorldSpec) -> WorldRun:
    """Run one world, and return how it went, even if it failed."""
    output = test_context.get().make_output()
    spec = dataclasses.replace(spec, fn=_as_example(spec.fn))
    try:
        if spec.kind == "threads":
            return run_threads(spec, output)
        from .process_world import run_processes  # imports much that worlds of threads do not need

        return run_processes(spec, output)
    finally:
        if output is not None:
            output.close()


def _as_example(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Return `fn` for ranks that take part in the example that runs here, if one does.

    Hypothesis keeps it for its own thread. With it, ``assume`` and ``note`` work on each rank.

    :raises ValueError: by `fn`, if it draws values, of which each rank would have its own.
    """
    control: Any = sys.modules.get("hypothesis.control")
    if control is None or not control.currently_in_test_context():
        return fn
    reporting: Any = sys.modules["hypothesis.reporting"]
    example, report = control.current_build_context(), reporting.current_reporter()

    def run() -> Any:
        __tracebackhide__ = True
        data, drawn = example.data, example.data.length
        current = NAMES["_current_build_context"]
        with current.with_value(example), reporting.with_reporter(report):
            try:
                return fn()
            finally:
                if data.frozen or data.length != drawn:  # also where a replay has no more values
                    raise ValueError(
                        "a rank has drawn values, as from st.data(), st.randoms() or "
                        "st.functions(), and each rank has its own: draw them in @given, before "
                        "the world begins, as with st.composite"
                    )

    return run


# -- many schedules --------------------------------------------------------------------------------


class Explored(NamedTuple):
    """What :func:`explore` has tried."""

    schedules: int  #: tried
    distinct: int  #: different orders in which ranks posted; of all orders, those that can differ
    steps: int  #: of the longest
    certificate: str  #: the proven fact, in a sentence


def explore(
    fn: Callable[[], Any],
    ranks: int = 4,
    *,
    schedules: int | None = None,
    strategy: Literal["random", "pct", "all"] = "random",
    depth: int = 2,
    seed: int | str | None = None,
    faults: Iterable[Fault] = (),
    timeout: float | timedelta | None = 60,
    nodes: int = 1,
    torch: bool = False,
    replicas: bool = False,
    check: Callable[[list[Any]], object] | None = None,
) -> Explored:
    """Run ``fn()`` under many schedules, in worlds of threads; return if none fails.

    Otherwise raise the failure with the fewest steps, as :func:`run_world` does, with the seed that
    replays it. The first schedule is run twice: if something else than the seed decides the calls
    (a clock, a random number, the order of a set), a replay would be worthless.

    :param schedules: how many to try, 1,000 by default; with "all", how many at most (100,000).
    :param strategy: "random"; or "pct": probabilistic concurrency testing, which finds a bug of
        `depth` orderings with a probability of at least 1 / (ranks * steps ** (depth - 1)) in each
        schedule (Burckhardt et al., ASPLOS 2010); or "all": each order of the ranks that can make a
        difference, which is a proof. What distinguishes orders is what the ranks do with each
        other in this library and in ``torch.distributed``, and what :func:`access` declares; not
        undeclared files and globals, and not threads that the program starts.
    :param check: called with the results of each world; what it raises is a failure of that
        schedule.
    :raises UncontrolledError: if the same schedule gives two different runs.
    :raises FaultMissed: if a fault never struck under any of them.
    :raises ValueError: with "all", if there are more orders than `schedules`, and none has failed.
    """
    __tracebackhide__ = True
    if strategy not in ("random", "pct", "all"):
        raise ValueError(f"strategy={strategy!r}: it takes 'random', 'pct' or 'all'")
    most = (100_000 if strategy == "all" else 1000) if schedules is None else schedules
    if most < 1 or depth < 1:
        raise ValueError(f"schedules={most}, depth={depth}: at least 1 of each")
    spec = WorldSpec(
        fn, ranks, seed=choose_seed(seed), faults=[*faults], timeout=timeout, nodes=nodes,
        torch=torch or replicas, replicas=replicas,
        traced=False,  # a trace of a thousand runs is of no use
    )  # fmt: skip
    if strategy == "pct" and not spec.seed.depth:  # PCT has to know how many steps there are
        pct = spec.seed._replace(depth=depth, steps=run_once(spec).steps)
        spec = dataclasses.replace(spec, seed=pct)
    if spec.seed.order is not None:  # that of a report
        most, strategy = 1, "random"
    runs = _run_orders(spec) if strategy == "all" else _run_seeds(spec)
    tried, distinct, steps = _try_all(spec, runs, most, check)
    certificate = f"{tried:,} random schedules of {ranks} ranks pass"
    if strategy == "all":
        if next(runs, None) is not None:
            raise ValueError(
                f"{tried:,} orders of {ranks} ranks pass, and there are more: try a smaller "
                f"program, fewer ranks, or a higher schedules="
            )
        certificate = f"all {tried:,} orders of {ranks} ranks pass; {distinct:,} were different"
    return Explored(tried, distinct, steps, certificate)


def _try_all(
    spec: WorldSpec,
    runs: Iterator[tuple[WorldRun, int]],
    most: int,
    check: Callable[[list[Any]], object] | None,
) -> tuple[int, int, int]:
    """Take in `most` of these runs, and fewer after a failure, and raise the shortest failure.

    Otherwise return how many there were, how many of them differed, and the steps of the longest.

    :raises UncontrolledError: if the first one, run again, differs.
    :raises FaultMissed: if a fault has never struck.
    """
    __tracebackhide__ = True
    paths = set[int]()
    steps = tried = failures = 0
    missed = spec.faults  # under every schedule
    shortest: tuple[int, Exception] | None = None  # steps, failure
    run = WorldRun([], missed)
    for tried, (run, path) in enumerate(runs, 1):
        if tried == 1:
            _compare(run, run_once(dataclasses.replace(spec, seed=run.seed or spec.seed)))
        paths.add(path)
        steps = max(steps, run.steps)
        missed = [fault for fault in missed if fault in run.missed]
        replay = test_context.get().replay(run.seed)
        try:
            results = results_of(run, replay)
            if check is not None:
                check(results)
        except Exception as error:
            failures += 1
            if failures == 1:
                most = min(most, tried + _FURTHER)
            if shortest is None or run.steps < shortest[0]:
                shortest = run.steps, add_note(error, replay)
        if tried == most:
            break
    if shortest is not None:
        fewest, failure = shortest
        which = f"{failures} of {tried} schedules fail"
        raise add_note(failure, f"{which}; this is the shortest, of {fewest} steps")
    check_faults_struck(run, missed)
    return tried, len(paths), steps


def _run_seeds(spec: WorldSpec) -> Iterator[tuple[WorldRun, int]]:
    """Yield the runs of one seed after the other, each with a number for its order of posts."""
    for number in itertools.count(spec.seed.number):
        run = run_once(dataclasses.replace(spec, seed=spec.seed._replace(number=number)))
        yield run, hash(tuple(run.path()))


def _run_orders(spec: WorldSpec) -> Iterator[tuple[WorldRun, int]]:
    """Yield a run of each order that can differ, with a number that only equal orders share."""
    late = sum(isinstance(fault, Join) for fault in spec.faults)
    number = 0
    for schedule in find_orders(spec.ranks + late):
        run = run_once(dataclasses.replace(spec, schedule=schedule))
        if schedule.diverged:
            raise UncontrolledError(
                "a rank could not continue where it could in an equal run: something other than "
                "the order of the ranks decides the calls, such as a clock, a random number, or a "
                f"thread of the program. {run.uncontrolled}".strip()
            )
        if run.undecided and all(outcome.error is None for outcome in run.outcomes):
            raise UncontrolledError(run.uncontrolled)
        run.seed = Seed(0, order=schedule.order)
        number += schedule.redundant is None
        yield run, number


def _compare(one: WorldRun, other: WorldRun) -> None:
    """Raise `UncontrolledError` if two runs of one seed differ."""
    __tracebackhide__ = True
    pairs = enumerate(itertools.zip_longest(one.path(), other.path()), 1)
    number, posts = next(((n, (a, b)) for n, (a, b) in pairs if a != b), (0, ()))
    if not number:
        return
    first, second = (
        "had ended" if post is None else f"rank {post[0]} came to {Label.decode(post[-1])}"
        for post in posts
    )
    raise UncontrolledError(
        f"two runs with seed {one.seed} differ from post {number} on: in one, {first}; in "
        f"the other, {second}. Something that the seed does not decide steers the calls: a "
        f"clock, a random number without a seed of its own, the order of a set, or what an earlier "
        f"run has left in a global. {one.uncontrolled or other.uncontrolled}".strip()
    )


# -- a fault at each round -------------------------------------------------------------------------


class Point(NamedTuple):
    """The effect of a fault at one round."""

    fault: Fault
    results: list[Any] | None  #: by rank, if the world ended well; None from a killed rank
    error: BaseException | None  #: the error that ended the world, if one did


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
    torch: bool = False,
    strategy: Literal["one", "all"] = "one",
    most: int = 10_000,
) -> list[Point]:
    """Run ``fn()`` with `fault` at each round of its rank in turn; return what it did at each.

    The last world is the one that ends before the fault strikes. What a fault normally does to the
    other ranks is in its point: they raise (`PeerLost`, `PeerFailed`, `SyncTimeout`), or wait for a
    stopped rank. Everything else is raised: a deadlock, or an exception of another rank.

    :param fault: its `at` is ignored: ``every_point(fn, Kill(rank=1))``.
    :param check: called with every point, to check the state that the fault has left.
    :param strategy: "one": each point in the order of the seed; "all": in each order of the ranks
        that can make a difference, as :func:`explore`. Worlds of threads only.
    """
    __tracebackhide__ = True
    require(fault, Fault, "a fault is a Kill, Raise, Delay, Join or Stop")
    if strategy == "all" and kind != "threads":
        raise ValueError(f"strategy='all', kind={kind!r}: say kind='threads'")
    chosen = choose_seed(seed)
    points: list[Point] = []
    worlds = 0
    for at in itertools.count(1):
        here = dataclasses.replace(fault, at=at)
        spec = WorldSpec(fn, ranks, kind, backend, chosen, [here], timeout, torch=torch)
        struck = False
        for run in (run for run, _ in _run_orders(spec)) if strategy == "all" else [run_once(spec)]:
            worlds += 1
            struck = struck or bool(run.struck)
            try:
                point = Point(here, results_of(run, test_context.get().replay(run.seed)), None)
            except BaseException as error:
                if not run.struck or not _is_expected(here, error):
                    error.add_note(f"with {here}" if run.struck else "without a fault")
                    raise
                point = Point(here, None, error)
            if run.struck:
                if check is not None:
                    check(point)
                points.append(point)
            if worlds == most and (struck or strategy == "all"):
                raise ValueError(
                    f"{most} worlds were too few: the last of them was one with {here}; raise most="
                )
        if not struck:
            return points
    raise AssertionError  # never reached


def _is_expected(fault: Fault, error: BaseException) -> bool:
    """Return whether such a fault normally makes a world end with this error."""
    if isinstance(fault, Raise):
        return isinstance(error, exception_type(fault.error))
    return is_consequence(error) or (isinstance(fault, Stop) and isinstance(error, StallError))
