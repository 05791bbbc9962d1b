"""What a world and its boards are, for those who read them from outside.

One file has a line for the world and a line for each of its boards. No rank depends on its
content, so a damaged file harms no rank.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .private_dir import PrivateDirectory

FILE = "world"
LONGEST = 4 << 20  #: bytes of it
_WORLD = ""  # in place of the name of a board


class WorldDescription(NamedTuple):
    """A world, or its part on one host. Ranks are written as by `format_ranks`."""

    run_id: str
    backend: str
    world_size: int
    ranks: str  #: of this host, by liveness slot
    hosts: Sequence[Sequence[str]] = ()  #: name and ranks of each, if there are several


class BoardDescription(NamedTuple):
    """A board, or its part on one host."""

    members: str  #: on all hosts
    here: str  #: those whose notes are in the cells, in their order


def describe_world(directory: PrivateDirectory, description: WorldDescription) -> None:
    """Write what the world is, unless the file has it already. The caller holds the run's lock.

    :raises ConfigurationError: if the file is something else.
    :raises OSError: if there is no space for it.
    """
    _add(directory, [_WORLD, *description])


def describe_board(directory: PrivateDirectory, name: str, description: BoardDescription) -> None:
    """Write what the board `name` is, as :func:`describe_world`."""
    _add(directory, [name, *description])


def is_part_of(board: str, name: str) -> bool:
    """Return whether `name` is that of the board, or of something that belongs to it."""
    return name == board or name.startswith(f"{board}-")


def forget_board(directory: PrivateDirectory, name: str) -> None:
    """Remove what the file says of the board `name`. The caller holds the run's lock.

    :raises OSError: if there is no space for a new file; the old one stays.
    """
    new = f"{FILE}.new"
    lines = directory.read(FILE).splitlines(keepends=True)
    kept = [line for line in lines if not is_part_of(name, json.loads(line)[0])]
    directory.write(new, b"".join(kept))
    os.replace(new, FILE, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)  # readers take no lock


def _add(directory: PrivateDirectory, fields: list[Any]) -> None:
    line = json.dumps(fields).encode() + b"\n"
    with os.fdopen(directory.open_file(FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b") as file:
        found = file.read(LONGEST)
        if line not in found and len(found) < LONGEST:  # else it is damaged
            file.write(line)


def read_descriptions(data: bytes) -> tuple[WorldDescription, dict[str, BoardDescription]]:
    """Return what the content of the file says of the world and, by name, of its boards.

    :raises LookupError, TypeError, ValueError: if it says nothing of the world, or is damaged.
    """
    lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    found = {name: fields for name, *fields in lines}
    world = WorldDescription(*found.pop(_WORLD))
    return world, {name: BoardDescription(*fields) for name, fields in found.items()}
