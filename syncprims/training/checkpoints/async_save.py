"""A save that runs in a thread beside the training, and the handle of any save.

The threads of all ranks write and commit together as :meth:`Save.run` does. They meet at a board of
their own: the ranks meet at others meanwhile. In a world of threads ranks take turns, and the save
is made at once.
"""

# pyright: reportPrivateUsage=false

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
    saving = Saving(save.place.path, save)

    def copy() -> None:
        own = save.each_own_file(lambda _, tensors: _copy_to_host(tensors))
        save.files = [file._replace(tensors=own.get(file.name, {})) for file in save.files]

    def clean_up() -> None:
        if save.leads and not saving.begun:
            save.abandon()

    with cleanup_on_error(save.doing, clean_up):
        coordinate(save.doing, copy)
        saving._start(lock)
    return saving


def finish_earlier() -> None:
    """Wait for the save in progress, if there is one; one of ranks before a `reform` is given up.

    :raises CheckpointError: if it has failed.
    """
    earlier = current().extras.get(_KEY)
    if isinstance(earlier, Saving) and earlier._end():
        earlier._outcome.result()


class Saving:
    """The handle of a save. It is also the path of the checkpoint's directory."""

    def __init__(self, path: str, save: Save | None = None) -> None:
        """With `save`, it is written by a thread of each rank; else it is complete."""
        self.path = path  #: the checkpoint's directory
        self.begun: bool = False  #: then only the thread removes what it has not finished
        if save is None:
            return
        self._save = save
        self._epoch = current().epoch
        self._group = _group_of_threads()
        self._outcome: Future[None] = Future()
        # Not a daemon: a program that ends lets its last checkpoint finish.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # of the same rank
            args=(self._run,),
            name="syncprims-save",
        )

    def __fspath__(self) -> str:
        return self.path

    def _start(self, lock: contextlib.ExitStack) -> None:
        """Start to write, and own `lock`."""
        self._lock = lock.pop_all()
        current().extras[_KEY] = self
        # First: a signal handler may raise in `start`, and the thread runs on.
        self.begun = True
        if internals_of(self._group).rounds.board.virtual_time:
            self._run()
        else:
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part. Does not wait."""
        return not (self.begun and self._thread.is_alive())

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if a rank's part has failed; once.
        """
        if current().extras.get(_KEY) is not self:
            return  # it was complete, or an earlier call has waited
        if not self._end():
            text = f"{self._save.doing} was not finished when a rank was lost: save again"
            raise CheckpointError(text, path=self.path)
        self._outcome.result()

    def _end(self) -> bool:
        """Return when the thread has ended: whether the ranks are still those that began to save.

        Otherwise a rank was lost, which has ended the save everywhere.
        """
        # If `join` raises, as a signal handler may, Python up to 3.12 forgets the running thread,
        # and does not wait for it at exit.
        wait([self._outcome])
        if self._thread.ident is not None:
            self._thread.join()
        del current().extras[_KEY]
        return self._epoch == current().epoch

    def _run(self) -> None:
        save = self._save
        try:
            with self._lock, self._group:
                save.run()
        except Exception as error:
            # The program may end without calling wait().
            filesystem.LOG.error("%s, in the background, has failed: %s", save.doing, error)
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)


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
