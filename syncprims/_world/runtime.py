"""The world of this process: started once, found by every primitive, and ended.

The one place with mutable state, and the one place that reads ``os.environ``.

A rank is a process, but in a test it may be a thread (:func:`seated`). Then it has a state of its
own, which only the slow ways ask for: the quick one finds the process's world, and that is set
aside for as long as any thread is a rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from syncprims._protocol.validation import seconds
from syncprims.errors import ConfigurationError, ForkedProcess, SyncError, WorldClosed, dump, load
from syncprims.interface import Topology

from .choice import choose, class_of
from .environment import detect, place_variables, read_settings
from .exit_hooks import Endings, reason
from .group import entered
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from datetime import timedelta
    from types import ModuleType

    from syncprims.interface import Backend, Settings

    from .group import Group

    Maker = Callable[[type[Backend], Topology, Settings], Backend]

# -- the state -------------------------------------------------------------------------------


class _State:
    """What a rank has: no world yet, a world, or the reason why there is none any more."""

    def __init__(self, environ: Mapping[str, str], make: Maker) -> None:
        self.environ = environ
        self.make = make
        self.world: World | None = None
        self.ended: Callable[[], SyncError] | None = None
        self.topology: Topology | None = None  # of a world that has ended
        self.starting = threading.RLock()  # two threads may make the first call
        self.aside: World | None = None  # the process's, while threads are ranks
        self.guests = 0  # how many are
        self.hosted = False  # a test has started the world: what `init` asks for is not there

    @property
    def running(self) -> World | None:
        return self.world or self.aside

    def forget(self, why: Callable[[], SyncError]) -> World | None:
        """Have no world any more; return the one there was."""
        world = self.running
        if world is not None:
            self.world = self.aside = None
            self.ended = why
            world.close_with(why)
        return world


def _make(cls: type[Backend], place: Topology, settings: Settings) -> Backend:
    return cls(place, settings)


_state = _State(os.environ, _make)  # of this process
_seat: ContextVar[_State | None] = ContextVar("syncprims_seat", default=None)


def _mine() -> _State:
    """Return the state of the rank that asks."""
    return _seat.get() or _state


def init(backend: str | None = None, *, timeout: float | timedelta | None = None) -> World:
    """Start the world and return it, once all ranks have joined and agree.

    `backend` and `timeout` (the default of every call, in seconds) may also come from
    ``SYNCPRIMS_BACKEND`` and ``SYNCPRIMS_TIMEOUT``. If the world runs already, it is returned.
    ``with init(...):`` ends it with the block. On the torch backends torch's own default group is
    not made by this: :meth:`World.open_process_group` does, for a DDP of one's own.

    :raises ConfigurationError: if the environment or the arguments contradict themselves or each
        other, or the ranks disagree.
    :raises BackendUnavailable: if the backend cannot work here.
    :raises SyncTimeout: naming the ranks that did not come within ``SYNCPRIMS_JOIN_TIMEOUT``.
    """
    _endings.watch_forks()  # before anything is held that a child could inherit
    state = _mine()
    with state.starting:
        running = state.running
        if running is not None and state.hosted:
            return running.adopt(seconds(timeout))
        if running is not None:
            _check_same(running, backend, seconds(timeout))
            return running
        if state.ended is not None and isinstance(state.ended(), ForkedProcess):
            raise state.ended()
        return _start(state, backend, seconds(timeout))


def current(timeout: float | timedelta | None = None) -> World:
    """Return the running world; the first call starts it from the environment.

    With `timeout`, that of a primitive that starts it, the others have no longer to join.

    :raises SyncError: as it did before, if a start has failed since the ranks could meet; then
        only :func:`init` tries again.
    :raises WorldClosed: after :func:`shutdown`.
    :raises ForkedProcess: in a forked child, which is not a rank.
    """
    world = _state.world
    if world is not None:
        return world
    state = _mine()
    if state.running is not None:
        return state.running
    if state.ended is not None:
        raise state.ended()
    _endings.watch_forks()
    with state.starting:
        running = _mine().running  # another thread may have been first
        return running or _start(state, None, None, join_within=seconds(timeout))


def shutdown() -> None:
    """End this rank's part in the world; the others see that it has finished.

    Nothing happens if there is no world. In a forked child it forgets the parent's world, so that
    another can be started.
    """
    state = _mine()
    if state.running is not None:
        _end(state, None)
    elif state.ended is not None and isinstance(state.ended(), ForkedProcess):
        state.ended = None
        state.topology = None


def active_group(timeout: float | timedelta | None = None) -> Group:
    """Return the group whose ``with`` block this is, else all ranks."""
    return entered.get() or (_state.world or current(timeout)).group


def topology() -> Topology:
    """Return this process's place, from the world if there is or was one, else the environment.

    :raises ConfigurationError: while ranks of this process are threads, in a test, in any other.
    """
    world = _state.world
    if world is not None:
        return world.topology
    state = _mine()
    if state is _state and state.guests:
        raise _no_rank()
    return state.topology or _place(state.environ)


def _no_rank() -> ConfigurationError:
    return ConfigurationError(
        "ranks of this process are threads, in a test, and this thread is none of them; call "
        "from a rank's own thread, or pass on its context: contextvars.copy_context().run(...)"
    )


def _place(environ: Mapping[str, str]) -> Topology:
    """Return this process's place by its launcher, else by the group it has initialized itself."""
    place = detect(environ)
    if place.launcher == "none":
        distributed = sys.modules.get("torch.distributed")
        if _is_initialized(distributed):
            assert distributed is not None
            rank, size = distributed.get_rank(), distributed.get_world_size()
            # Who shares a host is not known before the ranks have met.
            local = Topology(rank, size, rank, size, launcher="torch.distributed")
            return local._replace(run_id=place.run_id)
    return place


def _is_initialized(distributed: ModuleType | None) -> bool:
    return bool(
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )


# -- for tests: ranks that are threads, and backends that are looked at ------------------------


def clean_environ() -> dict[str, str]:
    """Return this process's variables but those that say which rank it is, of what, and where."""
    own = ("BACKEND", "DIR", "ERROR_FILE")
    outer = place_variables() | {f"SYNCPRIMS_{name}" for name in own}
    return {name: value for name, value in os.environ.items() if name not in outer}


@contextlib.contextmanager
def seated(environ: Mapping[str, str], make: Maker) -> Generator[None]:
    """Let this thread, or task, be a rank of its own, with these variables, within the block.

    `make` makes its backend. The process's own world is set aside meanwhile.
    """
    _endings.watch_forks()
    token = _seat.set(_State(environ, make))
    with _state.starting:
        if not _state.guests:
            _state.aside, _state.world = _state.world, None
        _state.guests += 1
    try:
        with host():
            yield
    finally:
        _seat.reset(token)
        with _state.starting:
            _state.guests -= 1
            if not _state.guests:
                _state.world, _state.aside = _state.aside, None


@contextlib.contextmanager
def host() -> Generator[World]:
    """Run the world of a test: the program in it finds it running, whatever backend it asks for."""
    with init() as world:
        _mine().hosted = True
        yield world


def become_rank(make: Maker) -> None:
    """Let this fresh child process be a rank, whatever its parent was; `make` makes its backend."""
    _seat.set(None)
    _state.__init__(os.environ, make)  # type: ignore[misc]


def _check_same(running: World, backend: str | None, timeout: float | None) -> None:
    if backend not in (None, "auto", running.backend_name):
        raise ConfigurationError(
            f"init({backend!r}): the world runs already, with backend {running.backend_name!r}; "
            f"call shutdown() before starting another"
        )
    if timeout is not None and timeout != running.settings.timeout:
        raise ConfigurationError(
            f"init(timeout={timeout:g}): the world runs already, with timeout "
            f"{running.settings.timeout}; call shutdown() before starting another"
        )


def _start(
    state: _State,
    backend: str | None,
    timeout: float | None,
    *,
    join_within: float | None = None,
) -> World:
    if state is _state and state.guests:
        raise _no_rank()
    environ = state.environ
    settings = read_settings(environ)
    if join_within is not None:
        settings = settings._replace(join_timeout=min(join_within, settings.join_timeout))
    if timeout is not None and settings.timeout not in (None, timeout):
        raise ConfigurationError(
            f"init(timeout={timeout:g}) contradicts SYNCPRIMS_TIMEOUT={settings.timeout:g}; "
            f"drop one of them"
        )
    if timeout is not None:
        settings = settings._replace(timeout=timeout)
    grouped = _is_initialized(sys.modules.get("torch.distributed"))
    choice = choose(environ, backend, grouped=grouped, find_place=lambda: _place(environ))
    made = state.make(class_of(choice), choice.place, settings)
    place = made.topology  # it may know more of hosts than the launcher says
    try:
        world = World(made, choice.backend, settings, place, end=_end_block)
        if state is _state:
            _endings.watch()
        state.world, state.ended, state.topology = world, None, place
        world.join()
    except BaseException as error:
        met = state.world is not None
        _end(state, error) if met else made.close(None)
        # It never ran, and another `init` may try again. But where ranks may have met already, a
        # mere call does not: it would take the place of the one that failed, out of step.
        state.topology = None
        state.ended = _as_before(error) if met and isinstance(error, SyncError) else None
        raise
    return world


def _as_before(error: SyncError) -> Callable[[], SyncError]:
    verdict = dump(error)
    return lambda: load(verdict)


def _end(state: _State, error: BaseException | None) -> None:
    """Leave the world, with `error` as the reason if there is one."""
    world = state.forget(_closed)
    if world is None:
        return
    if state is _state:
        _endings.unwatch()
    world.leave(error)


def _end_block(world: World, error: BaseException | None) -> None:
    """End the world whose ``with`` block has ended, unless it has been ended inside."""
    state = _mine()
    if state.running is world:
        _end(state, reason(error))


def _end_process(error: BaseException | None) -> None:
    _end(_state, error)


def _closed() -> SyncError:
    return WorldClosed(
        "this rank has left the world: shutdown() was called, the `with init()` block has ended, "
        "or Python is exiting. Make the call before that, or start a world with init()"
    )


def _on_fork() -> None:
    seat = _seat.get()
    if seat is not None:  # a thread was a rank; its child is a process, and none
        _seat.set(None)
        _leave_to_parent(seat)
        _state.topology = seat.topology or detect(seat.environ)
        _state.ended = seat.ended or _forked
    _leave_to_parent(_state)
    _state.guests = 0


def _leave_to_parent(state: _State) -> None:
    state.starting = threading.RLock()  # a thread that the child does not have may hold it
    world = state.forget(_forked)
    if world is not None:
        if state is _state:
            _endings.unwatch()
        world.abandon()


def _forked() -> SyncError:
    return ForkedProcess(
        f"process {os.getpid()} is a forked child of rank {topology().rank} and not a rank: "
        f"it cannot synchronize. Call primitives in the parent, or, to make the child a rank of "
        f"another world, call shutdown() in it first"
    )


_endings = Endings(_end_process, _on_fork)
