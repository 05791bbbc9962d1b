"""A save that runs in a thread beside the training, and the handle of any save.

The threads of all ranks write and commit together as :meth:`Save.run` does. They meet at a board of
their own: the ranks meet at others meanwhile. In a world of threads ranks take turns, and the save
is made at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait

import torch

from syncprims import CheckpointError, current
from syncprims._protocol.threads import BACKGROUND_SAVES
from syncprims._world.group import Group, internals_of
from syncprims._world.runtime import get_active_group, get_world

from . import filesystem
from .commit import Save
from .coordination import cleanup_on_error, coordinate
from .safetensors_file import in_huge_pages

_KEY = "training.saving"  # of the save in progress, among the world's extras
_GROUPS = "training.saving.groups"  # of the threads, by epoch and ranks


def start_save(save: Save, lock: contextlib.ExitStack) -> Saving:
    """Copy what this rank writes, and return while a thread writes it and then closes `lock`."""
    background = BackgroundSave(save)

    def copy() -> None:
        own = save.each_own_file(lambda _, tensors: _copy_to_host(tensors))
        save.files = [file._replace(tensors=own.get(file.name, {})) for file in save.files]

    def clean_up() -> None:
        if save.leads and not background.begun:
            save.abandon()

    with cleanup_on_error(save.doing, clean_up):
        coordinate(save.doing, copy)
        background.start(lock)
    return Saving(save.place.path, background)


def finish_earlier() -> None:
    """Wait for the save in progress, if there is one; one of ranks before a `reform` is given up.

    :raises CheckpointError: if it has failed.
    """
    earlier = current().extras.get(_KEY)
    if isinstance(earlier, BackgroundSave) and earlier.end():
        earlier.outcome.result()


class Saving:
    """The handle of a save. It is also the path of the checkpoint's directory."""

    def __init__(self, path: str, background: BackgroundSave | None = None) -> None:
        """Without `background`, the save is complete."""
        self.path = path  #: the checkpoint's directory
        self._background = background

    def __fspath__(self) -> str:
        return self.path

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part. Does not wait."""
        return self._background is None or not self._background.thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if a rank's part has failed; once.
        """
        latest = current().extras.get(_KEY)
        if not isinstance(latest, BackgroundSave) or latest is not self._background:
            return  # it was complete, or an earlier call has waited
        if not latest.end():
            text = f"{latest.doing} was not finished when a rank was lost: save again"
            raise CheckpointError(text, path=self.path)
        latest.outcome.result()


class BackgroundSave:
    """One rank's part of a save, written by a thread."""

    def __init__(self, save: Save) -> None:
        self.begun: bool = False  #: then only the thread removes what it has not finished
        self.doing: str = save.doing
        self.outcome: Future[None] = Future()
        self._save = save
        self._epoch: int = current().epoch
        self._group = _group_of_threads()
        # Not a daemon: a program that ends lets its last checkpoint finish.
        run = contextvars.copy_context().run  # as the same rank
        self.thread: threading.Thread = threading.Thread(
            target=run, args=(self._run,), name="syncprims-save"
        )

    def start(self, lock: contextlib.ExitStack) -> None:
        """Start to write, and own `lock`."""
        self._lock = lock.pop_all()
        current().extras[_KEY] = self
        # First: a signal handler may raise in `start`, and the thread runs on.
        self.begun = True
        if internals_of(self._group).rounds.board.virtual_time:
            self._run()
        else:
            self.thread.start()

    def end(self) -> bool:
        """Return when the thread has ended: whether the ranks are still those that began to save.

        Otherwise a rank was lost, which has ended the save everywhere.
        """
        # If `join` raises, as a signal handler may, Python up to 3.12 forgets the running thread,
        # and does not wait for it at exit.
        wait([self.outcome])
        if self.thread.ident is not None:
            self.thread.join()
        del current().extras[_KEY]
        return self._epoch == current().epoch

    def _run(self) -> None:
        try:
            with self._lock, self._group:
                self._save.run()
        except Exception as error:
            # The program may end without calling wait().
            filesystem.LOG.error("%s, in the background, has failed: %s", self.doing, error)
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)


def _group_of_threads() -> Group:
    """Return the active group's ranks, as a group in which only their threads meet."""
    world, active = get_world(), get_active_group()
    groups: dict[tuple[int, tuple[int, ...]], Group] = world.extras.setdefault(_GROUPS, {})
    key = world.epoch, active.ranks
    if key not in groups:
        rounds = world.open_rounds(active.ranks, BACKGROUND_SAVES)
        groups[key] = Group(active.ranks, world.rank, rounds, None)
    return groups[key]


def _copy_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in host memory: pinned, if they come from a GPU."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        pin = tensor.is_cuda
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
        copies[name] = (copy if pin else in_huge_pages(copy)).copy_(tensor, non_blocking=pin)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies
