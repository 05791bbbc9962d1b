"""Transports of arrays between the members of a board: shared memory, or an engine."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from syncprims._protocol.rounds import RoundSequence
from syncprims.interface import DeviceEngine, Engine, Window

from . import ENGINE_BROADCAST, ENGINE_PIECE, LEAST_PIECE, MOST_PIECE, Array
from .arrays import (
    LINE,
    empty_array,
    flat,
    is_array,
    is_fillable,
    is_on_device,
    on_host,
    raw,
    up_to_line,
)
from .reduction import combine

Arrays = Sequence[Any]
Sizes = Sequence[Sequence[int]]
Parts = Sequence[tuple[int, memoryview]]


class Operand(NamedTuple):
    """One array to reduce, and where its reduction goes."""

    mine: Array
    result: Array


class Transport(ABC):
    """Carries arrays. All members make the same call at one time, for arrays of the same specs.

    The rounds of `sequence` show that all are there and that all have the data: a member that dies,
    fails or differs raises on the others as in any round.
    """

    #: Whether the arrays of :meth:`gather` may differ in size, if each member has room for all.
    sizes_may_differ = False

    def __init__(self, device_engine: DeviceEngine | None) -> None:
        """Carry arrays from device to device by `device_engine`, if there is one.

        All other arrays of devices pass through the hosts' memory.
        """
        self._device_engine: Any = device_engine

    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays` with those of member number `src`."""
        direct = [array for array in arrays if self._takes(array)]
        if rest := [array for array in arrays if not self._takes(array)]:
            sends = src == sequence.index
            here = [on_host(array) if sends else _host_room(array) for array in rest]
            self._broadcast(sequence, here, src)
            if not sends:
                _copy_back(rest, here)
        if direct:
            sequence.meet()  # all are here, and alive: what is queued now will not wait for long
        for array in direct:
            room = array.detach().contiguous()
            self._device_engine.broadcast(room, src)
            if src != sequence.index and not array.is_contiguous():
                array.detach().copy_(room)

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members.

        Members reduce one part each, in the order of ranks: as one rank alone would have.
        """
        direct = [one for one in operands if self._takes(one.mine, op)]
        if rest := [one for one in operands if not self._takes(one.mine, op)]:
            here = [Operand(on_host(one.mine), _host_room(one.result)) for one in rest]
            self._reduce(sequence, here, op)
            _copy_back([one.result for one in rest], [one.result for one in here])
        if direct:
            sequence.meet()
        for one in direct:
            room = one.result.contiguous()
            room.copy_(one.mine)
            self._device_engine.all_reduce(room, op)
            _copy_back([one.result], [room])

    def _takes(self, array: Array, op: str | None = None) -> bool:
        """Return whether the array goes from device to device."""
        engine = self._device_engine
        return bool(engine and is_on_device(array) and engine.takes(array, op))

    @abstractmethod
    def _broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Broadcast arrays of the hosts' memory."""

    @abstractmethod
    def _reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Reduce arrays of the hosts' memory."""

    @abstractmethod
    def gather(self, sequence: RoundSequence, mine: Array, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]``, contiguous, with the `mine` of member number i, in hosts' memory.

        What a member has no room for, it leaves.
        """

    @abstractmethod
    def exchange(self, sequence: RoundSequence, parts: Arrays, rooms: Arrays, sizes: Sizes) -> None:
        """All-to-all: fill ``rooms[i]``, contiguous, with the part that member i has for this one.

        ``sizes[i][j]`` are the bytes from member i to member j, the same on all members.
        """


def _host_room(target: Array) -> Any:
    """Return `target` if it is contiguous in this host's memory, else such an array for it."""
    here = not is_on_device(target) and is_fillable(target)
    return target if here else target.new_empty(target.shape, device="cpu")


def _copy_back(targets: Sequence[Any], here: Sequence[Any]) -> None:
    for target, arrived in zip(targets, here, strict=True):
        if arrived is not target:
            target.detach().copy_(arrived)


class SharedMemoryTransport(Transport):
    """Carries arrays of the hosts' memory through a window, a piece at a time.

    Each piece is a round. Nothing is pickled, and no rank ever holds another's array: an array of
    any size passes through a window of fixed size, which stays in the processors' caches. What is
    posted with round k is in half k % 2, as in :mod:`syncprims._data.plane`.
    """

    sizes_may_differ = True

    def __init__(self, window: Window, device_engine: DeviceEngine | None) -> None:
        super().__init__(device_engine)
        self._window = window
        self._half = len(window.memory) // 2 // LINE * LINE

    def _broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        for array in arrays:
            part = [(0, raw(flat(array)))]
            writes, reads = (part, ()) if src == sequence.index else ((), part)
            self._pass_pieces(sequence, writes, reads, len(part[0][1]), 1)

    def _reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Reduce the operands piece by piece.

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

    def gather(self, sequence: RoundSequence, mine: Array, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i, a piece of all at a time."""
        me, members = sequence.index, len(rooms)
        data, targets = raw(flat(mine)), [None if r is None else raw(flat(r)) for r in rooms]
        if (own := targets[me]) is not None:
            own[:] = data
        reads = [(i, room) for i, room in enumerate(targets) if room is not None and i != me]
        longest = max([len(data), *(len(room) for _, room in reads)])
        self._pass_pieces(sequence, [(me, data)], reads, longest, members)

    def exchange(self, sequence: RoundSequence, parts: Arrays, rooms: Arrays, sizes: Sizes) -> None:
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
        self._pass_pieces(sequence, writes, reads, longest, members**2)

    def _pass_pieces(
        self, sequence: RoundSequence, writes: Parts, reads: Parts, longest: int, slots: int
    ) -> None:
        """Write the bytes of `writes`, and fill those of `reads`, in rounds of a piece of each.

        Each comes with the number of its slot; a half of the window has so many as `slots`. A piece
        is smaller where the `longest` is small, so that the others read while the next is written.
        """
        most = self._half // slots // LINE * LINE
        slot = min(most, MOST_PIECE, max(LEAST_PIECE, up_to_line(longest // 4)))
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
        combine(inputs, result, op)
        raw(self._result[part])[:] = raw(result)

    def _view(self, at: int, like: Array) -> Any:
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


class EngineTransport(Transport):
    """Carries arrays of the hosts' memory through an engine.

    Rounds before and after show that all are there and that all have the data: an engine by itself
    would wait for a dead peer forever.
    """

    def __init__(self, engine: Engine, device_engine: DeviceEngine | None) -> None:
        super().__init__(device_engine)
        self._engine = engine

    def _broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        def carry() -> None:
            for array in arrays:
                data = raw(flat(array))
                for at in range(0, len(data), ENGINE_BROADCAST):
                    self._engine.broadcast(data[at : at + ENGINE_BROADCAST], src)

        self._between_rounds(sequence, carry)

    def _reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        def carry() -> None:
            for operand in operands:
                mine, result = flat(operand.mine), flat(operand.result)
                most = max(1, ENGINE_PIECE // mine.itemsize)
                for begin in range(0, len(mine), most):
                    piece = Operand(mine[begin : begin + most], result[begin : begin + most])
                    self._reduce_piece(piece, op, sequence.index, len(sequence.rounds.members))

        self._between_rounds(sequence, carry)

    def gather(self, sequence: RoundSequence, mine: Array, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i."""
        import numpy

        def carry() -> None:
            data, targets = raw(flat(mine)), [None if r is None else raw(flat(r)) for r in rooms]
            most = max(1, ENGINE_PIECE // len(rooms))
            for begin in range(0, len(data), most):
                piece = data[begin : begin + most]
                everyone = raw(numpy.empty(len(piece) * len(rooms), numpy.uint8))
                self._engine.gather(piece, everyone)
                for member, target in enumerate(targets):
                    if target is not None:
                        found = everyone[member * len(piece) : (member + 1) * len(piece)]
                        target[begin : begin + len(piece)] = found

        self._between_rounds(sequence, carry)

    def exchange(self, sequence: RoundSequence, parts: Arrays, rooms: Arrays, sizes: Sizes) -> None:
        """Fill ``rooms[i]`` with the part that member i has for this one."""
        import numpy

        def carry() -> None:
            mine, targets = [raw(flat(p)) for p in parts], [raw(flat(r)) for r in rooms]
            members, longest = len(rooms), max(map(max, sizes))
            most = max(1, min(longest, ENGINE_PIECE // members))
            for begin in range(0, longest, most):  # an engine's parts are equally long
                sent = raw(numpy.zeros(most * members, numpy.uint8))
                got = raw(numpy.empty(most * members, numpy.uint8))
                for member, part in enumerate(mine):
                    piece = part[begin : begin + most]
                    sent[member * most : member * most + len(piece)] = piece
                self._engine.exchange(sent, got)
                for member, target in enumerate(targets):
                    source = sent if member == sequence.index else got
                    room = target[begin : begin + most]
                    room[:] = source[member * most : member * most + len(room)]

        self._between_rounds(sequence, carry)

    def _between_rounds(self, sequence: RoundSequence, carry: Callable[[], None]) -> None:
        """Call ``carry()`` once all are there, and return once all have the data.

        An error in it breaks the group: what others wait for in theirs will not come.
        """
        sequence.meet()
        sequence.run_watched(carry, self._engine.close, self._engine.obstacle)
        sequence.meet()

    def _reduce_piece(self, piece: Operand, op: str, index: int, members: int) -> None:
        """Reduce a piece: exchange parts, combine one's own, and gather the combined ones."""
        mine, result = piece
        part = -(-len(mine) // members)
        padded = empty_array(mine, part * members, mine.dtype)
        padded[: len(mine)] = mine
        padded[len(mine) :] = 0
        theirs = empty_array(mine, part * members, mine.dtype)
        self._engine.exchange(raw(padded), raw(theirs))
        combined = empty_array(result, part, result.dtype)
        parts = [theirs[member * part : (member + 1) * part] for member in range(members)]
        parts[index] = padded[index * part : (index + 1) * part]
        combine(parts, combined, op)
        whole = empty_array(result, part * members, result.dtype)
        self._engine.gather(raw(combined), raw(whole))
        result[:] = whole[: len(result)]
