"""The processes of other test suites, whose process groups are worlds of this library.

The launchers stay as they are: what they return, raise and share is their own. Two things below
them are replaced. A process that would be spawned is forked, from a server. That is a fork of
pytest's process, made when the tests have been collected: it has imported what they need, and none
of them has run in it. And a group that a process opens meets at the boards of a world.
"""

from __future__ import annotations

import _warnings
import atexit
import contextlib
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

from syncprims._world import runtime
from syncprims._world.registry import load_backend
from syncprims._world.scratch import scratch_directory
from syncprims._world.world import version
from syncprims.c10d import serve_every_backend
from syncprims.c10d.group_world import make_variables
from syncprims.c10d.torch_internals import (
    before_new_group,
    c10d,
    dist,
    find_backing_store,
    make_backend_error,
    replaced,
    replaced_init_barrier,
)
from syncprims.errors import PeerFailed, SyncError, chain_of, describe_exit
from syncprims.interface import Board

from . import (
    SameMembers,
    _WorldStore,  # pyright: ignore[reportPrivateUsage]
    import_lazy_modules,
    meet_makers,
)
from .as_gloo import as_gloo
from .suites import Suites

_standard: Any = multiprocessing  # its types leave out what is replaced here
for _name in (
    "connection", "forkserver", "pool", "popen_fork", "popen_forkserver", "popen_spawn_posix",
    "queues", "resource_tracker", "synchronize",
):  # fmt: skip
    importlib.import_module(f"multiprocessing.{_name}")
_server: Any = _standard.forkserver._forkserver
_atexit: Any = atexit
_spawn: Any = _standard.popen_spawn_posix.Popen
_SERVED = {"gloo", "nccl", "undefined"}
_ELASTIC = "torch.distributed.elastic.multiprocessing.api"
_POOL = "multiprocessing.pool"
#: In a queue that these read, the worker of a pool of processes waits for its next task.
_WORKERS = {
    "concurrent.futures.process", _POOL, "torch.testing._internal.common_distributed",
}  # fmt: skip
_LATER = 0.3  # seconds
_LONGEST_NEWS = 3.0  # seconds in which ranks say what they know of one that was lost
_TO_OPEN = 0.05  # seconds in which a new store listens
_LONGEST = 300.0  # seconds that ranks await the others at the start
_LOG = "log"  # a line for each group: why it was left to torch, or nothing


class _Popen(_standard.popen_forkserver.Popen):  # type: ignore[misc]
    """Starts a process as a fork of the server, with this process's variables and streams."""

    def _launch(self, process: object) -> None:
        for stream in (1, 2):
            self.duplicate_for_child(stream)  # the child has them first
        super()._launch(process)


class SuiteProcesses(Suites):
    """Serves the processes of a suite."""

    def __init__(self, filters: Sequence[Any]) -> None:
        """Serve the processes that are started from now on, without these filters of warnings."""
        super().__init__()
        self._filters = filters
        self._folder = self._undo.enter_context(scratch_directory("suites")).path
        (self._folder / _LOG).touch()
        self._serve_pools()
        self._serve_spawn()

        def run(process: object, *args: object, **named: object) -> Any:
            if not _kept:
                _kept.append(_serve(self._folder))
            try:
                return bootstrap(process, *args, **named)
            finally:
                if os.getpid() in _spawned:
                    _atexit._run_exitfuncs()  # as at the end of an interpreter
                    _standard.util._flush_std_streams()

        bootstrap = self._replace(_standard.process.BaseProcess, "_bootstrap", run)

        def make(size: int, *args: Any, **named: Any) -> Any:
            """Serve the process of pytest from the first group that it may share with others."""
            if not _kept and size > 1 and multiprocessing.active_children():
                _kept.append(self._undo.enter_context(_serve(self._folder)))
                self._undo.callback(_kept.clear)
                return c10d()._new_process_group_helper(size, *args, **named)
            return of_torch(size, *args, **named)

        of_torch = self._replace(c10d(), "_new_process_group_helper", make)

        def launch(popen: object, process: object) -> None:
            import_lazy_modules()  # else each forked process would
            fork(popen, process)

        fork = self._replace(_standard.popen_fork.Popen, "_launch", launch)
        if torch.cuda.is_available():
            self._leave_spawned()
            return
        for module in (_standard.popen_spawn_posix, _standard.popen_forkserver):
            self._replace(module, "Popen", self._open_process)
        _server.ensure_running = self.start
        self._note_seeds()

        def prepare(name: str) -> dict[str, Any]:
            key = getattr(_server, "_forkserver_authkey", None)  # Python 3.14 and newer
            return {**data(name), "environ": dict(os.environ), "server_key": key}

        data = self._replace(_standard.spawn, "get_preparation_data", prepare)
        self._undo.callback(_end_server)

    def _serve_spawn(self) -> None:
        """Make the error of `torch.multiprocessing` say where a dead rank was."""

        def join(context: Any, timeout: float | None = None, *rest: Any, **named: Any) -> Any:
            """Join processes of `torch.multiprocessing`; wait for what others say of a lost one."""
            if not context.sentinels:  # they have been joined
                return join_all(context, timeout, *rest, **named)
            ready = _standard.connection.wait(context.sentinels, timeout)
            ended = [context.sentinels[one] for one in ready]
            lost = next((one for one in ended if context.processes[one].exitcode), None)
            said = [Path(path) for path in context.error_files]
            if lost is None or said[lost].exists():
                return join_all(context, 0, *rest, **named)
            others = {one: said[rank] for one, rank in context.sentinels.items() if rank != lost}
            until = time.monotonic() + _LONGEST_NEWS
            told: list[Path] = []
            while others and not told and (left := until - time.monotonic()) > 0:
                of_ended = [others.pop(one) for one in _standard.connection.wait([*others], left)]
                told = [path for path in of_ended if path.exists()]
            context.sentinels = {context.processes[lost].sentinel: lost}  # else it could be another
            try:
                return join_all(context, 0, *rest, **named)
            except Exception as error:
                for path in told:
                    error.add_note(pickle.loads(path.read_bytes()))
                raise

        base = importlib.import_module("torch.multiprocessing.spawn").ProcessContext
        join_all = self._replace(base, "join", join)

    def _serve_pools(self) -> None:
        """Make the task of a rank fail with its process, which a pool replaces and forgets."""
        pool: Any = _standard.pool.Pool
        tasks_of: dict[int, dict[int, Any]] = {}  # of each pool, by its list of workers

        def handle(cls: Any, tasks: Any, queue: Any, *args: Any) -> None:
            tasks_of[id(args[3])] = tasks
            handle_workers.__func__(cls, tasks, queue, *args)

        def join(workers: list[Any]) -> Any:
            until = time.monotonic() + _LONGEST_NEWS
            for worker in workers:
                if worker.exitcode is not None:
                    _fail_task(self._folder, worker, tasks_of[id(workers)], until)
            return join_workers.__func__(workers)

        handle_workers = self._replace(pool, "_handle_workers", classmethod(handle))
        join_workers = self._replace(pool, "_join_exited_workers", staticmethod(join))

    def _leave_spawned(self) -> None:
        """Leave processes to themselves that would be spawned: a fork could use no GPU."""

        def launch(popen: object, process: object) -> None:
            why = "a process that may use a GPU (CUDA_VISIBLE_DEVICES= hides them)"
            self.left_alone[why] += 1
            spawn(popen, process)

        spawn = self._replace(_standard.popen_spawn_posix.Popen, "_launch", launch)

    def _note_seeds(self) -> None:
        """Note how modules of tests seed the generators, until the tests have been collected."""
        self._generators: dict[Any, Callable[[], Any]] = {  # how a new process seeds each
            torch: torch.default_generator.seed,
            numpy.random: numpy.random.seed,
            random: random.seed,
        }
        self._imports = self._undo.enter_context(contextlib.ExitStack())
        for owner, name in (
            (torch, "manual_seed"), (torch.random, "manual_seed"), (numpy.random, "seed"),
            (random, "seed"),
        ):  # fmt: skip
            noting = self._noting(torch if owner is torch.random else owner, vars(owner)[name])
            self._imports.enter_context(replaced((owner, name, noting)))

    def _noting(self, generator: Any, seed: Callable[..., Any]) -> Callable[..., Any]:
        """Return what seeds a generator; it is noted if a module of tests does so when imported."""

        @functools.wraps(seed)
        def note(*args: Any, **named: Any) -> Any:
            frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while frame is not None and frame.f_code.co_name != "<module>":
                frame = frame.f_back
            module = "__main__" if frame is None else frame.f_globals["__name__"]
            # A new process imports no conftest. Pytest's own main module is "__main__".
            if not module.startswith("__") and module.rpartition(".")[2] != "conftest":
                self._generators[generator] = functools.partial(seed, *args, **named)
            return seed(*args, **named)

        return note

    def _open_process(self, process: object) -> Any:
        """Start a process in the server; if a test has killed that, as a new interpreter."""
        self.start()
        try:
            return _Popen(process)
        except ConnectionRefusedError:
            self.left_alone["a process started after a test had killed all processes"] += 1
            return _spawn(process)

    def start(self) -> None:
        """Fork the server, if no process has needed it before."""
        if vars(_server).get("ensure_running") != self.start:
            return
        self._imports.close()
        _server.ensure_running = lambda: None  # also for forked processes, which cannot ask
        _standard.resource_tracker.ensure_running()
        _standard.forkserver.set_forkserver_preload([])
        made: list[int] = []  # of pipes, of which the server gets what is passed

        def pipe() -> tuple[int, int]:
            ends = open_pipe()
            made.extend(ends)
            return ends

        open_pipe = os.pipe
        of_pytest, seeds = self._filters, [*self._generators.values()]
        fork = functools.partial(_fork_server, made, of_pytest, seeds)
        with replaced((_standard.util, "spawnv_passfds", fork), (os, "pipe", pipe)):
            type(_server).ensure_running(_server)

    def report(self) -> list[str]:
        """Return how many groups were worlds, and what was left to itself, and why."""
        lines = Counter((self._folder / _LOG).read_text().splitlines())
        served = lines.pop("", 0)
        left = [f"{n} left to torch: {why}" for why, n in lines.items()]
        return [f"{served} process groups in worlds of processes", *left, *super().report()]


def _fail_task(folder: Path, worker: Any, tasks: dict[int, Any], until: float) -> None:
    """Make the task fail in which the worker of a pool has died, if that was a rank."""
    try:
        rank, job, part = map(int, (folder / f"task-{worker.pid}").read_text().split())
    except (OSError, ValueError):  # in no task, or it had just begun one
        return
    task: Any = tasks.get(job)
    if isinstance(task, _standard.pool.MapResult):  # it raises the first error
        while task._success and task._number_left > 1 and time.monotonic() < until:
            time.sleep(0.01)  # the other ranks say more
    if task is not None:
        task._set(part, (False, RuntimeError(f"rank {rank}: {describe_exit(worker.exitcode)}")))


# -- the server of processes -----------------------------------------------------------------------


def _fork_server(
    made: list[int],
    of_pytest: Sequence[Any],
    seeds: list[Callable[[], Any]],
    path: str,
    args: list[Any],
    passed: list[int],
) -> int:
    """Fork this process, and run there what a new interpreter would run by these arguments.

    Without the other ends of its pipes (`made`), the server sees that pytest has ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the server uses none
        pid = os.fork()
    if pid:
        return pid
    try:
        for fd in {*made}.difference(passed):
            os.close(fd)
        _server.ensure_running = lambda: None  # its processes use it, too
        filters = [one for one in warnings.filters if one not in of_pytest]
        warnings.resetwarnings()
        at_start: Any = _warnings.filters  # what Python has made
        warnings.filters = [*filters, *at_start]
        gc.freeze()  # to free here what pytest has left could end things of pytest
        os.register_at_fork(before=_load)
        prepare = _standard.spawn.prepare
        _standard.spawn.prepare = functools.partial(_prepare, prepare, seeds)
        exec(args[-1], {})
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


def _load() -> None:
    """Load here what otherwise each process would look for itself."""
    import_lazy_modules()
    load_backend("file")
    version()


def _end_server() -> None:
    """End the server; if processes still run, it ends after them.

    Without it, the process of pytest takes them for ended: it neither ends nor awaits them. A pool
    that is not closed would give too few of its workers their end, and wait for the others.
    """
    vars(_server).pop("ensure_running", None)
    if _server._forkserver_pid is not None and not _standard.active_children():
        with contextlib.suppress(ProcessLookupError):  # a test may have waited for all processes
            os.kill(_server._forkserver_pid, signal.SIGKILL)
        _server._stop()


def _prepare(before: Callable[[Any], None], seeds: list[Callable[[], Any]], data: Any) -> None:
    """Make this process what a new interpreter would be that the parent had started."""
    _spawned.append(os.getpid())
    _atexit._clear()  # those of pytest's process
    _atexit.register(_standard.util._exit_function)  # it writes what is still in queues
    for stream, (fd, inherited) in zip(
        ("stdout", "stderr"), enumerate(_server._inherited_fds[:2], 1), strict=True
    ):
        os.dup2(inherited, fd)
        os.close(inherited)
        text = os.fdopen(fd, "w", errors="backslashreplace", closefd=False)
        text.reconfigure(line_buffering=stream == "stderr")
        setattr(sys, stream, text)
        setattr(sys, f"__{stream}__", text)
    os.environ.clear()
    os.environ.update(data["environ"])
    _server._forkserver_authkey = data["server_key"]
    for handler in [*logging.root.handlers]:
        if type(handler).__module__.startswith("_pytest"):
            logging.root.removeHandler(handler)
    torch.set_num_threads(1)  # those of the operations of its parent are not here
    for seed in seeds:
        seed()
    before(data)


# -- in a process ----------------------------------------------------------------------------------

_kept: list[Any] = []  # until this process ends; empty in one that is not served
_task: list[int] = []  # of a pool, that this process does: its job, and which part of that
_spawned: list[int] = []  # this process, if its parent would have spawned it
_checks = contextlib.ExitStack()  # of groups, in the present world


def _serve(folder: Path) -> contextlib.ExitStack:
    """Serve the groups that this process opens, until what is returned is closed."""
    module = c10d()
    of_torch = module._new_process_group_helper
    stack = contextlib.ExitStack()
    stack.enter_context(serve_every_backend())
    stack.enter_context(replaced_init_barrier(meet_makers))
    stack.enter_context(as_gloo())
    stack.enter_context(replaced((Board, "observed", True)))
    ours = module._new_process_group_helper

    def open_group(
        size: int, rank: int, ranks: Any, backend: object, store: object, *args: Any, **kw: Any
    ) -> Any:
        if ranks:
            world = runtime.find_world()
            helper = of_torch if world is None else ours
            made = helper(size, rank, ranks, backend, store, *args, **kw)
            if world is not None and world.rank in ranks:  # as Gloo's members connect
                meet_makers(f"new_group {args[0]}", sorted(ranks), kw["timeout"].total_seconds())
            return made
        _checks.close()
        names = {part.rpartition(":")[2] for part in str(backend).split(",")}
        if names - _SERVED:
            if not rank:
                _log(folder, f"a group of the backend {backend}")
            return of_torch(size, rank, ranks, backend, store, *args, **kw)
        limit = min(kw["timeout"].total_seconds(), _LONGEST)
        own = _join(folder, store, rank, size, limit)
        group, prefixed = ours(size, rank, ranks, backend, own, *args, **kw)
        group._started = True  # the world ends with it
        group.stores = store, own  # torch keeps the C++ part of ours only
        served = isinstance(find_backing_store(store), dist.TCPStore)
        closed = own.path.with_suffix(".closed") if served else None
        group.shutdown = functools.partial(_shut_down, weakref.ref(group), rank, closed)
        return group, prefixed

    def make(*args: Any, **kw: Any) -> Any:
        try:
            return open_group(*args, **kw)
        except SyncError as error:
            make_backend_error(error)
            raise

    event = _standard.synchronize.Event
    queues = _standard.queues.Queue, _standard.queues.SimpleQueue
    stack.enter_context(
        replaced(
            (module, "_new_process_group_helper", make),
            (sys, "exit", _report_before(sys.exit)),
            (event, "wait", _leave_before(event.wait)),
            (queues[1], "put", _end_task_before(folder, queues[1].put)),
            *((queue, "get", _idle_during(folder, queue.get)) for queue in queues),
        )
    )
    return stack


def _shut_down(find_group: Callable[[], Any], rank: int, closed: Path | None) -> None:
    """Leave the world, after rank 0 has closed the store that it serves: then there is `closed`.

    The next group may have the same port. A rank that came there too early would meet the old
    store, or make torch's new one hang.
    """
    group, until = find_group(), time.monotonic() + _LATER
    group.stores = group.stores[1:]
    if closed is not None and rank:
        while not closed.exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(_TO_OPEN)
    elif closed is not None:
        closed.touch()
    type(group).shutdown(group)


def _report_before(exit_: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return `sys.exit`, before which a rank reports what its launcher has caught."""

    @functools.wraps(exit_)
    def report_and_exit(status: str | int | None = None, /) -> NoReturn:
        """Launchers show the failure of the process that ends first: a consequence comes later."""
        error, world = sys.exc_info()[1], runtime.find_world()
        if status and error is not None and world is not None:
            runtime.leave_group_world(world)
            if any(isinstance(link, PeerFailed) for link in chain_of(error)):
                time.sleep(_LATER)
        exit_(status)

    return report_and_exit


def _leave_before(wait: Callable[..., bool]) -> Callable[..., bool]:
    """Return the wait of an event, before which a worker of torch's elastic launcher leaves.

    There it has returned, and waits until all workers have. One of them may wait for this one.
    """

    @functools.wraps(wait)
    def leave_and_wait(event: object, timeout: float | None = None) -> bool:
        world, caller = runtime.find_world(), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if world is not None and caller.f_globals.get("__name__") == _ELASTIC:
            runtime.leave_group_world(world)
        return wait(event, timeout)

    return leave_and_wait


def _idle_during(folder: Path, get: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a queue, in which the worker of a pool is a rank that waits for a task.

    Another rank may wait for it, and the pool for that one.
    """

    @functools.wraps(get)
    def idle_and_get(queue: object, *args: Any, **named: Any) -> Any:
        world, caller = runtime.find_world(), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        module = caller.f_globals.get("__name__")
        if module not in _WORKERS:
            return get(queue, *args, **named)
        deadlocks = None if world is None else world.background.deadlocks
        if deadlocks is not None:
            deadlocks.begin_idle()
        try:
            got = get(queue, *args, **named)
        finally:
            if deadlocks is not None:
                deadlocks.end_wait()
        if module == _POOL and got is not None:
            _task[:] = got[:2]
            if world is not None:
                _note_task(folder, world.rank)
        return got

    return idle_and_get


def _note_task(folder: Path, rank: int) -> None:
    """Note which task of a pool this rank does: with its process, the task would be lost."""
    job, part = _task
    (folder / f"task-{os.getpid()}").write_text(f"{rank} {job} {part}")


def _end_task_before(folder: Path, put: Callable[..., None]) -> Callable[..., None]:
    """Return the method of a queue, before which the worker of a pool has done its task."""

    @functools.wraps(put)
    def end_and_put(queue: object, item: object) -> None:
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if _task and caller.f_globals.get("__name__") == _POOL:
            _task.clear()
            (folder / f"task-{os.getpid()}").unlink(missing_ok=True)
        put(queue, item)

    return end_and_put


def _log(folder: Path, line: str) -> None:
    with (folder / _LOG).open("a") as log:
        log.write(f"{line}\n")


def _join(folder: Path, store: object, rank: int, size: int, limit: float) -> _WorldStore:
    """Start a world of the ranks that share `store`, and return a store of this world.

    `limit` is in seconds.
    """
    variables = {
        **make_variables(store, rank, size),
        "SYNCPRIMS_DIR": str(folder),
        "SYNCPRIMS_JOIN_TIMEOUT": str(limit),
    }
    world = runtime.join_as(variables)
    if not rank:
        _log(folder, "")
    if _task:
        _note_task(folder, rank)
    path = folder / f"store-{variables['SYNCPRIMS_RUN_ID']}"
    _checks.enter_context(before_new_group(SameMembers(path)))
    return _WorldStore(path, world, 0)
