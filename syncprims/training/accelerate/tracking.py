"""Trackers: objects of the user's that receive a job's values on rank 0."""

from __future__ import annotations

from typing import Any

from syncprims import is_main


class Trackers:
    """The part of an Accelerator that passes values to trackers. It has none of its own."""

    def _start_tracking(self, log_with: Any) -> None:
        several = isinstance(log_with, list | tuple)
        given: list[Any] = list(log_with) if several else [log_with]  # pyright: ignore[reportUnknownArgumentType]
        self.trackers = [tracker for tracker in given if tracker is not None]
        for tracker in self.trackers:
            if isinstance(tracker, type) or not callable(getattr(tracker, "log", None)):
                raise TypeError(
                    f"log_with={tracker!r}: it takes objects with log(values, step=...), such as "
                    f"a run of wandb or a tracker of your own; none is made by its name"
                )

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers on rank 0, with `config`.

        Calls ``start()`` and ``store_init_configuration(config)`` of those that have them.

        :raises TypeError: if there are `init_kwargs`: the trackers exist already.
        """
        del project_name  # trackers have names of their own
        if init_kwargs:
            raise TypeError(
                "init_trackers(init_kwargs=): make the trackers with them, for log_with="
            )
        for tracker in self.trackers if is_main() else ():
            if hasattr(tracker, "start"):
                tracker.start()
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with this `name`; with `unwrap`, the ``tracker`` inside of it.

        :raises ValueError: if there is none.
        """
        for tracker in self.trackers:
            if _name_of(tracker) == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        raise ValueError(f"no tracker is named {name!r}; log_with= takes them")

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log `values` with all trackers on rank 0; `log_kwargs` has options by tracker's name."""
        for tracker in self.trackers if is_main() else ():
            tracker.log(values, step=step, **(log_kwargs or {}).get(_name_of(tracker), {}))

    def end_training(self) -> None:
        """Finish the trackers on rank 0. The world runs on until the program ends."""
        for tracker in self.trackers if is_main() else ():
            if hasattr(tracker, "finish"):
                tracker.finish()


def _name_of(tracker: Any) -> Any:
    return getattr(tracker, "name", type(tracker).__name__)
