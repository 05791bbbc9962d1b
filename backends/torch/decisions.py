"""Rounds between hosts, at the rendezvous store: a log per round, and what it decides.

Every round of a board has a *log* at the store: a key to which hosts append. Each host appends the
notes of its members, all in one entry, and reads the log in the same exchange. The order of the
log decides: the round is complete at the entry that adds the last host's notes, unless a verdict,
or the end of a member without which it cannot complete, comes before. So every host that reads the
log finds the same *decision*, and no decision ever changes. Everything may be done twice: a host
that contributes twice counts once.

A host that has found no decision after some looks appends that it waits, and sleeps until a second
key is there, which notifies it. The host whose entry decides the round sets that key if any host
waits. So a round in which all hosts come together costs a host one exchange, and one of them also
removes an old log. The number of ranks does not matter.

The log of a round is removed once no rank can need it any more, so the store does not grow.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from syncprims.interface import Board, Note, State

#: Kinds of decisions. Those but the first are entries of a log, too.
COMPLETE, VERDICT, END = b"A", b"V", b"E"
_NOTES, _WAITS = b"N", b"W"  # kinds of entries

_SIZES = struct.Struct("<II")  # distinct notes, members
_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<cII")  # kind, host, length
_NOTHING = "-"  # what no log contains
_REMEMBERED = 2 * Board.depth


class Store(Protocol):
    """What is used of a store of torch, whose types leave out some of it."""

    get: Callable[[str], bytes]
    set: Callable[[str, str | bytes], None]
    add: Callable[[str, int], int]
    append: Callable[[str, str | bytes], None]
    check: Callable[[list[str]], bool]
    compare_set: Callable[[str, str, str | bytes], bytes]
    delete_key: Callable[[str], bool]
    wait: Callable[[list[str]], None]


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


class Log(NamedTuple):
    """What the log of a round says, up to the entry that decides it."""

    notes: Mapping[int, bytes]  #: of each host that has contributed; the latest if there are two
    decision: bytes | None  #: None while there is none
    decided_by: tuple[bytes, int] | None  #: the kind of the entry that decides, and its host
    waiting: Collection[int]  #: hosts that had announced before that they wait


def encode_notes(notes: Sequence[Note]) -> bytes:
    """Return notes as bytes; equal ones, as in a barrier, are written once."""
    texts: dict[int, bytes] = {}  # by identity, since most are the same object
    return _encode([texts.get(id(n)) or texts.setdefault(id(n), n.encode()) for n in notes])


def decode_notes(data: bytes, mine: Note | None = None) -> list[Note]:
    """Return the notes that :func:`encode_notes` wrote; those equal to `mine` are `mine`."""
    texts = _decode(data)
    notes = {} if mine is None else {mine.encode(): mine}
    for text in set(texts) - set(notes):
        notes[text] = Note.decode(text)
    return [notes[text] for text in texts]


def _encode(texts: Sequence[bytes]) -> bytes:
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    parts = [_SIZES.pack(len(numbers), len(texts))]
    parts += [_LENGTH.pack(len(text)) + text for text in numbers]
    if len(numbers) > 1:
        # Of a broadcast, all but one are equal: thousands of ranks take some dozens of bytes.
        which = struct.pack(f"<{len(texts)}I", *map(numbers.__getitem__, texts))
        parts.append(zlib.compress(which, 1))
    return b"".join(parts)


def _decode(data: bytes) -> list[bytes]:
    distinct, count = map(int, _SIZES.unpack_from(data))
    at = _SIZES.size
    texts: list[bytes] = []
    for _ in range(distinct):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        texts.append(data[at - length : at])
    if distinct == 1:
        return texts * count
    which: Sequence[int] = struct.unpack(f"<{count}I", zlib.decompress(data[at:]))
    return [texts[int(number)] for number in which]


class Decisions:
    """The rounds of one board at the store. Its methods run on a link's thread."""

    def __init__(self, prefix: str, hosts: Mapping[int, Sequence[int]]) -> None:
        """Keep the rounds of a board under `prefix`; `hosts` has the members of each host.

        Members are given by their index in the board.
        """
        self._prefix = prefix
        self._hosts = hosts
        self._quiet = [0] * _REMEMBERED  # rounds that were decided, and for which nobody waited

    def contribute(
        self, store: Store, number: int, host: int, notes: Sequence[Note]
    ) -> bytes | None:
        """Contribute a host's notes, and return the round's decision if there is one then."""
        return self._append(store, number, _NOTES, host, encode_notes(notes))

    def read(self, store: Store, number: int) -> Log:
        """Return the log of a round."""
        # This reads in one exchange, and takes nothing for a key that is not there. `get` waits
        # for the key in an exchange of its own.
        data = bytes(store.compare_set(self._key(number, "log"), _NOTHING, _NOTHING))
        log = self.parse(b"" if data == _NOTHING.encode() else data)
        if log.decision is not None and not log.waiting:
            self._quiet[number % _REMEMBERED] = number
        return log

    def announce(self, store: Store, number: int, host: int) -> bytes | None:
        """Announce that a host waits for the decision, and return it if there is one already."""
        return self._append(store, number, _WAITS, host)

    def wait(self, store: Store, number: int) -> bytes | None:
        """Return the decision about a round, once the hosts that wait are notified."""
        store.wait([self._key(number, "decided")])
        return self.read(store, number).decision

    def notify(self, store: Store, number: int, log: Log) -> None:
        """Wake those that wait for the decision that the log of a round contains."""
        if log.waiting:
            store.set(self._key(number, "decided"), "")

    def remove_old(self, store: Store, number: int) -> None:
        """Remove the log that no rank can need once round `number` has been decided."""
        # A rank that has posted this round has collected all up to depth rounds before.
        over = number - Board.depth - 1
        if over > 0:
            store.delete_key(self._key(over, "log"))
            if self._quiet[over % _REMEMBERED] != over:
                store.delete_key(self._key(over, "decided"))

    def release(self, store: Store, number: int) -> None:
        """End every wait for a decision that all ranks know, and whose log has been removed."""
        store.set(self._key(number, "decided"), "")
        store.delete_key(self._key(number, "decided"))

    def abort(self, store: Store, number: int, host: int, text: bytes) -> bytes:
        """Break a round with `text`, unless it is decided; return its decision, or the verdict.

        If the decision is a member's end, all agree on the verdict about it.
        """
        decision = self._append(store, number, VERDICT, host, text)
        if decision is None or decision[:1] == END:
            return bytes(store.compare_set(f"{self._prefix}/verdict", "", VERDICT + text))
        return decision

    def end(self, store: Store, first: int, host: int, end: MemberEnd) -> None:
        """Make `end` the decision about the first round, from `first` on, that is not complete."""
        text = json.dumps(end).encode()
        for number in range(first, end.rounds + 2):
            if (self._append(store, number, END, host, text) or END)[:1] != COMPLETE:
                return

    def _append(
        self, store: Store, number: int, kind: bytes, host: int, data: bytes = b""
    ) -> bytes | None:
        """Append an entry, and return the decision. If this entry decides, notify who waits."""
        store.append(self._key(number, "log"), _ENTRY.pack(kind, host, len(data)) + data)
        log = self.read(store, number)
        if log.decided_by == (kind, host):
            self.notify(store, number, log)
        return log.decision

    def parse(self, data: bytes) -> Log:
        """Return what a log says, up to the entry that decides its round."""
        notes: dict[int, bytes] = {}
        waiting: set[int] = set()
        at = 0
        while at < len(data):
            kind, host, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size + length
            content = data[at - length : at]
            if kind == _WAITS:
                waiting.add(host)
            elif kind != _NOTES:
                return Log(notes, kind + content, (kind, host), waiting)
            else:
                notes[host] = content
                if len(notes) == len(self._hosts):
                    return Log(notes, COMPLETE + self._merge(notes), (kind, host), waiting)
        return Log(notes, None, None, waiting)

    def _merge(self, notes: Mapping[int, bytes]) -> bytes:
        """Return the notes of all members, from those of each host."""
        texts = [b""] * sum(map(len, self._hosts.values()))
        for host, members in self._hosts.items():
            for member, text in zip(members, _decode(notes[host]), strict=True):
                texts[member] = text
        return _encode(texts)

    def _key(self, number: int, what: str) -> str:
        return f"{self._prefix}/{number}/{what}"
