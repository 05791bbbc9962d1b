"""States that each rank saves alone.

A rank saves alone where a script saves on some ranks only. Main saves the common objects and its
random numbers. Any other rank that calls it saves its random numbers in a directory inside main's:
``rank-00001``. Each of these is a checkpoint of one rank, complete or absent. A mark, equal
on all ranks at one point of the program, shows which belong together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from syncprims import CheckpointError, current, get_rank, get_world_size, is_main
from syncprims._world.world import get_own_group
from syncprims.training.checkpoints import (
    Saving,
    Stateful,
    filesystem,
    load_state,
    save_state,
)
from syncprims.training.checkpoints.coordination import coordinate, directory_path, meet
from syncprims.training.checkpoints.states import MANIFEST, read_manifest

StateFiles = str | os.PathLike[str]


def save_alone(
    directory: StateFiles,
    objects: Callable[[], Mapping[str, Stateful]],
    *,
    mark: int,
    block: bool = True,
) -> Saving:
    """Save this rank's part of a state, without waiting for another rank.

    `objects` returns the common objects; it is called with this rank as the only one.

    :raises CheckpointError: on this rank, if it cannot write its part.
    """
    path = directory_path(directory)
    filesystem.make_directory(path)  # the ranks' parts may come in any order
    with get_own_group(current()):
        common = objects()
        if not is_main():
            return save_state(_part(path, get_rank()), {}, step=mark, block=block)
        return save_state(path, common, step=mark, block=block)


def load_alone(directory: StateFiles, objects: Callable[[], Mapping[str, Stateful]]) -> None:
    """Load what :func:`save_alone` or ``save_state`` has saved. Collective.

    Random numbers of ranks that are not there are left as they are and logged.

    :raises CheckpointError: on all ranks, as ``load_state``, but not for another number of ranks.
    """
    path = directory_path(directory)
    doing = f"load_state from {path}"
    meet(doing, path)  # each rank has saved before

    def saved() -> tuple[int, int | None]:
        if "random_states_0.pkl" in filesystem.names(path):
            raise CheckpointError(
                f"{path}: Accelerate has saved this state, in pickles, which are not read here. "
                f"Load the weights by load_checkpoint_in_model(model, {path!r}), and begin with a "
                f"new optimizer and schedule.",
                path=path,
            )
        state = read_manifest(path)
        return len(state.ranks), state.step

    (count, mark), _ = coordinate(doing, saved)
    if count > 1 or get_world_size() == 1:
        load_state(path, objects(), any_world_size=True)
        if count != get_world_size():
            _warn(path, list(range(get_world_size())), f"it was saved by {count} ranks")
        return

    def read() -> bool:
        with get_own_group(current()):
            load_state(path, objects(), rng=is_main())
            if is_main():
                return True
            part = _part(path, get_rank())
            if not filesystem.exists(f"{part}/{MANIFEST}") or read_manifest(part).step != mark:
                return False
            load_state(part, {})
            return True

    _, complete = coordinate(doing, read)
    missing = [rank for rank, there in enumerate(complete) if not there]
    if missing:
        _warn(path, missing, "main saved it without them")


def _warn(path: str, ranks: list[int], why: str) -> None:
    if is_main():
        filesystem.LOG.warning(
            "%s has no random numbers of ranks %s, because %s: these ranks keep their own",
            path, ranks, why,
        )  # fmt: skip


def _part(path: str, rank: int) -> str:
    return f"{path}/rank-{rank:05d}"
