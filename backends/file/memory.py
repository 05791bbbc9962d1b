"""The memory of a board: a file of cells, mapped by every member.

Each member has :data:`CELLS` cells, written by it alone and used in turn. A cell is a *word* and a
*body*. The words of one round stand side by side, so that one look sees all of them: each says
which round it is, and carries a check of itself and of its body. The body holds the label, and what
else fits in.

Nothing relies on the order in which another processor sees the stores. A note is taken only when
its word and its body prove each other whole, round included; a half-written or stale one merely
reads as "not there yet".
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError
from syncprims.interface import Board

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

#: A member posts at most `depth` notes ahead of what it has collected. So whoever has collected
#: round k knows that all have collected round k - depth, and a cell is free again after twice that.
CELLS = 2 * Board.depth
BODY_SIZE = 2048
_SHORT = 256  # bytes of a body that most need
TEXT_SIZE = 16 * 1024  #: room for a verdict

WORD = struct.Struct("<QII")  #: round, flags, check
HEAD = struct.Struct("<IIII")  #: lengths of label, payload and failure; checksum of the last two
FLAG, CONTENT, APART = 1, 2, 4  #: and from bit 8 on, how far the writer was ahead

_FAMILY = b"syncprims board "
_MAGIC = _FAMILY + b"2"
_HEADER = struct.Struct("<32sI")  # magic, members
_HEADER_SIZE = 64
_LINE = 64  # of a processor's cache
_TEXT = struct.Struct("<II")  # length, checksum
ROUND_FACTOR, FLAGS_FACTOR, MASK = 0x9E3779B1, 0x85EBCA6B, 0xFFFFFFFF


def word_of(number: int, flags: int, body_check: int) -> bytes:
    """Return the word of a note: equal for equal notes, and never equal for another round."""
    return WORD.pack(number, flags, _check_of(number, flags, body_check))


def _check_of(number: int, flags: int, body_check: int) -> int:
    return (body_check + number * ROUND_FACTOR + flags * FLAGS_FACTOR) & MASK


class Cells:
    """The cells of a board with `count` members, in the file `name` of `directory`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int) -> None:
        """Map the file, making it if it is not there; under the run's join lock.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if there is no room for it.
        """
        self.count = count
        # One more than members: an outsider who finds that the board cannot work may say so, too.
        self.intents = slice(_HEADER_SIZE, _HEADER_SIZE + 8 * (count + 1))
        asleep_at = _up(self.intents.stop, _LINE)
        self.asleep = slice(asleep_at, asleep_at + count)  #: a byte per member: it sleeps
        words_at = _up(self.asleep.stop, _LINE)
        self._row = _up(count * WORD.size, _LINE)
        #: where the words of a cell's round stand, of all members
        self.rows = [
            slice(words_at + cell * self._row, words_at + cell * self._row + count * WORD.size)
            for cell in range(CELLS)
        ]
        self.split = struct.Struct(f"{WORD.size}s" * count).unpack  #: a row into its words
        self._texts_at = _up(words_at + CELLS * self._row, mmap.PAGESIZE)
        self._bodies_at = self._texts_at + (count + 1) * TEXT_SIZE
        size = self._bodies_at + CELLS * count * BODY_SIZE
        fd = directory.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            lay(fd, size, _HEADER.pack(_MAGIC, count))
            magic, found = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
            if magic.rstrip(b"\0") != _MAGIC or found != count or os.fstat(fd).st_size != size:
                raise _no_board(directory, name, count, magic)
            self.memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    # -- notes --------------------------------------------------------------------------------

    def word_at(self, cell: int, index: int) -> slice:
        """Return where the word of member number `index` stands."""
        at = self.rows[cell].start + index * WORD.size
        return slice(at, at + WORD.size)

    def write_body(self, cell: int, index: int, body: bytes) -> None:
        """Write into one's own cell."""
        at = self._body_at(cell, index)
        self.memory[at : at + len(body)] = body

    def read_body(
        self, cell: int, index: int, word: bytes
    ) -> tuple[bytes, int, int, int, bytes] | None:
        """Return what a body holds, or None unless `word` proves it whole.

        That is the label; the lengths of payload and failure, and the checksum of the two; and the
        bytes from where they stand on, not proved yet.
        """
        number, flags, check_of_all = WORD.unpack(word)
        at = self._body_at(cell, index)
        body = self.memory[at : at + _SHORT]  # each line of it comes from another processor
        text, payload, failure, check = HEAD.unpack_from(body)
        end = HEAD.size + text
        if end + payload + failure > _SHORT:
            body = self.memory[at : at + BODY_SIZE]
        if _check_of(number, flags, zlib.crc32(body[:end])) != check_of_all:
            return None
        return body[HEAD.size : end], payload, failure, check, body[end:]

    def last_word(self, index: int) -> bytes:
        """Return the latest word of a member; one of round 0 if it has posted nothing."""
        words = [self.memory[self.word_at(cell, index)] for cell in range(CELLS)]
        return max(words, key=_round_of)

    def posted(self, index: int) -> int:
        """Return how many rounds a member has posted."""
        return _round_of(self.last_word(index))

    def all_posted(self, number: int) -> bool:
        """Tell whether every member has posted round `number`."""
        return all(self.posted(index) >= number for index in range(self.count))

    def _body_at(self, cell: int, index: int) -> int:
        return self._bodies_at + (cell * self.count + index) * BODY_SIZE

    # -- what members say of aborts -----------------------------------------------------------

    def intend(self, index: int, number: int) -> None:
        """Say that `index` wants round `number` aborted; 0 takes it back."""
        at = self.intents.start + 8 * index
        self.memory[at : at + 8] = number.to_bytes(8, "little")

    def intended(self) -> list[int]:
        """Return the round that each member, and last an outsider, wants aborted, or 0."""
        raw = self.memory[self.intents]
        return list(struct.unpack(f"<{self.count + 1}Q", raw))

    def write_text(self, index: int, text: bytes) -> None:
        """Write one's own text."""
        at = self._texts_at + index * TEXT_SIZE
        text = text[: TEXT_SIZE - _TEXT.size]
        self.memory[at + _TEXT.size : at + _TEXT.size + len(text)] = text
        self.memory[at : at + _TEXT.size] = _TEXT.pack(len(text), zlib.crc32(text))

    def read_text(self, index: int) -> bytes | None:
        """Return the text of `index`, or None while it is not whole."""
        at = self._texts_at + index * TEXT_SIZE
        length, check = _TEXT.unpack_from(self.memory, at)
        text = self.memory[at + _TEXT.size : at + min(_TEXT.size + length, TEXT_SIZE)]
        return text if len(text) == length and zlib.crc32(text) == check else None

    def close(self) -> None:
        """Let go of the file."""
        self.memory.close()


def _no_board(
    directory: PrivateDirectory, name: str, count: int, magic: bytes
) -> ConfigurationError:
    path = directory.path / name
    if magic.rstrip(b"\0") != _MAGIC and magic.startswith(_FAMILY):
        return ConfigurationError(
            f"{path} is of another version of syncprims; start all ranks from one installation"
        )
    return ConfigurationError(
        f"{path} is no board of {count} ranks of this version: it is damaged, or something else; "
        f"end what is left of the run, and remove {path.parent.parent}"
    )


def _round_of(word: bytes) -> int:
    return int.from_bytes(word[:8], "little")


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def lay(fd: int, size: int, header: bytes) -> None:
    """Make a new file of `size` bytes with this header; one that is there already stays.

    A rank that was killed in here leaves one without a header, which is as good as new.
    """
    if os.fstat(fd).st_size == 0 or os.pread(fd, len(header), 0) == bytes(len(header)):
        allocate(fd, size)
        os.pwrite(fd, header, 0)


def allocate(fd: int, size: int) -> None:
    """Give the file `size` bytes that are really there: a map of it can never fault."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS: only what is not there yet, since others may use the rest already
        end = os.fstat(fd).st_size
        while end < size:
            end += os.pwrite(fd, b"\0" * min(1 << 20, size - end), end)
