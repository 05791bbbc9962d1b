"""Collectives with ``async_op=True`` in the world of a test: the tensors change at `wait`.

The call itself is over when it returns, and a program that forgets to wait would pass.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work
from torch.futures import Future

from syncprims._protocol.call_site import NoteCache
from syncprims.c10d import torch_internals
from syncprims.c10d.torch_internals import c10d, dist
from syncprims.testing.errors import UnfinishedWork

T = TypeVar("T")

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip


class _Unfinished(threading.local):
    """The work that the thread of a rank has yet to wait for, with the call that started it."""

    def __init__(self) -> None:
        self.works: dict[_DeferredWork, str] = {}


_unfinished = _Unfinished()


class _DeferredWork(Work):
    """Work that gives tensors their new values when the program waits for it."""

    def __init__(self, work: Any, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._values = work, values

    def _finish(self) -> None:
        for tensor, value in self._values:
            tensor.copy_(value)
        self._values.clear()
        _unfinished.works.pop(self, None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the tensors have their new values."""
        self._finish()
        return True

    def synchronize(self) -> None:
        """Return once the tensors have their new values."""
        self._finish()

    def is_completed(self) -> bool:
        """Return True: a program that asks in a loop waits."""
        self._finish()
        return True

    is_success: Callable[..., bool] = is_completed

    def get_future(self) -> Future[Any]:
        """Return its future, which is done."""
        self._finish()
        future: Future[Any] = self._work.get_future()
        return future

    def result(self) -> Any:
        """Return the tensors, with their new values."""
        self._finish()
        return self._work.result()


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
        deferred = _DeferredWork(work, values)
        notes = NoteCache(torch_internals.BETWEEN)
        _unfinished.works[deferred] = str(notes.note(original.__name__).label)
        return deferred

    return call


def changes_at_wait() -> contextlib.AbstractContextManager[None]:
    """Return a context in which collectives of this process change their tensors at `wait`."""
    calls = [(name, _deferring(getattr(c10d(), name))) for name in _COLLECTIVES]
    return torch_internals.replaced(
        *((owner, name, call) for name, call in calls for owner in (c10d(), dist))
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
