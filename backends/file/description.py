"""The description of a world and its boards, for readers outside of the world.

A small file describes the world, and another one each of its boards. No rank depends on their
content, so a damaged file harms no rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims.interface import Label

if TYPE_CHECKING:  # Windows, where others read it, has no such module
    from .private_dir import PrivateDirectory

FILE = "world"  #: that of the world
OF_BOARD = "-about"  #: the end of the name of a board's, after the board's own


class WorldDescription(NamedTuple):
    """A world, or its part on one host. Ranks are written as by `format_ranks`."""

    run_id: str
    backend: str
    world_size: int
    ranks: str  #: of this host, by process number
    hosts: Sequence[Sequence[str]] = ()  #: name and ranks of each, if there are several
    processes: Sequence[int] = ()  #: of the ranks of this host, if they are not the first ones
    #: If there are several hosts, where the ranks publish their :class:`RankDescription`: host,
    #: port and prefix of the store, what a key begins with, and the seconds between two of them.
    store: Sequence[Any] = ()


class RankDescription(NamedTuple):
    """What a rank publishes about itself for readers on other hosts, again and again."""

    pid: int
    now: float  #: of its own clock, as :func:`time.monotonic`
    #: Of its boards with members on several hosts: the members, its last round and the label of
    #: that, what it waits for: a round, since when, and whether for data; and the board's name.
    boards: Sequence[tuple[str, int, str, Sequence[Any], str]]
    frames: Sequence[Mapping[str, Any]]  #: the stack of its main thread, if it waits at none


class HostReport(NamedTuple):
    """What one host knows of others that have not come to a round."""

    come: Sequence[int]  #: hosts that have come meanwhile
    seen: Mapping[str, Sequence[Any]]  #: by rank: its last round, and the label of that as text
    silent: Mapping[str, float]  #: by host: seconds without a sign of life

    def last_seen(self, rank: int) -> tuple[int, Label | None] | None:
        """Return the last round of `rank` and the label of that, if something is known of it."""
        if str(rank) not in self.seen:
            return None
        rounds, text = self.seen[str(rank)]
        return rounds, None if text is None else Label.decode(text.encode("latin-1"))


NO_REPORT = HostReport((), {}, {})  #: nothing is known


class BoardDescription(NamedTuple):
    """A board, or its part on one host."""

    members: str  #: on all hosts
    here: str  #: those whose notes are in the cells, in their order
    name: str = ""  #: beside it, boards may have the same members


def describe(
    directory: PrivateDirectory,
    name: str,
    about: WorldDescription | BoardDescription,
    *,
    replace: bool = False,
) -> None:
    """Write a description into the file `name`, or replace it. The caller holds the run's lock.

    :raises ConfigurationError: if the file is something else.
    :raises OSError: if there is no space for it.
    """
    if not replace and name in directory.names():
        os.close(directory.open_file(name, os.O_RDONLY))  # checks it; the others write the same
    else:
        directory.replace(name, json.dumps(about).encode())
