"""A group of ranks, and what its members can do together."""

from __future__ import annotations

import math
import operator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from syncprims._data import codec, objects, reduction
from syncprims._data.partition import split
from syncprims._protocol.rounds import PendingRound, Rounds
from syncprims._protocol.validation import seconds
from syncprims.errors import RankMismatch
from syncprims.interface import Note

from .sequential import InTurn, MainFirst

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Token
    from datetime import timedelta
    from types import TracebackType

    from syncprims.errors import SyncError

    Seconds = float | timedelta | None

T = TypeVar("T")

#: The group whose ``with`` block this code runs in, if any. Belongs to a thread or task, not to
#: the process.
entered: ContextVar[Group | None] = ContextVar("syncprims_group", default=None)


class Group:
    """Some ranks that synchronize together: the world, the ranks of one node, or a chosen set.

    Every member makes the same calls in the same order. `src` and the ranks in errors are world
    ranks. In ``with group:`` the module's functions act on this group.

    Every method that meets the others raises :class:`CollectiveMismatch`, :class:`SyncTimeout`,
    :class:`PeerLost` or :class:`PeerFailed` when they do not come as they should; `timeout` is in
    seconds, and None is the world's default.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, rounds: Rounds | None, timeout: float | None
    ) -> None:
        self.ranks = tuple(ranks)  #: world ranks of the members, ascending
        self._rank = rank
        self._member = rounds
        self._timeout = timeout
        self._tokens: list[Token[Group | None]] = []
        self.alone = rounds is not None and len(self.ranks) == 1  #: and the world is open
        #: What a plain barrier calls if it needs no round: this rank is alone, and the world open.
        self.skip_barrier: Callable[[], None] | None = None
        if rounds is not None and self.alone and not rounds.board.posts_alone:
            self.skip_barrier = rounds.skip_barrier
        self.skips_silently = self.skip_barrier is not None and not (rounds and rounds.traced)

    def __repr__(self) -> str:
        return f"<syncprims.Group of ranks {list(self.ranks)}>"

    def __enter__(self) -> Group:
        self._rounds  # noqa: B018 - raises for a rank that is no member
        self._tokens.append(entered.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered.reset(self._tokens.pop())

    @property
    def _rounds(self) -> Rounds:
        if self._member is None:
            raise ValueError(
                f"rank {self._rank} is not in the group of ranks {list(self.ranks)}: only members "
                f"enter it and call its methods"
            )
        return self._member

    def adopt(self, timeout: float) -> None:
        """Make this the default timeout of every later call."""
        self._timeout = timeout

    def close_with(self, why: Callable[[], SyncError]) -> None:
        """Make every later call raise ``why()``: the world is closed, or this is a forked child."""
        self.alone = self.skips_silently = False
        self.skip_barrier = None
        if self._member is not None:
            self._member.close_with(why)

    # -- calls --------------------------------------------------------------------------------

    def barrier(
        self, name: str | None = None, *, timeout: Seconds = None, device: bool = False
    ) -> None:
        """Return when every member has arrived.

        With `device`, this rank's GPU work is waited for first.
        """
        if device:
            _wait_for_device()
        if self.skip_barrier is not None and name is None and timeout is None:
            self.skip_barrier()
            return
        rounds = self._member or self._rounds
        timeout = self._timeout if timeout is None else seconds(timeout)
        rounds.meet(rounds.note("barrier", name), timeout)

    def broadcast(
        self, obj: T, src: int | None = None, *, out: Any = None, timeout: Seconds = None
    ) -> T:
        """Return `src`'s object on every member; on `src` itself, the very object.

        `src` is a world rank, by default the lowest member. With `out`, an array that arrives is
        copied into it, and `out` is returned.

        :raises EncodingError: on `src`, if the object cannot travel; the others get `PeerFailed`.
        :raises ValueError: if `src` is no member, or `out` has another shape or dtype.
        """
        src = self._source(src)
        rounds = self._rounds
        note = rounds.note("broadcast", src=src)
        if self.alone:
            objects.check(rounds, note.label, obj)
            rounds.meet(note)
            value: Any = obj
        else:
            value = objects.broadcast(rounds, note, obj, src, out, self._seconds(timeout))
        return value if out is None or out is value else reduction.copy_into(out, value)  # type: ignore[no-any-return]

    def all_gather(self, obj: T, *, timeout: Seconds = None) -> list[T]:
        """Return every member's object, in rank order; one's own is the very object.

        :raises EncodingError: if the object cannot travel; the others get `PeerFailed`.
        """
        rounds = self._rounds
        label = rounds.note("all_gather").label
        if self.alone:
            objects.check(rounds, label, obj)
            rounds.meet(Note(label))
            return [obj]
        return objects.gather(rounds, label, obj, self._seconds(timeout))

    def all_reduce(
        self, value: T, op: str = "sum", *, out: Any = None, timeout: Seconds = None
    ) -> T:
        """Return the sum, mean, min, max or product over all members, the same bits on each.

        `value` is a number, a numpy array, a torch tensor, or a dict, list or tuple of them, and
        is left alone. Python integers stay exact; arrays keep their dtype, except that a mean of
        integers is float64 and a sum or product of bools int64. With `out`, an array of the
        result's shape and dtype is filled and returned.

        :raises RankMismatch: on all members, if trees, shapes or dtypes differ.
        :raises ValueError: if `op` is unknown, or `out` does not fit.
        :raises TypeError: if `value` cannot be reduced; the others get `PeerFailed`.
        """
        reduction.check_op(op)
        note = self._rounds.note("all_reduce", op=op)
        seconds_ = self._seconds(timeout)
        result: Any = objects.all_reduce(self._rounds, note, value, op, out, seconds_)
        return result if out is None or out is result else reduction.copy_into(out, result)  # type: ignore[no-any-return]

    def any_rank(self, flag: object, *, timeout: Seconds = None) -> bool:
        """Return True on every member if `flag` is true on at least one."""
        rounds = self._rounds
        note = rounds.note("any_rank", flag=bool(flag))
        # A loop, since `any` over a generator takes as long as all the rest of this method.
        for other in rounds.meet(note, self._seconds(timeout)):  # noqa: SIM110
            if other.flag:
                return True
        return False

    def all_ranks(self, flag: object, *, timeout: Seconds = None) -> bool:
        """Return True on every member if `flag` is true on all."""
        rounds = self._rounds
        note = rounds.note("all_ranks", flag=bool(flag))
        for other in rounds.meet(note, self._seconds(timeout)):  # noqa: SIM110
            if not other.flag:
                return False
        return True

    def assert_same(self, value: object, name: str, *, timeout: Seconds = None) -> None:
        """Return only if `value` is the same on every member, bit for bit; only digests travel.

        Dicts and sets may differ in order.

        :raises RankMismatch: on all members otherwise, showing each rank's value.
        """
        import hashlib  # slow to import

        rounds = self._rounds
        label = rounds.note("assert_same", name).label
        data = objects.encode(rounds, label, value, canonical=True)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        limit = self._seconds(timeout)
        seen = [note.payload for note in rounds.meet(Note(label, payload=digest), limit)]
        if all(other == digest for other in seen):
            return
        # Equal objects may have different pickles: those are sent, to be compared themselves.
        mine = _shorten(value), None if codec.is_plain(value) else value
        shown = objects.gather(rounds, label, mine, limit)
        if not _all_equal([whole for _, whole in shown]):
            lines = "\n".join(
                f"  rank {rank}: {text}  (digest {other.hex()[:8]})"
                for rank, (text, _), other in zip(self.ranks, shown, seen, strict=True)
            )
            raise RankMismatch(
                f"{name} differs between ranks, at {label}:\n{lines}\n"
                f"Make it the same everywhere: equal seeds and inputs, or broadcast it.",
                call=str(label),
                arrived=list(self.ranks),
            )

    def main_first(self, *, name: str | None = None, timeout: Seconds = None) -> MainFirst:
        """Return a context manager: the lowest member runs the block, then the others.

        The lowest member does not wait for the others' blocks. If its block raises, the others get
        `PeerFailed` and no other block runs. Waiting is exempt from the default timeout.
        """
        return MainFirst(self._rounds, name, seconds(timeout))

    def in_turn(self, *, timeout: Seconds = None) -> InTurn:
        """Return a context manager: the members run the block one after another, in rank order.

        All leave together. If a block raises, no later one runs and the others get `PeerFailed`.
        """
        return InTurn(self._rounds, self._seconds(timeout))

    def split(self, items: Any, *, pad: bool = False) -> Any:
        """Return this member's contiguous share of `items`; see :func:`syncprims.split`."""
        return split(items, self.ranks.index(self._rounds.rank), len(self.ranks), pad=pad)

    # -- for the rest of the library ------------------------------------------------------------

    def send(self, kind: str, obj: T, src: int) -> T:
        """Broadcast under another call's name, so that errors show what the user wrote.

        As in `main_first`, the others wait for a body, however long it takes.
        """
        rounds = self._rounds
        note = rounds.note(kind, src=src)
        if self.alone:
            objects.check(rounds, note.label, obj)
            rounds.meet(note)
            return obj
        return objects.broadcast(rounds, note, obj, src, None, math.inf)  # type: ignore[no-any-return]

    def gather(self, kind: str, obj: T) -> list[T]:
        """Gather under another call's name, and wait for the others however long they take."""
        rounds = self._rounds
        label = rounds.note(kind).label
        if self.alone:
            rounds.meet(Note(label))
            return [obj]
        return objects.gather(rounds, label, obj, math.inf)

    def send_failure(self, kind: str, error: BaseException, src: int) -> None:
        """Let the others' :meth:`send` from `src` raise `PeerFailed`; does not wait."""
        self._rounds.fail(self._rounds.note(kind, src=src).label, error)

    def raise_flag(
        self, kind: str, name: str | None, flag: bool, payload: bytes
    ) -> list[tuple[int, bytes]]:
        """Return rank and payload of every member that raises its flag in this round."""
        rounds = self._rounds
        note = rounds.note(kind, name)
        return self._raised(rounds.meet(_flagged(note, flag, payload), self._timeout))

    def defer_flag(
        self, kind: str, name: str | None, flag: bool, payload: bytes, before: PendingRound | None
    ) -> PendingRound:
        """Post a flag, to ask :meth:`flags` for later, and wait for those of `before`."""
        rounds = self._rounds
        note = rounds.note(kind, name)
        return rounds.defer(_flagged(note, flag, payload), self._timeout, before)

    def flags(self, pending: PendingRound) -> list[tuple[int, bytes]]:
        """Return rank and payload of every member that raised its flag at `pending`."""
        return self._raised(self._rounds.finish(pending))

    def _raised(self, notes: Sequence[Note]) -> list[tuple[int, bytes]]:
        for note in notes:
            if note.flag:
                return [(r, n.payload) for r, n in zip(self.ranks, notes, strict=True) if n.flag]
        return []

    def _seconds(self, timeout: Seconds) -> float | None:
        return self._timeout if timeout is None else seconds(timeout)

    def _source(self, src: int | None) -> int:
        try:
            found = self.ranks[0] if src is None else int(operator.index(src))
        except TypeError:
            raise TypeError(f"src={src!r}: it takes a rank, a whole number") from None
        if found not in self.ranks:
            raise ValueError(
                f"src={src}: the group has ranks {list(self.ranks)}; src is a world rank in it"
            )
        return found


def _flagged(note: Note, flag: bool, payload: bytes) -> Note:
    return Note(note.label, flag, payload) if flag else note


def _all_equal(values: list[Any]) -> bool:
    """Tell whether all values were sent, and are equal in their own eyes."""
    try:
        return all(value is not None and bool(value == values[0]) for value in values)
    except Exception:  # a comparison is the object's own code: it may raise anything
        return False


def _shorten(value: object) -> str:
    """Return the value's repr on one line, its middle left out where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception as broken:  # the object's own code: the others wait to hear of the value
        text = f"<no text: its __repr__ raised {type(broken).__name__}>"
    return text if len(text) <= 160 else f"{text[:120]} ... {text[-30:]}"


def _wait_for_device() -> None:
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
