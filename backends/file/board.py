"""A board in shared memory: posting is writing one's own cell, collecting is looking at all.

If the words of all members for a round equal the reader's own, and it carries no payload, then all
notes are equal and nothing needs decoding: that is the case of every barrier. Otherwise a note is
decoded from its cell, or, where it did not fit in, from a file apart.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from typing import TYPE_CHECKING, NamedTuple

from syncprims.interface import Board, Label, Note, Status

from .abort import Verdicts
from .memory import (
    APART,
    BODY_SIZE,
    CELLS,
    CONTENT,
    FLAG,
    FLAGS_FACTOR,
    HEAD,
    MASK,
    ROUND_FACTOR,
    WORD,
    Cells,
    word_of,
)
from .spill import Apart
from .spin_policy import Patience
from .window import SharedWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims.interface import Window

    from .liveness import Seats
    from .private_dir import PrivateDirectory

_LOOKS = 100  # at most, and the processor given away after each, before the clock is asked
_LOOKS_PER_TIME = 16  # as many between two questions to the clock
_YIELD_FOR = 0.0005  # seconds of giving the processor away before sleeping
_FIRST_NAP, _LONGEST_NAP = 0.002, 0.05  # should nobody ring
_MOST_KNOWN = 4096
_WIDTH = WORD.size


class _Bare(NamedTuple):
    """A note without payload, and how it is written."""

    note: Note
    flags: int
    check: int
    body: bytes


class SlotBoard(Board):
    """The board of `members` in a file of `directory`, seen from `rank`."""

    def __init__(
        self,
        directory: PrivateDirectory,
        name: str,
        members: Sequence[int],
        rank: int,
        seats: Seats,
        seat_numbers: Sequence[int] | None = None,
    ) -> None:
        """Open the board, making it if this is the first member; under the run's join lock.

        `seat_numbers` says where the members sit, if not at their ranks: at a table of one host of
        several, seats are counted from zero.
        """
        super().__init__(members)
        self.seat_numbers = tuple(members if seat_numbers is None else seat_numbers)
        self._seat_of = dict(zip(self.members, self.seat_numbers, strict=True))
        self._directory = directory
        self._name = name
        self._seats = seats
        self._bells = seats.bells
        self._patience = Patience()
        self._window: SharedWindow | None = None
        self._index = self.members.index(rank)
        self._waiting_for, self._waiting_since = 0, 0.0  # the round, and since when
        self._mine = [(Note(Label("?")), b"")] * CELLS  # own notes of late, and their words
        self._bare: dict[int, _Bare] = {}  # by identity: a label compares slowly
        self._bodies: dict[bytes, tuple[int, bytes]] = {}  # by label: the check, and the body
        self._written: list[bytes | None] = [None] * CELLS  # the bodies of bare notes
        self._apart = Apart(directory, name)
        self._cells = Cells(directory, name, len(self.members))
        self._memory = self._cells.memory
        self._verdicts = Verdicts(self._cells, directory, name, self._index)
        self._rows = self._cells.rows
        self._own = [self._cells.word_at(cell, self._index) for cell in range(CELLS)]
        self._asleep = self._cells.asleep
        self._nobody = bytes(len(self.members))
        self._intents = self._cells.intents
        self._unbroken = bytes(self._intents.stop - self._intents.start)

    # -- post ---------------------------------------------------------------------------------

    def post(self, note: Note) -> None:
        """Write the note into this rank's next cell: the body first, then the word."""
        number = self.posted + 1
        cell = number % CELLS
        if note[2] or note[3]:  # a payload or a failure
            flags, check = self._write_content(number, note)
        else:
            bare = self._bare.get(id(note))
            if bare is None or bare.note is not note:
                bare = self._learn(note)
            _, flags, check, body = bare
            if self._written[cell] is not body:
                self._written[cell] = None  # an interrupt may come before it is
                self._cells.write_body(cell, self._index, body)
                self._written[cell] = body
        flags |= (number - 1 - self.collected) << 8
        check += number * ROUND_FACTOR + flags * FLAGS_FACTOR
        word = WORD.pack(number, flags, check & MASK)
        self._mine[cell] = note, word
        self.posted = number
        memory = self._memory
        memory[self._own[cell]] = word
        if memory[self._asleep] != self._nobody and self.is_full(number):
            self.wake()  # this was the note they have been waiting for

    def _learn(self, note: Note) -> _Bare:
        """Remember how a note without payload is written: the same one comes again and again."""
        if len(self._bare) > _MOST_KNOWN:
            self._bare.clear()
        text = note.label.encode()
        check, body = self._alone(text)
        bare = self._bare[id(note)] = _Bare(note, FLAG if note.flag else 0, check, body)
        return bare

    def _alone(self, text: bytes) -> tuple[int, bytes]:
        """Return the body that holds this label alone, and its check."""
        found = self._bodies.get(text)
        if found is None:
            body = HEAD.pack(len(text), 0, 0, 0) + text
            if len(body) > BODY_SIZE:
                raise ValueError(f"a label of {len(text)} bytes fits no cell: {text[:80]!r}")
            if len(self._bodies) > _MOST_KNOWN:
                self._bodies.clear()
            found = self._bodies[text] = zlib.crc32(body), body
        return found

    def is_full(self, number: int) -> bool:
        """Tell whether all words of a round that this rank has posted are there, whole or not."""
        cell = number % CELLS
        words = self._memory[self._rows[cell]]
        return words[::_WIDTH] == self._mine[cell][1][:1] * len(self.members)

    def wake(self) -> None:
        """Wake every member that sleeps."""
        for seat, asleep in zip(self.seat_numbers, self._memory[self._asleep], strict=True):
            if asleep:
                self._bells.ring(seat)

    def _write_content(self, number: int, note: Note) -> tuple[int, int]:
        """Write a body with more than a label; return its flags and its check."""
        label, flag, payload, failure = note
        text = label.encode()
        self._alone(text)  # or it is too long
        cell = number % CELLS
        content = payload + failure
        start = HEAD.pack(len(text), len(payload), len(failure), zlib.crc32(content)) + text
        flags = CONTENT | (FLAG if flag else 0)
        if len(start) + len(content) > BODY_SIZE:
            flags |= APART
            self._apart.write(self.members[self._index], number, content)
            content = b""
        self._written[cell] = None
        self._cells.write_body(cell, self._index, start + content)
        return flags, zlib.crc32(start)

    # -- collect ------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Wait for the oldest uncollected round: look, give the processor away, then sleep."""
        number = self.collected + 1
        cell = number % CELLS
        note, word = self._mine[cell]
        count = len(self.members)
        row, intents, memory = self._rows[cell], self._intents, self._memory
        # Words begin with the round. Payloads are not told apart by their words.
        all_here = word[:1] * count
        all_equal = b"" if note[2] or note[3] else word * count
        looks, begin = 0, 0.0
        patience = self._patience
        while True:
            seen = memory[row]
            if seen == all_equal:
                # The notes first, then the intents: the module on verdicts says why.
                if memory[intents] != self._unbroken:
                    break
                if begin:
                    patience.learn(time.monotonic() - begin, standing_for=4)
                self.collected = number
                if self._apart.written or number == 1:
                    self._tidy(number)
                return (note,) * count
            if seen[::_WIDTH] == all_here:
                notes = self.notes(number)
                if notes is None or memory[intents] != self._unbroken:
                    break
                self.collected = number
                if self._apart.written or number == 1:
                    self._tidy(number)
                return notes
            if not looks:
                if patience.waits or self._waiting_for == number:
                    break
                if not number & 3:  # now and then is enough
                    begin = time.monotonic()
            elif looks == _LOOKS:
                break
            looks += 1
            os.sched_yield()
        return self._collect_slowly(number, timeout)

    def _collect_slowly(self, number: int, timeout: float | None) -> Sequence[Note] | None:
        start = now = self.now()
        if self._waiting_for != number:  # else the core has asked again, after a look around
            self._waiting_for, self._waiting_since = number, start
            self._patience.count()
        nap = min(_LONGEST_NAP, max(_FIRST_NAP, now - self._waiting_since))
        looks, slept = 0, False
        while True:
            notes = self.notes(number)
            if self._memory[self._intents] != self._unbroken:
                if self._verdicts.on(number) is not None:
                    return None
                notes = self.notes(number)
            if notes is not None:
                self._patience.learn(self.now() - self._waiting_since)
                self.collected = number
                self._tidy(number)
                return notes
            sleepy = now - self._waiting_since >= _YIELD_FOR or self._patience.waits
            looks += 1
            if not sleepy and looks % _LOOKS_PER_TIME:
                os.sched_yield()
                continue
            if timeout is not None and now - start >= timeout:
                return None
            if sleepy:
                # Only after a sleep that was in vain: a death ends it, and most are not.
                if slept and self.in_vain(number):
                    return None
                self._sleep(number, nap if timeout is None else min(nap, timeout - (now - start)))
                slept, nap = True, min(2 * nap, _LONGEST_NAP)
            now = self.now()

    def _sleep(self, number: int, seconds: float) -> None:
        """Sleep until the last note of the round or a death wakes this rank, or time is up."""
        me = self._asleep.start + self._index
        try:
            self._memory[me] = 1
            # A note that came before its writer could see this would wake nobody.
            if not self.is_full(number) and self._memory[self._intents] == self._unbroken:
                self._bells.sleep(seconds)
        finally:
            with contextlib.suppress(ValueError):  # closed meanwhile, by a handler that has forked
                self._memory[me] = 0

    def in_vain(self, number: int) -> bool:
        """Tell whether a member is lost or has failed, or an absent one has finished."""
        departed = self._seats.departed(self.seat_numbers)
        # The last notes may have arrived just before their writers went.
        if not departed or self.notes(number) is not None:
            return False
        words = WORD.iter_unpack(self._memory[self._rows[number % CELLS]])
        absent = {s for s, word in zip(self.seat_numbers, words, strict=True) if word[0] != number}
        return any(
            state in ("lost", "failed") or (state == "finished" and seat in absent)
            for seat, state in departed
        )

    def notes(self, number: int) -> tuple[Note, ...] | None:
        """Return the notes of round `number`, or None while one is not here, or not whole."""
        cell = number % CELLS
        words = self._memory[self._rows[cell]]
        mine, own = self._mine[cell]
        count = len(self.members)
        if words[::_WIDTH] != own[:1] * count:
            return None
        bare = not (mine[2] or mine[3])
        if bare and words == own * count:
            return (mine,) * count
        # One word of notes without payload means one note: it is made once.
        known = {own: mine} if bare else {}
        notes: list[Note] = []
        for index, word in enumerate(self._cells.split(words)):
            note = known.get(word)
            if note is None:
                note = mine if index == self._index else self._take(number, index, word, mine.label)
                if note is None:
                    return None
                if not (note[2] or note[3]):
                    known[word] = note
            notes.append(note)
        return tuple(notes)

    def _take(self, number: int, index: int, word: bytes, label: Label) -> Note | None:
        """Return the note behind a word, or None while it is not all there."""
        found, flags, _ = WORD.unpack(word)
        if found != number:
            return None
        expected = label.encode()  # what one came for oneself is most likely what others did
        flag = bool(flags & FLAG)
        if not flags & CONTENT and word == word_of(number, flags, self._alone(expected)[0]):
            return Note(label, flag)
        body = self._cells.read_body(number % CELLS, index, word)
        if body is None:
            return None
        text, payload, failure, check, content = body
        size = payload + failure
        if flags & APART:
            content = self._apart.read(self.members[index], number)
        content = content[:size]
        if len(content) != size or zlib.crc32(content) != check:
            return None
        if text != expected:
            label = Label.decode(text)
        return Note(label, flag, content[:payload], content[payload:])

    # -- for a board above this one: see there ----------------------------------------------------

    @property
    def here(self) -> int:
        """The member whose view this is."""
        return self.members[self._index]

    def own(self, number: int) -> Note:
        """Return the note that this rank has posted to a round of late."""
        return self._mine[number % CELLS][0]

    def rounds_of(self, rank: int) -> int:
        """Return how many rounds a member has posted to."""
        return self._cells.posted(self.members.index(rank))

    def advance(self, number: int) -> None:
        """Count the rounds up to `number` as collected: their notes came another way."""
        self.collected = number
        self._tidy(number)

    def _tidy(self, number: int) -> None:
        if self._apart.written:
            # All have read what they had collected when they posted this round.
            words = WORD.iter_unpack(self._memory[self._rows[number % CELLS]])
            self._apart.remove_before(number - max(flags >> 8 for _, flags, _ in words))
        if number == 1:
            self._seats.watch()  # all have come: now is the time to keep an eye on each

    # -- status and abort -------------------------------------------------------------------------

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`: its cells say how far it is, its seat how it is."""
        index = self.members.index(rank)
        # The state first: what it posted before it went is there then.
        state = self._seats.state(self._seat_of[rank])
        word = self._cells.last_word(index)
        number, _, _ = WORD.unpack(word)
        body = self._cells.read_body(number % CELLS, index, word) if number else None
        return Status(number, Label.decode(body[0]) if body else None, *state)

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless it completes after all."""
        self._verdicts.give(self.collected + 1, verdict)
        self.wake()

    def verdict(self) -> bytes | None:
        """Return the verdict that bars the oldest uncollected round, if there is one."""
        return self._verdicts.on(self.collected + 1)

    def window(self) -> Window:
        """Return the memory that arrays pass through, making it if this is the first call."""
        if self._window is None:
            name, count = f"{self._name}-window", len(self.members)
            self._window = SharedWindow(self._directory, name, count)
        return self._window.window

    def close(self) -> None:
        """Let go of the files."""
        if self._window is not None:
            self._window.close()
        self._cells.close()


def refuse(directory: PrivateDirectory, name: str, count: int, verdict: bytes) -> None:
    """Abort, from outside, a board whose members still wait for each other to come."""
    cells = Cells(directory, name, count)
    Verdicts(cells, directory, name, index=count).give(1, verdict)
    cells.close()
