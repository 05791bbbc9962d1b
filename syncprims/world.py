"""The world of this process: started once, found by every primitive, and ended.

The one place with mutable state, and the one place that reads ``os.environ``.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from .arguments import seconds
from .endings import Endings, reason
from .environment import claims_of_size, detect, read_settings
from .errors import ConfigurationError, ForkedProcess, SyncError, WorldClosed
from .group import entered
from .interface import Topology
from .membership import World
from .registry import backend_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta
    from types import ModuleType

    from .group import Group

# -- the state -------------------------------------------------------------------------------


class _State:
    """What this process has: no world yet, a world, or the reason why there is none any more."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.ended: Callable[[], SyncError] | None = None
        self.topology: Topology | None = None  # of a world that has ended
        self.starting = threading.RLock()  # two threads may make the first call


_state = _State()


def init(backend: str | None = None, *, timeout: float | timedelta | None = None) -> World:
    """Start the world and return it, once all ranks have joined and agree.

    `backend` and `timeout` (the default of every call, in seconds) may also come from
    ``SYNCPRIMS_BACKEND`` and ``SYNCPRIMS_TIMEOUT``. If the world runs already, it is returned.
    ``with init(...):`` ends it with the block.

    :raises ConfigurationError: if the environment or the arguments contradict themselves or each
        other, or the ranks disagree.
    :raises BackendUnavailable: if the backend cannot work here.
    :raises SyncTimeout: naming the ranks that did not come within ``SYNCPRIMS_JOIN_TIMEOUT``.
    """
    _endings.watch_forks()  # before anything is held that a child could inherit
    with _state.starting:
        running = _state.world
        if running is not None:
            _check_same(running, backend, seconds(timeout))
            return running
        if _state.ended is not None and isinstance(_state.ended(), ForkedProcess):
            raise _state.ended()
        return _start(os.environ, backend, seconds(timeout))


def current(timeout: float | timedelta | None = None) -> World:
    """Return the running world; the first call starts it from the environment.

    With `timeout`, that of a primitive that starts it, the others have no longer to join.

    :raises WorldClosed: after :func:`shutdown`.
    :raises ForkedProcess: in a forked child, which is not a rank.
    """
    world = _state.world
    if world is not None:
        return world
    if _state.ended is not None:
        raise _state.ended()
    _endings.watch_forks()
    with _state.starting:
        return _state.world or _start(os.environ, None, None, join_within=seconds(timeout))


def shutdown() -> None:
    """End this rank's part in the world; the others see that it has finished.

    Nothing happens if there is no world. In a forked child it forgets the parent's world, so that
    another can be started.
    """
    if _state.world is not None:
        _end(None)
    elif _state.ended is not None and isinstance(_state.ended(), ForkedProcess):
        _state.ended = None
        _state.topology = None


def active_group(timeout: float | timedelta | None = None) -> Group:
    """Return the group whose ``with`` block this is, else all ranks."""
    return entered.get() or (_state.world or current(timeout)).group


def topology() -> Topology:
    """Return this process's place, from the world if there is or was one, else the environment."""
    if _state.world is not None:
        return _state.world.topology
    return _state.topology or _place(os.environ)


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
    environ: Mapping[str, str],
    backend: str | None,
    timeout: float | None,
    *,
    join_within: float | None = None,
) -> World:
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
    name, chosen_by = _choose(environ, backend)
    if name == "single":
        _refuse_lonely(environ, chosen_by)
    place = _place(environ)
    if name == "auto":
        name = "torch" if place.world_size > 1 else "single"
        chosen_by += f", which takes {name!r} for world_size={place.world_size}"
    try:
        cls = backend_class(name)
    except SyncError as error:
        error.args = (f"{error} (chosen by {chosen_by})",)
        raise
    if place.num_nodes > 1 and not cls.spans_hosts:
        raise ConfigurationError(
            f"backend {name!r} (chosen by {chosen_by}) joins the ranks of one host, and "
            f"{place.launcher} started {place.num_nodes} nodes; choose one that spans hosts"
        )
    made = cls(place, settings)
    place = made.topology  # it may know more of hosts than the launcher says
    try:
        world = World(made, name, settings, place, end=_end_block)
        _endings.watch()
        _state.world, _state.ended, _state.topology = world, None, place
        world.join()
    except BaseException as error:
        _end(error) if _state.world is not None else made.close(None)
        _state.ended = _state.topology = None  # it never ran: another attempt may
        raise
    return world


def _choose(environ: Mapping[str, str], backend: str | None) -> tuple[str, str]:
    """Return the name of the backend, and what decided it."""
    named = environ.get("SYNCPRIMS_BACKEND") or None
    if backend not in (None, "auto") and named not in (None, "auto", backend):
        raise ConfigurationError(
            f"init({backend!r}) contradicts SYNCPRIMS_BACKEND={named}; drop one of them"
        )
    if backend not in (None, "auto"):
        assert backend is not None
        return backend, f"init({backend!r})"
    if named not in (None, "auto"):
        assert named is not None
        return named, f"SYNCPRIMS_BACKEND={named}"
    if _is_initialized(sys.modules.get("torch.distributed")):
        return "torch", "the torch.distributed group that is initialized already"
    return "auto", f"SYNCPRIMS_BACKEND={named}" if named else "the default, auto"


def _refuse_lonely(environ: Mapping[str, str], chosen_by: str) -> None:
    """Refuse a world of one where the environment claims more: nothing falls back in silence."""
    claims = claims_of_size(environ)
    if claims:
        shown = " and ".join(f"{name}={size}" for name, size in claims.items())
        raise ConfigurationError(
            f"backend 'single' (chosen by {chosen_by}) is a world of one, and the environment says "
            f"{shown}; choose another backend, or unset {' and '.join(claims)}"
        )


def _end(error: BaseException | None) -> None:
    """Leave the world, with `error` as the reason if there is one."""
    world = _state.world
    if world is None:
        return
    _state.world = None
    _state.ended = _closed
    world.bar(_closed)
    _endings.unwatch()
    world.leave(error)


def _end_block(world: World, error: BaseException | None) -> None:
    """End the world whose ``with`` block has ended, unless it has been ended inside."""
    if _state.world is world:
        _end(reason(error))


def _closed() -> SyncError:
    return WorldClosed(
        "this rank has left the world: shutdown() was called, the `with init()` block has ended, "
        "or Python is exiting. Make the call before that, or start a world with init()"
    )


def _on_fork() -> None:
    _state.starting = threading.RLock()  # a thread that the child does not have may hold it
    world = _state.world
    if world is None:
        return
    _state.world = None
    _state.ended = _forked
    world.bar(_forked)
    _endings.unwatch()
    world.abandon()


def _forked() -> SyncError:
    return ForkedProcess(
        f"process {os.getpid()} is a forked child of rank {topology().rank} and not a rank: "
        f"it cannot synchronize. Call primitives in the parent, or, to make the child a rank of "
        f"another world, call shutdown() in it first"
    )


_endings = Endings(_end, _on_fork)
