"""The store of ``torch.distributed`` in the world of a test.

A rank that waits for a key waits for the other ranks: like a wait at a board, it is seen by the
scheduler or in the journals, and it ends if no rank can ever set the key.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import torch.distributed as dist


class Table(Protocol):
    """The keys and values of a store, which all ranks share; single operations are atomic."""

    def __getitem__(self, key: str) -> bytes: ...
    def __setitem__(self, key: str, value: bytes) -> None: ...
    def __delitem__(self, key: str) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no other rank changes the table."""
        ...


class SharedTable(dict[str, bytes]):
    """A table of ranks that are threads, one of which runs at a time."""

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Do nothing: the turn passes nowhere in such a block."""
        yield


class FileTable:
    """A table of ranks that are processes: a file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        new = self._folder / f".new-{os.getpid()}"
        new.write_bytes(value)
        new.rename(self._path(key))

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __contains__(self, key: object) -> bool:
        return self._path(str(key)).exists()

    def __iter__(self) -> Iterator[str]:
        names = (path.name for path in self._folder.iterdir())
        return (unquote(name[1:]) for name in names if name.startswith("="))

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Keep the others out of such blocks."""
        with (self._folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, key: str) -> Path:
        return self._folder / f"={quote(key, safe='')}"
