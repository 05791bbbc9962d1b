"""Trackers of experiments: figures of a run, written on rank 0 by the trackers' own libraries."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import syncprims

from .utils import Directory as _Directory


class GeneralTracker:
    """A tracker under its `name`. Subclass it for one of your own: ``start`` and ``log``."""

    name = "tracker"
    requires_logging_directory = False
    main_process_only = True  #: only rank 0 calls it
    tracker: Any = None  #: the object of the tracker's own library

    def __init__(self, run_name: str = "", logging_dir: Any = None, **options: object) -> None:
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.options = options

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Write figures."""
        raise NotImplementedError(f"{type(self).__name__} has no log(values, step)")

    def log_images(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Write lists of images, if the tracker can."""

    def finish(self) -> None:
        """End the run: everything is written."""


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``."""

    name = "tensorboard"
    requires_logging_directory = True

    def start(self) -> None:
        """Make the writer, of torch, else of tensorboardX."""
        library = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
        directory = str(Path(self.logging_dir) / self.run_name)
        self.writer: Any = importlib.import_module(library).SummaryWriter(directory, **self.options)
        self.tracker: Any = self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters."""
        simple = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        self.writer.add_hparams(simple, metric_dict={})
        self.writer.flush()
        directory = Path(self.logging_dir, self.run_name, str(time.time()))
        directory.mkdir(parents=True)
        (directory / "hparams.yml").write_text(json.dumps(simple, indent=1))  # YAML takes JSON

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Write scalars, texts and dicts of scalars."""
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **options)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **options)
            else:
                self.writer.add_scalar(name, value, global_step=step, **options)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Write batches of images."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **options)

    def finish(self) -> None:
        """Close the writer."""
        self.writer.close()


class WandBTracker(GeneralTracker):
    """Logs to a run of wandb; the run's name is the project."""

    name = "wandb"

    def start(self) -> None:
        """Begin the run."""
        self._wandb = importlib.import_module("wandb")
        self.run: Any = self._wandb.init(project=self.run_name, **self.options)
        self.tracker: Any = self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration."""
        self._wandb.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log figures."""
        self.run.log(values, step=step, **options)

    def log_images(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log lists of images."""
        for name, images in values.items():
            self.log({name: [self._wandb.Image(image) for image in images]}, step, **options)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


#: The trackers that are known by their names, and what each needs installed, one of them.
_KNOWN: dict[str, tuple[type[GeneralTracker], tuple[str, ...]]] = {
    "tensorboard": (TensorBoardTracker, ("tensorboard", "tensorboardX")),
    "wandb": (WandBTracker, ("wandb",)),
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of your own known by its ``name``, for ``log_with=``."""
    _KNOWN[tracker_class.name] = tracker_class, ()


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose libraries are installed."""
    return [name for name, (_, needs) in _KNOWN.items() if not needs or any(map(find_spec, needs))]


def on_main_process(function: Any) -> Any:
    """Make a method of a tracker run on rank 0 only, if its ``main_process_only`` is true."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) if _calls(self) else None

    return call


def _calls(tracker: object) -> bool:
    """Return whether this rank calls a tracker."""
    return syncprims.is_main() or not getattr(tracker, "main_process_only", True)


def _name_of(tracker: object) -> Any:
    return getattr(tracker, "name", type(tracker).__name__)


def _wrong(tracker: object) -> str:
    takes = f"names ({', '.join(_KNOWN)}, all), or objects with log(values, step=...)"
    return f"log_with={tracker!r}: it takes {takes}"


class _Silent:
    """A tracker of a rank that has none: every call does nothing."""

    def __getattr__(self, _: str) -> _Silent:
        return self

    def __call__(self, *_: object, **__: object) -> _Silent:
        return self


class Tracking:
    """The part of an Accelerator that logs."""

    logging_dir: _Directory

    def _start_tracking(self, log_with: object) -> None:
        given: Sequence[object] = log_with if isinstance(log_with, list | tuple) else [log_with]
        self.trackers: list[Any] = []  #: that are made, those by name after :meth:`init_trackers`
        self.log_with: list[Any] = []  #: the names of trackers that are not made yet
        for tracker in given:
            name = getattr(tracker, "value", tracker)  # of an enumeration
            if name == "all":
                self.log_with += get_available_trackers()
            elif isinstance(name, str):
                self._add_by_name(name)
            elif callable(getattr(tracker, "log", None)) and not isinstance(tracker, type):
                self.trackers.append(tracker)
            elif tracker is not None:
                raise TypeError(_wrong(tracker))

    def _add_by_name(self, name: str) -> None:
        if name not in _KNOWN:
            raise ValueError(_wrong(name))
        kind, needs = _KNOWN[name]
        if name not in get_available_trackers():
            text = "log_with=%r: nothing is logged there without its library: pip install %s"
            logging.getLogger("syncprims").warning(text, name, needs[0])
        elif kind.requires_logging_directory and self.logging_dir is None:
            raise ValueError(f"log_with={name!r} writes files: give the Accelerator a project_dir")
        else:
            self.log_with.append(name)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Make and start the trackers on rank 0, with `config`; none of them runs elsewhere.

        Those named in `log_with` are made, of `project_name`, with their options in `init_kwargs`,
        a dict by name. Known are ``tensorboard`` and ``wandb``; ``all`` represents those that
        are installed. Of given objects ``start()`` and
        ``store_init_configuration(config)`` are called if they have them.

        :raises TypeError: if there are `init_kwargs` for a tracker that exists already.
        """
        options = {name: some for name, some in (init_kwargs or {}).items() if some}
        if any(_name_of(tracker) in options for tracker in self.trackers):
            raise TypeError("init_trackers(init_kwargs=): make trackers with them, for log_with=")
        for name in self.log_with:
            if syncprims.is_main():
                kind, own = _KNOWN[name][0], options.get(name, {})
                where = [self.logging_dir] if kind.requires_logging_directory else []
                self.trackers.append(kind(project_name, *where, **own))
        self.log_with = []
        for tracker in filter(_calls, self.trackers):
            if hasattr(tracker, "start"):
                tracker.start()
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with this `name`; with `unwrap`, the object of its own library.

        A known tracker that this rank does not have (other ranks than 0, or without its library) is
        one that does nothing, whatever is called; so is any if there are no trackers at all.

        :raises ValueError: if there are others only.
        """
        for tracker in self.trackers:
            if _name_of(tracker) == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        if name in _KNOWN or not self.trackers:
            return _Silent()
        raise ValueError(f"no tracker is named {name!r}; log_with= takes them")

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log `values` with all trackers on rank 0; `log_kwargs` has options by tracker's name.

        On the other ranks, too, with trackers whose ``main_process_only`` is False.
        """
        for tracker in filter(_calls, self.trackers):
            options = (log_kwargs or {}).get(_name_of(tracker), {})
            tracker.log(values, step=step, **options)

    def end_training(self) -> None:
        """Finish the trackers on rank 0. The world runs on until the program ends."""
        for tracker in filter(_calls, self.trackers):
            if hasattr(tracker, "finish"):
                tracker.finish()
