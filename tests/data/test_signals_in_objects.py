"""What a signal handler raises within an object's own methods leaves the call as it is."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest
from conftest import in_processes, several
from support.rank_worlds import Ranks

import syncprims as sp
from syncprims.testing import run_world


class Preempted(RuntimeError):
    """Raised by a handler."""


@dataclasses.dataclass(repr=False)
class Interrupted:
    """A value; a signal arrives in one of its methods."""

    method: str = ""

    def _signal_in(self, method: str) -> None:
        if self.method == method:
            signal.raise_signal(signal.SIGUSR1)

    def __reduce__(self) -> Any:
        self._signal_in("reduce")
        return Interrupted, (self.method,)

    def __repr__(self) -> str:
        self._signal_in("repr")
        return "a value"


class Handler:
    """Handlers as programs have them."""

    def method(self, *_: object) -> None:
        raise Preempted

    def __call__(self, *_: object) -> None:
        raise Preempted


def handle(*_: object) -> None:
    raise Preempted


HANDLERS: list[Any] = [
    handle,
    lambda *_: handle(),
    functools.partial(handle, 1),
    Handler().method,
    Handler(),
]
CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a text": ("repr", lambda value: sp.assert_same(value, "value")),
    "a broadcast": ("reduce", sp.broadcast),
    "a gather": ("reduce", sp.all_gather),
}


@in_processes
@several(2)
@pytest.mark.parametrize("call", CALLS)
def test_it_is_raised_and_the_others_get_no_result(world: Ranks, call: str) -> None:
    method, make = CALLS[call]

    def program() -> str:
        signal.signal(signal.SIGUSR1, HANDLERS[len(call) % len(HANDLERS)])
        try:
            make(Interrupted(method if sp.is_main() else ""))
        except (sp.SyncError, Preempted) as error:
            return type(error).__name__
        return "no error"

    main, *others = world.run(program)
    assert main == "Preempted"
    assert {*others} <= {"PeerFailed", "PeerLost"}


@pytest.mark.parametrize("handler", HANDLERS)
def test_every_kind_of_handler_is_known(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted):
            run_world(lambda: sp.all_gather(Interrupted("reduce")), 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
