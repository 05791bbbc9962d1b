"""Arrays through memory that all members share, a piece at a time; each piece is a round.

Nothing is pickled, and no rank ever holds another's array: an array of any size passes through a
window of fixed size, which stays in the processors' caches. The rounds show when a piece is there
and when its part of the window is free again. So a rank that dies, fails or differs raises as in
any call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import flat, is_array, raw
from .reduction import combine
from .transport import Operand, Transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncprims._protocol.rounds import RoundSequence
    from syncprims.interface import Window

_SLOTS = 4  # of a broadcast, so that its source may be some pieces ahead
#: Of a reduction. A rank that has posted round k has read the results of piece k - 2, and may still
#: be reading those of k - 1: so piece k + 1 goes where k - 2 was.
_BUFFERS = 3
_SMALL_PIECE = 256 << 10
_LINE = 64  # bytes, of a processor's cache


class SharedMemoryTransport(Transport):
    """Carries arrays of the hosts' memory through a window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._slot_size = len(window.memory) // _SLOTS // _LINE * _LINE

    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays`, contiguous except on the source, with those of member number `src`."""
        if src == sequence.index:
            self._send(sequence, arrays)
            return
        memory, fence = self._window
        for begin, piece in self._byte_pieces(arrays):
            sequence.meet()  # the piece is there, and all have read the one before
            fence()
            piece[:] = memory[begin : begin + len(piece)]
            fence()  # read before this rank says so

    def _send(self, sequence: RoundSequence, arrays: Sequence[Any]) -> None:
        memory, fence = self._window
        first = sequence.rounds.board.posted + 1  # the round of piece 0
        for number, (begin, piece) in enumerate(self._byte_pieces(arrays)):
            # A part of the window is free when all have left the round of the piece in it.
            # In the first round, others may say that they cannot receive: that comes before more.
            sequence.collect_until(first if number == 1 else first + number - _SLOTS + 1)
            memory[begin : begin + len(piece)] = piece
            fence()
            sequence.post()
        sequence.collect_until(sequence.rounds.board.posted)

    def _byte_pieces(self, arrays: Sequence[Any]) -> Iterator[tuple[int, memoryview]]:
        """Yield each piece, and where it is in the window."""
        number = 0
        for array in [raw(flat(array)) for array in arrays]:
            most = _piece_size(len(array), self._slot_size)
            for at in range(0, len(array), most):
                yield number % _SLOTS * self._slot_size, array[at : at + most]
                number += 1

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members.

        In the round of piece k, members say that their part of it is there, and that they have
        reduced their part of piece k - 1.
        """
        fence = self._window.fence
        before: _Piece | None = None
        for piece in (*self._item_pieces(operands, sequence), None):
            if piece is not None:
                piece.write_mine()
            if before is not None:
                before.reduce_part(op)
            fence()
            sequence.meet()
            fence()
            if before is not None:
                before.read_others()
            before = piece
        fence()

    def _item_pieces(
        self, operands: Sequence[Operand], sequence: RoundSequence
    ) -> Iterator[_Piece]:
        """Yield the pieces of all operands; all parts of one fit into a buffer."""
        memory, members = self._window.memory, len(sequence.rounds.members)
        space = len(memory) // _BUFFERS - (members + 1) * _LINE
        number = 0
        for operand in operands:
            mine, result = flat(operand.mine), flat(operand.result)
            most = space // (members * mine.itemsize + result.itemsize)
            for begin in range(0, len(mine), most):
                part = Operand(mine[begin : begin + most], result[begin : begin + most])
                yield _Piece(memory, members, sequence.index, number % _BUFFERS, part)
                number += 1

    def gather(self, sequence: RoundSequence, mine: Any, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i, a piece of all at a time.

        Pieces use the halves of the window in turn: a rank that has posted round k has read the
        piece of round k - 1, so the piece of round k + 1 goes where that was.
        """
        memory, fence = self._window
        me, members = sequence.index, len(rooms)
        data, targets = raw(flat(mine)), [None if r is None else raw(flat(r)) for r in rooms]
        half = len(memory) // 2
        slot = _piece_size(len(data), half // members)
        if (own := targets[me]) is not None:
            own[:] = data
        for number, begin in enumerate(range(0, len(data), slot)):
            base = number % 2 * half
            piece = data[begin : begin + slot]
            memory[base + me * slot : base + me * slot + len(piece)] = piece
            fence()
            sequence.meet()
            fence()
            for member, target in enumerate(targets):
                if target is not None and member != me:
                    at = base + member * slot
                    target[begin : begin + len(piece)] = memory[at : at + len(piece)]
            fence()

    def exchange(
        self,
        sequence: RoundSequence,
        parts: Sequence[Any],
        rooms: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Fill ``rooms[i]`` with the part that member i has for this one, in pieces as `gather`."""
        memory, fence = self._window
        me, members = sequence.index, len(rooms)
        mine, targets = [raw(flat(p)) for p in parts], [raw(flat(r)) for r in rooms]
        targets[me][:] = mine[me]
        longest = (
            max(size for i, row in enumerate(sizes) for j, size in enumerate(row) if i != j)
            if members > 1
            else 0
        )
        half = len(memory) // 2
        slot = _piece_size(longest, half // members**2)
        for number, begin in enumerate(range(0, longest, slot)):
            base = number % 2 * half
            for member, part in enumerate(mine):
                if member != me and (piece := part[begin : begin + slot]):
                    at = base + (me * members + member) * slot
                    memory[at : at + len(piece)] = piece
            fence()
            sequence.meet()
            fence()
            for member, target in enumerate(targets):
                if member != me and (room := target[begin : begin + slot]):
                    at = base + (member * members + me) * slot
                    room[:] = memory[at : at + len(room)]
            fence()


class _Piece:
    """Some items of one array, and where they are in the window."""

    def __init__(
        self, memory: memoryview, members: int, index: int, buffer: int, operand: Operand
    ) -> None:
        self._memory = memory
        self._index = index
        self._mine, self._result = operand
        self._items = items = len(self._mine)
        at = buffer * (len(memory) // _BUFFERS)
        stride = _up(items * self._mine.itemsize)
        self._inputs_at = [at + member * stride for member in range(members)]
        self._result_at = at + members * stride
        part = _up(-(-items // members))  # in items: so no two members write one cache line
        self._part = slice(min(index * part, items), min((index + 1) * part, items))

    def _others(self, size: int) -> list[slice]:
        """Return where the parts of the others are, in bytes, if an item has `size`."""
        own = self._part
        parts = slice(0, own.start * size), slice(own.stop * size, self._items * size)
        return [part for part in parts if part.start < part.stop]

    def write_mine(self) -> None:
        """Write this rank's items, except for those of its own part: no other rank needs them."""
        size, at = self._mine.itemsize, self._inputs_at[self._index]
        mine, shared = raw(self._mine), self._memory[at : at + self._items * size]
        for part in self._others(size):
            shared[part] = mine[part]

    def reduce_part(self, op: str) -> None:
        """Write the reduction of this rank's part, for itself and for the others."""
        part = self._part
        if part.start == part.stop:
            return
        inputs = [
            self._mine[part] if member == self._index else self._view(at, like=self._mine)
            for member, at in enumerate(self._inputs_at)
        ]
        result = self._view(self._result_at, like=self._result)
        combine(inputs, op, result)
        raw(self._result[part])[:] = raw(result)

    def _view(self, at: int, like: Any) -> Any:
        """Return the items of this rank's part at `at` of the window, of the kind of `like`."""
        begin, count = at + self._part.start * like.itemsize, self._part.stop - self._part.start
        if is_array(like):
            import numpy

            return numpy.frombuffer(self._memory, like.dtype, count, begin)
        import torch

        return torch.frombuffer(self._memory, dtype=like.dtype, count=count, offset=begin)

    def read_others(self) -> None:
        """Read what the others have reduced."""
        size, at = self._result.itemsize, self._result_at
        result, shared = raw(self._result), self._memory[at : at + self._items * size]
        for part in self._others(size):
            result[part] = shared[part]


def _piece_size(size: int, most: int) -> int:
    """Return how much of arrays of `size` travels at a time, where there is room for `most`.

    Smaller where the array is small, so that the others read one piece while the next is written.
    """
    return min(most // _LINE * _LINE, max(_SMALL_PIECE, _up(size // _SLOTS)))


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
