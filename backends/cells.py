"""The memory of a board: a file of cells, mapped by every member.

Each member has :data:`CELLS` cells, written by it alone and used in turn. A cell is a *face*, one
cache line that says which round it is, and a *body* with the label and what else fits in.

Nothing relies on the order in which another processor sees the stores. A face carries a checksum
over all of itself, round included, and a checksum of its body. A reader takes a note only when both
prove it whole, so a half-written or stale one merely reads as "not there yet".
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import ConfigurationError
from syncprims.interface import Board

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

#: A member posts at most `depth` notes ahead of what it has collected. So whoever has collected
#: round k knows that all have collected round k - depth, and a cell is free again after twice that.
CELLS = 2 * Board.depth
FACE_SIZE = 64
BODY_SIZE = 2048
FACES_AT = 16 * 1024  #: before it: the header, and room for the longest verdict

FLAG, FAILED, APART = 1, 2, 4

_MAGIC = b"syncprims board 1"
_HEADER = struct.Struct("<32sI")  # magic, members
_FACE = struct.Struct("<QQIIQIII")
_CHECK = struct.Struct("<I")


class Face(NamedTuple):
    """What a cell says of itself."""

    round: int
    collected: int  #: rounds its owner had collected when it wrote this
    flags: int
    label: int  #: length of the encoded label, at the start of the body
    payload: int  #: lengths of what follows it, there or in a file apart
    failure: int
    label_check: int
    body_check: int  #: of all three

    def encode(self) -> bytes:
        """Return the face as it stands in memory, checksum and padding included."""
        packed = _FACE.pack(*self)
        return (packed + _CHECK.pack(zlib.crc32(packed))).ljust(FACE_SIZE, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> Face | None:
        """Return the face in `raw`, or None if its checksum does not prove it whole."""
        (check,) = _CHECK.unpack_from(raw, _FACE.size)
        if zlib.crc32(raw[: _FACE.size]) != check:
            return None
        return cls(*_FACE.unpack_from(raw))


_NO_FACE = Face(0, 0, 0, 0, 0, 0, 0, 0)


class Cells:
    """The cells of a board with `count` members, in the file `name` of `directory`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int) -> None:
        """Map the file, making it if it is not there; under the run's join lock.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if there is no room for it.
        """
        self.count = count
        self._bodies_at = FACES_AT + CELLS * count * FACE_SIZE
        size = self._bodies_at + CELLS * count * BODY_SIZE
        self.fd = directory.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            lay(self.fd, size, _HEADER.pack(_MAGIC, count))
            header = os.pread(self.fd, _HEADER.size, 0).ljust(_HEADER.size)
            magic, found = _HEADER.unpack(header)
            if magic.rstrip(b"\0") != _MAGIC or found != count or os.fstat(self.fd).st_size < size:
                raise ConfigurationError(
                    f"{directory.path / name} is no board of {count} ranks; remove the file, and "
                    f"start all ranks from one installation"
                )
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def face_at(self, cell: int, index: int) -> int:
        """Return where the face of member number `index` begins; those of a cell are adjacent."""
        return FACES_AT + (cell * self.count + index) * FACE_SIZE

    def body_at(self, cell: int, index: int) -> int:
        """Return where the body of member number `index` begins."""
        return self._bodies_at + (cell * self.count + index) * BODY_SIZE

    def raw_face(self, cell: int, index: int) -> bytes:
        """Return the face as it stands."""
        at = self.face_at(cell, index)
        return self.memory[at : at + FACE_SIZE]

    def last_face(self, index: int) -> Face:
        """Return the latest face of a member; one of round 0 if it has posted nothing."""
        faces = [Face.decode(self.raw_face(cell, index)) for cell in range(CELLS)]
        return max((face for face in faces if face is not None), default=_NO_FACE)

    def all_posted(self, number: int) -> bool:
        """Tell whether every member has posted round `number`."""
        return all(self.last_face(index).round >= number for index in range(self.count))

    def close(self) -> None:
        """Let go of the file."""
        self.memory.close()
        os.close(self.fd)


def lay(fd: int, size: int, header: bytes) -> None:
    """Make a new file of `size` bytes with this header; one that is there already stays.

    A rank that was killed in here leaves one without a header, which is as good as new.
    """
    if os.fstat(fd).st_size == 0 or os.pread(fd, len(header), 0) == bytes(len(header)):
        _allocate(fd, size)
        os.pwrite(fd, header, 0)


def _allocate(fd: int, size: int) -> None:
    """Give the file `size` bytes that are really there: a map of it can never fault."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        written = 0
        while written < size:
            written += os.pwrite(fd, b"\0" * min(1 << 20, size - written), written)
