"""A directory of checkpoints, one for each step that was saved."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, cast

from syncprims import CheckpointError

from . import filesystem
from .async_save import finish_earlier
from .commit import final_name, new_token, temporary
from .coordination import Team, coordinate, directory_path
from .integrity import read_current
from .states import MANIFEST, Loaded, load_state, save_to

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from .async_save import Saving
    from .stateful import Stateful


class Checkpoints:
    """The checkpoints of a run: ``<directory>/step-1000``, ``step-2000`` and so on.

    Each is complete, since one rename creates it. Other files in the directory are ignored.
    Of the complete ones, the last `keep_last` are kept (all, with None); the one just saved is
    always among them, and none is removed before that is durable.

    :raises TypeError: if `keep_last` is not a whole number.
    :raises ValueError: if `keep_last` is below 1, or `prefix` cannot begin a file's name.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        prefix: str = "step-",
    ) -> None:
        keep_last = None if keep_last is None else operator.index(keep_last)
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last!r}: it takes 1 or more, or None for all")
        if "/" in prefix or prefix.startswith(".") or "\0" in prefix:
            raise ValueError(f"prefix={prefix!r}: it begins the name of a directory")
        self.directory = directory_path(directory)
        self.keep_last = keep_last
        self.prefix = prefix

    def path(self, step: int) -> str:
        """Return the directory of a step's checkpoint, whether it exists or not."""
        return f"{self.directory}/{self.prefix}{step}"

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending. Not collective."""
        pattern = re.compile(re.escape(self.prefix) + r"(0|[1-9][0-9]*)")
        steps: list[int] = []
        for _ in range(3):
            names = filesystem.names(self.directory)
            matches = [match for match in map(pattern.fullmatch, names) if match]
            steps = sorted(int(match[1]) for match in matches if self._is_complete(match[0]))
            if names == filesystem.names(self.directory):
                break  # else another program may have replaced all of these
        return steps

    def _is_complete(self, name: str) -> bool:
        return filesystem.exists(f"{self.directory}/{name}/{MANIFEST}")

    def latest(self) -> int | None:
        """Return the highest step with a complete checkpoint, or None. Not collective."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        objects: Mapping[str, Stateful],
        *,
        rank_objects: Mapping[str, Stateful] | None = None,
        rng: bool = True,
        block: bool = True,
    ) -> Saving:
        """Save a step as :func:`save_state` does, then remove the oldest beyond `keep_last`.

        :raises CheckpointError: on all ranks, if a rank's part fails; no older one is lost.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step}: steps are counted from 0")
        return save_to(
            self.path(step), objects, rank_objects or {},
            step=step, rng=rng, block=block, on_commit=lambda: self._prune(step),
        )  # fmt: skip

    def load(
        self, objects: Mapping[str, Stateful], step: int | None = None, **options: Any
    ) -> Loaded:
        """Load the checkpoint of a step, by default the latest. Options as of :func:`load_state`.

        :raises CheckpointError: on all ranks, if there is none, or it is not as it was saved; the
            message then names an older one, which is not loaded automatically.
        """
        doing = f"Checkpoints.load from {self.directory}"
        steps: list[int] = []
        chosen = -1

        def load() -> Loaded:
            nonlocal steps, chosen
            steps = agreed_steps(self, doing)
            if step is None and not steps:
                raise CheckpointError(
                    f"{self.directory}: no complete checkpoint {self.prefix}<number> in it: "
                    f"expected one, found none. Save one, or start from the beginning.",
                    path=self.directory,
                )
            chosen = max(steps) if step is None else step
            return load_state(self.path(chosen), objects, **options)

        def was_replaced() -> bool:
            return step is None and bool(steps) and chosen not in agreed_steps(self, doing)

        try:
            return read_current(self.directory, load, was_replaced)
        except CheckpointError as error:
            older = [other for other in steps if other < chosen]
            if older:
                error.args = (f"{error} The newest older one is {self.path(older[-1])}.",)
            raise

    def _prune(self, saved: int) -> None:
        """Remove the oldest steps, and what killed saves of such steps left; log failures."""
        if self.keep_last is None:
            return
        try:
            steps = self.steps()
            others = [step for step in steps if step != saved]
            gone = others[: max(0, len(others) - self.keep_last + 1)]
            for step in gone:
                # Rename it first, so that no reader finds half of one.
                away = f"{self.directory}/{temporary(f'{self.prefix}{step}', new_token())}"
                filesystem.rename(self.path(step), away)
                filesystem.remove_directory_or_log(away)
            # Another process may be saving one of the later steps now.
            oldest = min({*steps, saved} - {*gone})
            for name in filesystem.names(self.directory):
                final = final_name(name)
                number = final.removeprefix(self.prefix)
                whole = final.startswith(self.prefix) and number.isdecimal()
                if whole and int(number) < oldest:
                    filesystem.remove_directory_or_log(f"{self.directory}/{name}")
        except OSError as error:
            filesystem.LOG.warning(
                "could not remove older checkpoints in %s: %s", self.directory, error
            )


def agreed_steps(checkpoints: Checkpoints, doing: str) -> list[int]:
    """Return the steps that the leading rank finds, once no save is in progress. Collective."""
    finish_earlier()
    team = Team.meet(doing)
    _, steps = coordinate(doing, checkpoints.steps, lambda steps: steps if team.leads else None)
    return cast("list[int]", steps[0])
