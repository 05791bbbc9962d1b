"""The launchers of other test suites: their ranks run in worlds of this library.

Each adapter replaces the one function of a launcher that starts its ranks. What it returns and
raises is what suites expect of the launcher. What no world can serve is left to the launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import re
import sys
import threading
import traceback
import unittest
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from syncprims._world.runtime import current
from syncprims.c10d.torch_internals import ProfilerRefused, replaced
from syncprims.errors import ConcurrentCall, chain_of
from syncprims.testing.outcomes import leaves, results_of
from syncprims.testing.world_spec import Kind, WorldSpec, test_context
from syncprims.testing.worlds import run_once

_LONGEST = 300.0  # seconds of real time for a world, as for a test of torch
_REFUSED_IN_THREADS = (ProfilerRefused, ConcurrentCall)  # processes can serve it


class _Exited(Exception):
    """A rank has called ``sys.exit`` with a code."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


class _Copier(pickle.Pickler):
    """Pickles what a process would get as a copy of its own; what stays shared is in `shared`."""

    def __init__(self, file: io.BytesIO, *, spawned: bool) -> None:
        super().__init__(file)
        self.shared: list[Any] = []
        self._numbers: dict[int, int] = {}  # of objects, by their id
        self._spawned = spawned

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of a queue or the like, or of a tensor in shared memory."""
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            if self._spawned and obj.device.type == "cpu":
                obj.share_memory_()  # as the pickler of torch does
            if not obj.is_shared():
                return None
        elif not type(obj).__module__.startswith("multiprocessing"):
            return None
        number = self._numbers.setdefault(id(obj), len(self.shared))
        if number == len(self.shared):
            self.shared.append(obj)
        return number


class _Restorer(pickle.Unpickler):
    def __init__(self, data: bytes, shared: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = [_alias(one) if isinstance(one, torch.Tensor) else one for one in shared]

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory, which has its own gradient."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copier(objects: Any, *, spawned: bool) -> Callable[[], Any]:
    """Return what makes a copy as a process would have it; no copy of what has no pickle."""
    file = io.BytesIO()
    copier = _Copier(file, spawned=spawned)
    try:
        copier.dump(objects)
    except Exception:  # as of a function within a function, which a forked process inherits
        return lambda: objects
    return lambda: _Restorer(file.getvalue(), copier.shared).load()


class Suites:
    """Serves the launchers of suites until it is closed, and counts what ran where."""

    def __init__(self, kind: Kind) -> None:
        """Replace the launchers; import torch before the suites do."""
        self.in_worlds: int = 0  #: launches
        self.in_processes: Counter[str] = Counter()  #: of those, by what threads have refused
        self.left_alone: Counter[str] = Counter()  #: launches, by the reason
        self._kind: Kind = kind
        self._undo = contextlib.ExitStack()
        self.close: Callable[[], None] = self._undo.close  #: puts the launchers back
        self._serve_start_processes()
        self._serve_elastic_launch()
        self._serve_pools()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        """Replace ``owner.name``, and return the old value."""
        before = vars(owner)[name]
        self._undo.enter_context(replaced((owner, name, function)))
        return before

    def _run(
        self, program: Callable[[int], Any], ranks: int, *, torchrun: bool = False
    ) -> list[Any]:
        """Return what ``program(rank)`` returns on each rank.

        The ranks have the variables of this process; with `torchrun`, also those of a worker.

        :raises _Exited: if a rank calls ``sys.exit`` with a code other than 0.
        """
        self.in_worlds += 1
        variables = dict(os.environ)

        def run() -> Any:
            if not torchrun:
                for name in os.environ.keys() - variables.keys():
                    if not name.startswith("SYNCPRIMS_"):
                        del os.environ[name]
                os.environ.update(variables)
            try:
                return program(current().rank)
            except SystemExit as end:
                if end.code:
                    raise _Exited(end.code) from None

        spec = WorldSpec(run, ranks, self._kind, torch=True, timeout=_LONGEST)
        try:
            ended = run_once(spec)
            # A suite whose ranks make different numbers of calls passes elsewhere.
            return results_of(ended, test_context.get().replay(ended.seed), equal_rounds=False)
        except Exception as error:
            links = [link for leaf in leaves(error) for link in chain_of(leaf)]
            refused = [link for link in links if isinstance(link, _REFUSED_IN_THREADS)]
            if self._kind == "processes" or not refused:
                raise
        self.in_processes[type(refused[0]).__name__] += 1
        ended = run_once(dataclasses.replace(spec, kind="processes"))
        return results_of(ended, "", equal_rounds=False)

    # -- functions that start processes -----------------------------------------------------------

    def _serve_start_processes(self) -> None:
        """Serve ``mp.spawn`` and ``mp.start_processes``, and all launchers that call these.

        Such as Accelerate's `debug_launcher` and `notebook_launcher`, and Lightning Fabric's.
        """
        package = importlib.import_module("torch.multiprocessing")
        module = importlib.import_module("torch.multiprocessing.spawn")

        def start(
            fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **named: Any
        ) -> Any:
            if not join:
                self.left_alone["the processes are not joined at once"] += 1
                return before(fn, args, nprocs, join, *rest, **named)
            start_method = rest[1] if len(rest) > 1 else named.get("start_method", "spawn")
            copy = _copier((fn, args), spawned=start_method != "fork")

            def program(rank: int) -> None:
                mine, its_args = copy()
                mine(rank, *its_args)

            try:
                self._run(program, nprocs)
            except _Exited as error:
                raise module.ProcessExitedException(
                    f"process {_rank_of(error)} terminated with exit code {error.code}",
                    _rank_of(error), os.getpid(), error.code,
                ) from error  # fmt: skip
            except Exception as error:
                rank, text = _rank_of(error), "".join(traceback.format_exception(error))
                raise module.ProcessRaisedException(
                    f"\n\n-- Process {rank} terminated with the following error:\n{text}",
                    rank, os.getpid(),
                ) from error  # fmt: skip

        before = self._replace(module, "start_processes", start)
        self._replace(package, "start_processes", start)

    def _serve_elastic_launch(self) -> None:
        api = importlib.import_module("torch.distributed.launcher.api")

        def call(launch: Any, *args: Any) -> Any:
            config, entry = launch._config, launch._entrypoint
            if not callable(entry) or config.max_nodes > 1:
                self.left_alone["elastic_launch of a command, or of several nodes"] += 1
                return before(launch, *args)
            ranks = config.nproc_per_node
            copy = _copier(args, spawned=True)
            try:
                results = self._run(lambda rank: entry(*copy()), ranks, torchrun=True)
            except Exception as error:
                _raise_child_failed(error)
            return dict(enumerate(results))

        before = self._replace(api.elastic_launch, "__call__", call)

    def _serve_pools(self) -> None:
        """Serve each ``Pool`` whose first call, one on each process, leaves a group open.

        Its processes would keep that group, so each later world begins with this call.
        """
        module: Any = importlib.import_module("multiprocessing.pool")
        run = self._run
        first_calls = weakref.WeakKeyDictionary[Any, Any]()  # None: it is not a pool of ranks

        def starmap(pool: Any, func: Any, iterable: Any, chunksize: int | None = None) -> Any:
            calls, first = [*iterable], first_calls.get(pool)
            if len(calls) != pool._processes or (pool in first_calls and first is None):
                first_calls.setdefault(pool, None)
                return before(pool, func, calls, chunksize)
            copy = _copier((func, calls), spawned=True)

            def program(rank: int) -> tuple[Any, bool]:
                result = None
                for make in (first, copy) if first else (copy,):
                    function, its_calls = make()
                    result = function(*its_calls[rank])
                return result, importlib.import_module("torch.distributed").is_initialized()

            results, are_open = zip(*run(program, len(calls)), strict=True)
            if first or all(are_open):
                first_calls.setdefault(pool, copy)
                return [*results]
            self.left_alone["a pool whose first call opens no process group"] += 1
            first_calls[pool] = None
            return before(pool, func, calls, chunksize)

        def map_(pool: Any, func: Any, iterable: Any, chunksize: int | None = None) -> Any:
            return starmap(pool, func, [(item,) for item in iterable], chunksize)

        before = self._replace(module.Pool, "starmap", starmap)
        self._replace(module.Pool, "map", map_)

    # -- torch's own bases of tests ---------------------------------------------------------------

    def serve_test_bases(self) -> None:
        """Serve these, if the suite has imported them: the import changes settings of torch."""
        base: Any = sys.modules.get("torch.testing._internal.common_distributed")
        if base is None:
            return
        skips = {skip.exit_code: skip.message for skip in base.TEST_SKIPS.values()}

        def join_processes(case: Any, fn: Any) -> None:
            name, cls = case._current_test_name(), type(case)

            def run_test(mine: Any, name: str, _: None) -> None:
                """Run it without a pipe to the parent process."""
                if hasattr(base, "common_utils"):  # torch 2.6 does not do this
                    base.common_utils.set_rng_seed()
                try:
                    getattr(mine, name)()
                finally:
                    if getattr(mine, "destroy_pg_upon_exit", False):
                        _destroy_groups()

            places = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            # Its _run is what a class of its own replaces, to open a group before each test.
            own: Any = type(cls.__name__, (cls,), {**places, "run_test": run_test})
            ranks = int(case.world_size)

            def program(rank: int) -> None:
                own._run(rank, name, case.file_name, None)

            if ranks < 1:
                why = "a test without ranks"
            elif getattr(case, "fake_pg", False) or fn in getattr(
                case, "special_return_code_checks", ()
            ):
                why = "a test that checks how its processes end"
            else:
                self._run_test(program, ranks, skips, "Process")
                return
            self.left_alone[why] += 1
            start(case, case.syncprims_process)
            join(case, fn)

        def remember(case: Any, process: Any) -> None:
            case.syncprims_process = process  # started only if no world can serve the test

        start = self._replace(base.MultiProcessTestCase, "_start_processes", remember)
        join = self._replace(base.MultiProcessTestCase, "_join_processes", join_processes)
        if self._kind == "threads":
            self._serve_threaded_bases(base.MultiThreadedTestCase, skips)
        if hasattr(base, "MultiProcContinuousTest"):  # not in torch 2.6
            self._serve_continuous_base(base.MultiProcContinuousTest, skips)

    def _serve_threaded_bases(self, base: Any, skips: Mapping[Any, str]) -> None:
        def join_threads(cls: Any, _: object, fn: Any) -> None:
            case = fn.__self__
            name, ranks = case._current_test_name, case.world_size

            def program(rank: int) -> None:
                mine = cls(name)
                mine.rank = rank
                if hasattr(mine, "_tls"):
                    mine._tls = threading.local()
                    mine._tls.precision, mine._tls.rel_tol = cls._precision, cls._rel_tol
                importlib.import_module("torch.distributed").init_process_group(
                    "threaded", rank=rank, world_size=ranks
                )
                try:
                    mine.perThreadSetUp()
                    getattr(mine, name)()
                finally:
                    _destroy_groups()
                    mine.perThreadTearDown()

            self._run_test(program, ranks, skips, "Thread")

        def spawn_threads(case: Any) -> None:
            """Start none: the test starts a world when it runs."""

        self._replace(base, "_spawn_threads", spawn_threads)
        self._replace(base, "_join_threads", classmethod(join_threads))  # type: ignore[arg-type]

    def _serve_continuous_base(self, base: Any, skips: Mapping[Any, str]) -> None:
        """Serve the base whose processes run all tests of a class: each test gets a world."""

        def spawn_processes(cls: Any, world_size: int) -> None:
            def program(name: str, rank: int) -> None:
                places = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
                own: Any = type(cls.__name__, (cls,), {**places, "rank": rank})
                dist: Any = importlib.import_module("torch.distributed")
                dist.init_process_group(own.backend_str(), timeout=own.timeout)
                own.pg = dist.group.WORLD
                try:
                    own._run_test_given_id(name)
                finally:
                    _destroy_groups()

            def run(name: str) -> Any:
                try:
                    self._run_test(partial(program, name), world_size, skips, "Process")
                except Exception as error:
                    return error
                return name

            cls.rdvz_file = ""
            cls.processes = cls.task_queues = cls.completion_queues = [_Process(run)]

        self._replace(base, "_spawn_processes", classmethod(spawn_processes))  # type: ignore[arg-type]

    def _run_test(
        self, program: Callable[[int], Any], ranks: int, skips: Mapping[Any, str], what: str
    ) -> None:
        """Run a test of torch, and raise what its base class raises."""
        try:
            self._run(program, ranks)
        except _Exited as error:
            if error.code in skips:
                raise unittest.SkipTest(skips[error.code]) from None
            raise RuntimeError(f"{what} {_rank_of(error)} exited with {error.code}") from error
        except unittest.SkipTest:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise RuntimeError(
                f"{what} {_rank_of(error)} exited with exception:\n{text}"
            ) from error


class _Process:
    """An object that such a base class accepts as a process and its two queues."""

    def __init__(self, run: Callable[[str], Any]) -> None:
        self._run = run

    def put(self, name: str | None) -> None:
        """Take the name of the next test; None after the last one."""
        self._name = name

    def get(self, timeout: float) -> Any:
        """Run that test, and return its name or what it raised."""
        return self._run(self._name or "")

    def join(self) -> None:
        """Return: there is no process."""


def _rank_of(error: BaseException) -> int:
    """Return the rank that has raised it, which a note names."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    found = re.search(r"^rank (\d+) of ", notes, re.MULTILINE)
    return int(found[1]) if found else 0


def _raise_child_failed(error: Exception) -> NoReturn:
    errors: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    rank = _rank_of(error)
    failure = errors.ProcessFailure(rank, os.getpid(), 1, "<N/A>")
    failure.message = "".join(traceback.format_exception(error))
    raise errors.ChildFailedError("world", {rank: failure}) from error


def _destroy_groups() -> None:
    dist: Any = importlib.import_module("torch.distributed")
    if dist.is_initialized():
        dist.destroy_process_group()
