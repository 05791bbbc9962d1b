"""All-to-all: each member has a part for each other one. Scatters are special cases of it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from syncprims._data.arrays import flat, raw
from syncprims._data.limits import LARGE
from syncprims._data.plane import DataPlane
from syncprims._protocol.rounds import RoundSequence
from syncprims.errors import RankMismatch
from syncprims.interface import Mark, Note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims._protocol.rounds import Rounds


def exchange(
    rounds: Rounds,
    note: Note,
    parts: Sequence[Any],
    rooms: Sequence[Any],
    timeout: float | None,
    known: Sequence[Sequence[int]] | None = None,
) -> None:
    """Fill ``rooms[i]``, contiguous, with the part that member i has for this one.

    Small parts travel in the notes of one round. Larger ones go through the transport. If the label
    says how large all parts are, ``known[i]`` are the bytes of those of member i. Otherwise each
    member sends the sizes of its own.

    :raises RankMismatch: on all members, if a part does not fit into its room.
    """
    count, me = len(parts), rounds.members.index(rounds.rank)
    form, begins = ("", 0) if known else (f"<{2 * count}Q", 16 * count)
    own_sizes = () if known else [array.nbytes for array in (*parts, *rooms)]
    try:
        transport = DataPlane.of(rounds).transport()
        most = max(map(sum, known)) if known else sum(own_sizes[:count])
        in_note = transport is None or most < LARGE
        sent = [raw(flat(part)) for part in parts] if in_note else []
        mark = Mark.INLINE if in_note else Mark.NONE
        payload = b"".join([struct.pack(form, *own_sizes), *sent])
        posted = Note(note.label, mark, payload) if payload else note
    except BaseException as error:
        rounds.fail(note.label, error)
        raise

    def read(notes: Sequence[Note]) -> None:
        sizes = known or [struct.unpack_from(form, other.payload) for other in notes]
        if not known:
            _check_sizes(rounds, note, sizes)
        if known or transport is None or all(other.mark for other in notes):
            for other, row, room in zip(notes, sizes, rooms, strict=True):
                if row[me]:
                    begin = begins + sum(row[:me])
                    raw(flat(room))[:] = other.payload[begin : begin + row[me]]
        else:
            sequence = RoundSequence(rounds, note, timeout)
            transport.exchange(sequence, parts, rooms, [row[:count] for row in sizes])

    if known and transport is not None and not in_note:
        RoundSequence.run(
            rounds, note, timeout, lambda one: transport.exchange(one, parts, rooms, known)
        )
    else:
        rounds.meet(posted, timeout, read)


def _check_sizes(rounds: Rounds, note: Note, sizes: Sequence[Sequence[int]]) -> None:
    """Accept parts that fit into their rooms.

    ``sizes[i]`` are the bytes of the parts of member i, then those of its rooms.
    """
    members = rounds.members
    for i, row in enumerate(sizes):
        for j, other in enumerate(sizes):
            if row[j] != other[len(members) + i]:
                rounds.raise_in_step(
                    RankMismatch(
                        f"{note.label}: rank {members[i]} sends {row[j]} bytes to rank "
                        f"{members[j]}, which has room for {other[len(members) + i]}; let the "
                        f"split sizes of both agree",
                        rank=rounds.rank,
                        call=str(note.label),
                        arrived=list(members),
                    )
                )
