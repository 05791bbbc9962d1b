"""What a world and its boards are, for those who read them from outside.

The ranks themselves do not read it. So nothing depends on these files, and a damaged one is no
error.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .private_dir import PrivateDirectory

WORLD = "world"  #: the name of a world's description
OF_BOARD = "-members"  #: what the name of a board's description adds to that of the board


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
    slots: str  #: their liveness slots


def write_description(
    directory: PrivateDirectory, name: str, description: WorldDescription | BoardDescription
) -> None:
    """Write the description, unless there is one; under the run's lock.

    :raises OSError: if there is no space for it.
    """
    try:
        fd = directory.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        json.dump(description, file)
