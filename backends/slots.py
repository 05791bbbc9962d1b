"""A board in shared memory: posting is writing one's own cell, collecting is looking at all.

If all faces of a round equal the reader's own, byte for byte, then all notes do, and nothing needs
decoding: that is the case of every barrier. Otherwise a note is decoded from its cell, or, where it
did not fit in, from a file apart.
"""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING

from syncprims.interface import Board, Label, Note, Status

from .cells import APART, BODY_SIZE, CELLS, FACE_SIZE, FAILED, FLAG, Cells, Face
from .verdicts import ABORT_AT, WHOLE, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .private_dir import PrivateDirectory
    from .seats import Seats

_SPINS = 40  # looks before the processor is given away
_YIELD_FOR = 0.0005  # seconds of giving it away before sleeping
_FIRST_NAP = 0.00005
_LOOK_FOR_DEATH_EVERY = 0.005
#: Who has waited for long may be told a little later: a nap is this part of the wait so far.
_NAP_PART, _SHORTEST_LONG_NAP, _LONGEST_NAP = 0.01, 0.005, 0.02


class SlotBoard(Board):
    """The board of `members` in a file of `directory`, seen from `rank`."""

    def __init__(
        self,
        directory: PrivateDirectory,
        name: str,
        members: Sequence[int],
        rank: int,
        seats: Seats,
    ) -> None:
        """Open the board, making it if this is the first member; under the run's join lock."""
        super().__init__(members)
        self._directory = directory
        self._name = name
        self._seats = seats
        self._index = self.members.index(rank)
        self._waiting_for, self._waiting_since = 0, 0.0  # the round, and since when
        self._mine: dict[int, tuple[Note, bytes]] = {}  # uncollected rounds: own note and face
        self._written: list[Label | None] = [None] * CELLS  # whose label alone is in the body
        self._apart: list[tuple[int, str]] = []  # own files with what did not fit in: round, name
        self._cells = Cells(directory, name, len(self.members))
        self._memory = self._cells.memory
        self._verdict = Verdict(self._cells)
        # With fewer processors than ranks, looking again only delays whom one waits for.
        self._spins = _SPINS if len(self.members) <= (os.cpu_count() or 1) else 1

    # -- post ---------------------------------------------------------------------------------

    def post(self, note: Note) -> None:
        """Write the note into this rank's next cell: the body first, then the face."""
        number = self.posted + 1
        label = note.label
        text = label.encode()
        if len(text) > BODY_SIZE:
            raise ValueError(f"the label {label} is longer than the {BODY_SIZE} bytes of a cell")
        check = label_check = zlib.crc32(text)
        cell = number % CELLS
        flags = FLAG if note.flag else 0
        if note.payload or note.failure:
            flags |= FAILED if note.failure else 0
            content = note.payload + note.failure
            check = zlib.crc32(content, check)
            if len(text) + len(content) > BODY_SIZE:
                flags |= APART
                self._write_apart(number, content)
                content = b""
            self._write_body(cell, text + content)
            self._written[cell] = None
        elif self._written[cell] is not label:
            self._write_body(cell, text)
            self._written[cell] = label
        sizes = len(text), len(note.payload), len(note.failure)
        face = Face(number, self.collected, flags, *sizes, label_check, check).encode()
        at = self._cells.face_at(cell, self._index)
        self._mine[number] = note, face
        self.posted = number
        self._memory[at : at + FACE_SIZE] = face

    def _write_body(self, cell: int, body: bytes) -> None:
        at = self._cells.body_at(cell, self._index)
        self._memory[at : at + len(body)] = body

    def _write_apart(self, number: int, content: bytes) -> None:
        """Write what does not fit into a cell to a file."""
        name = self._apart_name(number, self._index)
        fd = self._directory.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            self._directory.remove(name)
            raise OSError(
                error.errno,
                f"{error.strerror}, writing {len(content)} bytes for the other ranks; free some "
                f"space, or set SYNCPRIMS_DIR to a place with more",
                str(self._directory.path / name),
            ) from error
        self._apart.append((number, name))

    def _remove_apart(self, number: int) -> None:
        """Remove the files that all had read when they posted round `number`."""
        cell = number % CELLS
        faces = [Face.decode(self._cells.raw_face(cell, i)) for i in range(len(self.members))]
        read_by_all = min(face.collected if face is not None else 0 for face in faces)
        while self._apart and self._apart[0][0] <= read_by_all:
            self._directory.remove(self._apart.pop(0)[1])

    def _apart_name(self, number: int, index: int) -> str:
        return f"{self._name}-{self.members[index]}-{number}"

    # -- collect ------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Wait for the oldest uncollected round: look, give the processor away, then sleep."""
        number = self.collected + 1
        mine, face = self._mine[number]
        count = len(self.members)
        begin = self._cells.face_at(number % CELLS, 0)
        end = begin + count * FACE_SIZE
        same = face * count
        memory = self._memory
        for _ in range(self._spins):
            # The notes first, then the abort: the module on verdicts says why in this order.
            if memory[begin:end] == same and memory[ABORT_AT : ABORT_AT + 8] == WHOLE:
                self._count(number)
                return (mine,) * count
        return self._collect_slowly(number, mine, timeout)

    def _collect_slowly(
        self, number: int, mine: Note, timeout: float | None
    ) -> Sequence[Note] | None:
        notes: list[Note | None] = [None] * len(self.members)
        notes[self._index] = mine
        absent = [i for i in range(len(self.members)) if i != self._index]
        memory, own = self._memory, self._mine[number][1][:8]  # the round, as faces begin with it
        at = [self._cells.face_at(number % CELLS, i) for i in range(len(self.members))]
        start = now = self.now()
        if self._waiting_for != number:  # else the core has asked again, after a look around
            self._waiting_for, self._waiting_since = number, start
        look_for_death = start + _LOOK_FOR_DEATH_EVERY
        nap = min(_LONGEST_NAP, max(_FIRST_NAP, _NAP_PART * (now - self._waiting_since)))
        while True:
            absent = [
                i
                for i in absent
                if memory[at[i] : at[i] + 8] != own or not self._take(notes, i, number)
            ]
            if memory[ABORT_AT : ABORT_AT + 8] != WHOLE and self._verdict.bars(number):
                return None
            if not absent:
                self._count(number)
                return tuple(note for note in notes if note is not None)
            if timeout is not None and now - start >= timeout:
                return None
            if now >= look_for_death:
                if self._in_vain(absent):
                    # The last notes may have arrived just before.
                    absent = [i for i in absent if not self._take(notes, i, number)]
                    if absent:
                        return None
                    continue
                look_for_death = now + _LOOK_FOR_DEATH_EVERY
            if now - self._waiting_since < _YIELD_FOR:
                os.sched_yield()
            else:
                left = nap if timeout is None else min(nap, timeout - (now - start))
                time.sleep(max(0.0, left))
                most = max(_SHORTEST_LONG_NAP, _NAP_PART * (now - self._waiting_since))
                nap = min(nap * 1.5, most, _LONGEST_NAP)
            now = self.now()

    def _in_vain(self, absent: list[int]) -> bool:
        """Tell whether a member is lost or has failed, or an absent one has finished."""
        missing = [self.members[i] for i in absent]
        return any(
            state in ("lost", "failed") or (state == "finished" and rank in missing)
            for rank, state in self._seats.departed(self.members)
        )

    def _take(self, notes: list[Note | None], index: int, number: int) -> bool:
        """Read the note of one member for round `number`, if it is there and whole."""
        cell = number % CELLS
        raw = self._cells.raw_face(cell, index)
        mine, own = self._mine[number]
        if raw == own:
            notes[index] = mine
            return True
        face = Face.decode(raw)
        if face is None or face.round != number:
            return False
        notes[index] = note = self._read(face, cell, index)
        return note is not None

    def _read(self, face: Face, cell: int, index: int) -> Note | None:
        """Return the note behind a face, or None while it is not all there."""
        at = self._cells.body_at(cell, index)
        size = face.payload + face.failure
        text = self._memory[at : at + face.label]
        if face.flags & APART:
            content = self._read_apart(face.round, index)
        else:
            content = self._memory[at + face.label : at + face.label + size]
        if len(content) != size or zlib.crc32(content, zlib.crc32(text)) != face.body_check:
            return None
        failure = content[face.payload :]
        return Note(self._decode(text), bool(face.flags & FLAG), content[: face.payload], failure)

    def _read_apart(self, number: int, index: int) -> bytes:
        try:
            fd = self._directory.open_file(self._apart_name(number, index), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def _decode(self, text: bytes) -> Label:
        """Return the label; the very object, if this rank came with the same one."""
        mine = self._mine.get(self.collected + 1)
        if mine is not None and mine[0].label.encode() == text:
            return mine[0].label
        return Label.decode(text)

    def _count(self, number: int) -> None:
        self.collected = number
        del self._mine[number]
        if self._apart:
            self._remove_apart(number)
        if number == 1:
            self._seats.watch()  # all have come: now is the time to keep an eye on each

    # -- status and abort -------------------------------------------------------------------------

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`: its cells say how far it is, its seat how it is."""
        index = self.members.index(rank)
        state = self._seats.state(rank)  # first: what it posted before it went is there then
        face = self._cells.last_face(index)
        label = None
        if face.round:
            at = self._cells.body_at(face.round % CELLS, index)
            text = self._memory[at : at + face.label]
            label = self._decode(text) if zlib.crc32(text) == face.label_check else None
        return Status(face.round, label, *state)

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless it completes after all."""
        self._verdict.give(self.collected + 1, verdict)

    def verdict(self) -> bytes | None:
        """Return the verdict that bars the oldest uncollected round, once it is decided."""
        return self._verdict.on(self.collected + 1)

    def close(self) -> None:
        """Let go of the file."""
        self._cells.close()


def refuse(directory: PrivateDirectory, name: str, count: int, verdict: bytes) -> None:
    """Abort, from outside, a board whose members still wait for each other to come."""
    cells = Cells(directory, name, count)
    Verdict(cells).give(1, verdict)
    cells.close()
