"""Collectives with ``async_op=True`` in the world of a test: the tensors change at `wait`.

The call itself is over when it returns. So a program would pass that forgets to wait, or changes
tensors before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work
from torch.futures import Future

from syncprims._data.digests import digest_tensors
from syncprims._protocol.call_site import NoteCache
from syncprims.c10d import SyncProcessGroup, torch_internals
from syncprims.c10d.torch_internals import c10d, dist
from syncprims.testing.errors import UnfinishedWork

T = TypeVar("T")

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip


_Values = list[tuple[torch.Tensor, torch.Tensor]]


class _Unfinished(threading.local):
    """The work that the thread of a rank has yet to wait for, with the call that started it."""

    def __init__(self) -> None:
        self.works: dict[_DeferredWork, str] = {}


_unfinished = _Unfinished()


class _DeferredWork(Work):
    """Work that gives tensors their new values when the program waits for it.

    :raises UnfinishedWork: from then on, if one of its tensors has changed meanwhile.
    """

    def __init__(self, work: Any, label: str, before: _Values, after: _Values) -> None:
        """Copy `after` to its tensors at the end, which have the values `before` until then."""
        super().__init__()
        self._work, self._label, self._before, self._after = work, label, before, after

    def _finish(self) -> None:
        _unfinished.works.pop(self, None)
        before, self._before = self._before, []
        if not all(_are_same(tensor, old) for tensor, old in before):
            here = NoteCache(torch_internals.BETWEEN).note("wait").label
            raise UnfinishedWork(
                f"this rank has changed a tensor of {self._label} before {here}: until then, the "
                f"call may read it, or fill it. Call wait() first, or give it a copy"
            )
        for tensor, value in self._after:
            tensor.copy_(value)
        self._after = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the tensors have their new values."""
        _unfinished.works.pop(self, None)  # also if that raises
        self._work.wait(*([timeout] if timeout else []))
        self._finish()
        return True

    def synchronize(self) -> None:
        """Return once the tensors have their new values."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is over: a program that asks in a loop waits."""
        if self._work.is_completed():
            self._finish()
            return True
        return False

    is_success: Callable[..., bool] = is_completed

    def get_future(self) -> Future[Any]:
        """Return its future, which is done."""
        self.wait()
        future: Future[Any] = self._work.get_future()
        return future

    def result(self) -> Any:
        """Return the tensors, with their new values."""
        self.wait()
        return self._work.result()

    def source_rank(self) -> int:
        """Return the group rank that sends what this receives."""
        rank: int = self._work.source_rank()
        return rank

    _source_rank: Callable[..., int] = source_rank


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    named = [("", one)], [("", other)]  # there may be NaN
    return digest_tensors(named[0]) == digest_tensors(named[1])


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.data
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: object, **named: object) -> Any:
        is_async = named.get("async_op") or any(arg is True for arg in args)
        # Torch's own code waits in C++, or knows that it need not.
        if not is_async or sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):  # pyright: ignore[reportPrivateUsage]
            return original(*args, **named)
        before = [(tensor, tensor.clone()) for tensor in _tensors_in([*args, *named.values()])]
        work = original(*args, **named)
        if work is None or type(work).__name__ == "_IllegalWork":  # of a coalescing manager
            return work
        values = [(t, t.clone()) for t, old in before if not torch.equal(t, old)]
        for tensor, old in before:
            tensor.copy_(old)
        return _defer(work, original.__name__, before, values)

    return call


def _defer(work: Any, kind: str, before: _Values, after: _Values) -> _DeferredWork:
    label = str(NoteCache(torch_internals.BETWEEN).note(kind).label)
    deferred = _DeferredWork(work, label, before, after)
    if after or kind != "isend":  # what a send needs is over when its receive has begun
        _unfinished.works[deferred] = label
    return deferred


def _deferring_transfer(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: object, tensors: Sequence[torch.Tensor], *args: Any) -> Any:
        data = tensors[0].data
        if type(data) is not torch.Tensor or data.is_quantized or not data.is_contiguous():
            return original(group, tensors, *args)
        room = torch.empty_like(data) if kind == "irecv" else data
        work = original(group, [room], *args)
        data, room = _bytes_of(data), _bytes_of(room)  # nothing else works for every dtype
        return _defer(work, kind, [(data, data.clone())], [(data, room)] * (kind == "irecv"))

    return call


def changes_at_wait() -> contextlib.AbstractContextManager[None]:
    """Return a context in which collectives of this process change their tensors at `wait`."""
    calls = [(name, _deferring(getattr(c10d(), name))) for name in _COLLECTIVES]
    return torch_internals.replaced(
        *((owner, name, call) for name, call in calls for owner in (c10d(), dist)),
        (SyncProcessGroup, "send", _deferring_transfer(SyncProcessGroup.send, "isend")),
        (SyncProcessGroup, "recv", _deferring_transfer(SyncProcessGroup.recv, "irecv")),
    )


def finishing(fn: Callable[[], T]) -> Callable[[], T]:
    """Return a function as `fn` that raises at its end, if it has not waited for some work.

    :raises UnfinishedWork: naming the calls.
    """

    @functools.wraps(fn)
    def run() -> T:
        __tracebackhide__ = True
        works = _unfinished.works
        works.clear()
        result = fn()
        if works:
            calls = ", ".join(dict.fromkeys(works.values()))
            raise UnfinishedWork(
                f"this rank never waited for {calls}: call wait() on what a call with "
                f"async_op=True returns, before you use its tensors"
            )
        return result

    return run
