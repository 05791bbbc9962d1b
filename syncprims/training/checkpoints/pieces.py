"""The digest of much data: of pieces first, so that several processors can share the work.

XXH3-128 of each :data:`LENGTH` bytes, and XXH3-128 of these digests one after another.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import xxhash

from .threads import share

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 4 << 20  #: bytes in a piece, the last one excepted. Part of the format
_AT_ONCE = 1 << 20  # bytes that are read and then digested: they are in the processor's cache then


class Digest:
    """Takes data as they come, and has their digest in the end."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_128()
        self._room = LENGTH

    def update(self, data: memoryview) -> None:
        """Take some more data."""
        while data:
            some, data = data[: self._room], data[self._room :]
            self._piece.update(some)
            self._room -= len(some)
            if not self._room:
                self._close_piece()

    def _close_piece(self) -> None:
        self._whole.update(self._piece.digest())
        self._piece.reset()
        self._room = LENGTH

    def hexdigest(self) -> str:
        """Return the digest of all; nothing more can be taken."""
        if self._room < LENGTH:
            self._close_piece()
        return self._whole.hexdigest()


def digest_of(
    length: int, read: Callable[[memoryview, int], None], tell: Callable[[int], object]
) -> str:
    """Return the digest of `length` bytes, of which ``read(room, start)`` brings some into memory.

    `tell` is called with numbers of bytes. Takes a megabyte of memory for each thread.
    """
    found = [b""] * -(-length // LENGTH)
    own = threading.local()

    def one(number: int) -> int:
        room = getattr(own, "room", None)
        if room is None:
            room = own.room = memoryview(bytearray(_AT_ONCE))
        begin, hashed = number * LENGTH, xxhash.xxh3_128()
        end = min(begin + LENGTH, length)
        for start in range(begin, end, _AT_ONCE):
            some = room[: end - start]
            read(some, start)
            hashed.update(some)
        found[number] = hashed.digest()
        return end - begin

    share(one, len(found), tell)
    return xxhash.xxh3_128_hexdigest(b"".join(found))
