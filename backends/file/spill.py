"""What does not fit into a cell: a file of its own for one rank and round."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory


class Apart:
    """The files apart from the board `board` in `directory`."""

    def __init__(self, directory: PrivateDirectory, board: str) -> None:
        self._directory = directory
        self._board = board
        self.written: list[tuple[int, str]] = []  #: one's own that still stand: round and name

    def write(self, rank: int, number: int, content: bytes) -> None:
        """Write what this rank says in round `number`.

        :raises OSError: if the disk is full; then nothing is left of it.
        """
        name = self._name(rank, number)
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
        self.written.append((number, name))

    def read(self, rank: int, number: int) -> bytes:
        """Return what `rank` said in round `number`; what is not there is empty."""
        try:
            fd = self._directory.open_file(self._name(rank, number), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def remove_before(self, number: int) -> None:
        """Remove one's own files of the rounds before `number`."""
        while self.written and self.written[0][0] < number:
            self._directory.remove(self.written.pop(0)[1])

    def _name(self, rank: int, number: int) -> str:
        return f"{self._board}-{rank}-{number}"
