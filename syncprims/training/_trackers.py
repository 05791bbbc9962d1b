"""Where a job's figures go: to objects of the user's, on rank 0."""

from __future__ import annotations

from typing import Any

from syncprims import is_main


class Trackers:
    """The half of an Accelerator that hands figures on. There is none of its own."""

    def _start_tracking(self, log_with: Any) -> None:
        several = isinstance(log_with, list | tuple)
        given: list[Any] = list(log_with) if several else [log_with]  # pyright: ignore[reportUnknownArgumentType]
        given = [tracker for tracker in given if tracker is not None]
        for tracker in given:
            if isinstance(tracker, type) or not callable(getattr(tracker, "log", None)):
                raise TypeError(
                    f"log_with={tracker!r}: it takes objects with log(values, step=...), such as "
                    f"a run of wandb or a tracker of your own; none is made by its name"
                )
        self.trackers: list[Any] = given

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Let trackers begin and take `config`, on rank 0.

        Those that have ``start()`` and ``store_init_configuration(config)`` are told.

        :raises TypeError: if there are `init_kwargs`, since the trackers are made already.
        """
        del project_name  # they have their own
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
        """Return the tracker with this `name`; with `unwrap`, its own ``tracker`` inside.

        :raises ValueError: if there is none.
        """
        for tracker in self.trackers:
            if getattr(tracker, "name", type(tracker).__name__) == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        raise ValueError(f"no tracker is named {name!r}; log_with= takes them")

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Hand `values` to all trackers, on rank 0; `log_kwargs` are options by tracker's name."""
        for tracker in self.trackers if is_main() else ():
            name = getattr(tracker, "name", type(tracker).__name__)
            tracker.log(values, step=step, **(log_kwargs or {}).get(name, {}))

    def end_training(self) -> None:
        """Let trackers finish, on rank 0. The world goes on until the program ends."""
        for tracker in self.trackers if is_main() else ():
            if hasattr(tracker, "finish"):
                tracker.finish()
