"""A save that a thread of main writes beside the training, and the handle of any save.

Ranks cannot communicate while they train. So they bring everything to main before they go on, and
main's thread needs none of them: it writes and commits alone. A rank that fails or ends meanwhile
does not disturb the save.
"""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from syncprims import current
from syncprims._world.runtime import announce_activity, get_active_group

from . import filesystem
from .coordination import attempt, coordinate
from .safetensors_file import in_huge_pages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .commit import Save

_KEY = "training.saving"  # of the save in progress, among the world's extras
_WAIT = "Saving.wait"  # the call under whose name ranks wait for each other


class Saving:
    """The handle of a save. It is also the path of the checkpoint's directory."""

    def __init__(self, path: str) -> None:
        self.path = path  #: the checkpoint's directory

    def __fspath__(self) -> str:
        return self.path

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part. Does not wait."""
        return True

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if the save has failed; once.
        """


class _BackgroundSaving(Saving):
    """A save that a thread of main writes."""

    def __init__(self, save: Save) -> None:
        super().__init__(save.place.path)
        self._save = save
        self._group = get_active_group()  # wait() uses it, wherever it is called
        self._finished: Future[None] = Future()
        # Not a daemon: a program that ends lets its last checkpoint finish.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # of the same rank
            args=(self._run,),
            name="syncprims-save",
        )

    def start(self) -> None:
        """Start to write. Only the leading rank calls this."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part. Does not wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if the save has failed; once.
        """
        extras, save = current().extras, self._save
        if extras.get(_KEY) is not self:
            return  # an earlier call has waited
        del extras[_KEY]
        with self._group:
            coordinate(save.doing, self._finish if save.team.leads else lambda: None, call=_WAIT)

    def _finish(self) -> None:
        self._finished.result()
        self._thread.join()

    def _run(self) -> None:
        save = self._save
        announce_activity(self, f"{save.doing} in the background")
        error = attempt(save.write_and_commit, self._finished).exception()
        if error is not None:  # the program may end without calling wait()
            filesystem.LOG.error("%s, in the background, has failed: %s", save.doing, error)
        announce_activity(self, None)


def start_save(save: Save) -> Saving:
    """Return while a thread of main writes a save that :func:`copied` has returned."""
    saving = current().extras[_KEY] = _BackgroundSaving(save)
    if save.team.leads:
        saving.start()
    return saving


def finish_earlier() -> None:
    """Wait for the save in progress, if there is one.

    :raises CheckpointError: if it has failed.
    """
    earlier = current().extras.get(_KEY)
    if isinstance(earlier, Saving):
        earlier.wait()


def copied(save: Save) -> Save:
    """Return the save of a copy of what this rank writes, which the training does not change.

    :raises CheckpointError: on all ranks, if there is no memory for it.
    """
    own, _ = coordinate(
        save.doing, lambda: save.each_own_file(lambda _, t: _copy_to_host(t)), lambda _: None
    )
    return save._replace(files=[f._replace(tensors=own.get(f.name, {})) for f in save.files])


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
