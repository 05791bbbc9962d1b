"""The digest of much data: of pieces first, so that several processors can share the work.

XXH3-128 of each :data:`LENGTH` bytes, and XXH3-128 of these digests one after another.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 4 << 20  #: bytes in a piece, the last one excepted. Part of the format
_ALONE = 4 * LENGTH  # bytes up to which starting threads is not worth it
_MOST_THREADS = 8  # more would only wait for memory


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


def digest_of(data: memoryview, tell: Callable[[int], object]) -> str:
    """Return the digest of data that are all there, having `tell` called with numbers of bytes."""
    whole = xxhash.xxh3_128()
    starts = range(0, len(data), LENGTH)

    def one(start: int) -> bytes:
        return xxhash.xxh3_128_digest(data[start : start + LENGTH])

    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    if len(data) <= _ALONE or threads == 1:
        for start in starts:
            whole.update(one(start))
            tell(min(LENGTH, len(data) - start))
        return whole.hexdigest()
    with ThreadPoolExecutor(threads) as pool:
        for start, found in zip(starts, pool.map(one, starts), strict=True):
            whole.update(found)
            tell(min(LENGTH, len(data) - start))
    return whole.hexdigest()
