"""The processes of other test suites, whose process groups are worlds of this library.

The launchers stay as they are: what they return, raise and share is their own. A process that would
be spawned is one of a fork server of Python, which has imported what the tests import
(`suite_server`). The groups are those of `suite_groups`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction
from pathlib import Path
from typing import Any, cast

import torch

from syncprims._world.scratch import scratch_directory
from syncprims.c10d.torch_internals import replaced, serve_groups

from . import suite_groups as groups

VARIABLE = "SYNCPRIMS_SUITE"  #: names the folder of the suite
IMPORTS = "imports"  #: in it: the path and the modules of the tests
_SERVER = "syncprims.testing.torch_worlds.suite_server"


class SuiteProcesses:
    """Serves the processes of a suite."""

    def __init__(self) -> None:
        """Serve the processes that are started from now on."""
        self._undo = contextlib.ExitStack()
        self.close: Callable[[], None] = self._undo.close  #: puts all back
        folder = self._undo.enter_context(scratch_directory("suites")).path
        self._log, self._imports = folder / groups.LOG, folder / IMPORTS
        self._log.touch()
        if torch.cuda.is_available():
            why = "all groups: GPUs are here, and only processors are served (hide the GPUs)"
            groups.log(folder, why)
            return
        os.environ[VARIABLE] = str(folder)
        self._undo.callback(os.environ.pop, VARIABLE, None)
        served = functools.partial(groups.open_group_of_pytest, folder)
        self._undo.enter_context(serve_groups(served))
        start = functools.partial(_start, folder, popen_spawn_posix.Popen)
        self._undo.enter_context(replaced((popen_spawn_posix, "Popen", start)))
        multiprocessing.set_forkserver_preload([_SERVER])

    def start(self) -> None:
        """Note what the suite has imported, when all tests have been collected."""
        names = [name for name, module in sys.modules.copy().items() if _may_be_shared(module)]
        path = [str(Path(entry).absolute()) for entry in sys.path]
        self._imports.write_text(json.dumps([path, names]))

    def report(self) -> list[str]:
        """Return how many groups were worlds, and what was left to torch, and why."""
        lines = Counter(self._log.read_text().splitlines())
        served = lines.pop("", 0)
        left = [f"{n} left to torch: {why}" for why, n in lines.items()]
        return [f"{served} process groups in worlds of processes", *left]


def _may_be_shared(module: object) -> bool:
    """Return whether processes may share what was imported: no module of tests, or of pytest."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader is not None and not type(loader).__module__.startswith("_pytest.")


def _start(folder: Path, spawn: Callable[[Any], Any], process: object) -> Any:
    """Start in the fork server a process that would be spawned; if a test has killed it, `spawn`.

    Processes of processes are spawned: each of these would start a server of its own.
    """
    os.environ[VARIABLE] = str(folder)  # a test may have removed it
    if multiprocessing.parent_process() is None:
        with contextlib.suppress(ChildProcessError, ConnectionError):
            return popen_forkserver.Popen(cast("Any", _Started(process)))
    return spawn(process)


class _Started:
    """A process, which finds the variables and streams of this one before it is unpickled."""

    def __init__(self, process: object) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _second, (_Surroundings(), self._process)


class _Surroundings:
    """The variables and streams of this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        streams: Any = reduction
        return _take_over, (dict(os.environ), [streams.DupFd(fd) for fd in (1, 2)])


def _take_over(variables: dict[str, str], streams: list[Any]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for fd, stream in enumerate(streams, 1):
        own = stream.detach()
        os.dup2(own, fd)
        os.close(own)


def _second(_: None, process: object) -> object:
    return process
