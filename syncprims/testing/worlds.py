"""``run_world``: a function on every rank of a world that exists as long as the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from .faults import Fault
from .outcomes import WorldRun
from .thread_world import ThreadWorld
from .verdict import check_faults_struck, results_of
from .world_spec import Kind, Start, WorldSpec, choose_seed, test_context


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
    """Run ``fn()`` on each rank of a new world; return the results in rank order.

    In a world of threads one rank runs at a time and the turn passes at rounds, as `seed` decides;
    module globals, ``os.environ`` and the working directory are shared. In one of processes every
    rank is a process of its own, on `backend` (default "file").

    The world runs before `fn` begins: an `init` in `fn` finds it running, and its arguments have no
    effect.

    If one rank raises, this call raises that very exception (from a process, one of equal type and
    text). A note says which rank it was and how the others ended. A rank that a fault kills has the
    result None.

    :param start: how processes begin: "fork" (the fastest, and the default unless CUDA is in use),
        "forkserver" or "spawn" (both need `fn` at the top level of a file).
    :param nodes: how many machines the ranks of a world of threads seem to be on, equally many on
        each.
    :param timeout: seconds of real time after which a world that still runs is given up.
    :raises DeadlockError: if ranks wait for notes that can never come.
    :raises UnequalRounds: if all ended without an error, but with different numbers of calls.
    :raises StallError: when `timeout` has passed, or all wait for a rank that a fault has stopped.
    :raises ExceptionGroup: if ranks raised exceptions of several types that are no consequences.
    :raises FaultMissed: if a fault never struck, though nothing ended the world early.
    :raises TypeError: if `fn` is no function, or an async one, which would not run.
    :raises ValueError: if there is no such kind of world, or a fault's rank is not in it.
    """
    __tracebackhide__ = True
    chosen = choose_seed(seed)
    run = run_once(WorldSpec(fn, ranks, kind, backend, chosen, [*faults], timeout, start, nodes))
    results = results_of(run, test_context.get().replay(run.seed))
    check_faults_struck(run, run.missed)
    return results


def run_once(spec: WorldSpec) -> WorldRun:
    """Run one world, and return how it went, even if it failed."""
    output = test_context.get().make_output()
    if spec.kind == "threads":
        return ThreadWorld(spec, output).run()
    from .process_world import ProcessWorld  # imports much that worlds of threads do not need

    return ProcessWorld(spec, output).run()
