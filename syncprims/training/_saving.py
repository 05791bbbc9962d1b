"""What the Accelerator saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncprims import CheckpointError, all_gather, barrier, get_rank, is_main

from .preparation import unwrap_model
from .seeding import random_state, set_random_state

if TYPE_CHECKING:
    from torch import nn

    from .preparation import Preparation


def save(obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write `obj` to the file `f` on rank 0, whole or not at all; the others go on at once.

    With `safe_serialization`, `obj` is a dict of tensors and the file one of safetensors.
    """
    if not is_main():
        return
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    path = Path(f)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        if safe_serialization:
            from safetensors.torch import save_file

            save_file({name: t.contiguous() for name, t in obj.items()}, beside, {"format": "pt"})
        else:
            torch.save(obj, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class Saving:
    """The saving half of an Accelerator."""

    preparation: Preparation

    def _start_saving(self) -> None:
        self._registered: dict[str, Any] = {}

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` to the file `f` on rank 0. See :func:`save`."""
        save(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state, under the names it had before `prepare`."""
        return (unwrap_model(model, keep_fp32_wrapper=True) if unwrap else model).state_dict()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let :meth:`save_state` and :meth:`load_state` take care of these objects, too.

        :raises ValueError: if one has no ``state_dict`` and ``load_state_dict``.
        """
        for obj in objects:
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                raise ValueError(
                    f"{obj!r} has no state_dict() and load_state_dict(); only objects that have "
                    f"both can be checkpointed"
                )
            self._registered[f"registered_{len(self._registered)}"] = obj

    def stateful(self) -> dict[str, Any]:
        """Return everything with a state, by name: each has `state_dict` and `load_state_dict`."""
        return {}

    def save_state(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the job's whole state to a directory; all ranks return when all have. Collective.

        :raises CheckpointError: on all ranks, if one cannot write its part.
        """
        folder = Path(output_dir)
        part = folder / f"rank_{get_rank()}.pt"
        state = {name: obj.state_dict() for name, obj in self.stateful().items()}
        state["random"] = random_state()
        problem = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = part.with_suffix(".new")
            torch.save(state, beside)
            beside.replace(part)
        except OSError as error:
            problem = f"{part}: {error}"
        _agree(problem, "saved")

    def load_state(self, input_dir: str | os.PathLike[str]) -> None:
        """Continue with the state in a directory. Collective.

        :raises CheckpointError: on all ranks, if one cannot read its part.
        """
        part = Path(input_dir) / f"rank_{get_rank()}.pt"
        problem, state = None, {}
        try:
            state = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            problem = f"{part}: {error}"
        named = self.stateful()
        if problem is None and (absent := named.keys() - state.keys()):
            problem = f"{part}: no state of {sorted(absent)}"
        _agree(problem, "loaded")
        for name, obj in named.items():
            obj.load_state_dict(state[name])
        set_random_state(state["random"])
        barrier("load_state")


def _agree(problem: str | None, what: str) -> None:
    """Return if all ranks are well; otherwise raise the same error on all."""
    for rank, said in enumerate(all_gather(problem)):
        if said is not None:
            raise CheckpointError(f"the state was not {what}: rank {rank}, {said}", rank=rank)
