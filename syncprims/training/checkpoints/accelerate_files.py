"""States that Accelerate has saved: its files, read without running code."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncprims import CheckpointError, get_rank
from syncprims.training.rng import restore_cpu

from . import filesystem, manifest
from .coordination import Directory, Team, coordinate
from .integrity import refusal
from .load_model import load_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from .stateful import Stateful

_MODEL = "pytorch_model"
_MARKS = ("model.safetensors", "pytorch_model.bin", "optimizer.bin", "random_states_0.pkl")
#: What a state of numpy's generator is made of, in files of torch.
_NUMPY: Any = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    getattr(np, "_core", getattr(np, "core", None)).multiarray._reconstruct,  # type: ignore[union-attr]
]


def is_by_accelerate(directory: str | os.PathLike[str]) -> bool:
    """Return whether Accelerate has saved the state in a directory."""
    path = Directory.of(directory).path
    if not filesystem.is_directory(path):
        return False
    names = filesystem.names(path)
    return manifest.NAME not in names and any(mark in names for mark in _MARKS)


def load_accelerate_state(
    directory: str | os.PathLike[str],
    models: Sequence[nn.Module],
    optimizers: Sequence[Stateful],
    schedules: Sequence[Stateful],
    registered: Mapping[str, Stateful],
    scaler: Any = None,
) -> None:
    """Load a state that Accelerate has saved. Collective.

    Each rank reads the files, and its own random states. What is missing of the random states, or
    cannot be read without running code, is logged and left as it is; so is ``sampler.bin``.

    :raises CheckpointError: on all ranks, naming the file, if one of another object is missing, or
        cannot be read. Objects before it have been loaded.
    """
    path = Directory.of(directory).path
    doing = f"load_state from {path}"
    Team.meet(doing)

    def read() -> None:
        names = set(filesystem.names(path))
        for i, model in enumerate(models):
            candidates = _numbered("model", i, ".safetensors"), _numbered(_MODEL, i, ".bin")
            file = _first(path, names, *candidates)
            load_model(model, file, None, None, strict=True, allow_links=False)
        for kind, objects in (("optimizer", optimizers), ("scheduler", schedules)):
            for i, one in enumerate(objects):
                one.load_state_dict(_read(_first(path, names, _numbered(kind, i, ".bin"))))
        if scaler is not None:
            scaler.load_state_dict(_read(_first(path, names, "scaler.pt")))
        for i, one in enumerate(registered.values()):
            one.load_state_dict(_read(_first(path, names, f"custom_checkpoint_{i}.pkl")))
        _restore_random_states(path, names)
        for name in sorted(names):
            if name.startswith(("sampler", "dl_state_dict")):
                filesystem.LOG.warning(
                    "%s/%s is not read: it may need code to be run, and the order of data follows "
                    "from a seed here", path, name,
                )  # fmt: skip

    coordinate(doing, read, lambda _: None)


def _numbered(stem: str, number: int, ending: str) -> str:
    return f"{stem}_{number}{ending}" if number else f"{stem}{ending}"


def _first(path: str, names: set[str], *candidates: str) -> str:
    for name in candidates:
        if name in names:
            return f"{path}/{name}"
    raise refusal(path, "missing", " or ".join(candidates), ", ".join(sorted(names)))


def _read(path: str) -> Any:
    """Return what is in one of torch's files. No code in it is run.

    :raises CheckpointError: if it cannot be read, or needs code.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors
        first = str(error).strip().split("\n", 1)[0]
        raise refusal(path, "not readable", "tensors and plain data, no code", first) from error


def _restore_random_states(path: str, names: set[str]) -> None:
    name = f"random_states_{get_rank()}.pkl"
    try:
        if name not in names:
            raise refusal(f"{path}/{name}", "missing", "random states of this rank", "none")
        states = _read(f"{path}/{name}")
        version, words, gauss = states["random_state"]
        python = (version, tuple(words), gauss)
        restore_cpu((python, states["numpy_random_seed"], states["torch_manual_seed"]))
        if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
            torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
    except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError) as error:
        filesystem.LOG.warning("random numbers are left as they are: %s", error)
