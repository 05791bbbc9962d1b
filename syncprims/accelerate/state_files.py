"""States in files of two more kinds: those that each rank saves alone, and Accelerate's own.

A rank saves alone where a script saves on some ranks only. Main saves the common objects and its
own. Any other rank that calls it saves its own objects and random numbers in a directory inside
main's: ``rank-00001``. Each of these is a checkpoint of one rank, complete or absent. A mark, equal
on all ranks at one point of the program, shows which belong together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from syncprims import CheckpointError, current, get_rank, get_world_size, is_main
from syncprims._world.world import get_own_group
from syncprims.training.checkpoints import (
    Saving,
    Stateful,
    filesystem,
    load_checkpoint_in_model,
    load_state,
    save_state,
)
from syncprims.training.checkpoints.coordination import coordinate, directory_path, meet
from syncprims.training.checkpoints.integrity import refusal
from syncprims.training.checkpoints.states import MANIFEST, read_manifest
from syncprims.training.rng import restore_cpu

StateFiles = str | os.PathLike[str]


def save_alone(
    directory: StateFiles,
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
    path = directory_path(directory)
    filesystem.make_directory(path)  # the ranks' parts may come in any order
    with get_own_group(current()):
        common = objects()
        if not is_main():
            part = _part(path, get_rank())
            return save_state(part, {}, rank_objects=rank_objects, step=mark, block=block)
        return save_state(path, common, rank_objects=rank_objects, step=mark, block=block)


def load_alone(
    directory: StateFiles,
    objects: Callable[[], Mapping[str, Stateful]],
    rank_objects: Mapping[str, Stateful],
) -> None:
    """Load what :func:`save_alone` or ``save_state`` has saved. Collective.

    What is not there for a rank, its objects and random numbers, is left as it is and logged.

    :raises CheckpointError: on all ranks, as ``load_state``, but not for another number of ranks.
    """
    path = directory_path(directory)
    doing = f"load_state from {path}"
    meet(doing, path)  # each rank has saved before

    def saved() -> tuple[int, int | None]:
        state = read_manifest(path)
        return len(state.ranks), state.step

    (count, mark), _ = coordinate(doing, saved)
    if count > 1 or get_world_size() == 1:
        load_state(path, objects(), rank_objects=rank_objects, any_world_size=True)
        if count != get_world_size():
            _warn(path, list(range(get_world_size())), f"it was saved by {count} ranks")
        return

    def read() -> bool:
        with get_own_group(current()):
            if is_main():
                load_state(path, objects(), rank_objects=rank_objects)
                return True
            load_state(path, objects(), rng=False, strict=False)
            part = _part(path, get_rank())
            if not filesystem.exists(f"{part}/{MANIFEST}"):
                return False
            if read_manifest(part).step != mark:
                return False
            load_state(part, {}, rank_objects=rank_objects)
            return True

    _, complete = coordinate(doing, read)
    missing = [rank for rank, there in enumerate(complete) if not there]
    if missing:
        _warn(path, missing, "main saved it without them")


def _warn(path: str, ranks: list[int], why: str) -> None:
    if is_main():
        filesystem.LOG.warning(
            "%s has no random numbers and no windows of ranks %s, because %s: these ranks go on "
            "with their own", path, ranks, why,
        )  # fmt: skip


def _part(path: str, rank: int) -> str:
    return f"{path}/rank-{rank:05d}"


# -- what Accelerate has saved, read without running code -----------------------------------------

#: What a state of numpy's generator is made of, in files of torch.
_NUMPY: Any = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    getattr(np, "_core", getattr(np, "core", None)).multiarray._reconstruct,  # type: ignore[union-attr]
]
_MARKS = ("model.safetensors", "pytorch_model.bin", "optimizer.bin", "random_states_0.pkl")


def is_by_accelerate(directory: StateFiles) -> bool:
    """Return whether Accelerate has saved the state in a directory."""
    path = directory_path(directory)
    if not filesystem.is_directory(path):
        return False
    names = filesystem.names(path)
    return MANIFEST not in names and any(mark in names for mark in _MARKS)


def load_accelerate_state(
    directory: StateFiles, models: Sequence[nn.Module], objects: Mapping[str, Stateful]
) -> None:
    """Load a state that Accelerate has saved; `objects` are those of its other files. Collective.

    Random states that are missing, or cannot be read without running code, are logged and left as
    they are. The order of data follows from a seed here: ``sampler.bin`` is not read.

    :raises CheckpointError: on all ranks, naming the file, if one is missing, or cannot be read
        without running code. Objects before it have been loaded.
    """
    path = directory_path(directory)
    doing = f"load_state from {path}"
    meet(doing)

    def read() -> None:
        for i, model in enumerate(models):
            file = f"{path}/model{number_suffix(i)}.safetensors"
            older = f"{path}/pytorch_model{number_suffix(i)}.bin"
            load_checkpoint_in_model(model, file if filesystem.exists(file) else older)
        for name, obj in objects.items():
            obj.load_state_dict(_read(f"{path}/{name}"))
        try:
            _restore_random_states(_read(f"{path}/random_states_{get_rank()}.pkl"))
        except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError) as error:
            filesystem.LOG.warning("random numbers are left as they are: %s", error)

    coordinate(doing, read, lambda _: None)


def _read(path: str) -> Any:
    """Return what is in one of torch's files. No code in it is run."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors
        first = str(error).strip().split("\n", 1)[0]
        raise refusal(path, "not readable", "tensors and plain data, no code", first) from error


def _restore_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["random_state"]
    python = (version, tuple(words), gauss)
    restore_cpu((python, states["numpy_random_seed"], states["torch_manual_seed"]))
    if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


def number_suffix(index: int) -> str:
    """Return what Accelerate appends to the names of all files but the first."""
    return f"_{index}" if index else ""
