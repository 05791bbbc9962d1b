"""To go on after a loss: a new world of those who are left, and the state for those behind."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from syncprims._protocol.validation import Seconds, seconds, whole_number
from syncprims._world.runtime import get_world, reform_world
from syncprims._world.world import Change

T = TypeVar("T")


def reform(*, min_ranks: int = 1, timeout: Seconds = None) -> Change:
    """Return what has changed: the ranks that are left, and those that join, are the world now.

    Every rank that lives calls it, after `PeerLost` or `PeerFailed`, or when processes wait to join
    (:attr:`Trigger.joiners`). Ranks keep their order and are numbered from 0; those that join come
    last. Groups, process groups and what was built on them belong to the world before: make them
    again. On one host no rank that lives is ever left out: this waits for it.

    :param min_ranks: with fewer, the call raises on all ranks.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :raises SyncTimeout: on all ranks that called it, naming those that live and have not.
    :raises PeerLost: on all of them, if fewer than `min_ranks` are left.
    :raises BackendUnavailable: if the world's backend cannot do it.
    """
    least = whole_number(min_ranks, "min_ranks takes a whole number")
    if least < 1:
        raise ValueError(f"min_ranks={least}: it takes a number from 1 up")
    return reform_world(least, seconds(timeout))


def hand_over(tree: T, change: Change) -> T:
    """Return `tree` as the rank ``change.furthest`` has it, on the ranks that are behind or new.

    The other ranks keep their own. `tree` is made of dicts, lists and tuples. In it, an object with
    `state_dict` and `load_state_dict`, as a model or an optimizer, takes the state and stays the
    same object. Every rank calls it after :func:`reform`, and before other calls; where no rank is
    behind or new, nothing is sent.

    :raises ValueError: if the world has changed again since.
    :raises TypeError: on every rank that has a tensor or model that is distributed over ranks: load
        a checkpoint instead.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    world = get_world()
    if change.epoch != world.epoch:
        raise ValueError(
            f"change is of epoch {change.epoch}, and the world is in epoch {world.epoch}: pass the "
            f"result of the last reform()"
        )
    most, own = max(change.rounds), change.rounds[world.rank]
    state = _state_of(tree)  # on all ranks: all refuse a distributed tensor, or none
    if min(change.rounds) == most:
        return tree
    sends = world.rank == change.furthest
    state = world.group.broadcast(state if sends else None, change.furthest)
    if own < most:
        tree = cast("T", _restore(tree, state))
        world.set_rounds_completed(world.rounds_completed() + most - own)
    return tree


def _state_of(tree: Any) -> Any:
    """Return what travels: states in place of the objects that have one."""
    kind = _kind(tree)
    if kind.__name__ in ("DTensor", "FullyShardedDataParallel"):
        raise TypeError(
            f"hand_over() takes state of which each rank has a full copy, and a {kind.__name__} is "
            f"distributed over the ranks: the part of a lost rank is in a checkpoint only: load it"
        )
    if hasattr(tree, "load_state_dict"):
        state = tree.state_dict()
        return _state_of({**state} if isinstance(state, dict) else state)  # a model's is ordered
    if kind is dict:
        return {key: _state_of(value) for key, value in tree.items()}
    if kind in (list, tuple):
        return cast("Any", kind(map(_state_of, tree)))
    return tree


def _restore(tree: Any, state: Any) -> Any:
    """Return what arrived; where `tree` has objects that take a state, they take it."""
    if hasattr(tree, "load_state_dict"):
        tree.load_state_dict(state)
        return tree
    kind = _kind(tree)
    if kind is not _kind(state) or kind not in (dict, list, tuple):
        return state
    if kind is dict:
        return {key: _restore(tree.get(key), value) for key, value in state.items()}
    return cast("Any", kind(map(_restore, tree, state))) if len(tree) == len(state) else state


def _kind(value: object) -> Any:
    return type(value)
