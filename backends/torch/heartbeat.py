"""Signs of life between hosts: who has been silent for how long.

Each host counts up its key at the store several times within the time after which its silence
means that it is gone. Any of its ranks does it, so a stopped or busy one silences nobody. Only who
waits for a host looks at its key, and silence is measured on the waiting side's clock alone.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..file.private_dir import PrivateDirectory

_TIME = struct.Struct("<d")
BEATS = 5  #: within the time after which silence is taken for death


class Heartbeat:
    """The beats of this host, and what is known of the others'."""

    def __init__(self, directory: PrivateDirectory, prefix: str, host: int, limit: float) -> None:
        """Share the time of the last beat with the other ranks of this host.

        :raises OSError: if there is no room for it.
        """
        self.limit = limit  #: seconds of silence that mean death
        self._prefix = prefix
        self._host = host
        self._seen: dict[int, tuple[int, float]] = {}  # host -> beats, and since when
        fd = directory.open_file("beat", os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)

    @property
    def every(self) -> float:
        """Seconds between two beats."""
        return self.limit / BEATS

    def beat(self, store: Any) -> None:
        """Count one up for this host, unless another of its ranks just has."""
        now = time.monotonic()  # one clock for all processes of a host
        (last,) = _TIME.unpack_from(self._memory)
        if not 0 <= now - last < 0.75 * self.every:
            self._memory[: _TIME.size] = _TIME.pack(now)
            store.add(self._key(self._host), 1)

    def look(self, store: Any, hosts: Iterable[int]) -> None:
        """See whether these hosts have beaten since the last look."""
        for host in hosts:
            beats = store.add(self._key(host), 0)
            if self._seen.get(host, (-1, 0.0))[0] != beats:
                self._seen[host] = beats, time.monotonic()

    def silence(self, host: int) -> float:
        """Return for how many seconds, up to the last look, `host` has not been heard of."""
        _, since = self._seen.get(host, (0, time.monotonic()))
        return time.monotonic() - since

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _key(self, host: int) -> str:
        return f"{self._prefix}/beat/{host}"
