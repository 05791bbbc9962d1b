"""Rounds between hosts, at the rendezvous store: contributions, and the decision about each round.

For every round of a board there are three keys. Each host contributes its members' notes: it
appends them to the first key, all in one piece, and counts itself at the second. The host that is
counted last reads the first key and makes the round's *decision* from it, at the third key, which
all hosts wait for. So a round costs a host three messages, and the last one seven, which removes
an old round, too. The number of ranks does not matter.

The decision is written once, by compare-and-set, and never changes: all notes, or the verdict that
breaks the round, or the end of a member without which it cannot complete. That one key determines
for all what came first. Everything before it may be done twice: a host that contributes twice is
read once, and a count that is too high or too low is only a hint.

Keys of a round are removed once no rank can need them any more, so the store does not grow.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from syncprims.interface import Board, Note, State

COMPLETE, VERDICT, END = b"A", b"V", b"E"

_SIZES = struct.Struct("<II")  # distinct notes, members
_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<II")  # host, length


class Store(Protocol):
    """What is used of a store of torch, whose types leave out some of it."""

    get: Callable[[str], bytes]
    set: Callable[[str, str | bytes], None]
    add: Callable[[str, int], int]
    append: Callable[[str, str | bytes], None]
    check: Callable[[list[str]], bool]
    compare_set: Callable[[str, str, str | bytes], bytes]
    delete_key: Callable[[str], bool]


def read_key(store: Store, key: str) -> bytes:
    """Return the value of `key` at once; empty if it has none."""
    return bytes(store.get(key)) if store.check([key]) else b""


class MemberEnd(NamedTuple):
    """A member that will post no more notes at this board."""

    rank: int
    rounds: int  #: that it has posted to
    state: State
    detail: str = ""
    failure: str = ""


def encode_notes(notes: Sequence[Note]) -> bytes:
    """Return notes as bytes; equal ones, as in a barrier, are written once."""
    numbers: dict[bytes, int] = {}
    of_note: dict[int, int] = {}  # by identity, since most are the same object
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
        # Of a broadcast, all but one are equal: thousands of ranks take some dozens of bytes.
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


class Decisions:
    """The rounds of one board at the store. Its methods run on a link's thread."""

    def __init__(self, prefix: str, hosts: Mapping[int, Sequence[int]]) -> None:
        """Keep the rounds of a board under `prefix`; `hosts` has the members of each host.

        Members are given by their index in the board.
        """
        self._prefix = prefix
        self._hosts = hosts

    def contribute(
        self, store: Store, number: int, host: int, notes: Sequence[Note]
    ) -> bytes | None:
        """Contribute a host's notes; return the round's decision if they were the last."""
        data = encode_notes(notes)
        store.append(self._key(number, "notes"), _PIECE.pack(host, len(data)) + data)
        if store.add(self._key(number, "count"), 1) < len(self._hosts):
            return None
        return self.complete(store, number, _pieces(store.get(self._key(number, "notes"))))

    def complete(self, store: Store, number: int, pieces: Mapping[int, bytes]) -> bytes | None:
        """Decide the round if `pieces` has the notes of all hosts, and return the decision."""
        if len(pieces) < len(self._hosts):
            return None
        notes: list[Any] = [None] * sum(len(members) for members in self._hosts.values())
        for host, members in self._hosts.items():
            for member, note in zip(members, decode_notes(pieces[host]), strict=True):
                notes[member] = note
        return self._decide(store, number, COMPLETE + encode_notes(notes))

    def remove_old(self, store: Store, number: int) -> None:
        """Remove the round that no rank can need once round `number` has been decided."""
        # A rank that has posted this round has collected all up to depth rounds before.
        over = number - Board.depth - 1
        if over > 0:
            for what in ("notes", "count", "decision"):
                store.delete_key(self._key(over, what))

    def contributions(self, store: Store, number: int) -> dict[int, bytes]:
        """Return what each host has contributed to a round so far."""
        return _pieces(read_key(store, self._key(number, "notes")))

    def wait(self, store: Store, number: int) -> bytes:
        """Return the decision about a round, once it is there."""
        return bytes(store.get(self._key(number, "decision")))

    def release(self, store: Store, number: int) -> None:
        """End every wait for a decision that all ranks know, and that has been removed."""
        store.set(self._key(number, "decision"), "")
        store.delete_key(self._key(number, "decision"))

    def abort(self, store: Store, number: int, text: bytes) -> bytes:
        """Break a round with `text`, unless it is decided; return its decision, or the verdict.

        If the decision is a member's end, all agree on the verdict about it.
        """
        decision = self._decide(store, number, VERDICT + text)
        if decision[:1] == END:
            return bytes(store.compare_set(f"{self._prefix}/verdict", "", VERDICT + text))
        return decision

    def end(self, store: Store, first: int, end: MemberEnd) -> None:
        """Make `end` the decision about the first round, from `first` on, that is not complete."""
        decision = END + json.dumps(end).encode()
        for number in range(first, end.rounds + 2):
            if self._decide(store, number, decision)[:1] != COMPLETE:
                return

    def _decide(self, store: Store, number: int, decision: bytes) -> bytes:
        return bytes(store.compare_set(self._key(number, "decision"), "", decision))

    def _key(self, number: int, what: str) -> str:
        return f"{self._prefix}/{number}/{what}"


def _pieces(data: bytes) -> dict[int, bytes]:
    """Return the contribution of each host; the latest if there are two."""
    found: dict[int, bytes] = {}
    at = 0
    while at + _PIECE.size <= len(data):
        host, length = _PIECE.unpack_from(data, at)
        at += _PIECE.size + length
        found[host] = data[at - length : at]
    return found
