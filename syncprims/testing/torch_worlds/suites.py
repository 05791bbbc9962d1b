"""The launchers of other test suites: their ranks run in worlds of threads.

Each adapter replaces the one function of a launcher that starts its ranks. What it returns and
raises is what suites expect of the launcher. What no world can serve is left to the launcher.
(`suite_processes` serves the processes of any launcher.)
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing.process
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import torch

from syncprims._world.exit_hooks import reason
from syncprims._world.runtime import current
from syncprims.c10d.torch_internals import replaced
from syncprims.errors import ConcurrentCall, SyncError, chain_of, leaves
from syncprims.testing.outcomes import results_of
from syncprims.testing.world_spec import WorldSpec, test_context
from syncprims.testing.worlds import run_once

_LONGEST = 300.0  # seconds of real time for a world, as for a test of torch
_HINT = (
    "ranks are threads of one process here, and share its globals: see whether this happens with "
    "--syncprims-worlds=processes, too"
)
#: Start processes that no adapter sees.
_COMMANDS = "torchrun", "torch.distributed.", "accelerate launch", "deepspeed"


class _Exited(Exception):
    """A rank has called ``sys.exit`` with a code."""

    def __init__(self, code: object) -> None:
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


def _copier(objects: object, *, spawned: bool) -> Callable[[], Any]:
    """Return what makes a copy as a process would have it; no copy of what has no pickle."""
    file = io.BytesIO()
    copier = _Copier(file, spawned=spawned)
    try:
        copier.dump(objects)
    except Exception:  # as of a function within a function, which a forked process inherits
        return lambda: objects
    return lambda: _Restorer(file.getvalue(), copier.shared).load()


class Suites:
    """Serves a suite until it is closed, and counts what is left to its own launchers."""

    def __init__(self) -> None:
        """Count commands that launch ranks."""
        self.left_alone: Counter[str] = Counter()  #: by the reason
        self._undo = contextlib.ExitStack()
        self.close: Callable[[], None] = self._undo.close  #: puts all back

        def start(process: object, args: Any, *rest: object, **named: object) -> None:
            line = args if isinstance(args, str) else " ".join(map(str, args))
            if any(command in line for command in _COMMANDS):
                self.left_alone["a command that starts its ranks itself"] += 1
            before(process, args, *rest, **named)

        before = self._replace(subprocess.Popen, "__init__", start)

    def start(self) -> None:
        """Go on when all tests have been collected: the suite has imported what it uses."""
        raise NotImplementedError

    def report(self) -> list[str]:
        """Return how many launches were served, and why others were not."""
        return [f"{n} left to its own launcher: {why}" for why, n in self.left_alone.items()]

    def _replace(self, owner: object, name: str, function: object) -> Any:
        """Replace ``owner.name``, and return the old value."""
        before = vars(owner)[name]
        self._undo.enter_context(replaced((owner, name, function)))
        return before


class SuiteThreads(Suites):
    """Serves the launchers of a suite in worlds of threads."""

    def __init__(self) -> None:
        """Replace the launchers; import torch before the suites do."""
        super().__init__()
        self._in_worlds = 0  # launches
        self._serve_start_processes()
        self._serve_elastic_launch()

        def start(process: object) -> None:
            if self._counts:
                self.left_alone["a process that no adapter has started"] += 1
            before(process)

        self._counts = True
        before = self._replace(multiprocessing.process.BaseProcess, "start", start)

    def start(self) -> None:
        """Count the tests of torch's own whose ranks are threads: nothing else sees these start."""
        base = sys.modules.get("torch.testing._internal.common_distributed")
        if base is None:
            return

        def spawn(case: object) -> None:
            self.left_alone["a MultiThreadedTestCase of torch"] += 1
            before(case)

        before = self._replace(base.MultiThreadedTestCase, "_spawn_threads", spawn)

    def report(self) -> list[str]:
        """Return how many launches were worlds, and what was left to itself, and why."""
        return [f"{self._in_worlds} launches in worlds of threads", *super().report()]

    @contextlib.contextmanager
    def _left(self, why: str) -> Generator[None]:
        """Within the block, a launch is left to itself, and its processes are not counted."""
        self.left_alone[why] += 1
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def _run(
        self, program: Callable[[int], Any], ranks: int, *, torchrun: bool = False
    ) -> list[Any]:
        """Return what ``program(rank)`` returns on each rank.

        The ranks have the variables of this process; with `torchrun`, also those of a worker.

        :raises _Exited: if a rank calls ``sys.exit`` with a code other than 0.
        """
        self._in_worlds += 1
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
                if reason(end):
                    raise _Exited(end.code) from None

        spec = WorldSpec(run, ranks, torch=True, timeout=_LONGEST)
        try:
            ended = run_once(spec)
            # A suite whose ranks make different numbers of calls passes elsewhere.
            return results_of(ended, test_context.get().replay(ended.seed), equal_rounds=False)
        except Exception as error:
            links = [link for leaf in leaves(error) for link in chain_of(leaf)]
            verdicts = [link for link in links if isinstance(link, SyncError)]
            refused = any(isinstance(link, ConcurrentCall) for link in verdicts)
            if (refused or not verdicts) and not isinstance(error, _Exited):
                error.add_note(_HINT)
            raise

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
                with self._left("the processes are not joined at once"):
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
                with self._left("elastic_launch of a command, or of several nodes"):
                    return before(launch, *args)
            ranks = config.nproc_per_node
            copy = _copier(args, spawned=True)
            try:
                results = self._run(lambda rank: entry(*copy()), ranks, torchrun=True)
            except Exception as error:
                _raise_child_failed(error)
            return dict(enumerate(results))

        before = self._replace(api.elastic_launch, "__call__", call)


def _rank_of(error: BaseException) -> int:
    """Return the rank that has raised it, which a note names."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    found = re.search(r"^rank (\d+) of ", notes, re.MULTILINE)
    return int(found[1]) if found else 0


def _raise_child_failed(error: Exception) -> NoReturn:
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    rank = _rank_of(error)
    failure = errors.ProcessFailure(rank, os.getpid(), 1, "<N/A>")
    failure.message = "".join(traceback.format_exception(error))
    raise errors.ChildFailedError("world", {rank: failure}) from error
