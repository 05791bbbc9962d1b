"""Saving and loading: the Accelerator's methods, and the functions of the same names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from syncprims import CollectiveMismatch, PeerLost, SyncTimeout, current, is_local_main, is_main
from syncprims._world.world import get_own_group
from syncprims.training import checkpoints
from syncprims.training.accumulation import Accumulator
from syncprims.training.checkpoints import LoadHook, Registered, SaveHook, Saving
from syncprims.training.preparation import Preparation, unwrap_model

from .config import AcceleratorSettings, check_fixed, check_unsupported


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
    """Load the weights of a checkpoint into the model, after the files are verified.

    `checkpoint` is a weights file, an index, or a directory with one. `device_map` gives the device
    for each part of the model by the beginning of its name (``""`` is all), or one device for all;
    `dtype` another type for its floating-point tensors. Parameters on the meta device are created
    on the device of the map, else on the CPU. If the whole model is there, its files are verified
    while they are read, in one pass, and otherwise before. Without `strict`, tensors that are
    missing or unknown to the model are logged and left. Symbolic links, as in the cache of a hub,
    are followed only with `allow_links`. Every rank that calls this reads for itself. Other
    arguments of Accelerate's function are accepted if they ask for what is always so here.

    :raises CheckpointError: naming the file, what was expected and what was found. The model is
        then unchanged, unless the message says otherwise: if the disk fails or the file is written
        to after it was verified, or if a part of the model loads names or values in its own way, so
        that only the load shows what is missing. A model on the meta device is always unchanged.
    :raises TypeError: if `checkpoint` is neither a str nor a path; and for what is not offered,
        such as offloading, saying what to do instead.
    :raises ValueError: if `device_map` names a device that cannot hold tensors, or none for a
        parameter.
    """
    check_unsupported("load_checkpoint_in_model", {"offload_folder": offload_folder, **others})
    checkpoints.load_model(
        model, checkpoint, device_map, dtype, strict=strict, allow_links=allow_links
    )


class Project(NamedTuple):
    """Where an Accelerator saves: the fields of Accelerate's ProjectConfiguration, read-only."""

    project_dir: Path | None
    logging_dir: Path | None
    automatic_checkpoint_naming: bool  #: True if there is a project directory
    total_limit: int | None  #: the number of checkpoints that are kept
    iteration: int  #: the number of the next checkpoint
    save_on_each_node: bool = False


class _OwnProject(Project):
    """The project of an Accelerator."""

    owner: Checkpointing

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            super().__setattr__(name, value)
        elif value != getattr(self, name):
            instead = "Accelerator(project_config=ProjectConfiguration(...))"
            if name == "iteration":
                instead = "leave it out: checkpoints are numbered from those in the directory"
            raise AttributeError(
                f"project_configuration.{name} = {value!r} is not offered; instead: {instead}"
            )

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Make this the Accelerator's project directory, and its logging directory without one."""
        owner = self.owner
        owner.project_dir = None if project_dir is None else Path(project_dir)
        owner.logging_dir = owner.logging_dir or owner.project_dir


class Checkpointing:
    """The part of an Accelerator that saves and loads."""

    accumulator: Accumulator
    preparation: Preparation
    project_dir: Path | None
    logging_dir: Path | None

    def _start_saving(
        self,
        settings: AcceleratorSettings,
        *,
        resume_loaders: bool,
        together: bool,
        unwrap_for_hooks: bool,
    ) -> None:
        self._unwrap_for_hooks = unwrap_for_hooks
        self._resume_loaders = resume_loaders
        self._together = together
        project, logging = settings.project_dir, settings.logging_dir
        self.project_dir = None if project is None else Path(project)
        #: where trackers may write: by default the project's directory
        self.logging_dir = self.project_dir if logging is None else Path(logging)
        self._keep_last = settings.keep_last
        self._registered: dict[str, Any] = {}
        self._before_saving: list[SaveHook] = []
        self._before_loading: list[LoadHook] = []

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` to the file `f` on rank 0, completely or not at all; others return at once.

        With `safe_serialization`, `obj` is a dict of tensors and the file is in safetensors format.
        `f` may also be an object with ``write``, which is called with the bytes. Links are
        followed.

        :raises CheckpointError: on rank 0, naming path and errno, if the file cannot be written, or
            `f` exists and is not a regular file (a directory, a device).
        """
        if not is_main():
            return
        if not hasattr(f, "write"):
            checkpoints.save_object(obj, f, safe=safe_serialization)
        elif safe_serialization:
            from safetensors.torch import save as to_bytes

            f.write(to_bytes({name: t.contiguous() for name, t in obj.items()}, {"format": "pt"}))
        else:
            torch.save(obj, f)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state, under the names it had before `prepare`."""
        return (unwrap_model(model) if unwrap else model).state_dict()

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Make :meth:`save_state` and :meth:`load_state` include these objects, too.

        Each is saved under its name; objects without one are ``registered_0`` and so on, in order.

        :raises ValueError: if one has no ``state_dict`` and ``load_state_dict``, or a name is
            taken.
        """
        first = sum(name.startswith("registered_") for name in self._registered)
        fresh = {f"registered_{first + i}": obj for i, obj in enumerate(objects)} | named
        taken = {*self.stateful(), *self.rank_stateful()}
        wrong = [
            f"{name}: {obj!r}"
            for name, obj in fresh.items()
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} has no state_dict() and load_state_dict(); only objects that "
                f"have both can be checkpointed"
            )
        for name, obj in fresh.items():
            if name in taken:
                raise ValueError(f"the name {name!r} is taken; give {obj!r} another")
        self._registered.update(fresh)

    def stateful(self) -> dict[str, Any]:
        """Return, by name, the objects whose state is the same on all ranks."""
        accumulator = self.accumulator
        named: dict[str, Any] = {}
        if accumulator.precision.scaler is not None:
            named["precision"] = accumulator.precision
        named |= self._named_models()
        named |= {f"optimizer_{i}": one for i, one in enumerate(accumulator.optimizers)}
        named |= {f"scheduler_{i}": one for i, one in enumerate(accumulator.schedules)}
        return {**named, **self._registered}

    def rank_stateful(self) -> dict[str, Any]:
        """Return, by name, the objects with a state of this rank's own: windows and loaders."""
        loaders = self.preparation.loaders if self._resume_loaders else []
        named = {f"loader_{i}": one for i, one in enumerate(loaders)}
        return {"accumulator": self.accumulator, **named}

    def _named_models(self) -> dict[str, nn.Module]:
        """Return the models inside of the prepared ones, by the names for saving them."""
        return {f"model_{i}": unwrap_model(m) for i, m in enumerate(self.accumulator.models)}

    def _models_for_hooks(self) -> dict[str, nn.Module]:
        if self._unwrap_for_hooks:
            return self._named_models()
        return {f"model_{i}": model for i, model in enumerate(self.accumulator.models)}

    def register_save_state_pre_hook(self, hook: SaveHook) -> Registered:
        """Call ``hook(models, weights, directory)`` on every rank before each :meth:`save_state`.

        The hook may write its own files to the directory, which exists, change the models' weights,
        and remove from the list the weights that are not to be saved: the first rank's list counts.
        If it raises, all ranks raise `CheckpointError`. The handle's ``remove()`` ends it.
        """
        return Registered(self._before_saving, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> Registered:
        """Call ``hook(models, directory)`` on every rank before each :meth:`load_state`.

        The hook may load models itself and remove them from the list, the same ones on every rank.
        If it raises, all ranks raise `CheckpointError`. The handle's ``remove()`` ends it.
        """
        return Registered(self._before_loading, hook)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model's weights in files that other libraries read, too. Collective.

        With `save_together` False, rank 0 saves a model that is the same on all ranks; the others
        return at once. See :func:`syncprims.training.save_model`.
        """
        model = unwrap_model(model)
        if not self._together and not _is_spread(model):
            if is_main():
                with get_own_group(current()):
                    checkpoints.save_model(
                        model, save_directory, max_shard_size, safe_serialization
                    )
            return
        with _for_all_ranks("save_model()"):
            checkpoints.save_model(model, save_directory, max_shard_size, safe_serialization)

    @property
    def should_save_model(self) -> bool:
        """Whether this is the first rank of its node, for scripts that write models themselves."""
        return is_local_main()

    @property
    def project_configuration(self) -> _OwnProject:
        """The project's directories, the number of kept checkpoints, and the next one's number."""
        named = self.project_dir is not None
        made = _OwnProject(
            self.project_dir, self.logging_dir, named, self._keep_last, self.save_iteration
        )
        made.owner = self
        return made

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
        """Save the whole state of the job to a directory: completely or not at all. Collective.

        Without `output_dir` it is the next ``checkpoint_N`` in ``checkpoints`` of the project's
        directory. With ``block=False`` it is written in the background, and the handle's ``wait()``
        returns when it is durable.

        :raises CheckpointError: on all ranks, if one rank cannot write its part.
        """
        if self._together:
            instead = "leave it out: a state is tensors and JSON, and never pickle"
            check_fixed(True, safe_serialization, "save_state(safe_serialization=False)", instead)
        common, own = self.stateful(), self.rank_stateful()
        models, hooks = self._models_for_hooks(), self._before_saving
        if output_dir is not None:
            path = os.fspath(output_dir)

            def offered() -> dict[str, Any]:
                checkpoints.offer_weights(path, hooks, models, common)
                return common

            if self._together or any(map(_is_spread, self._named_models().values())):
                with _for_all_ranks("save_state()"):
                    return checkpoints.save_state(path, offered(), rank_objects=own, block=block)
            saving = checkpoints.save_state_alone(
                path, offered, own, mark=self._mark(), block=block
            )
            if not safe_serialization and is_main():
                for i, model in enumerate(self._named_models().values()):
                    name = f"pytorch_model_{i}.bin" if i else "pytorch_model.bin"
                    checkpoints.save_object(model.state_dict(), f"{path}/{name}", safe=False)
            return saving
        kept = self._checkpoints()
        with _for_all_ranks("save_state() without a directory"):
            steps = checkpoints.agreed_steps(kept, f"save_state to {kept.directory}")
            step = max(steps, default=-1) + 1
            checkpoints.offer_weights(kept.path(step), hooks, models, common)
            return kept.save(step, common, rank_objects=own, block=block)

    def _mark(self) -> int:
        """Return a number that is the same on all ranks where they save the same state."""
        return sum(one.steps_taken + one.steps_skipped for one in self.accumulator.optimizers)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: None = None,
        *,
        map_location: str | None = None,
    ) -> None:
        """Load the state in a directory, by default the project's latest. Collective.

        Also one that Accelerate has saved. `map_location` is None, ``"cpu"``
        or ``"on_device"``; each object is loaded where it is in every case.

        :raises CheckpointError: on all ranks, if there is none, it is damaged, or it was saved by
            another number of ranks.
        :raises TypeError: for another `map_location`, and for `load_kwargs`.
        """
        instead = "leave it out: all comes back as it was"
        check_fixed({}, load_kwargs, "load_state(load_kwargs=)", instead)
        if map_location not in (None, "cpu", "on_device"):
            raise TypeError(
                f"load_state(map_location={map_location!r}): it takes None, 'cpu' or 'on_device'"
            )
        with _for_all_ranks("load_state()"):
            self._load_state(input_dir)

    def _load_state(self, input_dir: str | os.PathLike[str] | None) -> None:
        common, own = self.stateful(), self.rank_stateful()
        models, hooks = self._models_for_hooks(), self._before_loading
        if input_dir is not None:
            path = os.fspath(input_dir)
            if checkpoints.is_by_accelerate(path):
                self._load_from_accelerate(path)
                return

            def offered() -> dict[str, Any]:
                checkpoints.offer_models(path, hooks, models, common)
                return common

            if self._together:
                checkpoints.load_state(path, offered(), rank_objects=own)
            else:
                checkpoints.load_state_alone(path, offered, own)
            return
        kept = self._checkpoints()
        step = None
        if hooks and (steps := checkpoints.agreed_steps(kept, f"load_state from {kept.directory}")):
            step = steps[-1]
            checkpoints.offer_models(kept.path(step), hooks, models, common)
        kept.load(common, step, rank_objects=own)

    def _load_from_accelerate(self, path: str) -> None:
        accumulator, common = self.accumulator, self.stateful()
        models = self._named_models()
        checkpoints.offer_models(path, self._before_loading, self._models_for_hooks(), common)
        checkpoints.load_accelerate_state(
            path,
            [model for name, model in models.items() if name in common],
            accumulator.optimizers,
            accumulator.schedules,
            self._registered,
            accumulator.precision.scaler,
        )

    def _checkpoints(self) -> checkpoints.Checkpoints:
        if self.project_dir is None:
            raise ValueError("name a directory, or make the Accelerator with project_dir=")
        return checkpoints.Checkpoints(
            self.project_dir / "checkpoints", prefix="checkpoint_", keep_last=self._keep_last
        )


def _is_spread(model: nn.Module) -> bool:
    """Return whether a model is spread over ranks, so that no rank can save it alone."""
    return any(map(checkpoints.is_dtensor, model.parameters()))


@contextlib.contextmanager
def _for_all_ranks(call: str) -> Generator[None]:
    """Add to errors of a block that all ranks enter what scripts of Accelerate often miss."""
    try:
        yield
    except (CollectiveMismatch, PeerLost, SyncTimeout) as error:
        text = (
            f"{error}\nAll ranks call {call}. If it is under `if is_main_process:`, or in a "
            f"function that runs on one rank only, call it outside of that."
        )
        raise type(error)(text, **error.facts()).with_traceback(error.__traceback__) from None
