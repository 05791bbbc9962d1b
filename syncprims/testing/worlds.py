"""``run_world``: a function on every rank of a world that lives as long as the call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from syncprims._protocol.validation import require, seconds

from .ambient import ambient
from .faults import Fault
from .schedules import Seed
from .threads import ThreadWorld
from .verdict import conclude, refuse_missed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from .runs import Run
    from .starting import Start

    Kind = Literal["threads", "processes"]


def run_world(
    fn: Callable[[], Any],
    ranks: int = 4,
    *,
    kind: Kind = "threads",
    backend: str | None = None,
    seed: int | str | None = None,
    faults: Iterable[Fault] = (),
    timeout: float | timedelta | None = 60,
    start: Start | None = None,
    nodes: int = 1,
) -> list[Any]:
    """Return what ``fn()`` returns on each rank of a world that is gone afterwards.

    In a world of threads one rank runs at a time and the turn passes at rounds, as `seed` decides;
    module globals, ``os.environ`` and the working directory are everybody's. In one of processes
    every rank is a process of its own, on `backend` ("file" unless said otherwise).

    The world runs before `fn` begins: an `init` in it finds it running, whatever it asks for.

    If one rank raises, that very exception is raised here (from a process, one of equal type and
    text), with a note that says which rank it was and what became of the others. A rank that a
    fault kills has the result None.

    :param start: how processes begin: "fork" (the quickest, and the default unless CUDA is in use),
        "forkserver" or "spawn" (then `fn` stands at the top level of a file).
    :param nodes: how many machines the ranks of a world of threads believe to be on, so many each.
    :param timeout: seconds of real time after which a world that still runs is given up.
    :raises DeadlockError: if ranks wait for what can never come.
    :raises UnequalRounds: if all ended well, but with different numbers of calls.
    :raises StallError: when `timeout` has passed, or all wait for a rank that a fault has stopped.
    :raises ExceptionGroup: if ranks raised exceptions of several types, none a consequence.
    :raises FaultMissed: if a fault never struck, though nothing ended the world early.
    :raises TypeError: if `fn` is no function, or an async one, which would not run.
    :raises ValueError: if there is no such kind of world, or a fault's rank is not in it.
    """
    __tracebackhide__ = True
    around = ambient.get()
    chosen = Seed.read(seed) if seed is not None else around.seed or Seed.fresh()
    run = run_once(
        fn,
        ranks,
        kind=kind,
        backend=backend,
        seed=chosen,
        faults=[*faults],
        timeout=timeout,
        start=start,
        nodes=nodes,
    )
    results = conclude(run, around.replay(run.seed))
    refuse_missed(run, run.missed)
    return results


def run_once(
    fn: Callable[[], Any],
    ranks: int,
    *,
    kind: Kind,
    backend: str | None,
    seed: Seed,
    faults: list[Fault],
    timeout: float | timedelta | None,
    start: Start | None = None,
    nodes: int = 1,
    traced: bool = True,
) -> Run:
    """Return how one world went, whatever it came to."""
    _check(fn, ranks, kind, backend, faults)
    _check_nodes(ranks, kind, nodes)
    limit = seconds(timeout)
    sink = ambient.get().sink()
    if kind == "threads":
        run = ThreadWorld(fn, ranks, seed, faults, sink, nodes, traced=traced).run(limit)
    else:
        from .processes import ProcessWorld  # not before it is asked for

        run = ProcessWorld(fn, ranks, backend or "file", faults, sink, start).run(limit)
    run.faults = faults
    return run


def _check(
    fn: object, ranks: object, kind: str, backend: str | None, faults: Sequence[Fault]
) -> None:
    require(ranks, int, "ranks is how many there are")
    assert isinstance(ranks, int)
    if isinstance(ranks, bool):
        raise TypeError(f"ranks is how many there are, and {ranks} is a bool")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a world has at least one")
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: it takes a function, which every rank calls")
    if _is_async(fn) or _is_async(getattr(fn, "__call__", None)):  # noqa: B004 - it can be called
        raise TypeError(
            f"fn={getattr(fn, '__qualname__', fn)} is async: its body would not run. Pass a plain "
            f"function that runs it, as lambda: asyncio.run(...)"
        )
    if kind not in ("threads", "processes"):
        raise ValueError(f"kind={kind!r}: it takes 'threads' or 'processes'")
    if kind == "threads" and backend not in (None, "threads"):
        raise ValueError(f"backend={backend!r} has ranks in processes: say kind='processes'")
    for fault in faults:
        require(fault, Fault, "a fault is a Kill, Raise, Delay or Stop")
        if fault.rank >= ranks:
            raise ValueError(f"{fault}: there are ranks 0 to {ranks - 1}")


def _is_async(fn: object) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)


def _check_nodes(ranks: int, kind: str, nodes: int) -> None:
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"nodes={nodes}: {ranks} ranks cannot be as many on each")
    if nodes > 1 and kind != "threads":
        raise ValueError(f"nodes={nodes}: processes are on this machine; say kind='threads'")
