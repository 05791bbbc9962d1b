"""A group of ranks, and what its members can do together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, Unpack, cast, overload

from syncprims._data import reduction, values
from syncprims._data.partition import split
from syncprims._data.reduction import Op
from syncprims._protocol.rounds import Rounds
from syncprims._protocol.validation import Seconds, seconds, whole_number
from syncprims.interface import Note

from .sequential import InTurn, MainFirst

T = TypeVar("T")
_mark_of = attrgetter("mark")

#: The groups whose ``with`` blocks this code runs in, the innermost last. They belong to a thread
#: or task, not to the process or the group: blocks of several tasks may overlap.
entered: ContextVar[tuple[Group, ...]] = ContextVar("syncprims_groups", default=())


class CallOptions(TypedDict, total=False):
    """The arguments of every call that carries a value."""

    name: str | None
    timeout: Seconds


class GroupInternals:
    """What the rest of the library needs of a group, beside its methods."""

    rounds: Rounds  #: of this rank
    timeout: float | None  #: of a call that names none, in seconds
    arrived: Callable[[], object] | None  #: returns the processes that wait to join, if any may
    is_silent: bool  #: the plain barrier needs no round: of one, in an open world, not observed


class Group:
    """Some ranks that synchronize together: the world, the ranks of one node, or a chosen set.

    Made by :func:`syncprims.group`. Every member makes the same calls in the same order. `src` and
    the ranks in errors are world ranks. In ``with group:`` the module's functions act on this
    group. The methods are the module's functions of the same names, among the members.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        rounds: Rounds | None,
        timeout: float | None,
        arrived: Callable[[], object] | None = None,
    ) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)  #: world ranks of the members, ascending
        self._internals = own = GroupInternals()
        own.rounds = rounds or cast("Rounds", _NoRounds(self.ranks, rank))
        own.timeout, own.arrived = timeout, arrived
        own.is_silent = rounds is not None and len(ranks) == 1 and not rounds.observed

    def __repr__(self) -> str:
        return f"<syncprims.Group of ranks {list(self.ranks)}>"

    def __enter__(self) -> Group:
        self._internals.rounds.members  # noqa: B018 - raises for a rank that is not a member
        entered.set((*entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        groups = list(entered.get())
        # Blocks of generators may end in another order than they began, and in another context.
        if self in groups:
            groups.reverse()
            groups.remove(self)
            entered.set(tuple(reversed(groups)))

    def barrier(
        self, name: str | None = None, *, timeout: Seconds = None, device: bool = False
    ) -> None:
        """As :func:`syncprims.barrier`, among the members."""
        if device:
            _wait_for_device()
        own = self._internals
        if own.is_silent and name is None and timeout is None:
            return
        rounds = own.rounds
        timeout = own.timeout if timeout is None else seconds(timeout)
        rounds.meet(rounds.note("barrier", name), timeout)

    def broadcast(
        self,
        obj: T,
        src: int | None = None,
        *,
        name: str | None = None,
        out: object = None,
        timeout: Seconds = None,
    ) -> T:
        """As :func:`syncprims.broadcast`, among the members; `src` is by default the lowest."""
        if src is None:
            src = self.ranks[0]
        elif src.__class__ is not int:
            src = whole_number(src, "src takes a rank, a whole number")
        if src not in self.ranks:
            raise ValueError(
                f"src={src}: the group has ranks {list(self.ranks)}; src is a world rank in it"
            )
        return _broadcast(self, "broadcast", name, obj, src, out, timeout)

    def all_gather(self, obj: T, *, name: str | None = None, timeout: Seconds = None) -> list[T]:
        """As :func:`syncprims.all_gather`, among the members."""
        return gather_as(self, "all_gather", obj, timeout, name=name)

    @overload
    def all_reduce(
        self, value: int, op: Literal["mean"], *, out: None = None, **more: Unpack[CallOptions]
    ) -> float: ...
    @overload
    def all_reduce(
        self, value: bool, op: Literal["sum", "prod"] = "sum", *, out: None = None,
        **more: Unpack[CallOptions],
    ) -> int: ...  # fmt: skip
    @overload
    def all_reduce(
        self, value: T, op: Op = "sum", *, out: object = None, **more: Unpack[CallOptions]
    ) -> T: ...
    def all_reduce(
        self,
        value: object,
        op: Op = "sum",
        *,
        name: str | None = None,
        out: object = None,
        timeout: Seconds = None,
    ) -> Any:
        """As :func:`syncprims.all_reduce`, among the members."""
        if op.__class__ is not str or op not in reduction.OPS:
            op = reduction.check_op(op)
        own = self._internals
        rounds = own.rounds
        limit = own.timeout if timeout is None else seconds(timeout)
        note = rounds.note("all_reduce", name, None, op)
        return values.all_reduce(rounds, note, value, op, out, limit)

    def any_rank(self, flag: object, *, name: str | None = None, timeout: Seconds = None) -> bool:
        """As :func:`syncprims.any_rank`, among the members."""
        rounds = self._internals.rounds
        note = rounds.note("any_rank", name, yes=bool(flag))
        return rounds.meet(note, self._seconds(timeout), _is_any_set)

    def all_ranks(self, flag: object, *, name: str | None = None, timeout: Seconds = None) -> bool:
        """As :func:`syncprims.all_ranks`, among the members."""
        rounds = self._internals.rounds
        note = rounds.note("all_ranks", name, yes=bool(flag))
        return rounds.meet(note, self._seconds(timeout), _are_all_set)

    def assert_same(self, value: object, name: str, *, timeout: Seconds = None) -> None:
        """As :func:`syncprims.assert_same`, among the members."""
        from syncprims._data import comparison  # not before it is asked for

        rounds = self._internals.rounds
        label = rounds.note("assert_same", name).label
        comparison.assert_same(rounds, label, value, name, self._seconds(timeout))

    def main_first(self, name: str | None = None, *, timeout: Seconds = None) -> MainFirst:
        """As :func:`syncprims.main_first`, among the members: the lowest one goes first."""
        return MainFirst(self._internals.rounds, name, seconds(timeout))

    def in_turn(self, name: str | None = None, *, timeout: Seconds = None) -> InTurn:
        """As :func:`syncprims.in_turn`, among the members."""
        return InTurn(self._internals.rounds, name, self._seconds(timeout))

    @overload
    def split(self, items: range, *, pad: Literal[False] = False) -> range: ...
    @overload
    def split(self, items: range, *, pad: bool) -> range | list[int]: ...
    @overload
    def split(self, items: tuple[T, ...], *, pad: bool = False) -> tuple[T, ...]: ...
    @overload
    def split(self, items: T, *, pad: bool = False) -> T: ...
    def split(self, items: object, *, pad: bool = False) -> Any:
        """As :func:`syncprims.split`, among the members."""
        return split(items, self._internals.rounds.index, len(self.ranks), pad=pad)

    def _seconds(self, timeout: Seconds) -> float | None:
        return self._internals.timeout if timeout is None else seconds(timeout)


class _NoRounds:
    """In place of the rounds of a group, for a rank that is not a member."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def __getattr__(self, _: str) -> NoReturn:
        """Raise: only members have rounds."""
        raise ValueError(
            f"rank {self._rank} is not in the group of ranks {list(self._ranks)}: only members "
            f"enter it and call its methods"
        )


# -- for the rest of the library -----------------------------------------------------------------


def internals_of(group: Group) -> GroupInternals:
    """Return what users of `group` do not see."""
    return group._internals  # pyright: ignore[reportPrivateUsage]


def innermost_group() -> Group | None:
    """Return the group whose ``with`` block this is; None outside of all."""
    groups = entered.get()
    return groups[-1] if groups else None


class SharedResult(NamedTuple):
    """A result that rank `src` of a group sends to the others, in the call that the user wrote.

    The block computes it, and :meth:`send` sends it. If the block raises, the others raise
    `PeerFailed` where they wait for the result.
    """

    group: Group
    call: str
    name: str | None
    src: int

    def __enter__(self) -> SharedResult:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            rounds = internals_of(self.group).rounds
            rounds.fail(rounds.note(self.call, self.name, self.src).label, error)

    def send(self, result: object) -> Any:
        """Return the result of `src` on every member, without a timeout."""
        return _broadcast(self.group, self.call, self.name, result, self.src, None, math.inf)


def _broadcast(
    group: Group, kind: str, name: str | None, obj: T, src: int, out: object, timeout: Seconds
) -> T:
    own = internals_of(group)
    note = own.rounds.note(kind, name, src)
    limit = own.timeout if timeout is None else seconds(timeout)
    value: T = values.broadcast(own.rounds, note, obj, src, out, limit)
    return value


def gather_as(
    group: Group, kind: str, obj: T, timeout: Seconds = math.inf, *, name: str | None = None
) -> list[T]:
    """Gather under the name of the call `kind`; by default all members wait without a timeout."""
    own = internals_of(group)
    limit = own.timeout if timeout is None else seconds(timeout)
    return values.gather(own.rounds, own.rounds.note(kind, name), obj, limit)


# `map`, since a generator takes as long as all the rest of the call.


def _is_any_set(notes: Sequence[Note]) -> bool:
    return any(map(_mark_of, notes))


def _are_all_set(notes: Sequence[Note]) -> bool:
    return all(map(_mark_of, notes))


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
