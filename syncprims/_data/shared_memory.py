"""Arrays through memory that all members share, a piece at a time; each piece is a round.

Nothing is pickled, and no rank ever holds another's array: an array of any size passes through a
window of fixed size, which stays in the processors' caches. The rounds show when a piece is there
and when its part of the window is free again. So a rank that dies, fails or differs raises as in
any call.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from .arrays import LINE, flat, is_array, raw, up_to_line
from .reduction import combine
from .transport import Operand, Transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncprims._protocol.rounds import RoundSequence
    from syncprims.interface import Window

#: Bytes of a piece: the others read it while the next one is written.
_LEAST_PIECE, _MOST_PIECE = 512 << 10, 2 << 20


class SharedMemoryTransport(Transport):
    """Carries arrays of the hosts' memory through a window.

    What is posted with round k is in half k % 2. A rank writes there when it has collected round
    k - 1: so all have posted that, and have read what came with round k - 2.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._half = len(window.memory) // 2 // LINE * LINE

    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays`, contiguous except on the source, with those of member number `src`."""
        memory, fence = self._window
        board = sequence.rounds.board
        for piece in self._byte_pieces(arrays):
            if src == sequence.index:
                sequence.collect_until(board.posted)
                begin = self._half * (board.posted + 1 & 1)
                memory[begin : begin + len(piece)] = piece
                fence()
                sequence.post()
            else:
                sequence.meet()  # the piece is there
                fence()
                begin = self._half * (board.collected & 1)
                piece[:] = memory[begin : begin + len(piece)]
                fence()  # read before this rank says so
        sequence.collect_until(board.posted)

    def _byte_pieces(self, arrays: Sequence[Any]) -> Iterator[memoryview]:
        for array in [raw(flat(array)) for array in arrays]:
            most = _piece_size(len(array), self._half)
            for at in range(0, len(array), most):
                yield array[at : at + most]

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members.

        In the round of piece k, members say that their items of it are there, and that they have
        reduced their part of piece k - 1.
        """
        fence, board = self._window.fence, sequence.rounds.board
        sequence.collect_until(board.posted)
        before: _Piece | None = None
        for piece in (*self._item_pieces(operands, sequence), None):
            begin = self._half * (board.posted + 1 & 1)
            if before is not None:
                before.reduce_part(op, self._half * (board.posted & 1), begin)
            if piece is not None:
                piece.write_mine(begin)
            fence()
            sequence.meet()
            fence()
            if before is not None:
                before.read_others(begin)
            before = piece
        fence()  # read before this rank says so

    def _item_pieces(
        self, operands: Sequence[Operand], sequence: RoundSequence
    ) -> Iterator[_Piece]:
        """Yield the pieces of all operands."""
        memory, members = self._window.memory, len(sequence.rounds.members)
        results = self._half // (members + 1) // LINE * LINE  # bytes, at the end of a half
        slot = (self._half - results) // members // LINE * LINE
        for operand in operands:
            mine, result = flat(operand.mine), flat(operand.result)
            most = min(slot // mine.itemsize, results // result.itemsize)
            for at in range(0, len(mine), most):
                part = Operand(mine[at : at + most], result[at : at + most])
                yield _Piece(memory, members, sequence.index, self._half - results, part)

    def gather(self, sequence: RoundSequence, mine: Any, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i, a piece of all at a time."""
        me, members = sequence.index, len(rooms)
        data, targets = raw(flat(mine)), [None if r is None else raw(flat(r)) for r in rooms]
        if (own := targets[me]) is not None:
            own[:] = data
        reads = [(i, room) for i, room in enumerate(targets) if room is not None and i != me]
        longest = max([len(data), *(len(room) for _, room in reads)])
        slot = _piece_size(longest, self._half // members)
        self._pass_pieces(sequence, [(me, data)], reads, longest, slot)

    def exchange(
        self,
        sequence: RoundSequence,
        parts: Sequence[Any],
        rooms: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Fill ``rooms[i]`` with the part that member i has for this one, in pieces as `gather`."""
        me, members = sequence.index, len(rooms)
        mine, targets = [raw(flat(p)) for p in parts], [raw(flat(r)) for r in rooms]
        targets[me][:] = mine[me]
        others = [i for i in range(members) if i != me]
        writes = [(me * members + i, mine[i]) for i in others]
        reads = [(i * members + me, targets[i]) for i in others]
        # The same on all members, since all make the same rounds.
        pairs = itertools.permutations(range(members), 2)
        longest = max((sizes[i][j] for i, j in pairs), default=0)
        slot = _piece_size(longest, self._half // members**2)
        self._pass_pieces(sequence, writes, reads, longest, slot)

    def _pass_pieces(
        self,
        sequence: RoundSequence,
        writes: Sequence[tuple[int, memoryview]],
        reads: Sequence[tuple[int, memoryview]],
        longest: int,
        slot: int,
    ) -> None:
        """Write the bytes of `writes`, and fill those of `reads`, in rounds of a piece of each.

        Each comes with the number of its slot in a half of the window, which has `slot` bytes.
        """
        memory, fence = self._window
        board = sequence.rounds.board
        sequence.collect_until(board.posted)
        for begin in range(0, longest, slot):
            base = self._half * (board.posted + 1 & 1)
            for number, data in writes:
                piece, at = data[begin : begin + slot], base + number * slot
                memory[at : at + len(piece)] = piece
            fence()
            sequence.meet()
            fence()
            for number, room in reads:
                piece, at = room[begin : begin + slot], base + number * slot
                piece[:] = memory[at : at + len(piece)]
            fence()  # read before this rank says so


class _Piece:
    """Some items of one array, and where they are in the window."""

    def __init__(
        self, memory: memoryview, members: int, index: int, results_at: int, operand: Operand
    ) -> None:
        """`results_at` is where in a half the results of a piece begin."""
        self._memory = memory
        self._index = index
        self._mine, self._result = operand
        self._items = items = len(self._mine)
        stride = up_to_line(items * self._mine.itemsize)
        self._inputs_at = [member * stride for member in range(members)]
        self._results_at = results_at
        part = up_to_line(-(-items // members))  # in items: so no two members write one cache line
        self._part = slice(min(index * part, items), min((index + 1) * part, items))

    def _others(self, size: int) -> list[slice]:
        """Return where the parts of the others are, in bytes, if an item has `size`."""
        own = self._part
        parts = slice(0, own.start * size), slice(own.stop * size, self._items * size)
        return [part for part in parts if part.start < part.stop]

    def write_mine(self, half: int) -> None:
        """Write this rank's items, except for those of its own part: no other rank needs them.

        `half` is where the half of the window begins.
        """
        size, at = self._mine.itemsize, half + self._inputs_at[self._index]
        mine, shared = raw(self._mine), self._memory[at : at + self._items * size]
        for part in self._others(size):
            shared[part] = mine[part]

    def reduce_part(self, op: str, half: int, results: int) -> None:
        """Write the reduction of this rank's part, for itself and for the others.

        The items are in the half that begins at `half`, the results go to that at `results`.
        """
        part = self._part
        if part.start == part.stop:
            return
        inputs = [
            self._mine[part] if member == self._index else self._view(half + at, like=self._mine)
            for member, at in enumerate(self._inputs_at)
        ]
        result = self._view(results + self._results_at, like=self._result)
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

    def read_others(self, half: int) -> None:
        """Read what the others have reduced, in the half that begins at `half`."""
        size, at = self._result.itemsize, half + self._results_at
        result, shared = raw(self._result), self._memory[at : at + self._items * size]
        for part in self._others(size):
            result[part] = shared[part]


def _piece_size(size: int, most: int) -> int:
    """Return how much of arrays of `size` travels at a time, where there is room for `most`.

    Smaller where the array is small, so that the others read one piece while the next is written.
    """
    return min(most // LINE * LINE, _MOST_PIECE, max(_LEAST_PIECE, up_to_line(size // 4)))
