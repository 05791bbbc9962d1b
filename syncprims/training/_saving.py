"""What the Accelerator saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import is_local_main, is_main

from ._familiar import only, refuse
from .checkpoints import (
    Checkpoints,
    Registered,
    agreed_steps,
    load_model,
    load_state,
    offer_models,
    offer_weights,
    save_model,
    save_object,
    save_state,
)
from .preparation import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from .checkpoints import LoadHook, SaveHook, Saving
    from .preparation import Preparation


def save(obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write `obj` to the file `f` on rank 0, whole or not at all; the others go on at once.

    With `safe_serialization`, `obj` is a dict of tensors and the file one of safetensors. `f` may
    also be something with ``write``, which then gets the bytes. Links are followed, and what is no
    regular file stays as it is.

    :raises CheckpointError: on rank 0, naming path and errno, if it cannot be written, or there is
        something else in its place: a directory, a device.
    """
    if not is_main():
        return
    if not hasattr(f, "write"):
        save_object(obj, f, safe=safe_serialization)
    elif safe_serialization:
        from safetensors.torch import save as in_bytes

        f.write(in_bytes({name: t.contiguous() for name, t in obj.items()}, {"format": "pt"}))
    else:
        torch.save(obj, f)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    offload_folder: None = None,
    dtype: torch.dtype | str | None = None,
    *,
    strict: bool = True,
    allow_links: bool = False,
    **others: Any,
) -> None:
    """Bring the weights of a checkpoint into the model, after they have been proved whole.

    `checkpoint` is a weights file, an index, or a directory with one. `device_map` gives the device
    for each part of the model by the beginning of its name (``""`` is all), or one for all; `dtype`
    another type for its floating-point tensors. Parameters on the meta device come to be where the
    map says, else on the CPU. Without `strict`, tensors that are missing or not known to the model
    are reported and left. Symbolic links, as in the cache of a hub, are followed only with
    `allow_links`. Every rank that calls it reads for itself. Of what else Accelerate's function
    takes, what is so here anyway may be asked for.

    :raises CheckpointError: naming the file, what was expected and what was found; then the model
        is as it was, unless the message says otherwise: where the disk fails, or somebody writes to
        the file, after it has been proved; and where a part of the model takes names or values in
        its own way, so that only a load shows what is missing.
    :raises TypeError: if `checkpoint` is neither a str nor a path; and for what is not offered, as
        offloading, saying what to do instead.
    :raises ValueError: if `device_map` names a device that cannot hold tensors, or none for a
        parameter.
    """
    refuse("load_checkpoint_in_model", {"offload_folder": offload_folder, **others})
    load_model(model, checkpoint, device_map, dtype, strict=strict, allow_links=allow_links)


class Project(NamedTuple):
    """Where an Accelerator saves, as Accelerate's ProjectConfiguration says it: to be read."""

    project_dir: Path | None
    logging_dir: Path | None
    automatic_checkpoint_naming: bool  #: with a directory, always
    total_limit: int | None  #: of checkpoints that are kept
    iteration: int  #: the number of the next one
    save_on_each_node: bool = False


class Checkpointing:
    """The part of an Accelerator that saves and loads."""

    preparation: Preparation

    def _start_saving(
        self,
        project_dir: str | os.PathLike[str] | None,
        logging_dir: str | os.PathLike[str] | None,
        keep_last: int | None,
    ) -> None:
        self.project_dir = None if project_dir is None else Path(project_dir)
        #: where trackers of the user's may write; the project's directory unless told otherwise
        self.logging_dir = self.project_dir if logging_dir is None else Path(logging_dir)
        self._keep_last = keep_last
        self._registered: dict[str, Any] = {}
        self._before_saving: list[SaveHook] = []
        self._before_loading: list[LoadHook] = []

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` to the file `f` on rank 0. See :func:`save`."""
        save(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state, under the names it had before `prepare`."""
        return (unwrap_model(model, keep_fp32_wrapper=True) if unwrap else model).state_dict()

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Let :meth:`save_state` and :meth:`load_state` take care of these objects, too.

        Each is saved under its name. Those without get ``registered_0`` and so on, by order.

        :raises ValueError: if one has no ``state_dict`` and ``load_state_dict``, or a name is
            taken.
        """
        first = sum(name.startswith("registered_") for name in self._registered)
        fresh = {f"registered_{first + i}": obj for i, obj in enumerate(objects)} | named
        taken = {*self.stateful(), *self.rank_stateful()}
        for name, obj in fresh.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                raise ValueError(
                    f"{obj!r} has no state_dict() and load_state_dict(); only objects that have "
                    f"both can be checkpointed"
                )
            if name in taken:
                raise ValueError(f"the name {name!r} is taken; give {obj!r} another")
        self._registered.update(fresh)

    def stateful(self) -> dict[str, Any]:
        """Return what has a state that is the same on all ranks, by name."""
        return {}

    def rank_stateful(self) -> dict[str, Any]:
        """Return what has a state of this rank's own, by name."""
        return {}

    def _named_models(self) -> dict[str, nn.Module]:
        """Return the prepared models by the names that they are saved under."""
        return {}

    def register_save_state_pre_hook(self, hook: SaveHook) -> Registered:
        """Call ``hook(models, weights, directory)`` on every rank before each :meth:`save_state`.

        It may write files of its own to the directory, which is there, change the models' weights,
        and take those out of the list that are not to be saved: what it leaves on the first rank
        counts. What it raises, all ranks raise as a `CheckpointError`. It ends with the handle's
        ``remove()``.
        """
        return Registered(self._before_saving, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> Registered:
        """Call ``hook(models, directory)`` on every rank before each :meth:`load_state`.

        It may load models by itself, and takes those out of the list: on every rank the same. What
        it raises, all ranks raise as a `CheckpointError`. It ends with the handle's ``remove()``.
        """
        return Registered(self._before_loading, hook)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model's weights, for this library and others to read. Collective.

        See :func:`syncprims.training.save_model`.
        """
        save_model(unwrap_model(model), save_directory, max_shard_size, safe_serialization)

    @property
    def should_save_model(self) -> bool:
        """Whether this is the first rank of its node, for scripts that write models themselves."""
        return is_local_main()

    @property
    def project_configuration(self) -> Project:
        """The project's directories, how many checkpoints are kept, and the next one's number."""
        named = self.project_dir is not None
        return Project(
            self.project_dir, self.logging_dir, named, self._keep_last, self.save_iteration
        )

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint in the project's directory."""
        if self.project_dir is None:
            return 0
        latest = self._checkpoints().latest()
        return 0 if latest is None else latest + 1

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
    ) -> Saving:
        """Save the job's whole state to a directory: whole, or not at all. Collective.

        Without `output_dir` it is the next ``checkpoint_N`` in ``checkpoints`` of the project's
        directory. With ``block=False`` it is written behind the training, and the handle's
        ``wait()`` returns when it is durable.

        :raises CheckpointError: on all ranks, if one cannot write its part.
        """
        instead = "leave it out: a state is tensors and JSON, and never pickle"
        only(True, safe_serialization, "save_state(safe_serialization=False)", instead)
        common, own = self.stateful(), self.rank_stateful()
        models, hooks = self._named_models(), self._before_saving
        if output_dir is not None:
            offer_weights(os.fspath(output_dir), hooks, models, common)
            return save_state(output_dir, common, rank_objects=own, block=block)
        kept = self._checkpoints()
        step = max(agreed_steps(kept, f"save_state to {kept.directory}"), default=-1) + 1
        offer_weights(kept.path(step), hooks, models, common)
        return kept.save(step, common, rank_objects=own, block=block)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: None = None
    ) -> None:
        """Continue with the state in a directory, else with the project's latest. Collective.

        :raises CheckpointError: on all ranks, if there is none, it is not as it was saved, or it
            is of another number of ranks.
        """
        only({}, load_kwargs, "load_state(load_kwargs=)", "leave it out: all comes back as it was")
        common, own = self.stateful(), self.rank_stateful()
        models, hooks = self._named_models(), self._before_loading
        if input_dir is not None:
            offer_models(os.fspath(input_dir), hooks, models, common)
            load_state(input_dir, common, rank_objects=own)
            return
        kept = self._checkpoints()
        step = None
        if hooks and (steps := agreed_steps(kept, f"load_state from {kept.directory}")):
            step = steps[-1]
            offer_models(kept.path(step), hooks, models, common)
        kept.load(common, step, rank_objects=own)

    def _checkpoints(self) -> Checkpoints:
        if self.project_dir is None:
            raise ValueError("name a directory, or make the Accelerator with project_dir=")
        return Checkpoints(
            self.project_dir / "checkpoints", prefix="checkpoint_", keep_last=self._keep_last
        )
