"""States that each rank saves without the others, for scripts that save on some ranks only.

Main saves the common objects and its own. Any other rank that calls it saves its own objects and
random numbers in a directory inside main's: ``rank-00001``. Each of these is a checkpoint of one
rank, complete or absent. A mark, equal on all ranks at one point of the program, shows which belong
together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from syncprims import CheckpointError, current, get_rank, get_world_size, is_main
from syncprims._world.world import get_own_group

from . import filesystem, manifest
from .async_save import Saving
from .coordination import Directory, Team, coordinate
from .load_state import load_state
from .save_state import save_state

if TYPE_CHECKING:
    import os

    from .stateful import Stateful


def save_state_alone(
    directory: str | os.PathLike[str],
    objects: Callable[[], Mapping[str, Stateful]],
    rank_objects: Mapping[str, Stateful],
    *,
    mark: int,
    block: bool = True,
) -> Saving:
    """Save this rank's part of a state, without waiting for another rank.

    `objects` returns the common objects; it is called with this rank as the only one.

    :raises CheckpointError: on this rank, if it cannot write its part.
    """
    path = Directory.of(directory).path
    filesystem.make_directory(path)  # the ranks' parts may come in any order
    with get_own_group(current()):
        common = objects()
        if not is_main():
            part = _part(path, get_rank())
            return save_state(part, {}, rank_objects=rank_objects, step=mark, block=block)
        saving = save_state(path, common, rank_objects=rank_objects, step=mark, block=block)
    for name in filesystem.names(path):
        if name.startswith("rank-") and filesystem.is_directory(f"{path}/{name}"):
            with contextlib.suppress(CheckpointError):
                if manifest.read(f"{path}/{name}").step != mark:  # of an older state
                    filesystem.remove_directory_or_log(f"{path}/{name}")
    return saving


def load_state_alone(
    directory: str | os.PathLike[str],
    objects: Callable[[], Mapping[str, Stateful]],
    rank_objects: Mapping[str, Stateful],
) -> None:
    """Load what :func:`save_state_alone` or :func:`save_state` has saved. Collective.

    What is not there for a rank, its objects and random numbers, is left as it is and logged.

    :raises CheckpointError: on all ranks, as :func:`load_state`, but not for another number of
        ranks.
    """
    where = Directory.of(directory)
    path, doing = where.path, f"load_state from {where.path}"
    Team.meet(doing, where)  # each rank has saved before

    def saved() -> tuple[int, int | None]:
        found = manifest.read(path)
        return len(found.ranks), found.step

    (count, mark), _ = coordinate(doing, saved)
    if count > 1 or get_world_size() == 1:
        load_state(path, objects(), rank_objects=rank_objects, any_world_size=True)
        if count != get_world_size():
            _tell(path, list(range(get_world_size())), f"it was saved by {count} ranks")
        return

    def read() -> bool:
        with get_own_group(current()):
            if is_main():
                load_state(path, objects(), rank_objects=rank_objects)
                return True
            load_state(path, objects(), rng=False, strict=False)
            part = _part(path, get_rank())
            if not filesystem.exists(f"{part}/{manifest.NAME}"):
                return False
            if manifest.read(part).step != mark:
                return False
            load_state(part, {}, rank_objects=rank_objects)
            return True

    complete = coordinate(doing, read).by_rank
    missing = [rank for rank, there in enumerate(complete) if not there]
    if missing:
        _tell(path, missing, "main saved it without them")


def _tell(path: str, ranks: list[int], why: str) -> None:
    if is_main():
        filesystem.LOG.warning(
            "%s: it has no random numbers and data places of ranks %s: %s; these go on as they are",
            path, ranks, why,
        )  # fmt: skip


def _part(path: str, rank: int) -> str:
    return f"{path}/rank-{rank:05d}"
