"""Arrays that members give and take in place: for callers that have the arrays of the result.

All members know the sizes of what they give and take, since the label of the call contains them.
Small arrays travel in the notes of one round. Larger ones go through a transport, where there is
one.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any

from syncprims._protocol.rounds import RoundSequence
from syncprims.interface import Mark, Note

from .arrays import empty_array, flat, is_array, raw
from .plane import DataPlane
from .reduction import combine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims._protocol.rounds import Rounds

    from .transport import Operand, Transport

_INLINE = 1024  # bytes of one member that travel in its note


def reduce(
    rounds: Rounds, note: Note, operands: Sequence[Operand], op: str, timeout: float | None
) -> None:
    """Fill the results of all operands, with the same bits on all members."""

    def take(payloads: Sequence[bytes]) -> None:
        begin = 0
        for operand in operands:
            size = operand.mine.nbytes
            parts = [_items(data, operand.mine, begin) for data in payloads]
            combine(parts, op, flat(operand.result))
            begin += size

    def carry(sequence: RoundSequence, transport: Transport) -> None:
        sequence.meet()
        transport.reduce(sequence, operands, op)

    _run(rounds, note, [operand.mine for operand in operands], timeout, take, carry)


def reduce_scatter(
    rounds: Rounds, note: Note, parts: Sequence[Any], result: Any, op: str, timeout: float | None
) -> None:
    """Fill `result` with the reduction of what all members have as the part of this one."""
    me = rounds.members.index(rounds.rank)

    def take(payloads: Sequence[bytes]) -> None:
        begin = sum(part.nbytes for part in parts[:me])
        combine([_items(data, parts[me], begin) for data in payloads], op, flat(result))

    def carry(sequence: RoundSequence, transport: Transport) -> None:
        rooms = [empty_array(parts[me], len(flat(parts[me])), parts[me].dtype) for _ in parts]
        sizes = [[part.nbytes for part in parts]] * len(parts)
        sequence.meet()
        transport.exchange(sequence, parts, rooms, sizes)
        combine(rooms, op, flat(result))

    _run(rounds, note, parts, timeout, take, carry)


def broadcast(
    rounds: Rounds, note: Note, arrays: Sequence[Any], src: int, timeout: float | None
) -> None:
    """Fill `arrays`, contiguous except on the source, with those of member number `src`."""
    me = rounds.members.index(rounds.rank)

    def take(payloads: Sequence[bytes]) -> None:
        if me != src:
            _fill(arrays, payloads[src])

    def carry(sequence: RoundSequence, transport: Transport) -> None:
        sequence.meet()
        transport.broadcast(sequence, arrays, src)

    _run(rounds, note, arrays, timeout, take, carry, sends=me == src)


def gather(
    rounds: Rounds, note: Note, mine: Any, rooms: Sequence[Any | None], timeout: float | None
) -> None:
    """Fill ``rooms[i]``, contiguous, with the `mine` of member number i."""

    def take(payloads: Sequence[bytes]) -> None:
        for room, data in zip(rooms, payloads, strict=True):
            if room is not None:
                _fill([room], data)

    def carry(sequence: RoundSequence, transport: Transport) -> None:
        sequence.meet()
        transport.gather(sequence, mine, rooms)

    _run(rounds, note, [mine], timeout, take, carry)


def scatter(
    rounds: Rounds,
    note: Note,
    parts: Sequence[Any],
    room: Any,
    src: int,
    timeout: float | None,
) -> None:
    """Fill `room`, contiguous, with the part that member number `src` has for this one.

    `parts` are empty on the others. All rooms are equally long.
    """
    members, me = len(rounds.members), rounds.members.index(rounds.rank)
    size = room.nbytes

    def take(payloads: Sequence[bytes]) -> None:
        _fill([room], payloads[src][me * size : (me + 1) * size])

    def carry(sequence: RoundSequence, transport: Transport) -> None:
        nothing = empty_array(room, 0, room.dtype)
        rooms = [room if member == src else nothing for member in range(members)]
        sizes = [[size if member == src else 0] * members for member in range(members)]
        sequence.meet()
        transport.exchange(sequence, parts or [nothing] * members, rooms, sizes)

    _run(rounds, note, parts, timeout, take, carry, sends=me == src, size=size * members)


def exchange(
    rounds: Rounds,
    note: Note,
    parts: Sequence[Any],
    rooms: Sequence[Any],
    refuse: Callable[[Sequence[Sequence[int]]], None],
    timeout: float | None,
) -> None:
    """All-to-all: fill ``rooms[i]``, contiguous, with the part that member i has for this one.

    ``refuse(sizes)`` raises, the same on all members, if the parts do not fit into the rooms:
    ``sizes[i]`` are the bytes of the parts of member i, then those of its rooms.
    """
    count = len(parts)
    me = rounds.members.index(rounds.rank)
    head = struct.Struct(f"<{2 * count}Q")
    sizes_of_mine = [array.nbytes for array in (*parts, *rooms)]
    transport = _find_transport(rounds, note)
    inline = transport is None or sum(sizes_of_mine[:count]) <= _INLINE
    payload = head.pack(*sizes_of_mine) + (_join(parts) if inline else b"")

    def call(sequence: RoundSequence) -> None:
        notes = sequence.meet(Note(note.label, Mark.INLINE if inline else Mark.NONE, payload))
        sizes = [head.unpack_from(found.payload) for found in notes]
        try:
            refuse(sizes)
        except Exception as error:
            rounds.in_step = error
            raise
        if all(found.mark == Mark.INLINE for found in notes):
            for member, found in enumerate(notes):
                begin = head.size + sum(sizes[member][:me])
                _fill([rooms[member]], found.payload[begin : begin + sizes[member][me]])
        else:
            assert transport is not None, "all members have one, or none has"
            transport.exchange(sequence, parts, rooms, [row[:count] for row in sizes])

    RoundSequence.run(rounds, note, timeout, call)


# -- one call --------------------------------------------------------------------------------------


def _run(
    rounds: Rounds,
    note: Note,
    arrays: Sequence[Any],
    timeout: float | None,
    take: Callable[[Sequence[bytes]], None],
    carry: Callable[[RoundSequence, Transport], None],
    *,
    sends: bool = True,
    size: int | None = None,
) -> None:
    """Make one call: all of its arrays travel in notes, or by ``carry(sequence, transport)``.

    `size` is what decides, in bytes: the same on all members, by default that of `arrays`. A rank
    that does not send has an empty note.
    """
    if size is None:
        size = sum(array.nbytes for array in arrays)
    if size > _INLINE:
        transport = _find_transport(rounds, note)
        if transport is not None:
            RoundSequence.run(rounds, note, timeout, lambda sequence: carry(sequence, transport))
            return
    payload = _join(arrays) if sends else b""
    posted = Note(note.label, payload=payload) if payload else note
    rounds.meet(posted, timeout, lambda notes: take([found.payload for found in notes]))


def _find_transport(rounds: Rounds, note: Note) -> Transport | None:
    """Return what carries arrays; if there is no space for it, the others get a `PeerFailed`."""
    try:
        return DataPlane.of(rounds).transport()
    except BaseException as error:
        rounds.fail(note.label, error)
        raise


def _join(arrays: Sequence[Any]) -> bytes:
    return b"".join(raw(flat(array)) for array in arrays)


def _fill(arrays: Sequence[Any], data: bytes) -> None:
    begin = 0
    for array in arrays:
        room = raw(flat(array))
        room[:] = data[begin : begin + len(room)]
        begin += len(room)


def _items(data: bytes, like: Any, begin: int) -> Any:
    """Return as many items as `like` has, of its kind, from `begin` of `data`."""
    vector = flat(like)
    if is_array(vector):
        import numpy

        return numpy.frombuffer(data, vector.dtype, len(vector), begin)
    torch: Any = sys.modules["torch"]
    if not len(vector):
        return vector
    items = bytearray(data[begin : begin + vector.nbytes])
    return torch.frombuffer(items, dtype=vector.dtype)
