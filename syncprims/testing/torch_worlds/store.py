"""The store of ``torch.distributed`` in the world of a test.

A rank that waits for a key waits for any of the other ranks. The world sees that as it sees a wait
at a board: it ends with an error if no rank can ever set the key.
"""

from __future__ import annotations

import contextlib
import fcntl
import pickle
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from syncprims import errors
from syncprims._protocol.diagnosis import Snapshot
from syncprims._world.group import rounds_of
from syncprims._world.world import World, wait_any
from syncprims.c10d.torch_internals import dist
from syncprims.interface import Board, BoardView, Label


class Table(Protocol):
    """The keys and values of a store, which all ranks of a world share."""

    def read(self) -> dict[str, bytes]:
        """Return what is in it now."""
        ...

    def change(self) -> contextlib.AbstractContextManager[dict[str, bytes]]:
        """Return a context that changes the table; no other rank reads or changes it meanwhile."""
        ...


class SharedTable:
    """A table of ranks that are threads: one runs at a time, and keeps the turn in here."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def read(self) -> dict[str, bytes]:
        """Return what is in it now."""
        return self._values

    @contextlib.contextmanager
    def change(self) -> Generator[dict[str, bytes]]:
        """Return what is in it now."""
        yield self._values


class FileTable:
    """A table of ranks that are processes; a file contains it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.touch()

    def read(self) -> dict[str, bytes]:
        """Return what is in it now."""
        with self._path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._load(file.read())

    @contextlib.contextmanager
    def change(self) -> Generator[dict[str, bytes]]:
        """Return what is in it now; what the block has made of that is written at its end."""
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            values = self._load(file.read())
            yield values
            file.seek(0)
            file.truncate()
            file.write(pickle.dumps(values))

    def _load(self, data: bytes) -> dict[str, bytes]:
        return dict(pickle.loads(data)) if data else {}


class WorldStore(dist.Store):  # type: ignore[misc]
    """A store of one rank in the world of a test."""

    def __init__(self, table: Table, world: World, prefix: str) -> None:
        """Use `table`; `prefix` distinguishes the keys from those of earlier stores."""
        super().__init__()
        self._table = table
        self._world = world
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        with self._table.change() as values:
            values[self._prefix + key] = _encode(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once a rank has set it."""
        self._yield()
        self._await([key], None, "get")
        return self._table.read()[self._prefix + key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key has, from 0 on, and return the sum."""
        self._yield()
        with self._table.change() as values:
            number = int(values.get(self._prefix + key, b"0")) + amount
            values[self._prefix + key] = str(number).encode()
        return number

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        with self._table.change() as values:
            values[self._prefix + key] = values.get(self._prefix + key, b"") + _encode(value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if the old one is the expected one; return what the key has then."""
        self._yield()
        with self._table.change() as values:
            old = values.get(self._prefix + key)
            if old == _encode(expected) or (old is None and not expected):
                values[self._prefix + key] = _encode(desired)
            return values.get(self._prefix + key, _encode(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys have been set."""
        self._yield()
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all these keys have been set."""
        self._await(keys, timeout, "wait")

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was there."""
        self._yield()
        with self._table.change() as values:
            return values.pop(self._prefix + key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys there are."""
        self._yield()
        return sum(key.startswith(self._prefix) for key in self._table.read())

    # torch's C++ code finds these by their names in C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, once all have been set."""
        self._yield()
        self._await(keys, None, "multi_get")
        values = self._table.read()
        return [values[self._prefix + key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of these keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that there are `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the time limit of other stores: a wait that cannot end is found without one."""

    def _yield(self) -> None:
        """Give up the turn: a program may read again and again, until another rank changes a key.

        `set` does not: a rank that only writes waits for no other.
        """
        wait_any(self._world, [rounds_of(self._world.group)], lambda: True, 0.0)

    def _has(self, keys: Sequence[str]) -> bool:
        values = self._table.read()
        return all(self._prefix + key in values for key in keys)

    def _await(self, keys: Sequence[str], timeout: timedelta | None, call: str) -> None:
        """Return once all keys are there.

        :raises PeerLost, PeerFailed: if a rank is lost or has failed, or all others have finished.
        :raises CollectiveMismatch: if all ranks wait for each other.
        :raises torch.distributed.DistStoreError: after `timeout`, as from other stores.
        """
        if self._has(keys):
            return
        rounds = rounds_of(self._world.group)
        label = rounds.note(f"store.{call}", ", ".join(keys)).label
        rank, board = self._world.rank, rounds.board
        begin = board.now()

        def came() -> bool:
            if self._has(keys):
                return True
            error = _absence(board, rank, label, board.now() - begin)
            if error is not None and timeout is None:
                board.abort(errors.dump(error))
            return False

        seconds = None if timeout is None else timeout.total_seconds()
        if wait_any(self._world, [rounds], came, seconds, str(label)):
            return
        verdict = board.verdict()
        if verdict is not None:
            raise errors.load(verdict)
        raise dist.DistStoreError(f"{label} timed out after {seconds:g} s: the keys were not set")


def _absence(board: Board, rank: int, label: Label, waited: float) -> errors.SyncError | None:
    """Return why what `rank` waits for will not come; None if another rank may still set it."""
    seen = {member: board.status(member)._replace(rounds=0) for member in board.members}
    seen[rank] = seen[rank]._replace(rounds=1, label=label)
    states = {status.state for member, status in seen.items() if member != rank}
    if states - {"finished"} and not states & {"lost", "failed"}:
        return None
    return Snapshot(BoardView(board.members, seen, {}), rank, 1, waited, 0).absence()


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
