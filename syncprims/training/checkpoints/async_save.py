"""A save that runs in a thread beside the training, and the handle of any save.

In such a save the ranks cannot communicate with collectives: they are training. So each rank writes
a file that reports the outcome of its part, and the leading rank looks until all are there.

An empty file, the leading rank's own report, says that it is waiting. When it gives up, it removes
that file first, and then everything that the save has made. When it has all reports, it removes
that file last. So a rank that finds this file gone, and its own report still there, knows that the
save was abandoned.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from syncprims import CheckpointError, current
from syncprims._world.runtime import announce_activity, get_active_group

from . import filesystem, integrity
from .commit import removed_by_others
from .coordination import attempt, cleanup_on_error, combine, coordinate, message_of
from .safetensors_file import in_huge_pages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .commit import Save

_KEY = "training.saving"  # of the save in progress, among the world's extras
_WAIT = "Saving.wait"  # the call under whose name ranks wait for each other
_GRACE = 60.0  # seconds that a program that has ended waits for the other ranks


def start_save(save: Save, lock: contextlib.ExitStack) -> Saving:
    """Copy what this rank writes, and return while a thread writes it.

    Then the thread closes `lock`, or after a failure the call that waits for it.
    """
    extras = current().extras

    def copy() -> None:
        if save.leads:
            filesystem.write_small(save.report_path(0), b"")
        own = save.each_own_file(lambda _, tensors: _copy_to_host(tensors))
        save.files = [file._replace(tensors=own.get(file.name, {})) for file in save.files]

    def clean_up() -> None:
        if save.leads and not is_saving(extras):
            save.abandon()

    with cleanup_on_error(save.doing, clean_up):
        coordinate(save.doing, copy)
        saving = extras[_KEY] = Saving(save.place.path, save)
        saving._start(lock)
    return saving


def finish_earlier() -> None:
    """Wait for the save in progress, if there is one; one of ranks before a `reform` is given up.

    :raises CheckpointError: if it has failed.
    """
    earlier = current().extras.get(_KEY)
    if isinstance(earlier, Saving) and not earlier._give_up():
        earlier.wait()


def is_saving(extras: Mapping[str, Any]) -> bool:
    """Return whether a world has a save that a thread has begun and no call has waited for."""
    saving = extras.get(_KEY)
    return isinstance(saving, Saving) and saving.begun


class Saving:
    """The handle of a save. It is also the path of the checkpoint's directory."""

    def __init__(self, path: str, save: Save | None = None) -> None:
        """With `save`, it is written by a thread of each rank; else it is complete."""
        self.path = path  #: the checkpoint's directory
        self.begun = False  #: then only the thread removes what it has not finished
        if save is None:
            return
        self._save = save
        self._group = get_active_group()  # wait() uses it, wherever it is called
        self._epoch = current().epoch
        self._written: Future[Any] = Future()
        self._committed: Future[None] = Future()
        self._cancelled = threading.Event()
        self._abandoned = False
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
        self.begun = True  # first: a signal handler may raise in `start`, and the thread runs on
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part. Does not wait."""
        return not (self.begun and self._thread.is_alive())

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if a rank's part has failed; once.
        """
        extras = current().extras
        if extras.get(_KEY) is not self:
            return  # it was complete, or an earlier call has waited
        doing = self._save.doing
        if self._give_up():
            raise CheckpointError(
                f"{doing} was under way when a rank was lost, and counts as not made: save again",
                path=self.path,
            )
        del extras[_KEY]
        wait([self._written])
        with self._lock, self._group, cleanup_on_error(doing, self._cancel):
            coordinate(doing, self._written.result, call=_WAIT)
            self._join()
            coordinate(doing, self._committed.result, call=_WAIT)

    def _give_up(self) -> bool:
        """Return whether the ranks of this save have changed since; then nothing is left of it."""
        if self._epoch == current().epoch:
            return False
        del current().extras[_KEY]
        with self._lock:
            self._cancel()
        return True

    def _cancel(self) -> None:
        self._cancelled.set()
        self._join()
        if self._abandoned:
            self._save.abandon()  # once more: now all ranks have stopped writing

    def _join(self) -> None:
        """Return when the thread has done everything it has to."""
        # If `join` raises, as a signal handler may, Python up to 3.12 forgets the running thread,
        # and does not wait for it at exit.
        wait([self._committed])
        self._thread.join()

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        save = self._save
        announce_activity(self, f"{save.doing} in the background")
        outcome = attempt(save.write)
        attempt(lambda: self._end_writing(outcome), self._written)
        attempt(lambda: self._commit(outcome), self._committed)
        error = self._committed.exception() or self._written.exception()
        if error is not None:  # the program may end without calling wait()
            filesystem.LOG.error("%s, in the background, has failed: %s", save.doing, error)
        announce_activity(self, None)

    def _end_writing(self, outcome: Future[Any]) -> Any:
        save = self._save
        if outcome.exception() is not None:
            save.remove_own_files()
        if not save.leads:
            if outcome.exception() is not None and not _is_awaited(save):
                return None  # the leading rank has failed, and removed what this one wrote to
            _report(save, message_of(outcome))
        return outcome.result()

    def _commit(self, outcome: Future[Any]) -> None:
        save = self._save
        if not save.leads:
            return
        try:
            reports = _collect_reports(save, message_of(outcome), self._cancelled)
            written = combine(save.doing, reports, outcome.exception())
        except BaseException:
            self._abandoned = True
            save.abandon()
            raise
        save.commit(written)
        self._lock.close()


def _is_awaited(save: Save) -> bool:
    """Return whether the leading rank waits for reports."""
    return filesystem.exists(save.report_path(0))


def _report(save: Save, message: dict[str, Any]) -> None:
    """Report the outcome of this rank's part to the leading rank.

    If that has given up, nothing is left of the save, and the leading rank raises the reason.
    """
    part, report = (save.report_path(save.number, suffix) for suffix in ("-part", ""))
    try:
        filesystem.write_small(part, integrity.dump_sealed(message))
        filesystem.rename(part, report)
    except Exception:
        filesystem.remove_or_log(part)
        if _is_awaited(save):
            raise
        return  # the directory was removed meanwhile
    with contextlib.suppress(OSError):  # the report is written: not an error of this rank
        # Remove it, and do not only look: what a network file system shows may be gone, and only
        # one rank can remove a file.
        if not _is_awaited(save) and filesystem.remove(report):
            save.abandon()


def _collect_reports(
    save: Save, own: dict[str, Any], cancelled: threading.Event
) -> list[dict[str, Any]]:
    """Return the reports of all ranks once they are there, and remove their files.

    :raises CheckpointError: if the save is cancelled, or this program ended long ago.
    """
    doing, ranks = save.doing, save.ranks
    reports = {save.number: own}
    pause, ended = 0.005, 0.0
    while True:
        for index in range(len(ranks)):
            path = save.report_path(index)
            if index not in reports and filesystem.exists(path):
                reports[index] = integrity.load_sealed(path)
        if len(reports) == len(ranks):
            break
        if cancelled.wait(pause):
            raise CheckpointError(f"{doing}: given up, since a rank's part has failed")
        if not _is_awaited(save):
            raise removed_by_others(doing, f"{save.place.folder} or files in it")
        pause = min(2 * pause, 0.1)
        if not threading.main_thread().is_alive():
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _GRACE:
                late = [rank for index, rank in enumerate(ranks) if index not in reports]
                raise CheckpointError(f"{doing}: ranks {late} have not finished their part")
    for index in sorted(reports, reverse=True):  # the leading rank's last
        filesystem.remove(save.report_path(index))
    return [reports[index] for index in sorted(reports)]


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
