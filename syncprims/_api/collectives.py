"""What users call: who am I, and the collectives of the current group.

Each function hands on to the method of the same name, so that a :class:`~syncprims.Group` and the
module can never differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from syncprims._data.partition import split as split_items
from syncprims._world.group import entered
from syncprims._world.runtime import active_group, current, topology

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from syncprims._world.group import Group
    from syncprims._world.sequential import InTurn, MainFirst

    Seconds = float | timedelta | None

T = TypeVar("T")


# -- who am I? From the environment: nobody is waited for --------------------------------------


def get_rank() -> int:
    """Return this process's number among all ranks."""
    return topology().rank


def get_world_size() -> int:
    """Return the number of ranks."""
    return topology().world_size


def get_local_rank() -> int:
    """Return this process's number on its node."""
    return topology().local_rank


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return topology().local_world_size


def get_node_rank() -> int:
    """Return this node's number."""
    return topology().node_rank


def get_num_nodes() -> int:
    """Return the number of nodes."""
    return topology().num_nodes


def is_main() -> bool:
    """Tell whether this is rank 0."""
    return topology().rank == 0


def is_local_main() -> bool:
    """Tell whether this is the first rank of its node."""
    return topology().local_rank == 0


def is_last() -> bool:
    """Tell whether this is the highest rank."""
    place = topology()
    return place.rank == place.world_size - 1


# -- together ----------------------------------------------------------------------------------
#
# `group` is a Group; by default the one whose `with` block this is, else all ranks. What each call
# raises stands at the Group's method of the same name.


def group(ranks: Sequence[int]) -> Group:
    """Return the group of these world ranks. Every rank of the world calls it, members or not.

    Members use it as ``with group([0, 1]):``, or call its methods.

    :raises ValueError: if a rank does not exist or stands twice.
    """
    return current().new_group(ranks)


def barrier(
    name: str | None = None,
    *,
    timeout: Seconds = None,
    group: Group | None = None,
    device: bool = False,
) -> None:
    """Return when every member has arrived. See :meth:`Group.barrier`."""
    members = group or active_group(timeout)
    if members.skips_silently and name is None and timeout is None and not device:
        return  # as the Group's method would; in a world of one the extra call is half the price
    if members.skip_barrier is not None and name is None and timeout is None and not device:
        members.skip_barrier()
        return
    members.barrier(name, timeout=timeout, device=device)


def broadcast(
    obj: T, src: int = 0, *, out: Any = None, timeout: Seconds = None, group: Group | None = None
) -> T:
    """Return `src`'s object on every member. See :meth:`Group.broadcast`."""
    return (group or active_group(timeout)).broadcast(obj, src, out=out, timeout=timeout)


def all_gather(obj: T, *, timeout: Seconds = None, group: Group | None = None) -> list[T]:
    """Return every member's object, in rank order. See :meth:`Group.all_gather`."""
    return (group or active_group(timeout)).all_gather(obj, timeout=timeout)


def all_reduce(
    value: T,
    op: str = "sum",
    *,
    out: Any = None,
    timeout: Seconds = None,
    group: Group | None = None,
) -> T:
    """Return the sum, mean, min, max or prod over all members. See :meth:`Group.all_reduce`."""
    return (group or active_group(timeout)).all_reduce(value, op, out=out, timeout=timeout)


def any_rank(flag: object, *, timeout: Seconds = None, group: Group | None = None) -> bool:
    """Return True everywhere if `flag` is true on at least one member."""
    return (group or active_group(timeout)).any_rank(flag, timeout=timeout)


def all_ranks(flag: object, *, timeout: Seconds = None, group: Group | None = None) -> bool:
    """Return True everywhere if `flag` is true on all members."""
    return (group or active_group(timeout)).all_ranks(flag, timeout=timeout)


def assert_same(
    value: object, name: str, *, timeout: Seconds = None, group: Group | None = None
) -> None:
    """Return only if `value` is the same on every member. See :meth:`Group.assert_same`."""
    (group or active_group(timeout)).assert_same(value, name, timeout=timeout)


def main_first(
    *,
    local: bool = False,
    name: str | None = None,
    timeout: Seconds = None,
    group: Group | None = None,
) -> MainFirst:
    """Return a context manager: main runs the block, then the others. See `Group.main_first`.

    With `local`, the first rank of each node goes first, and no node waits for another.

    :raises ValueError: if both `local` and `group` say who is first.
    """
    if local and group is not None:
        raise ValueError(
            f"main_first(local=True, group={group!r}): local is the group of this node's "
            f"ranks; give one of the two"
        )
    if local:
        return current(timeout).node_group.main_first(name=name, timeout=timeout)
    return (group or active_group(timeout)).main_first(name=name, timeout=timeout)


def in_turn(*, timeout: Seconds = None, group: Group | None = None) -> InTurn:
    """Return a context manager: ranks run the block one after another. See `Group.in_turn`."""
    return (group or active_group(timeout)).in_turn(timeout=timeout)


def split(items: Any, *, pad: bool = False) -> Any:
    """Return this rank's contiguous share of `items`, extras going to the lowest ranks.

    Takes a list, tuple, range, dict of equally long sequences, numpy array, tensor, or anything
    with ``.select(indices)``, and returns the same type; `items` itself is left alone. With `pad`,
    the last of all items is repeated until every share is equally long (a range becomes a list).
    Nobody is waited for.

    :raises TypeError: for `str` and `bytes`, and for what has no length.
    :raises ValueError: if the dict's values differ in length.
    """
    within = entered.get()
    if within is not None:
        return within.split(items, pad=pad)
    place = topology()
    return split_items(items, place.rank, place.world_size, pad=pad)
