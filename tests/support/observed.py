"""Worlds of real processes that go on while a test looks at them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import syncprims as sp
from support.rank_environment import free_port
from support.rank_worlds import PATIENCE, Kind, environment, fork
from syncprims.who.observation import Observation, WorldReport


def _be_rank(program: Callable[[], Any]) -> None:
    with sp.init():
        with contextlib.suppress(sp.SyncError, SystemExit):
            program()
        while True:  # as a training that goes on without the others
            time.sleep(3600)


@contextlib.contextmanager
def running(
    kind: Kind, directory: Path, program: Callable[[], Any], **variables: str
) -> Generator[list[int]]:
    """Run `program` on ranks that then sleep until the block ends; yield their pids."""
    run_id = uuid.uuid4().hex
    if kind.backend == "torch":
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    pids: list[int] = []
    try:
        for rank in range(kind.ranks):
            env = environment(kind, rank, directory, run_id, **variables)
            pids.append(fork(partial(_be_rank, program), env))
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def await_report(
    which: str | int | os.PathLike[str],
    is_it: Callable[[WorldReport], bool],
    stuck_after: float = 0.2,
) -> WorldReport:
    """Look at one world until what is seen of it passes the test, and return that."""
    deadline = time.monotonic() + PATIENCE
    reports: list[WorldReport] = []
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(sp.ConfigurationError),  # it has not started yet
            contextlib.closing(Observation(which, stuck_after)) as observation,
        ):
            observation.look()
            while time.monotonic() < deadline:
                time.sleep(0.02)
                reports = observation.look()
                if not reports:
                    break
                if is_it(reports[0]):
                    return reports[0]
        time.sleep(0.02)
    raise AssertionError(f"it was never seen; at last: {reports}")
