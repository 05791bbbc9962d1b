"""The directory that a user names for a checkpoint, which all ranks must mean alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from syncprims import CheckpointError

from . import disk

if TYPE_CHECKING:
    from collections.abc import Sequence


class Directory(NamedTuple):
    """A directory, as it was passed and where that is."""

    given: str
    path: str  #: absolute: a later chdir must not matter

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> Directory:
        """Return the directory of this name.

        :raises TypeError: if it is neither a str nor a path.
        :raises ValueError: if it is empty, which is easily meant for something else.
        """
        given = os.fspath(cast("Any", directory))
        if not isinstance(given, str):
            raise TypeError(f"directory={directory!r}: it takes a str or a path")
        if not given:
            raise ValueError("directory='': it takes a name; '.' is the working directory")
        return cls(given, disk.absolute(given))

    def joined(self, name: str) -> Directory:
        """Return the directory of this name in this one."""
        return Directory(f"{self.given}/{name}", f"{self.path}/{name}")


class Named(NamedTuple):
    """Who names a directory, and which."""

    rank: int
    host: int
    given: str
    path: str

    def is_that_of(self, other: Named) -> bool:
        """Tell whether both mean the same.

        Ranks of two hosts may have other working directories and mounts: there, the same name does.
        """
        same = self.path == other.path
        return same or (self.host != other.host and self.given == other.given)


def check_same(call: str, named: Sequence[Named]) -> None:
    """Accept ranks that are about to save to one directory.

    :raises CheckpointError: on all ranks, otherwise.
    """
    first = named[0]
    for one in named:
        if not one.is_that_of(first):
            raise CheckpointError(
                f"{call}: rank {one.rank} saves to {one.path}, and rank {first.rank} to "
                f"{first.path}. Every rank passes the same directory: broadcast a name that comes "
                f"from a clock or a random number.",
                path=one.path,
                rank=one.rank,
            )
