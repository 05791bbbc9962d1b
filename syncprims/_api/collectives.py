"""The public functions: rank queries, and the collectives of the current group.

Each collective calls the method of the same name, so that a :class:`~syncprims.Group` and the
module can never differ. `timeout` is in seconds or a `timedelta`; None is the world's default.
`group` is by default the group of the innermost ``with`` block, or all ranks outside of one.

Every call that waits for other ranks raises `CollectiveMismatch` if they make another call,
`SyncTimeout` if they do not come within `timeout`, `PeerLost` if one of them dies, and
`PeerFailed` if one raises. The message names the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

from syncprims._data.partition import split as split_items
from syncprims._data.reduction import Op
from syncprims._protocol.validation import Seconds, require, seconds
from syncprims._world.group import CallOptions, Group, innermost_group
from syncprims._world.runtime import get_active_group, get_host_number, get_topology, get_world
from syncprims._world.sequential import InTurn, MainFirst

T = TypeVar("T")


# -- which rank is this? From the environment: nothing is waited for ------------------------------


def get_rank() -> int:
    """Return this process's number among all ranks, from 0. Waits for no rank."""
    return get_topology().rank


def get_world_size() -> int:
    """Return the number of ranks. Waits for no rank."""
    return get_topology().world_size


def get_local_rank() -> int:
    """Return this process's number on its node, from 0.

    If the launcher does not say it, the first call starts the world, as a primitive does.
    """
    return get_host_number("local_rank")


def get_local_world_size() -> int:
    """Return the number of ranks on this node. May start the world, as :func:`get_local_rank`."""
    return get_host_number("local_world_size")


def get_node_rank() -> int:
    """Return this node's number, from 0. May start the world, as :func:`get_local_rank`."""
    return get_host_number("node_rank")


def get_num_nodes() -> int:
    """Return the number of nodes. May start the world, as :func:`get_local_rank`."""
    return get_host_number("num_nodes")


def is_main() -> bool:
    """Return whether this is rank 0. Waits for no rank."""
    return get_topology().rank == 0


def is_local_main() -> bool:
    """Return whether this is the first rank of its node.

    May start the world, as :func:`get_local_rank`.
    """
    return get_host_number("local_rank") == 0


def is_last() -> bool:
    """Return whether this is the highest rank. Waits for no rank."""
    topology = get_topology()
    return topology.rank == topology.world_size - 1


# -- collectives -----------------------------------------------------------------------------------


class _GroupedOptions(CallOptions, total=False):
    group: Group | None


def _checked(group: Group) -> Group:
    """Return the group that a user has passed; raise TypeError if it is something else."""
    require(group, Group, "group= takes a Group, such as group([0, 1])")
    return group


def group(ranks: Sequence[int]) -> Group:
    """Return the group of these world ranks. Every rank of the world calls it, members or not.

    Members use it as ``with group([0, 1]):``, or call its methods. The same ranks give the same
    group.

    :raises ValueError: if a rank does not exist or is named twice.
    :raises TypeError: if a rank is not a whole number.
    :raises SyncError: if the ranks do not meet, as :func:`barrier`.
    """
    return get_world().make_group(ranks)


def barrier(
    name: str | None = None,
    *,
    timeout: Seconds = None,
    group: Group | None = None,
    device: bool = False,
) -> None:
    """Return when every member of the group has arrived.

    With `device`, this rank's GPU work is completed before it arrives. `name` is shown in errors,
    and must be the same on all members.

    :param timeout: seconds, or a `timedelta`; None is the world's default: without
        ``SYNCPRIMS_TIMEOUT`` it waits as long as the missing rank lives, and says so after 30 s.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises CollectiveMismatch: on all members, if one makes another call.
    :raises SyncTimeout: naming the ranks that did not arrive in time.
    :raises PeerLost: if a member died, or finished without this call.
    :raises PeerFailed: if a member raised; with its type, message and traceback.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    # As the Group's method does; without that call a barrier of one is twice as fast.
    if members._internals.is_silent and name is None and timeout is None and not device:  # pyright: ignore[reportPrivateUsage]
        return
    members.barrier(name, timeout=timeout, device=device)


def broadcast(
    obj: T,
    src: int = 0,
    *,
    name: str | None = None,
    out: object = None,
    timeout: Seconds = None,
    group: Group | None = None,
) -> T:
    """Return the object of rank `src` on every member; on `src` itself, the very object.

    `src` is a world rank. With `out`, an array that arrives is copied into it, and `out` is
    returned.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises EncodingError: on `src`, if the object cannot travel; the others raise `PeerFailed`.
    :raises ValueError: if `src` is not a member, or `out` has another shape or dtype.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.broadcast(obj, src, name=name, out=out, timeout=timeout)


def all_gather(
    obj: T, *, name: str | None = None, timeout: Seconds = None, group: Group | None = None
) -> list[T]:
    """Return every member's object, in rank order; this rank's own is the very object.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises EncodingError: if the object cannot travel; the others raise `PeerFailed`.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.all_gather(obj, name=name, timeout=timeout)


@overload
def all_reduce(
    value: int, op: Literal["mean"], *, out: None = None, **more: Unpack[_GroupedOptions]
) -> float: ...
@overload
def all_reduce(
    value: bool,
    op: Literal["sum", "prod"] = "sum",
    *,
    out: None = None,
    **more: Unpack[_GroupedOptions],
) -> int: ...
@overload
def all_reduce(
    value: T, op: Op = "sum", *, out: object = None, **more: Unpack[_GroupedOptions]
) -> T: ...
def all_reduce(
    value: object,
    op: Op = "sum",
    *,
    name: str | None = None,
    out: object = None,
    timeout: Seconds = None,
    group: Group | None = None,
) -> Any:
    """Return the sum, mean, min, max or prod over all members, the same bits on each.

    `value` is a number, a numpy array, a torch tensor, or a dict, list or tuple of them, and does
    not change. Numbers of numpy are reduced as Python's. Integers stay exact; arrays keep their
    dtype, except that a mean of integers is float64 and a sum or product of bools int64. With
    `out`, an array of the result's shape and dtype is filled and returned.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises RankMismatch: on all members, if trees, shapes or dtypes differ.
    :raises ValueError: if `op` is unknown, or `out` does not fit.
    :raises TypeError: if `value` cannot be reduced; the others raise `PeerFailed`.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.all_reduce(value, op, name=name, out=out, timeout=timeout)


def any_rank(
    flag: object, *, name: str | None = None, timeout: Seconds = None, group: Group | None = None
) -> bool:
    """Return True on every member if `flag` is true on at least one, else False on every member.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.any_rank(flag, name=name, timeout=timeout)


def all_ranks(
    flag: object, *, name: str | None = None, timeout: Seconds = None, group: Group | None = None
) -> bool:
    """Return True on every member if `flag` is true on all, else False on every member.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.all_ranks(flag, name=name, timeout=timeout)


def assert_same(
    value: object, name: str, *, timeout: Seconds = None, group: Group | None = None
) -> None:
    """Return only if `value` is the same on every member, bit for bit.

    Arrays, tensors, parameters, and mappings, lists and tuples of them are compared by type, shape,
    dtype and bytes, and so are the fields of a dataclass; mappings and sets may differ in order.
    Only digests travel. `name` says in errors what the value is.

    :param timeout: seconds, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises RankMismatch: on all members otherwise, showing each rank's value.
    :raises TypeError: for an object of another kind; compare plain parts of it.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    members.assert_same(value, name, timeout=timeout)


def main_first(
    name: str | None = None,
    *,
    local: bool = False,
    at: str | os.PathLike[str] | None = None,
    timeout: Seconds = None,
    group: Group | None = None,
) -> MainFirst:
    """Return a context manager: main runs the block, then all other ranks run it.

    Main is the lowest rank of the group. It does not wait for the others' blocks. If its block
    raises, the others raise `PeerFailed` and no other block runs. With `local`, the first rank of
    each node goes first, and no node waits for another. With `at`, a directory, the nodes that
    share it form one group, whose lowest rank goes first. Blocks may be nested, in every form.

    :param at: exists on every node, and rank 0 may write there. All ranks meet at the first call
        with this path, which leaves a mark in it for a moment and uses no lock.
    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds for main's block, or a `timedelta`; None waits as long as it takes, the
        world's default does not apply.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises ValueError: if more than one of `local`, `at` and `group` is given.
    :raises ConfigurationError: on a rank that cannot use `at`, which the error names with its host.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    if bool(local) + (at is not None) + (group is not None) > 1:
        raise ValueError(
            f"main_first(local={local}, at={at!r}, group={group!r}): each of them selects the "
            f"ranks that wait for their first; pass only one"
        )
    if at is not None:
        return get_world(timeout).main_first_at(at, name, seconds(timeout))
    if local:
        return get_world(timeout).main_first_on_node(name, seconds(timeout))
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.main_first(name=name, timeout=timeout)


def in_turn(
    name: str | None = None, *, timeout: Seconds = None, group: Group | None = None
) -> InTurn:
    """Return a context manager: the members run the block one after another, in rank order.

    All leave together. If a block raises, no later one runs and the others raise `PeerFailed`.

    :param name: shown in errors; the same on all members, so that no other call is mistaken for it.
    :param timeout: seconds for each block, or a `timedelta`; None is the world's default.
    :param group: by default that of the ``with`` block, else all ranks.
    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    members = get_active_group(timeout) if group is None else _checked(group)
    return members.in_turn(name=name, timeout=timeout)


@overload
def split(items: range, *, pad: Literal[False] = False) -> range: ...
@overload
def split(items: range, *, pad: bool) -> range | list[int]: ...
@overload
def split(items: tuple[T, ...], *, pad: bool = False) -> tuple[T, ...]: ...
@overload
def split(items: T, *, pad: bool = False) -> T: ...
def split(items: object, *, pad: bool = False) -> Any:
    """Return this rank's contiguous share of `items`; extra items go to the lowest ranks.

    Takes a list, tuple, range, dict of equally long sequences, numpy array, tensor, or anything
    with ``.select(indices)``, and returns the same type; `items` does not change. With `pad`, the
    last of all items is repeated until every share is equally long (a range becomes a list). In a
    group's ``with`` block the members share. Waits for no rank.

    :raises TypeError: for `str` and `bytes`, and for what has no length.
    :raises ValueError: if the dict's values differ in length.
    """
    within = innermost_group()
    if within is not None:
        return within.split(items, pad=pad)
    topology = get_topology()
    return split_items(items, topology.rank, topology.world_size, pad=pad)
