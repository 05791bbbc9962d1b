"""A board in shared memory: to post is to write one's own cell, to collect is to read all of them.

If the words of all members for a round equal the reader's own, and it carries no payload, then all
notes are equal and nothing needs decoding. That is the case of every barrier. Otherwise a note is
decoded from its cell, or, if it did not fit there, from a file of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Sequence
from hashlib import blake2b

from syncprims.interface import MARKS, Board, Label, Note, Status, WaitView, Window, ends_round

from .abort import Aborts
from .liveness import Liveness
from .memory import (
    AHEAD,
    AHEAD_SHIFT,
    BODY_SIZE,
    CELLS,
    CONTENT,
    DIGEST,
    FLAGS_FACTOR,
    HEAD,
    MARK,
    MASK,
    ROUND_FACTOR,
    SPILLED,
    WORD,
    Cells,
    Claims,
    open_window,
)
from .private_dir import PrivateDirectory

_LOOKS = 100  # at most, with a yield after each, before the clock is read
_LOOKS_PER_TIME = 16  # between two readings of the clock
YIELD_FOR = 0.0005  #: seconds of yielding before sleeping
FIRST_NAP, LONGEST_NAP = 0.002, 0.05  #: seconds of sleep, in case no rank wakes this one
NAPS = 5  #: after so many it asks who has ended, in case that came before it slept
_MOST_KNOWN = 4096
# Seconds. Among themselves, ranks wait for microseconds, and for a millisecond while others copy a
# piece of an array. Another process keeps a processor for a time slice.
_LONG = 0.002
_LONG_WEIGHT, _LIMIT = 3, 12  # a long wait counts as much as three short ones; when to sleep
_FEWEST, _MOST = 16, 256  # waits that sleep before yielding is tried again
_WIDTH = WORD.size


class SharedMemoryBoard(Board):
    """The board of `members` in a file, seen from the one whose entry `liveness` holds."""

    seen_outside = True

    def __init__(
        self,
        file: str,
        members: Sequence[int],
        liveness: Liveness,
        processes: Sequence[int],
        name: str,
    ) -> None:
        """Open the board, creating it if this is the first member; under the run's lock.

        `processes` are the members' process numbers. On one host of several, these count from zero.
        """
        super().__init__(members, name)
        self.processes = tuple(processes)
        self._file = file
        self._liveness = liveness
        self._doorbell = liveness.doorbell
        self._spin_policy = SpinPolicy()
        self._window: Window | None = None
        self._index = self.processes.index(liveness.process)
        self.rank = self.members[self._index]  #: this one
        self._waiting_for, self._waiting_since = 0, 0.0  # the round, and since when
        self._mine = [(Note(Label("?")), b"")] * CELLS  # own latest notes, and their words
        # Notes without payload, and how they are written. By identity: a label compares slowly.
        self._bare: dict[int, tuple[Note, int, int, bytes]] = {}
        # What came without payload, by check: the body, and the notes by mark.
        self._seen: dict[int, tuple[bytes, list[Note]]] = {}
        self._written: list[bytes | None] = [None] * CELLS  # the bodies of bare notes
        #: rounds and names of this rank's files for what did not fit its cells, not yet removed
        self._spilled: list[tuple[int, str]] = []
        self._cells = Cells(liveness.directory, file, len(self.members))
        self._memory = self._cells.memory
        self.small_window = self._cells.small_window
        self._aborts = _aborts_of(self._cells, liveness.claims, file, self._index)
        self._rows = self._cells.rows
        self._own = [self._cells.word_at(cell, self._index) for cell in range(CELLS)]
        self._asleep = self._cells.asleep
        self._all_awake = bytes(len(self.members))
        self._intents = self._cells.intents
        self._no_intents = bytes(self._intents.stop - self._intents.start)

    # -- post ---------------------------------------------------------------------------------

    def post(self, note: Note) -> None:
        """Write the note into this rank's next cell: the body first, then the word."""
        number = self.posted + 1
        cell = number % CELLS
        if note[2] or note[3]:  # a payload or a failure
            flags, check = self._write_content(number, note)
        else:
            bare = self._bare.get(id(note))
            if bare is None or bare[0] is not note:
                bare = self._prepare(note)
            _, flags, check, body = bare
            if self._written[cell] is not body:
                self._written[cell] = None  # an interrupt may come before it is written
                self._cells.write_body(cell, self._index, body)
                self._written[cell] = body
        flags |= (number - 1 - self.collected) << AHEAD_SHIFT
        check += number * ROUND_FACTOR + flags * FLAGS_FACTOR
        word = WORD.pack(number, flags, check & MASK)
        self._mine[cell] = note, word
        self.posted = number
        memory = self._memory
        memory[self._own[cell]] = word
        if memory[self._asleep] != self._all_awake and self.is_full(number):
            self.wake()  # they were waiting for this note

    def _prepare(self, note: Note) -> tuple[Note, int, int, bytes]:
        """Return how a note without payload is written; the same one comes again and again."""
        if len(self._bare) > _MOST_KNOWN:
            self._bare.clear()
        digest, check, body = _body_of(note.label.encode())
        bare = self._bare[id(note)] = note, digest | note.mark, check, body
        return bare

    def is_full(self, number: int) -> bool:
        """Return whether all words of a round that this rank has posted are there, whole or not."""
        cell = number % CELLS
        words = self._memory[self._rows[cell]]
        return words[::_WIDTH] == self._mine[cell][1][:1] * len(self.members)

    def wake(self) -> None:
        """Wake each member that sleeps."""
        for process, asleep in zip(self.processes, self._memory[self._asleep], strict=True):
            if asleep:
                self._doorbell.wake(process)

    def _write_content(self, number: int, note: Note) -> tuple[int, int]:
        """Write a body that has more than a label; return its flags and its check."""
        label, mark, payload, failure = note
        text = label.encode()
        cell = number % CELLS
        content = payload + failure
        start = _start_of_body(text, len(payload), len(failure), zlib.crc32(content))
        flags = CONTENT | mark
        if len(start) + len(content) > BODY_SIZE:
            flags |= SPILLED
            self._spill(number, content)
            content = b""
        self._written[cell] = None
        self._cells.write_body(cell, self._index, start + content)
        return flags, zlib.crc32(start)

    def _spill(self, number: int, content: bytes) -> None:
        """Write the content of this rank's note for round `number` into a file of its own.

        :raises SharedMemoryError: if the disk is full; then nothing is left of the file.
        """
        directory, name = self._liveness.directory, self._spill_name(self.rank, number)
        with directory.explained(f"writing {len(content)} bytes for the other ranks", name):
            try:
                directory.write(name, content)
            except OSError:
                with contextlib.suppress(PermissionError):
                    directory.remove(name)
                raise
        self._spilled.append((number, name))

    def _read_spilled(self, rank: int, number: int) -> bytes:
        """Return the content of the file that `rank` wrote for `number`.

        :raises SharedMemoryError: if something has removed it, or no descriptor is left.
        """
        directory, name = self._liveness.directory, self._spill_name(rank, number)
        with directory.explained(f"reading what rank {rank} sends", name):
            return directory.read(name)

    def _spill_name(self, rank: int, number: int) -> str:
        return f"{self._file}-{rank}-{number}"

    # -- collect ------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Wait for the oldest uncollected round: look, yield the processor, then sleep."""
        number = self.collected + 1
        cell = number % CELLS
        note, word = self._mine[cell]
        count = len(self.members)
        row, intents, memory = self._rows[cell], self._intents, self._memory
        # Different payloads may have the same word.
        all_equal = b"" if note[2] or note[3] else word * count
        # The last member to arrive, for which all others wait, sees all words at once.
        if memory[row] == all_equal and memory[intents] == self._no_intents:
            self.collected = number
            if self._spilled or number == 1:
                self._tidy(number)
            return (note,) * count
        all_here = word[:1] * count  # words begin with the round
        looks, begin = 0, 0.0
        policy = self._spin_policy
        while True:
            seen = memory[row]
            if seen == all_equal:
                notes: tuple[Note, ...] | None = (note,) * count
            elif seen[::_WIDTH] == all_here:
                notes = self.notes(number)
            elif looks == _LOOKS or (
                not looks and (policy.sleeps_left or self._waiting_for == number)
            ):
                break
            else:
                if not looks and not number & 3:  # some of the waits are enough
                    begin = time.monotonic()
                looks += 1
                os.sched_yield()
                continue
            # The notes first, then the intents: abort.py says why.
            if notes is None or memory[intents] != self._no_intents:
                break
            if begin:
                policy.record(time.monotonic() - begin, weight=4)
            self.collected = number
            if self._spilled or number == 1:
                self._tidy(number)
            return notes
        return self._collect_slowly(number, timeout)

    def _collect_slowly(self, number: int, timeout: float | None) -> Sequence[Note] | None:
        start = now = time.monotonic()
        if self._waiting_for != number:  # else the core asks again for the same round
            self._waiting_for, self._waiting_since = number, start
            self._spin_policy.count_wait()
        nap = min(LONGEST_NAP, max(FIRST_NAP, now - self._waiting_since))
        looks, naps, woken = 0, 0, False
        while True:
            notes = self.notes(number)
            if self._memory[self._intents] != self._no_intents:
                if self.verdict() is not None:
                    return None
                notes = self.notes(number)
            if notes is not None:
                self._spin_policy.record(time.monotonic() - self._waiting_since)
                self.collected = number
                self._tidy(number)
                return notes
            sleepy = now - self._waiting_since >= YIELD_FOR or self._spin_policy.sleeps_left
            looks += 1
            if not sleepy and looks % _LOOKS_PER_TIME:
                os.sched_yield()
                continue
            if timeout is not None and now - start >= timeout:
                return None
            if sleepy:
                if (woken or naps == NAPS) and self.is_in_vain(number):
                    return None
                naps = naps % NAPS + 1
                nap = nap if timeout is None else min(nap, timeout - (now - start))
                woken, nap = self._sleep(number, nap), min(2 * nap, LONGEST_NAP)
            now = time.monotonic()

    def _sleep(self, number: int, seconds: float) -> bool:
        """Sleep, at most so long; return whether a note, or the end of a process, ended it."""
        me = self._asleep.start + self._index
        try:
            self._memory[me] = 1
            # A note posted before its writer could see this byte would wake no rank.
            if not self.is_full(number) and self._memory[self._intents] == self._no_intents:
                return self._doorbell.sleep(seconds)
            return True
        finally:
            with contextlib.suppress(ValueError):  # closed meanwhile: a signal handler forked
                self._memory[me] = 0

    def is_in_vain(self, number: int) -> bool:
        """Return whether a member is lost or has failed, or an absent one has finished."""
        ended = self._liveness.ended(self.processes)
        # The last notes may have arrived just before their writers ended.
        if not ended or self.notes(number) is not None:
            return False
        words = WORD.iter_unpack(self._memory[self._rows[number % CELLS]])
        absent = {p for p, word in zip(self.processes, words, strict=True) if word[0] != number}
        return any(ends_round(state, process in absent) for process, state in ended)

    def notes(self, number: int) -> tuple[Note, ...] | None:
        """Return the notes of round `number`, or None while one is missing or not whole."""
        cell = number % CELLS
        words = self._memory[self._rows[cell]]
        mine, own = self._mine[cell]
        count = len(self.members)
        if words[::_WIDTH] != own[:1] * count:
            return None
        bare = not (mine[2] or mine[3])
        if bare and words == own * count:
            return (mine,) * count
        # Equal words of notes without payload mean equal notes, so each is made once.
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
        """Return the note that belongs to a word, or None while it is not whole."""
        flags: int
        found, flags, check = WORD.unpack(word)
        if found != number:
            return None
        cell = number % CELLS
        if not flags & CONTENT:
            seen = self._seen.get((check - number * ROUND_FACTOR - flags * FLAGS_FACTOR) & MASK)
            # Two labels may have the same check.
            if seen is not None and self._cells.holds_body(cell, index, seen[0]):
                return seen[1][flags & MARK]
        expected = label.encode()  # most likely the others made the same call
        body = self._cells.read_body(cell, index, word)
        if body is None:
            return None
        text, payload, failure, check, content = body
        size = payload + failure
        if flags & SPILLED:
            content = self._read_spilled(self.members[index], number)
        content = content[:size]
        if len(content) != size or zlib.crc32(content) != check:
            return None
        if text != expected:
            label = Label.decode(text)
        if not flags & CONTENT:
            if len(self._seen) > _MOST_KNOWN:
                self._seen.clear()
            _, check, bare = _body_of(text)
            self._seen[check] = bare, [Note(label, mark) for mark in MARKS]
        return Note(label, MARKS[flags & MARK], content[:payload], content[payload:])

    # -- for the two-level board ------------------------------------------------------------------

    def posted_note(self, number: int) -> Note:
        """Return the note that this rank has posted to a recent round."""
        return self._mine[number % CELLS][0]

    def rounds_of(self, rank: int) -> int:
        """Return how many rounds a member has posted to."""
        return self._cells.posted(self.members.index(rank))

    def advance(self, number: int) -> None:
        """Count the rounds up to `number` as collected; their notes came in another way."""
        self.collected = number
        self._tidy(number)

    def _tidy(self, number: int) -> None:
        if self._spilled:
            # All have read what they had collected when they posted this round.
            words = WORD.iter_unpack(self._memory[self._rows[number % CELLS]])
            over = number - max((flags & AHEAD) >> AHEAD_SHIFT for _, flags, _ in words)
            while self._spilled and self._spilled[0][0] < over:
                self._liveness.directory.remove(self._spilled.pop(0)[1])
        if number == 1:
            self._liveness.watch_all()  # all have joined, so each can be watched

    # -- status and abort -------------------------------------------------------------------------

    def status(self, rank: int) -> Status:
        """Return what is known of `rank`: its rounds from its cells, its state from its entry."""
        index = self.members.index(rank)
        # The state first: then everything that it posted before its end is visible.
        state = self._liveness.state(self.processes[index])
        word = self._cells.last_word(index)
        number, _, _ = WORD.unpack(word)
        body = self._cells.read_body(number % CELLS, index, word) if number else None
        return Status(number, Label.decode(body[0]) if body else None, *state)

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless that has completed."""
        self._aborts.abort(self.collected + 1, verdict)
        self.wake()

    def verdict(self) -> bytes | None:
        """Return the verdict that covers the oldest uncollected round, if there is one."""
        if self._memory[self._intents] == self._no_intents:
            return None
        return self._aborts.verdict(self.collected + 1)

    def inform(self) -> None:
        """Make the next look at each member ask for its lock, too."""
        self._liveness.distrust()

    def publish_wait(self, wait: WaitView) -> None:
        """Record in this board's memory what this rank waits for."""
        with contextlib.suppress(ValueError):  # closed meanwhile: a signal handler forked
            self._cells.write_wait(self._index, wait)

    def window(self) -> Window:
        """Return the memory that arrays pass through; the first call creates it."""
        if self._window is None:
            file, count = f"{self._file}-window", len(self.members)
            self._window = open_window(self._liveness.directory, file, count)
        return self._window

    def close(self) -> None:
        """Unmap the files."""
        if self._window is not None:
            with contextlib.suppress(BufferError):  # an array in it is still in use
                self._window.memory.release()
        self._cells.close()


def _start_of_body(text: bytes, payload: int, failure: int, check: int) -> bytes:
    """Return the lengths and the label that a body begins with."""
    start = HEAD.pack(len(text), payload, failure, check) + text
    if len(start) > BODY_SIZE:
        raise ValueError(f"a label of {len(text)} bytes fits no cell: {text[:80]!r}")
    return start


def _body_of(text: bytes) -> tuple[int, int, bytes]:
    """Return the body that holds only this label: its digest in flags, its check, and it."""
    body = _start_of_body(text, 0, 0, 0)
    # The check alone would be equal for some labels that differ.
    digest = int.from_bytes(blake2b(text, digest_size=4).digest()) & DIGEST
    return digest, zlib.crc32(body), body


class SpinPolicy:
    """Chooses between ``sched_yield`` and sleeping, from the last waits of a rank at one board.

    Yielding is by far the fastest if only ranks want the processor: each continues as soon as the
    one before it is done. If another CPU-bound process competes, each yield costs a whole time
    slice, for this rank or for those that wait for it. Then sleeping is better. Competition shows
    in long waits that come again and again, and not in single ones, as between rounds where ranks
    do work of their own. After some waits, yielding is tried again.
    """

    def __init__(self) -> None:
        self.sleeps_left = 0  #: of the next waits, those that sleep at once
        self._next = _FEWEST
        self._score = 0

    def count_wait(self) -> None:
        """Count a wait that was not over after a few looks."""
        if self.sleeps_left:
            self.sleeps_left -= 1

    def record(self, waited: float, weight: int = 1) -> None:
        """Record a wait of so many seconds, which represents `weight` waits."""
        if waited > _LONG:
            self._score += _LONG_WEIGHT
            if self._score >= _LIMIT:
                self.sleeps_left, self._next = self._next, min(4 * self._next, _MOST)
                self._score -= _LONG_WEIGHT
        else:
            self._score = max(0, self._score - weight)
            if not self.sleeps_left:
                self._next = max(self._next // 2, _FEWEST)


def abort_from_outside(directory: PrivateDirectory, name: str, count: int, verdict: bytes) -> None:
    """Abort a board whose members still wait for others to join; for a rank that cannot join."""
    with (
        contextlib.closing(Cells(directory, name, count)) as cells,
        contextlib.closing(Claims(directory)) as claims,
    ):
        _aborts_of(cells, claims, name, count).abort(1, verdict)


def _aborts_of(cells: Cells, claims: Claims, name: str, index: int) -> Aborts:
    at, texts_at, count = cells.intents.start, cells.texts_at, cells.count + 1
    return Aborts(cells.memory, at, texts_at, count, claims, name, index, cells.all_posted)
