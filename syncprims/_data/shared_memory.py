"""Arrays in bulk: through memory that all members share, a piece at a time; each piece is a round.

Nothing is pickled, and no rank ever holds another's array: an array of any size passes through a
window of fixed size, which stays in the processors' caches. The rounds say when a piece is there
and when its place is free again, so that a rank that dies, fails or differs is told as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import flat, raw
from .kinds import is_array
from .reduction import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncprims._protocol.round_sequence import Steps
    from syncprims.interface import Note, Window

_SLOTS = 4  # of a broadcast, so that its source may be some pieces ahead
#: Of a reduction. Whoever has posted round k has read the results of piece k - 2, and may still be
#: reading those of k - 1: so piece k + 1 goes where k - 2 was.
_BUFFERS = 3
_SMALL_PIECE = 256 << 10
_LINE = 64  # bytes, of a processor's cache


def send(steps: Steps, step: Note, window: Window, arrays: Sequence[Any]) -> None:
    """Pass `arrays` to all members, who call :func:`receive` for such; one round per piece."""
    size = _slot_size(window)
    first = steps.posted + 1  # the round of piece 0
    sources = [raw(flat(array)) for array in arrays]
    for number, (index, at, length) in enumerate(_byte_pieces(sources, size)):
        # The place of the piece is free when all have gone on from the round of its last one. In
        # the first round, others may say that they cannot receive: that is heard before going on.
        steps.reach(first if number == 1 else first + number - _SLOTS + 1)
        begin = number % _SLOTS * size
        window.memory[begin : begin + length] = sources[index][at : at + length]
        window.fence()
        steps.post(step)
    steps.reach(steps.posted)


def receive(steps: Steps, step: Note, window: Window, arrays: Sequence[Any]) -> None:
    """Fill the contiguous `arrays` with what the source sends."""
    size = _slot_size(window)
    targets = [raw(flat(array)) for array in arrays]
    for number, (index, at, length) in enumerate(_byte_pieces(targets, size)):
        steps.post(step)  # and so the piece before has been read
        steps.reach(steps.posted)
        window.fence()
        begin = number % _SLOTS * size
        targets[index][at : at + length] = window.memory[begin : begin + length]
        window.fence()  # read before this rank says so


class Job(NamedTuple):
    """One array to reduce, and where to."""

    mine: Any
    result: Any  #: contiguous


def reduce(steps: Steps, step: Note, window: Window, jobs: Sequence[Job], op: str) -> None:
    """Fill the results of all jobs, on all members alike.

    Each member reduces its share of a piece, always in the order of ranks: so all hold the same
    bits, and the same that one rank would have found by itself. In the round of piece k, members
    say that their part of it is there, and that they have reduced their share of piece k - 1.
    """
    members, index = steps.members, steps.index
    vectors = [Job(flat(job.mine), flat(job.result)) for job in jobs]
    before: _Piece | None = None
    pieces = [
        _Piece(window.memory, len(members), index, number % _BUFFERS, job, begin, end)
        for number, (job, begin, end) in enumerate(_item_pieces(vectors, window, len(members)))
    ]
    for piece in (*pieces, None):
        if piece is not None:
            piece.write_mine()
        if before is not None:
            before.reduce_share(op)
        window.fence()
        steps.post(step)
        steps.reach(steps.posted)
        window.fence()
        if before is not None:
            before.read_others()
        before = piece
    window.fence()


class _Piece:
    """Some items of one array, and their places in the window."""

    def __init__(
        self,
        memory: memoryview,
        count: int,
        index: int,
        buffer: int,
        job: Job,
        begin: int,
        end: int,
    ) -> None:
        self._memory = memory
        self._count = count
        self._index = index
        self._job = Job(job.mine[begin:end], job.result[begin:end])
        self._items = end - begin
        at = buffer * (len(memory) // _BUFFERS)
        stride = _up(self._items * job.mine.itemsize)
        self._inputs_at = [at + member * stride for member in range(count)]
        self._result_at = at + count * stride
        share = _up(-(-self._items // count))  # in items: so no two members write one cache line
        self._shares = [
            slice(min(i * share, self._items), min((i + 1) * share, self._items))
            for i in range(count)
        ]

    def write_mine(self) -> None:
        """Write this rank's items, but for those of its own share, which nobody else needs."""
        mine = raw(self._job.mine)
        size = self._job.mine.itemsize
        at = self._inputs_at[self._index]
        shared = self._memory[at : at + self._items * size]
        for begin, end in self._not_mine(size):
            shared[begin:end] = mine[begin:end]

    def _not_mine(self, size: int) -> list[tuple[int, int]]:
        """Return where the shares of the others begin and end, in bytes."""
        own = self._shares[self._index]
        ends = ((0, own.start * size), (own.stop * size, self._items * size))
        return [(begin, end) for begin, end in ends if begin < end]

    def reduce_share(self, op: str) -> None:
        """Write the reduction of this rank's share, for itself and for the others."""
        share = self._shares[self._index]
        if share.start == share.stop:
            return
        parts = [
            self._job.mine[share]
            if member == self._index
            else _vector(self._memory, at, share, like=self._job.mine)
            for member, at in enumerate(self._inputs_at)
        ]
        result = _vector(self._memory, self._result_at, share, like=self._job.result)
        combine(parts, op, result)
        raw(self._job.result[share])[:] = raw(result)

    def read_others(self) -> None:
        """Read what the others have reduced."""
        result = raw(self._job.result)
        size = self._job.result.itemsize
        own = self._shares[self._index]
        at = self._result_at
        for begin, end in ((0, own.start), (own.stop, self._items)):
            if begin < end:
                result[begin * size : end * size] = self._memory[
                    at + begin * size : at + end * size
                ]


def _vector(memory: memoryview, at: int, share: slice, like: Any) -> Any:
    """Return the items of `share` at `at` of the window, as an array or tensor like `like`."""
    begin, count = at + share.start * like.itemsize, share.stop - share.start
    if is_array(like):
        import numpy

        return numpy.frombuffer(memory, like.dtype, count, begin)
    import torch

    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=begin)


def _slot_size(window: Window) -> int:
    return len(window.memory) // _SLOTS // _LINE * _LINE


def _byte_pieces(arrays: Sequence[memoryview], size: int) -> Iterator[tuple[int, int, int]]:
    """Return array number, place and length of each piece."""
    for index, array in enumerate(arrays):
        # Smaller ones where the array is small, so that the others read one while the next is
        # written.
        most = min(size, max(_SMALL_PIECE, _up(len(array) // _SLOTS)))
        for at in range(0, len(array), most):
            yield index, at, min(most, len(array) - at)


def _item_pieces(
    jobs: Sequence[Job], window: Window, members: int
) -> Iterator[tuple[Job, int, int]]:
    """Return job, first item and last item of each piece; all its places fit into a buffer."""
    room = len(window.memory) // _BUFFERS - (members + 1) * _LINE
    for job in jobs:
        most = room // (members * job.mine.itemsize + job.result.itemsize)
        for begin in range(0, len(job.mine), most):
            yield job, begin, min(begin + most, len(job.mine))


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
