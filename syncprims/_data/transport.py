"""How the arrays of a call travel between the members of a board."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import empty_array, flat, is_on_device, on_host, raw
from .reduction import combine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims._protocol.rounds import RoundSequence
    from syncprims.interface import DeviceEngine, Engine

_REDUCED_AT_ONCE = 16 << 20  # bytes of one's own array
_BROADCAST_AT_ONCE = 256 << 20  # bytes


class Operand(NamedTuple):
    """One array to reduce, and where its reduction goes."""

    mine: Any
    result: Any  #: contiguous


class Transport(ABC):
    """Carries arrays. All members make the same call at one time, for arrays of the same specs.

    The rounds of `sequence` show that all are there and that all have the data: a member that dies,
    fails or differs raises on the others as in any round.
    """

    @abstractmethod
    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays`, contiguous except on the source, with those of member number `src`."""

    @abstractmethod
    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members.

        Members reduce one part each, in the order of ranks: as one rank alone would have.
        """

    @abstractmethod
    def gather(self, sequence: RoundSequence, mine: Any, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]``, contiguous, with the `mine` of member number i.

        What a member has no room for, it leaves. All are equally long; but in shared memory they
        may differ, if each member has room for all others.
        """

    @abstractmethod
    def exchange(
        self,
        sequence: RoundSequence,
        parts: Sequence[Any],
        rooms: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """All-to-all: fill ``rooms[i]``, contiguous, with the part that member i has for this one.

        ``sizes[i][j]`` are the bytes from member i to member j, the same on all members.
        """


class EngineTransport(Transport):
    """Carries arrays of the hosts' memory through an engine.

    Rounds before and after show that all are there and that all have the data: an engine by itself
    would wait for a dead peer forever.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays`, contiguous except on the source, with those of member number `src`."""

        def carry() -> None:
            for array in arrays:
                data = raw(flat(array))
                for at in range(0, len(data), _BROADCAST_AT_ONCE):
                    self._engine.broadcast(data[at : at + _BROADCAST_AT_ONCE], src)

        self._between_rounds(sequence, carry)

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members."""

        def carry() -> None:
            for operand in operands:
                mine, result = flat(operand.mine), flat(operand.result)
                most = max(1, _REDUCED_AT_ONCE // mine.itemsize)
                for begin in range(0, len(mine), most):
                    piece = Operand(mine[begin : begin + most], result[begin : begin + most])
                    self._reduce(piece, op, sequence.index, len(sequence.rounds.members))

        self._between_rounds(sequence, carry)

    def gather(self, sequence: RoundSequence, mine: Any, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i."""
        import numpy

        def carry() -> None:
            data, targets = raw(flat(mine)), [None if r is None else raw(flat(r)) for r in rooms]
            most = max(1, _REDUCED_AT_ONCE // len(rooms))
            for begin in range(0, len(data), most):
                piece = data[begin : begin + most]
                everyone = raw(numpy.empty(len(piece) * len(rooms), numpy.uint8))
                self._engine.gather(piece, everyone)
                for member, target in enumerate(targets):
                    if target is not None:
                        found = everyone[member * len(piece) : (member + 1) * len(piece)]
                        target[begin : begin + len(piece)] = found

        self._between_rounds(sequence, carry)

    def exchange(
        self,
        sequence: RoundSequence,
        parts: Sequence[Any],
        rooms: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Fill ``rooms[i]`` with the part that member i has for this one."""
        import numpy

        def carry() -> None:
            mine, targets = [raw(flat(p)) for p in parts], [raw(flat(r)) for r in rooms]
            members, longest = len(rooms), max(map(max, sizes))
            most = max(1, min(longest, _REDUCED_AT_ONCE // members))
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

    def _reduce(self, piece: Operand, op: str, index: int, members: int) -> None:
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
        combine(parts, op, combined)
        whole = empty_array(result, part * members, result.dtype)
        self._engine.gather(raw(combined), raw(whole))
        result[:] = whole[: len(result)]


class DeviceTransport(Transport):
    """Carries arrays of hosts and of devices: from device to device where an engine can.

    All others pass through the hosts' memory, and `host` carries them there.
    """

    def __init__(self, host: Transport, engine: DeviceEngine | None) -> None:
        self._host = host
        self._engine = engine

    def broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill `arrays`, contiguous except on the source, with those of member number `src`."""
        if rest := [array for array in arrays if not self._engine_for(array)]:
            sends = src == sequence.index
            here = [on_host(array) if sends else _host_room(array) for array in rest]
            self._host.broadcast(sequence, here, src)
            if not sends:
                _copy_back(rest, here)
        direct = [(array, engine) for array in arrays if (engine := self._engine_for(array))]
        if direct:
            sequence.meet()  # all are here, and alive: what is queued now will not wait for long
        for array, engine in direct:
            engine.broadcast(array.detach().contiguous(), src)

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members."""
        if rest := [one for one in operands if not self._engine_for(one.mine, op)]:
            here = [Operand(on_host(one.mine), _host_room(one.result)) for one in rest]
            self._host.reduce(sequence, here, op)
            _copy_back([one.result for one in rest], [one.result for one in here])
        direct = [(one, engine) for one in operands if (engine := self._engine_for(one.mine, op))]
        if direct:
            sequence.meet()
        for one, engine in direct:
            one.result.copy_(one.mine)
            engine.all_reduce(one.result, op)

    def gather(self, sequence: RoundSequence, mine: Any, rooms: Sequence[Any | None]) -> None:
        """Fill ``rooms[i]`` with the `mine` of member number i, through the hosts' memory."""
        here = [None if room is None else _host_room(room) for room in rooms]
        self._host.gather(sequence, on_host(mine), here)
        pairs = [(r, h) for r, h in zip(rooms, here, strict=True) if r is not None]
        _copy_back([room for room, _ in pairs], [arrived for _, arrived in pairs])

    def exchange(
        self,
        sequence: RoundSequence,
        parts: Sequence[Any],
        rooms: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Fill ``rooms[i]`` with the part that member i has, through the hosts' memory."""
        here = [_host_room(room) for room in rooms]
        self._host.exchange(sequence, [on_host(part) for part in parts], here, sizes)
        _copy_back(rooms, here)

    def _engine_for(self, array: Any, op: str | None = None) -> DeviceEngine | None:
        engine = self._engine
        return engine if engine and is_on_device(array) and engine.takes(array, op) else None


def _host_room(target: Any) -> Any:
    """Return `target`, or, for one on a device, an array for it in this host's memory."""
    return target.new_empty(target.shape, device="cpu") if is_on_device(target) else target


def _copy_back(targets: Sequence[Any], here: Sequence[Any]) -> None:
    for target, arrived in zip(targets, here, strict=True):
        if arrived is not target:
            target.detach().copy_(arrived)
