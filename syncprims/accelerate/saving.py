"""Saving and loading: the Accelerator's methods and its hooks."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import syncprims
from syncprims import CheckpointError, get_rank, get_world_size, is_main, training
from syncprims._world.runtime import get_world
from syncprims.training import Accumulator, Saving, Stateful, unwrap_model
from syncprims.training.checkpoints import filesystem
from syncprims.training.checkpoints.coordination import coordinate, meet
from syncprims.training.checkpoints.save_model import save_object
from syncprims.training.checkpoints.stateful import check_objects, state_of
from syncprims.training.checkpoints.states import MANIFEST, agreed_steps, read_manifest
from syncprims.training.optimizer import delegated
from syncprims.training.preparation import Preparation
from syncprims.training.pytree import is_dtensor

from .unsupported import check_fixed
from .utils import Directory, ProjectConfiguration

Weights: TypeAlias = dict[str, Any]
SaveHook: TypeAlias = Callable[[list[nn.Module], list[Weights], str], object]
LoadHook: TypeAlias = Callable[[list[nn.Module], str], object]


class _SavedWeights:
    """A model's weights, as the hooks leave them. They are saved, and never loaded."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def state_dict(self) -> Weights:
        return self._weights

    def load_state_dict(self, state_dict: Weights) -> None:
        raise NotImplementedError


class _PartOfWeights(_SavedWeights):
    """A model that takes the weights that it has a parameter for, and keeps its others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.state_dict())
        self._model = model

    def load_state_dict(self, state_dict: Weights) -> None:
        self._model.load_state_dict(state_dict, strict=False)


class Checkpointing:
    """The part of an Accelerator that saves and loads."""

    accumulator: Accumulator
    preparation: Preparation
    use_stateful_dataloader: bool

    def _start_saving(self, project_dir: Directory, project: Any) -> None:
        #: the directories, the number of checkpoints that are kept, the next one's least number
        self.project_configuration: Any = project or ProjectConfiguration(project_dir)
        of_nodes, call = self.project_configuration.save_on_each_node, "save_on_each_node=True"
        check_fixed(False, of_nodes, call, "save to one directory that all ranks see")
        if self.project_dir is None and project_dir is not None:
            self.project_configuration.set_directories(project_dir)
        self._registered: dict[str, Any] = {}
        self._before_saving: OrderedDict[int, SaveHook] = OrderedDict()
        self._before_loading: OrderedDict[int, LoadHook] = OrderedDict()

    project_dir: Directory = delegated("project_configuration.project_dir", "That of the project.")
    logging_dir: Directory = delegated("project_configuration.logging_dir", "That of trackers.")

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
            save_object(obj, f, safe=safe_serialization)
        elif safe_serialization:
            from safetensors.torch import save as to_bytes

            f.write(to_bytes({name: t.contiguous() for name, t in obj.items()}, {"format": "pt"}))
        else:
            torch.save(obj, f)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state, under the names it had before `prepare`."""
        return (unwrap_model(model) if unwrap else model).state_dict()

    def register_for_checkpointing(self, *objects: Stateful, **named: Stateful) -> None:
        """Make :meth:`save_state` and :meth:`load_state` include these objects, too.

        Each is saved under its name; objects without one are ``registered_0`` and so on, in order.

        :raises TypeError: if one has no ``state_dict`` and ``load_state_dict``.
        :raises ValueError: if a name is taken, or cannot be a file's name.
        """
        first = sum(name.startswith("registered_") for name in self._registered)
        fresh = {f"registered_{first + i}": obj for i, obj in enumerate(objects)} | named
        check_objects(fresh, {})
        if taken := fresh.keys() & self._stateful(self._models_inside()).keys():
            raise ValueError(f"objects are already registered as {sorted(taken)}; use other names")
        self._registered.update(fresh)

    def _models_inside(self) -> list[nn.Module]:
        """Return the models inside of the prepared ones."""
        return [unwrap_model(model) for model in self.accumulator.models]

    def _stateful(self, models: Iterable[Stateful]) -> dict[str, Any]:
        """Return, by name, the objects whose state is the same on all ranks."""
        accumulator = self.accumulator
        scaled = accumulator.precision.scaler is not None
        # A position in an epoch is one of all ranks, of any number of them.
        loaders = self.preparation.loaders if self.use_stateful_dataloader else []
        several: dict[str, Iterable[Any]] = {
            "model": models,
            "optimizer": accumulator.optimizers,
            "scheduler": accumulator.schedules,
            "loader": loaders,
        }
        named = {f"{kind}_{i}": obj for kind, some in several.items() for i, obj in enumerate(some)}
        precision = {"precision": accumulator.precision} if scaled else {}
        return {**precision, **named, **self._registered}

    # -- hooks ------------------------------------------------------------------------------------

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, directory)`` on every rank before each :meth:`save_state`.

        The models are those inside of DDP. The hook may write its own files to the directory, which
        exists, change the models' weights, and remove from the end of the list those that are not
        to be saved: as many on all ranks as on the first. If it raises, so does the save, on all
        ranks that wait for each other in it. The handle's ``remove()`` ends it.
        """
        return _add(self._before_saving, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, directory)`` on every rank before each :meth:`load_state`.

        The hook may load models itself and remove them from the list, the same ones on every rank.
        If it raises, all ranks raise `CheckpointError`. The handle's ``remove()`` ends it.
        """
        return _add(self._before_loading, hook)

    def _objects_to_save(self, directory: str) -> dict[str, Any]:
        """Return the common objects, with the weights that the hooks leave in place of models.

        :raises CheckpointError: on all ranks, if a hook raises on one.
        """
        models = self._models_inside()
        if not self._before_saving:
            return self._stateful(models)
        path = filesystem.directory_path(directory)

        def call_hooks() -> list[Weights]:
            Path(path).mkdir(parents=True, exist_ok=True)
            some, weights = list(models), [state_of(model) for model in models]
            for hook in list(self._before_saving.values()):
                hook(some, weights, path)
            return weights

        own, counts = coordinate(f"save_state to {path}", call_hooks, len)
        return self._stateful([_SavedWeights(weights) for weights in own[: counts[0]]])

    def _objects_to_load(self, directory: str, strict: bool) -> dict[str, Any]:
        """Return the common objects without the models that the hooks load themselves.

        :raises CheckpointError: on all ranks, if a hook raises on one.
        """
        path, left = filesystem.directory_path(directory), self._models_inside()

        def call_hooks() -> None:
            for hook in list(self._before_loading.values()):
                hook(left, path)

        if self._before_loading:
            coordinate(f"load_state from {path}", call_hooks)
        return self._stateful(left if strict else [_PartOfWeights(model) for model in left])

    # -- models and states ------------------------------------------------------------------------

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model's weights in files that other libraries read, too.

        Rank 0 saves a model that is the same on all ranks; the others return at once. A model that
        is spread over ranks is saved by all. See :func:`syncprims.training.save_model`.
        """
        model = unwrap_model(model)
        arguments = (model, save_directory, max_shard_size, safe_serialization)
        if _is_spread(model):
            with _for_all_ranks("save_model()"):
                training.save_model(*arguments)
        elif is_main():
            with get_world().own_group():
                training.save_model(*arguments)

    @property
    def should_save_model(self) -> bool:
        """Whether this is the first rank of its node, for scripts that write models themselves."""
        return syncprims.is_local_main()

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint in the project's directory."""
        steps = [] if self.project_dir is None else self._checkpoints().steps()
        return self._next_number(steps)

    def _next_number(self, steps: Sequence[int]) -> int:
        return max(int(self.project_configuration.iteration), max(steps, default=-1) + 1)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
    ) -> Saving:
        """Save the state of the job to a directory: completely or not at all.

        Each rank that calls this saves its part, and waits for no other: so scripts may save on
        rank 0 only. Without `output_dir` it is the next ``checkpoint_N`` in ``checkpoints`` of the
        project's directory; then all ranks call this, and so they do for models that are spread
        over ranks. Without `safe_serialization` rank 0 adds weights in a file of torch. With
        ``block=False`` it is written in the background, and the handle's ``wait()`` returns when it
        is durable. Gradients that wait for more micro-batches are not saved: a warning says so.

        :raises CheckpointError: on all ranks, if one rank cannot write its part.
        """
        if self.accumulator.is_half_full and is_main():
            what = "save_state: gradients that wait for more micro-batches are not saved"
            filesystem.LOG.warning("%s; save where sync_gradients is true", what)
        if output_dir is None:
            steps = self._checkpoints()
            with _for_all_ranks("save_state() without a directory"):
                there = agreed_steps(steps, f"save_state to {steps.directory}")
                number = self._next_number(there)
                common = self._objects_to_save(steps.path(number))
                saving = steps.save(number, common, block=block)
            self.project_configuration.iteration = number + 1
            return saving
        path = os.fspath(output_dir)
        if any(map(_is_spread, self._models_inside())):
            with _for_all_ranks("save_state()"):
                common = self._objects_to_save(path)
                return training.save_state(path, common, block=block)
        # The same number on all ranks where they save the same state.
        mark = sum(o.steps_taken + o.steps_skipped for o in self.accumulator.optimizers)
        saving = _save_alone(path, lambda: self._objects_to_save(path), mark, block=block)
        if not safe_serialization and is_main():
            for i, model in enumerate(self._models_inside()):
                name = f"pytorch_model_{i}.bin" if i else "pytorch_model.bin"
                save_object(model.state_dict(), f"{path}/{name}", safe=False)
        return saving

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: None = None,
        *,
        map_location: str | None = None,
        strict: bool = True,
    ) -> None:
        """Load the state in a directory, by default the project's latest. Collective.

        `map_location` is None, ``"cpu"`` or ``"on_device"``; each object is loaded where it is in
        every case. Without `strict`, a model takes the weights that it has a parameter for, and
        keeps its others.

        :raises CheckpointError: on all ranks, if there is none, or it is damaged.
        :raises TypeError: for another `map_location`, and for `load_kwargs`.
        """
        instead = "leave it out: all comes back as it was"
        check_fixed({}, load_kwargs, "load_state(load_kwargs=)", instead)
        if map_location not in (None, "cpu", "on_device"):
            what = f"load_state(map_location={map_location!r})"
            raise TypeError(f"{what}: it takes None, 'cpu' or 'on_device'")
        with _for_all_ranks("load_state()"):
            if input_dir is None:
                self._load_latest(strict)
            else:
                path = os.fspath(input_dir)
                _load_alone(path, lambda: self._objects_to_load(path, strict))
        self.accumulator.restart()

    def _load_latest(self, strict: bool) -> None:
        steps = self._checkpoints()
        there = agreed_steps(steps, f"load_state from {steps.directory}")
        step = there[-1] if there else None
        steps.load({} if step is None else self._objects_to_load(steps.path(step), strict), step)

    def _checkpoints(self) -> training.Checkpoints:
        if self.project_dir is None:
            raise ValueError("name a directory, or make the Accelerator with project_dir=")
        return training.Checkpoints(
            Path(self.project_dir) / "checkpoints",
            prefix="checkpoint_",
            keep_last=self.project_configuration.total_limit,
        )


def _add(hooks: OrderedDict[int, Any], hook: Callable[..., object]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _is_spread(model: nn.Module) -> bool:
    """Return whether a model is spread over ranks, so that no rank can save it alone."""
    return any(map(is_dtensor, model.parameters()))


@contextlib.contextmanager
def _for_all_ranks(call: str) -> Generator[None]:
    """Add to errors of a block that all ranks enter what scripts of Accelerate often miss."""
    try:
        yield
    except (syncprims.CollectiveMismatch, syncprims.PeerLost, syncprims.SyncTimeout) as error:
        cure = f"All ranks call {call}: it must not be under `if is_main_process:`."
        raise type(error)(f"{error}\n{cure}", **error.facts()).with_traceback(
            error.__traceback__
        ) from None


# -- states that each rank saves alone, where a script saves on some ranks only --------------------
#
# Main saves the common objects and its random numbers. Any other rank that calls it saves its
# random numbers in a directory inside of main's: `rank-00001`. Each of these is a checkpoint of one
# rank, complete or absent. A mark, equal on all ranks at one point of the program, shows which
# belong together.


def _save_alone(
    path: str, objects: Callable[[], Mapping[str, Stateful]], mark: int, *, block: bool
) -> Saving:
    """Save this rank's part of a state, without waiting for another rank.

    `objects` returns the common objects; it is called with this rank as the only one.

    :raises CheckpointError: on this rank, if it cannot write its part.
    """
    path = filesystem.directory_path(path)
    with get_world().own_group():
        # The ranks' parts may come in any order.
        coordinate(f"save_state to {path}", lambda: filesystem.make_directory(path))
        common = objects()
        if not is_main():
            return training.save_state(_part(path, get_rank()), {}, step=mark, block=block)
        return training.save_state(path, common, step=mark, block=block)


def _load_alone(path: str, objects: Callable[[], Mapping[str, Stateful]]) -> None:
    """Load what :func:`_save_alone` or ``save_state`` has saved. Collective.

    Random numbers of ranks that are not there are left as they are and logged.

    :raises CheckpointError: on all ranks, as ``load_state``, but not for another number of ranks.
    """
    path = filesystem.directory_path(path)
    doing = f"load_state from {path}"
    meet(doing, path)  # each rank has saved before

    def saved() -> tuple[int, int | None]:
        if "random_states_0.pkl" in filesystem.names(path):
            what = f"{path}: Accelerate has saved this state in pickles, which are not read"
            cure = "load the weights by load_checkpoint_in_model(), and make a new optimizer"
            raise CheckpointError(f"{what}; {cure}", path=path)
        state = read_manifest(path)
        return len(state.ranks), state.step

    (count, mark), _ = coordinate(doing, saved)
    if count > 1 or get_world_size() == 1:
        training.load_state(path, objects(), any_world_size=True)
        if count != get_world_size():
            _warn(path, list(range(get_world_size())), f"it was saved by {count} ranks")
        return

    def read() -> bool:
        with get_world().own_group():
            training.load_state(path, objects(), rng=is_main())
            if is_main():
                return True
            part = _part(path, get_rank())
            if not filesystem.exists(f"{part}/{MANIFEST}") or read_manifest(part).step != mark:
                return False
            training.load_state(part, {})
            return True

    _, complete = coordinate(doing, read)
    missing = [rank for rank, there in enumerate(complete) if not there]
    if missing:
        _warn(path, missing, "main saved it without them")


def _warn(path: str, ranks: list[int], why: str) -> None:
    if is_main():
        text = "%s has no random numbers of ranks %s, because %s: these ranks keep their own"
        filesystem.LOG.warning(text, path, ranks, why)


def _part(path: str, rank: int) -> str:
    return f"{path}/rank-{rank:05d}"
