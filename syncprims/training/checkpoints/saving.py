"""A save that is under way behind the training, or done."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any

import torch

from syncprims import current
from syncprims._world.runtime import get_active_group

from .messages import collect, is_heard, leave, listen
from .together import STANDS, Outcome, clearing, log, settle, together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .job import File, Job

_KEY = "training.saving"  # among the world's belongings
_WAIT = "Saving.wait"  # the call under whose name ranks wait for each other, whoever makes it


def save_now(job: Job) -> Saving:
    """Save, and return when that is done."""
    try:
        written = together(job.doing, job.write, advice=STANDS).by_rank
    except BaseException:
        job.remove_own()  # also where another rank has failed, or is gone
        if job.team.leads:
            job.abandon()
        raise
    together(job.doing, lambda: job.commit(written) if job.team.leads else None, advice=STANDS)
    return Saving(job)


def save_behind(job: Job) -> Saving:
    """Copy what this rank writes, and return while that is being done."""

    def copy() -> list[File]:
        if job.team.leads:
            listen(job)
        return [file._replace(tensors=_copies(file.tensors)) for file in job.own()]

    extras = current().extras
    try:
        copied = together(job.doing, copy, lambda _: None, advice=STANDS).own
        saving = extras[_KEY] = _Behind(job._replace(files=copied))
        saving.start()
    except BaseException:
        if job.team.leads and not is_under_way(extras):
            job.abandon()
        raise
    return saving


def finish_earlier() -> None:
    """Wait for the save that is under way, if there is one.

    :raises CheckpointError: if it has failed.
    """
    earlier = current().extras.get(_KEY)
    if isinstance(earlier, Saving):
        earlier.wait()


def is_under_way(extras: Mapping[str, Any]) -> bool:
    """Tell whether a world has a save that a thread has begun, and nobody has waited for."""
    saving = extras.get(_KEY)
    return isinstance(saving, _Behind) and saving.begun


class Saving:
    """A save; it is done, or becomes so. As a path it is the checkpoint's directory."""

    def __init__(self, job: Job) -> None:
        self.path = job.place.path  #: the checkpoint's directory

    def __fspath__(self) -> str:
        return self.path

    @property
    def done(self) -> bool:
        """True once this rank has nothing more to do for it. Waits for nobody."""
        return True

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if a rank's part has failed; once.
        """


class _Behind(Saving):
    """A save that a thread of each rank writes."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job = job
        self._group = get_active_group()  # in which it is waited for, wherever that is
        self._written: Outcome[Any] | None = None
        self._committed: Outcome[Any] | None = None
        self._has_written = threading.Event()
        self._has_ended = threading.Event()
        self._given_up = threading.Event()
        self._abandoned = False
        self.begun = False  #: then the thread sees to what it has not finished, and nobody else
        # No daemon: a program that ends lets its last checkpoint be finished.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # of the same rank
            args=(self._run,),
            name="syncprims-save",
        )

    def start(self) -> None:
        """Begin to write."""
        self.begun = True  # before: a signal's handler may raise in there, and the thread run on
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once this rank has nothing more to do for it. Waits for nobody."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is durable. All ranks that save it call it.

        :raises CheckpointError: on all ranks, if a rank's part has failed; once.
        """
        extras = current().extras
        if extras.get(_KEY) is not self:
            return  # it was waited for before
        del extras[_KEY]
        doing, leads = self._job.doing, self._job.team.leads
        self._has_written.wait()
        with self._group, clearing(doing, self._clear):
            together(doing, lambda: _again(self._written), call=_WAIT, advice=STANDS)
            self._end()
            committed = (lambda: _again(self._committed)) if leads else (lambda: None)
            together(doing, committed, call=_WAIT, advice=STANDS)

    def _clear(self) -> None:
        self._given_up.set()
        self._end()
        if self._abandoned:
            self._job.abandon()  # once more: now all ranks have written what they had to

    def _end(self) -> None:
        """Return when the thread has done all it had to."""
        # An exception in `join`, as of a signal's handler, lets Python up to 3.12 forget a thread
        # that runs on: then nobody would wait for it when the program ends.
        self._has_ended.wait()
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._save()
        finally:
            self._has_written.set()
            self._has_ended.set()

    def _save(self) -> None:
        job = self._job
        self._written = written = Outcome.of(self._write, lambda result: result)
        self._has_written.set()
        if job.team.leads:
            self._committed = Outcome.of(lambda: self._commit(written), lambda result: result)
        elif written.error is not None:
            job.remove_own()
        error = (self._committed or written).error
        if error is not None:  # the program may never ask for it
            log().error("%s, behind the training, has failed: %s", job.doing, error)

    def _write(self) -> Any:
        job = self._job
        written = Outcome.of(lambda: job.write(quiet=True), lambda result: result)
        if not job.team.leads:
            if written.error is not None and not is_heard(job):
                return None  # the leading rank has failed, and removed what this one wrote to
            leave(job, written.plain)
        return _again(written)

    def _commit(self, written: Outcome[Any]) -> None:
        job = self._job
        try:
            said = collect(job, written.plain, self._given_up)
            told = settle(job.doing, written, said).by_rank
        except BaseException:
            self._abandoned = True
            job.abandon()
            raise
        job.commit(told)


def _again(outcome: Outcome[Any] | None) -> Any:
    """Return the result, or raise what was raised."""
    assert outcome is not None, "the thread has ended"
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in memory of the host: pinned, where they come from a GPU."""
    copies: dict[str, torch.Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors.items():
        if tensor.device.type == "cuda":
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        else:
            copies[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    for device in devices:
        torch.cuda.synchronize(device)
    return copies
