"""What the ranks of one host tell each other about rounds with other hosts.

One rank asks the store, all read the answer here. Nothing relies on who that is: the fate of a
round is the same whoever writes it down, and each entry proves itself whole, as in the cells. Who
finds nothing here can still ask for itself.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

from ..file.memory import CELLS, lay

if TYPE_CHECKING:
    from ..file.private_dir import PrivateDirectory

_MAGIC = b"syncprims relay 1".ljust(32, b"\0")
_WORD = struct.Struct("<Q")
_ENTRY = struct.Struct("<QII")  # round, length, check
_ENTRY_SIZE = 8 * 1024
_NEWS_SIZE = 64 * 1024
#: In place of a fate that is too large to stand here: it is to be read from the store.
ELSEWHERE = b"?"


class Relay:
    """The shared memory of one board's `count` members on this host, one of whom is `index`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int, index: int) -> None:
        """Map it, making it if it is not there; under the table's lock.

        :raises OSError: if there is no room for it.
        """
        self._directory = directory
        self._name = name
        self._count = count
        self._index = index
        self._waiting_at = len(_MAGIC)
        self._brought_at = self._waiting_at + _WORD.size * count
        self._news_at = self._brought_at + _WORD.size
        self._entries_at = self._news_at + _NEWS_SIZE
        size = self._entries_at + CELLS * _ENTRY_SIZE
        fd = directory.open_file(f"{name}-relay", os.O_RDWR | os.O_CREAT)
        try:
            lay(fd, size, _MAGIC)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._cut: bytes | None = None

    # -- fates --------------------------------------------------------------------------------

    def publish(self, number: int, fate: bytes) -> None:
        """Write down the fate of a round."""
        if len(fate) > _ENTRY_SIZE - _ENTRY.size:
            fate = ELSEWHERE
        self._write(self._entries_at + number % CELLS * _ENTRY_SIZE, number, fate)

    def fate(self, number: int) -> bytes | None:
        """Return the fate of a round, None if it is not known here."""
        at = self._entries_at + number % CELLS * _ENTRY_SIZE
        return self._read(at, _ENTRY_SIZE, number)

    # -- who does what for the host -----------------------------------------------------------

    @property
    def brought(self) -> int:
        """The last round to which this host's notes have been brought."""
        return int(_WORD.unpack_from(self._memory, self._brought_at)[0])

    @brought.setter
    def brought(self, number: int) -> None:
        if number > self.brought:
            self._memory[self._brought_at : self._brought_at + _WORD.size] = _WORD.pack(number)

    def wait_for(self, number: int) -> None:
        """Say that this member waits for the fate of a round; 0: for none."""
        at = self._waiting_at + _WORD.size * self._index
        self._memory[at : at + _WORD.size] = _WORD.pack(number)

    def before_me(self, number: int) -> int:
        """Return how many members wait for the same round and come before this one."""
        begin = self._waiting_at
        words = struct.unpack_from(f"<{self._index}Q", self._memory, begin)
        return sum(word == number for word in words)

    # -- news of other hosts --------------------------------------------------------------------

    def tell(self, number: int, news: dict[str, Any]) -> None:
        """Write down what is known of those who have not come to a round yet."""
        data = json.dumps(news).encode()
        if len(data) <= _NEWS_SIZE - _ENTRY.size:
            self._write(self._news_at, number, data)

    def news(self, number: int) -> dict[str, Any]:
        """Return what was last told of a round."""
        data = self._read(self._news_at, _NEWS_SIZE, number)
        return json.loads(data) if data else {}

    # -- when the store is gone -------------------------------------------------------------------

    def cut(self, verdict: bytes) -> bytes:
        """Let this host break the board by itself; return the verdict of the first to say so."""
        name = f"{self._name}-cut-{self._index}"
        fd = self._directory.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as file:
            file.write(verdict)
        self._directory.claim(f"{self._name}-cut", str(self._index))
        return self.is_cut() or verdict

    def is_cut(self) -> bytes | None:
        """Return the verdict by which this host has broken the board by itself, if it has."""
        if self._cut is None:
            index = self._directory.claimed(f"{self._name}-cut")
            if index is not None and index.isdecimal():
                fd = self._directory.open_file(f"{self._name}-cut-{index}", os.O_RDONLY)
                with os.fdopen(fd, "rb") as file:
                    self._cut = file.read()
        return self._cut

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    # -- entries --------------------------------------------------------------------------------

    def _write(self, at: int, number: int, data: bytes) -> None:
        check = zlib.crc32(data, number & 0xFFFFFFFF)
        begin = at + _ENTRY.size
        self._memory[begin : begin + len(data)] = data
        self._memory[at:begin] = _ENTRY.pack(number, len(data), check)

    def _read(self, at: int, size: int, number: int) -> bytes | None:
        found, length, check = _ENTRY.unpack_from(self._memory, at)
        if found != number or length > size - _ENTRY.size:
            return None
        data = self._memory[at + _ENTRY.size : at + _ENTRY.size + length]
        return data if zlib.crc32(data, number & 0xFFFFFFFF) == check else None
