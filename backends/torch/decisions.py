"""Rounds between hosts, at the rendezvous store: what was brought to one, and its fate.

For every round of a board there are three keys. Each host brings its members' notes, all in one
piece, appended to the first key, and counts itself at the second. Whoever is counted last reads the
first key and makes the round's *fate* out of it, at the third, which all hosts wait for. So a round
costs each host four messages, whatever the number of its ranks.

The fate is written once, by compare-and-set, and never changes: all notes, or the verdict that
breaks the round, or the end of a member without whom it cannot complete. That one key settles who
was first, for everybody. Everything before it may be done twice: a host that is brought twice is
read once, and a count that is too high or too low is only a hint.

Keys of a round are removed once nobody can need them any more, so the store does not grow.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims.interface import Board, Note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COMPLETE, VERDICT, END = b"A", b"V", b"E"

_SIZES = struct.Struct("<II")  # distinct notes, members
_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<II")  # host, length


class End(NamedTuple):
    """A member that will post no more notes at this board."""

    rank: int
    rounds: int  #: that it has posted to
    state: str  #: as in :class:`Status`
    detail: str = ""
    failure: str = ""

    def encode(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> End:
        """Return what :meth:`encode` wrote."""
        return cls(*json.loads(data))


def encode_notes(notes: Sequence[Note]) -> bytes:
    """Return notes as bytes; equal ones, as in a barrier, are written once."""
    numbers: dict[bytes, int] = {}
    of_note: dict[int, int] = {}  # by identity, since most are the very same
    which: list[int] = []
    for note in notes:
        number = of_note.get(id(note))
        if number is None:
            data = note.encode()
            number = of_note[id(note)] = numbers.setdefault(data, len(numbers))
        which.append(number)
    parts = [_SIZES.pack(len(numbers), len(notes))]
    parts += [_LENGTH.pack(len(data)) + data for data in numbers]
    if len(numbers) > 1:
        # Of a broadcast, all but one are alike: thousands of ranks take some dozens of bytes.
        parts.append(zlib.compress(struct.pack(f"<{len(which)}I", *which), 1))
    return b"".join(parts)


def decode_notes(data: bytes, mine: Note | None = None) -> list[Note]:
    """Return the notes that :func:`encode_notes` wrote; those equal to `mine` are `mine`."""
    distinct, count = map(int, _SIZES.unpack_from(data))
    at = _SIZES.size
    own = None if mine is None else mine.encode()
    notes: list[Note] = []
    for _ in range(distinct):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        text = data[at : at + length]
        at += length
        notes.append(mine if mine is not None and text == own else Note.decode(text))
    if distinct == 1:
        return notes * count
    which: Sequence[int] = struct.unpack(f"<{count}I", zlib.decompress(data[at:]))
    return [notes[int(number)] for number in which]


class Fates:
    """The rounds of one board at the store. Its methods run on a link's thread."""

    def __init__(self, prefix: str, hosts: Mapping[int, Sequence[int]]) -> None:
        """Keep the rounds of a board under `prefix`; `hosts` says which members are where.

        Members are given by their place in the board.
        """
        self._prefix = prefix
        self._hosts = hosts

    def bring(self, store: Any, number: int, host: int, notes: Sequence[Note]) -> bytes | None:
        """Bring a host's notes; return the round's fate if that was the last."""
        data = encode_notes(notes)
        store.append(self._key(number, "notes"), _PIECE.pack(host, len(data)) + data)
        if store.add(self._key(number, "count"), 1) < len(self._hosts):
            return None
        return self.complete(store, number, dict(_pieces(store.get(self._key(number, "notes")))))

    def complete(self, store: Any, number: int, brought: Mapping[int, bytes]) -> bytes | None:
        """Return the round's fate, having made it if `brought` is all of it; else None."""
        if len(brought) < len(self._hosts):
            return None
        notes: list[Any] = [None] * sum(len(members) for members in self._hosts.values())
        for host, members in self._hosts.items():
            for member, note in zip(members, decode_notes(brought[host]), strict=True):
                notes[member] = note
        fate = self._settle(store, number, COMPLETE + encode_notes(notes))
        # Whoever has posted this round has collected all up to depth rounds before.
        over = number - Board.depth - 1
        if over > 0:
            for what in ("notes", "count", "fate"):
                store.delete_key(self._key(over, what))
        return fate

    def brought(self, store: Any, number: int) -> dict[int, bytes]:
        """Return what hosts have brought to a round so far."""
        key = self._key(number, "notes")
        if not store.check([key]):
            return {}
        return dict(_pieces(store.get(key)))

    def wait(self, store: Any, number: int) -> bytes:
        """Return the fate of a round, once it is there."""
        return bytes(store.get(self._key(number, "fate")))

    def release(self, store: Any, number: int) -> None:
        """End every wait for a fate that all have known for long, and that is gone."""
        store.set(self._key(number, "fate"), "")
        store.delete_key(self._key(number, "fate"))

    def abort(self, store: Any, number: int, text: bytes) -> bytes:
        """Break a round with `text`, unless it is too late; return its fate, or the verdict.

        Where the fate is a member's end, all agree on the words for it.
        """
        fate = self._settle(store, number, VERDICT + text)
        if fate[:1] == END:
            return bytes(store.compare_set(f"{self._prefix}/verdict", "", VERDICT + text))
        return fate

    def end(self, store: Any, first: int, end: End) -> None:
        """Let the first round that lacks `end.rank`, from `first` on, have that as its fate."""
        for number in range(first, end.rounds + 2):
            if self._settle(store, number, END + end.encode())[:1] != COMPLETE:
                return

    def _settle(self, store: Any, number: int, fate: bytes) -> bytes:
        return bytes(store.compare_set(self._key(number, "fate"), "", fate))

    def _key(self, number: int, what: str) -> str:
        return f"{self._prefix}/{number}/{what}"


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    with contextlib.suppress(struct.error):
        while at < len(data):
            host, length = _PIECE.unpack_from(data, at)
            at += _PIECE.size
            yield host, data[at : at + length]
            at += length
