"""The world of this process: started once, found by every primitive, and ended.

The one place of the core that reads ``os.environ``, and where that world is found.

A rank is a process, but in a test it may be a thread (:func:`thread_as_rank`). Then it has a state
of its own, which only the slow paths look for: the fast path finds the process's world, and that is
set aside for as long as any thread is a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any

from syncprims import errors
from syncprims._protocol.call_site import describe_call
from syncprims._protocol.validation import Seconds, seconds
from syncprims.errors import ConfigurationError, SyncError
from syncprims.interface import UNKNOWN, Backend, Settings, Topology

from . import launchers
from .exit_hooks import ExitHooks, reason
from .group import Group, entered
from .nodes import place_on_nodes, without_nodes
from .registry import choose_backend, find_end_recorder
from .settings import EPOCH_NOTE, STOP_NOTE, derive_store, find_misspelt, read_settings
from .world import Change, RunningWorld, World, dump_failure, report_failure, report_to_torchrun

MakeBackend = Callable[[type[Backend], Topology, Settings], Backend]

_OUR_FILE, _FILE_OF_TORCHRUN = "SYNCPRIMS_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"
_C10D = "torch.distributed.distributed_c10d"
_modules = sys.modules


def _no_group() -> None:
    """Stand for a reference to a group that is not there."""


class _State:
    """The state of a rank: no world yet, a world, or the reason why its world has ended."""

    def __init__(self, environ: Mapping[str, str], make: MakeBackend) -> None:
        self.environ = environ
        self.make = make
        self.world: RunningWorld | None = None
        self.ended: Callable[[], SyncError] | None = None
        self.topology: Topology | None = None  # of a world that has ended
        self.last_epoch = 0  # of all worlds
        self.failure: bytes | None = None  # that ends the process, outside of a world
        self.in_vain = ""  # the call that was to start a world, and could not
        self.starting = threading.RLock()  # two threads may make the first call
        self.is_starting = False  # a world; a signal handler may call meanwhile
        self.extras: dict[str, Any] = {}  # what belongs to the world, or to the next one
        self.aside: RunningWorld | None = None  # the process's world, while threads are ranks
        self.thread_worlds = 0  # how many worlds of such ranks there are
        self.provided = False  # a test has started the world: what `init` asks for is ignored
        self.warnings: set[str] = set()  # of likely mistakes, each logged once
        self.kept: dict[Any, Any] = {}  # what lasts longer than a world, by what it is
        # Torch's, that was last compared with the world. To keep it would keep its connections.
        self.process_group: Callable[[], Any] = _no_group

    @property
    def running(self) -> RunningWorld | None:
        return self.world or self.aside

    def forget(self, why: Callable[[], SyncError]) -> RunningWorld | None:
        """Close the world, so that it raises ``why()``, and return it if there is one."""
        world = self.running
        if world is not None:
            self.world = self.aside = None
            self.ended, self.extras = why, {}
            world.close(why)
            # A launcher asks for the cause of a failure also after shutdown().
            asks = any(self.environ.get(name) for name in (_OUR_FILE, _FILE_OF_TORCHRUN))
            if self is _state and (why is not _closed or not asks):
                _exit_hooks.remove()
        return world


_state = _State(os.environ, lambda cls, top, settings: cls(top, settings))  # of this process
_thread_state: ContextVar[_State | None] = ContextVar("syncprims_thread_state", default=None)


def _get_state() -> _State:
    """Return the state of the rank that this code runs on."""
    return _thread_state.get() or _state


def init(backend: str | None = None, *, timeout: Seconds = None) -> World:
    """Start the world and return it, once all ranks have joined and agree.

    `backend` and `timeout` (the default of every call, in seconds) may also come from
    ``SYNCPRIMS_BACKEND`` and ``SYNCPRIMS_TIMEOUT``. If the world runs already, it is returned.
    ``with init(...):`` ends it with the block. On the torch backends this does not make torch's own
    default group: :meth:`World.open_process_group` does, for a DDP of one's own.

    :raises ConfigurationError: if the environment or the arguments contradict themselves or each
        other, or the ranks disagree.
    :raises BackendUnavailable: if the backend cannot work here.
    :raises SyncTimeout: naming the ranks that did not come within ``SYNCPRIMS_JOIN_TIMEOUT``.
    """
    _exit_hooks.watch_forks()  # before anything is held that a child could inherit
    state = _get_state()
    with state.starting:
        running, limit = state.running, seconds(timeout)
        if running is None:
            if state.ended is _forked:
                raise _forked()
            call = describe_call()
            # In a test, the library calls `init`, in a call that is not a part of the world.
            own = call if call.startswith("init ") else ""
            settings = _make_settings(state.environ, limit, first_call=own)
            return _start(state, backend, settings)
        if not state.provided:
            _check_process_group(state)
            _check_same(running, backend, limit)
        elif limit is not None:
            running.set_timeout(limit)
        return running


def current(timeout: Seconds = None) -> World:
    """Return the running world; the first call starts it from the environment.

    `timeout`, in seconds, is that of a primitive that starts the world: the other ranks have no
    longer than that to join.

    :raises SyncError: the error of an earlier start that failed after the ranks could meet; then
        only :func:`init` tries again.
    :raises WorldClosed: after :func:`shutdown`.
    :raises ForkedProcess: in a forked child, which is not a rank.
    """
    return get_world(timeout)


def get_world(timeout: Seconds = None) -> RunningWorld:
    """As :func:`current`, with what the rest of the library needs of a world."""
    world = _state.world
    if world is not None:
        return world
    state = _get_state()
    if state.running is not None:
        return state.running
    if state.ended is not None:
        raise state.ended()
    _exit_hooks.watch_forks()
    with state.starting:
        # Another thread may have been first: so the state is read again.
        running = _get_state().running
        if running is not None:
            return running
        limit = seconds(timeout)
        settings = _make_settings(state.environ, join_within=limit, first_call=describe_call())
        return _start(state, None, settings)


def shutdown() -> None:
    """End this rank's part in the world; the others see that it has finished.

    Where an exception is on its way, as in a ``finally``, they see that it has failed with that.
    Nothing happens if there is no world. A forked child forgets its parent's world, so that it can
    start another.
    """
    state = _get_state()
    if state.ended is _forked:
        state.ended = state.topology = None
    _end(state, _on_its_way())


def get_active_group(timeout: Seconds = None) -> Group:
    """Return the group of the innermost ``with`` block, or that of all ranks outside of one."""
    # Every call comes here, and few programs have such a group: the name is looked up first.
    if _C10D in _modules and _get_process_group() is not _state.process_group():
        _check_process_group(_state)
    groups = entered.get()
    return groups[-1] if groups else (_state.world or get_world(timeout)).group


def get_extras() -> dict[str, Any]:
    """Return what belongs to this rank's world, or to the one that it will start.

    Starts no world. Safe in a signal handler.

    :raises SyncError: as :func:`current`, after the end of a world.
    """
    state = _get_state()
    if state.running is None:
        _check_is_rank(state)
        if state.ended is not None:
            raise state.ended()
    return state.extras


def reform_world(min_ranks: int, timeout: float | None) -> Change:
    """As :func:`syncprims.reform`."""
    from .membership import reform

    world = get_world()
    change = reform(world, min_ranks, world.timeout if timeout is None else timeout)
    _take_topology(_get_state(), world)
    return change


def get_stop_note() -> str | None:
    """Return the file by which this process tells our launcher that it was asked to stop."""
    path = _get_state().environ.get("SYNCPRIMS_ERROR_FILE")
    return f"{path}{STOP_NOTE}" if path else None


def get_settings() -> Settings:
    """Return what the user has set for this process, whether it is a rank or not.

    :raises ConfigurationError: if a variable's value is not what it takes.
    """
    return read_settings(_get_state().environ)


def get_topology() -> Topology:
    """Return this process's topology, from the world if there is or was one, else the environment.

    What a launcher does not say about hosts is unknown until the world has met.

    :raises ConfigurationError: if a group of ``torch.distributed`` contradicts the world; and in a
        thread that is not a rank, while other threads are (in a test).
    """
    world = _state.world
    if world is not None:
        if _get_process_group() is not _state.process_group():
            _check_process_group(_state)
        return world.topology
    state = _get_state()
    _check_is_rank(state)
    return state.topology or _find_topology(state.environ)


def get_host_number(name: str) -> int:
    """Return a number of :func:`get_topology` about hosts; where it is unknown, start the world."""
    topology = get_topology()
    if getattr(topology, name) == UNKNOWN:
        topology = _find_one_host(topology) or current().topology
    number: int = getattr(topology, name)
    return number


def _find_one_host(topology: Topology) -> Topology | None:
    """Return `topology` on the one host that the named backend joins; None if it spans hosts."""
    state = _get_state()
    if state.running is not None or not state.environ.get("SYNCPRIMS_BACKEND"):
        return None
    choice = choose_backend(state.environ, None, grouped=False, find_topology=lambda: topology)
    if choice.load().spans_hosts:
        return None
    return place_on_nodes(topology, [(0, rank) for rank in range(topology.world_size)])


def _check_is_rank(state: _State) -> None:
    if state is _state and state.thread_worlds:
        raise ConfigurationError(
            "in this test, ranks are threads, and this thread belongs to no rank; make the call in "
            "a thread of a rank, or in its context: contextvars.copy_context().run(...)"
        )


def _find_topology(environ: Mapping[str, str]) -> Topology:
    """Return this process's topology by its launcher, or by the group it has initialized itself.

    Which of them decides depends on their sizes alone, which are the same on all ranks. If the
    group is smaller, the backend refuses it: each of the launcher's ranks may have one of its own.
    """
    group = _get_process_group()
    if group is None:
        return launchers.detect(environ)
    try:
        topology = launchers.detect(environ)
        if topology.world_size > group.size():
            return topology
        if topology.world_size == group.size() and topology.launcher != "none":
            if topology.rank == group.rank():
                return topology
            return topology._replace(rank=group.rank(), local_rank=UNKNOWN, node_rank=UNKNOWN)
    except ConfigurationError:
        if environ.get("SYNCPRIMS_LAUNCHER"):
            raise
    run_id = environ.get("SYNCPRIMS_RUN_ID") or None
    place = Topology(group.rank(), group.size(), launcher="torch.distributed", run_id=run_id)
    return place if place.world_size == 1 else without_nodes(place)


def _get_process_group() -> Any:
    """Return the default group of ``torch.distributed``, if the program has initialized it."""
    try:
        return _modules[_C10D].group.WORLD
    except (KeyError, AttributeError):  # not imported; or another thread is importing it
        return None


def _check_process_group(state: _State) -> None:
    """Compare the world with the default group of ``torch.distributed``, once for each group.

    If they contradict each other, this rank leaves the world: its numbers are wrong.

    :raises ConfigurationError: if they do.
    """
    world, group = state.running, _get_process_group()
    if state is not _state or world is None:
        return
    state.process_group = _no_group if group is None else weakref.ref(group)
    topology = world.topology
    if group is None or (group.rank(), group.size()) == (topology.rank, topology.world_size):
        return
    error = ConfigurationError(
        f"torch.distributed says rank={group.rank()} and world_size={group.size()}, and the world "
        f"of this process, which was started before, says rank={topology.rank} and "
        f"world_size={topology.world_size}: make the first call of syncprims after "
        f"init_process_group(), or call init() after it",
        rank=topology.rank,
    )
    _fail(state, error)
    raise error


# -- for process groups of torch ------------------------------------------------------------------


def find_world() -> RunningWorld | None:
    """Return the world that runs, if one does; none is started."""
    return _get_state().running


def names_backend() -> bool:
    """Return whether the environment names a backend: the first call starts the world with it."""
    return bool(_get_state().environ.get("SYNCPRIMS_BACKEND"))


def join_as(variables: Mapping[str, str]) -> RunningWorld:
    """Start a world in which `variables` say which rank this process is, in place of a launcher's.

    :func:`leave_group_world` ends it.

    :raises SyncError: as :func:`init`.
    """
    state = _get_state()
    launched = launchers.list_rank_variables()
    others = {name: value for name, value in os.environ.items() if name not in launched}
    state.environ = {**others, **variables}
    try:
        init()
    except BaseException:
        state.environ = os.environ
        raise
    return get_world()


def keep_until_exit(name: object, thing: object) -> None:
    """Keep the first `thing` of this name until the process ends."""
    _get_state().kept.setdefault(name, thing)


def leave_group_world(world: World) -> None:
    """End a world that a process group has started: this process may start another one."""
    state = _get_state()
    if state.running is world:
        _end(state, _on_its_way())
        state.ended = state.topology = None
    if state is _state:
        state.environ = os.environ


# -- for tests: ranks that are threads, and backends that are observed -----------------------------


def environ_without_rank() -> dict[str, str]:
    """Return this process's variables without those that say which rank it is, and where."""
    own = {"SYNCPRIMS_BACKEND", "SYNCPRIMS_DIR", "SYNCPRIMS_ERROR_FILE"}
    outer = launchers.list_rank_variables() | own
    return {name: value for name, value in os.environ.items() if name not in outer}


@contextlib.contextmanager
def threads_as_ranks() -> Generator[None]:
    """Set the process's own world aside within the block, in which threads are ranks.

    It is not the threads that do this: one that never ends must not keep the world.
    """
    with _state.starting:
        if not _state.thread_worlds:
            _state.aside, _state.world = _state.world, None
        _state.thread_worlds += 1
    try:
        yield
    finally:
        with _state.starting:
            _state.thread_worlds -= 1
            if not _state.thread_worlds:
                _state.world, _state.aside = _state.aside, None


@contextlib.contextmanager
def thread_as_rank(environ: Mapping[str, str], make: MakeBackend) -> Generator[None]:
    """Make this thread, or task, a rank of its own, with these variables, within the block.

    `make` makes its backend. :func:`threads_as_ranks` surrounds all ranks.
    """
    _exit_hooks.watch_forks()
    token = _thread_state.set(_State(environ, make))
    try:
        with provided_world():
            yield
    finally:
        _thread_state.reset(token)


@contextlib.contextmanager
def provided_world() -> Generator[World]:
    """Run the world of a test: the program's own `init` returns it, whatever backend it names."""
    with init() as world:
        _get_state().provided = True
        yield world


def become_rank(make: MakeBackend) -> None:
    """Make this fresh child process a rank, whatever its parent was; `make` makes its backend."""
    _thread_state.set(None)
    _state.__init__(os.environ, make)  # type: ignore[misc]


# -- start and end ---------------------------------------------------------------------------------


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


def _start(state: _State, backend: str | None, settings: Settings) -> RunningWorld:
    if state.is_starting:
        raise errors.ConcurrentCall(
            f"a signal handler calls {describe_call()}, and it has interrupted the start of the "
            f"world: let the handler set a flag, as Trigger.set_on_signal does"
        )
    state.is_starting = True
    try:
        return _start_once(state, backend, settings)
    finally:
        state.is_starting = False


def _start_once(state: _State, backend: str | None, settings: Settings) -> RunningWorld:
    _check_is_rank(state)
    environ = state.environ
    if state is _state:
        _open_standard_streams()
        _exit_hooks.install(brief=settings.error_file is not None)
    grouped = _get_process_group() is not None
    from .membership import await_admission, is_joining, join_epoch  # slow to import

    choice = choose_backend(
        environ, backend, grouped=grouped, find_topology=lambda: _find_topology(environ)
    )
    topology = choice.topology
    if settings.store is None:
        settings = settings._replace(store=derive_store(environ, topology))
    _warn_of_variables(state, topology)
    made = state.make(choice.load(), topology, settings)
    try:
        epoch = await_admission(made) if is_joining(made) else None
        topology = made.topology
        world = RunningWorld(
            made, choice.backend, settings, topology, state.extras, end=_end_block, decided=epoch
        )
        state.world, state.ended, state.topology = world, None, topology
        if settings.elastic and made.can_reform:
            join_epoch(world)
        else:
            world.join()
        _take_topology(state, world)
        state.in_vain = ""
        if settings.error_file is not None:  # the failure of an earlier world is over
            report_failure(settings.error_file, None)
        _check_process_group(state)
    except BaseException as error:
        # It never ran, and `init` may try again. But where ranks may have met already, a mere call
        # does not: it would take the place of the one that failed, out of step.
        if state.world is None:
            made.close(None)
            state.ended = state.topology = None
        else:
            _fail(state, error)
            state.in_vain = settings.first_call or "init"
        if state is _state:
            # What is raised here is shown as the errors of a running world are.
            _exit_hooks.install(brief=settings.error_file is not None)
        raise
    return world


def _take_topology(state: _State, world: RunningWorld) -> None:
    """Keep the numbers of a world that has met, and correct variables that name others."""
    top = state.topology = world.topology
    if world.settings.error_file and world.settings.elastic:
        state.last_epoch = max(state.last_epoch, world.epoch)  # another world begins at 0 again
        report_failure(world.settings.error_file + EPOCH_NOTE, b"%d" % state.last_epoch)
    if world.epoch:
        variables = launchers.make_rank_variables(top.rank, top.world_size, top.num_nodes)
        environ: Any = state.environ
        environ.update({name: value for name, value in variables.items() if name in environ})


def _make_settings(
    environ: Mapping[str, str],
    timeout: float | None = None,
    join_within: float | None = None,
    first_call: str = "",
) -> Settings:
    """Return the settings by the variables and the arguments of the call that starts the world."""
    settings = read_settings(environ)._replace(first_call=first_call)
    if join_within is not None:
        settings = settings._replace(join_timeout=min(join_within, settings.join_timeout))
    if timeout is None:
        return settings
    if settings.timeout not in (None, timeout):
        raise ConfigurationError(
            f"init(timeout={timeout:g}) contradicts SYNCPRIMS_TIMEOUT={settings.timeout:g}; "
            f"remove one of them"
        )
    return settings._replace(timeout=timeout)


def _open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed.

    A file of the world would take their place, and whatever the process prints would go there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(fd)


def _warn_of_variables(state: _State, topology: Topology) -> None:
    """Log once, on one rank of each node, which variables are likely mistakes.

    Those are variables with our prefix that are never read, and variables that say that there
    should be more ranks than this one.
    """
    if state is not _state or topology.local_rank:
        return
    warnings: list[str] = []
    for name, nearest in find_misspelt(state.environ).items():
        hint = f": did you mean {nearest}?" if nearest else "."
        warnings.append(
            f"{name} is set, and nothing reads it{hint} `syncprims env` lists the variables that "
            f"are read"
        )
    missing = launchers.find_half_world(state.environ, topology) if topology.world_size == 1 else ""
    if missing:
        warnings.append(
            f"this is a world of one: {missing}. If it is meant to be alone, set "
            f"SYNCPRIMS_LAUNCHER=none"
        )
    for warning in warnings:
        if warning not in state.warnings:
            import logging  # slow to import

            state.warnings.add(warning)
            logging.getLogger("syncprims").warning(warning)


def _fail(state: _State, error: BaseException) -> None:
    """Leave the world because of `error`; every later call raises it, until `init`."""
    _end(state, error)
    state.ended = state.topology = None
    if isinstance(error, SyncError):
        verdict = errors.dump(error)
        state.ended = lambda: errors.load(verdict)


def _end(state: _State, error: BaseException | None) -> None:
    """Leave the world, with `error` as the reason if there is one."""
    world = state.forget(_closed)
    if world is not None:
        world.leave(error)


def _on_its_way() -> BaseException | None:
    """Return the exception that ends the code which calls us, if one does."""
    error = sys.exc_info()[1]
    ends_a_loop = isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit)
    return None if ends_a_loop else reason(error)


def _end_block(world: World, error: BaseException | None) -> None:
    """End the world whose ``with`` block has ended, unless it has been ended inside."""
    state = _get_state()
    if state.running is world:
        _end(state, reason(error))


def _closed() -> SyncError:
    return errors.WorldClosed(
        "this rank has left the world: shutdown() was called, the `with init()` block has ended, "
        "or Python is exiting. Make the call before that, or start a world with init()"
    )


def _on_fork() -> None:
    thread = _thread_state.get()
    if thread is not None:  # a thread was a rank; its child is a process, and no rank
        _thread_state.set(None)
        _leave_to_parent(thread)
        _state.topology = thread.topology or launchers.detect(thread.environ)
        _state.ended = thread.ended or _forked
    _leave_to_parent(_state)
    _state.thread_worlds = 0


def _leave_to_parent(state: _State) -> None:
    # A thread that the child does not have may be starting a world.
    state.starting, state.is_starting = threading.RLock(), False
    world = state.forget(_forked)
    if world is not None:
        world.abandon()


def _forked() -> SyncError:
    return errors.ForkedProcess(
        f"process {os.getpid()} is a forked child of rank {get_topology().rank} and not a rank: "
        f"it cannot synchronize. Call primitives in the parent, or, to make the child a rank of "
        f"another world, call shutdown() in it first"
    )


def _end_process(error: BaseException | None) -> None:
    """Leave the world. If it has ended before, report `error` to the launcher all the same."""
    environ = _state.environ
    world, ours = _state.running, environ.get(_OUR_FILE)
    if error is not None and _state.ended is not _forked:
        if path := environ.get(_FILE_OF_TORCHRUN):
            report_to_torchrun(path, error)
        if world is None:
            with contextlib.suppress(SyncError):
                _state.failure = dump_failure(launchers.detect(environ).rank, error)
                if ours:
                    report_failure(ours, _state.failure)
    broken = world.rounds.closed if world is not None and ours and error is None else None
    verdict = broken() if broken else None
    _end(_state, error)
    if world is not None and ours and verdict and world.rank not in verdict.failures:
        # It may exit with a code because of that: Python says nothing of a `raise SystemExit(1)`.
        report_failure(ours, dump_failure(world.rank, verdict))


def _publish_activity(text: str) -> None:
    """Publish why this rank may make no call any more."""
    if world := _state.running:
        world.publish_activity(text)


_exit_hooks = ExitHooks(_end_process, _on_fork, _publish_activity)


def _is_launched() -> bool:
    """Return whether a launcher has started this process as a rank of several."""
    environ = os.environ
    return bool(launchers.find_world_sizes(environ)) and not launchers.is_started_by_rank(environ)


def _record_early_end(process: int) -> None:
    """Record that this process ends without having started a world, if it is a rank of several."""
    environ, in_vain = _state.environ, _state.in_vain
    ended = _state.topology is not None or _state.ended is not None
    never_started = _state.running is None and (bool(in_vain) or not ended)
    # Our launcher sees the end itself, and a forked child is not a rank.
    if not never_started or "SYNCPRIMS_ERROR_FILE" in environ or os.getpid() != process:
        return
    if not _is_launched():
        return
    with contextlib.suppress(Exception):  # the others wait until their timeout
        recorder, topology, settings = find_end_recorder(environ)
        if topology.run_id is not None:
            settings = settings._replace(first_call=in_vain)
            recorder.record_end(topology, settings, None, _state.failure)


atexit.register(_record_early_end, os.getpid())
if _is_launched():  # it may fail before its first call
    _exit_hooks.install(brief=bool(os.environ.get(_OUR_FILE)))
