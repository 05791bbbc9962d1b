"""The verdict on a board: once it is broken, everybody hears the same.

An abort names a round. Nobody passes that round or a later one; earlier ones stay collectable. The
question to settle is the race with the last member's note, which may arrive at this very moment.

* The aborting rank writes the round into the abort word, pauses, and only then looks whether all
  notes have come after all.
* Every other rank looks for notes first and at the abort word afterwards.

So either the aborting rank sees the last note and takes the abort back, or whoever sees that note
also sees the abort. The pause, a millisecond, is ten thousand times what a store needs to reach the
other processors, so this holds on weakly ordered ones too.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import time
import zlib
from typing import TYPE_CHECKING

from .cells import FACES_AT

if TYPE_CHECKING:
    from collections.abc import Generator

    from .cells import Cells

ABORT_AT = 64  #: where the abort word stands, on a cache line of its own
_ABORT = struct.Struct("<Q")
WHOLE = _ABORT.pack(0)  #: the abort word of an unbroken board
_TEXT_AT = 128
_TEXT = struct.Struct("<III")  # decided, length, checksum
_TEXT_SIZE = FACES_AT - _TEXT_AT - _TEXT.size
_WEIGHED, _DECIDED = 0, 1
_PAUSE = 0.001


class Verdict:
    """The verdict on the board in `cells`."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def bars(self, number: int) -> bool:
        """Tell whether round `number` is aborted, or about to be."""
        aborted: int = _ABORT.unpack_from(self._cells.memory, ABORT_AT)[0]
        return 0 < aborted <= number

    def give(self, number: int, text: bytes) -> None:
        """Abort round `number` with `text`, unless it is too late or another came first."""
        with self._deciding():
            if self._cells.memory[ABORT_AT : ABORT_AT + 8] == WHOLE:
                # The text first: should this rank die here, the next one finds it whole.
                self._write(_WEIGHED, text[:_TEXT_SIZE])
                self._cells.memory[ABORT_AT : ABORT_AT + 8] = _ABORT.pack(number)
                self._weigh(text[:_TEXT_SIZE])

    def on(self, number: int) -> bytes | None:
        """Return the text that bars round `number`, once it is decided; None if nothing does."""
        if not self.bars(number):
            return None
        with self._deciding():  # an abort that is being weighed may still be taken back
            decided, text = self._read()
            if decided == _WEIGHED and self.bars(number):
                self._weigh(text)  # whoever began to has died over it
            return text if self.bars(number) else None

    def _weigh(self, text: bytes) -> None:
        """Take the abort back if all notes have come after all; else it stands."""
        memory = self._cells.memory
        time.sleep(_PAUSE)
        (aborted,) = _ABORT.unpack_from(memory, ABORT_AT)
        if self._cells.all_posted(aborted):
            memory[ABORT_AT : ABORT_AT + 8] = WHOLE
        else:
            self._write(_DECIDED, text)

    def _write(self, decided: int, text: bytes) -> None:
        memory = self._cells.memory
        at = _TEXT_AT + _TEXT.size
        memory[at : at + len(text)] = text
        memory[_TEXT_AT:at] = _TEXT.pack(decided, len(text), zlib.crc32(text))

    def _read(self) -> tuple[int, bytes]:
        """Return whether it is decided, and the text; an empty one if that is damaged."""
        memory = self._cells.memory
        decided, length, check = _TEXT.unpack_from(memory, _TEXT_AT)
        at = _TEXT_AT + _TEXT.size
        text = memory[at : at + min(length, _TEXT_SIZE)]
        return decided, text if zlib.crc32(text) == check else b""

    @contextlib.contextmanager
    def _deciding(self) -> Generator[None]:
        """Hold the board's own lock; the kernel frees it if its holder dies in here."""
        fcntl.flock(self._cells.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._cells.fd, fcntl.LOCK_UN)
