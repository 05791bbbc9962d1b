"""The process groups that the processes of another test suite open: worlds of this library.

Torch loads our backend by its entry point in each process, however that was started. Where the
variable names the folder of a suite, the backend asks this module about every group.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from syncprims._world import runtime
from syncprims._world.exit_hooks import reason
from syncprims._world.world import RunningWorld
from syncprims.c10d import group_world
from syncprims.c10d.torch_internals import (
    Opening,
    make_backend_error,
    replaced,
    replaced_init_barrier,
)
from syncprims.errors import PeerFailed, SyncError, chain_of

from . import SameMembers, meet_makers
from .as_gloo import as_gloo

LOG = "log"  #: in the folder: a line for each group: why it was left to torch, or nothing
_SERVED = {"gloo", "nccl", "undefined"}
_LATER = 0.3  # seconds
_LONGEST = 300.0  # seconds that ranks await the others at the start
_checks = contextlib.ExitStack()  # of groups, in the present world
_same_members: list[SameMembers] = []  # of the present world


def log(folder: Path, line: str) -> None:
    """Add a line for the report of the suite."""
    with (folder / LOG).open("a") as file:
        file.write(f"{line}\n")


def open_group(
    folder: Path, opening: Opening, ours: Callable[[], Any], torchs: Callable[[], Any]
) -> Any:
    """Return a group of ours, or one of torch where no world can serve it.

    :raises SyncError: if a rank does not come, or makes another group.
    """
    try:
        if opening.ranks:
            return _open_another(opening, ours, torchs)
        _checks.close()
        names = {part.rpartition(":")[2] for part in opening.backend.split(",")}
        if names - _SERVED:
            if not opening.rank:
                log(folder, f"a group of the backend {opening.backend}")
            return torchs()
        limit = min(opening.timeout.total_seconds(), _LONGEST)
        start = functools.partial(_start_world, folder, limit)
        with replaced((group_world, "start_world", start)):
            return ours()
    except SyncError as error:
        make_backend_error(error)
        raise


def open_group_of_pytest(folder: Path, opening: Opening, ours: Any, torchs: Any) -> Any:
    """As :func:`open_group`, in pytest's process: it may be a rank beside processes of its own."""
    shared = opening.size > 1 and multiprocessing.active_children()
    in_child = multiprocessing.parent_process() is not None
    if in_child or shared or (opening.ranks and runtime.find_world()):
        return open_group(folder, opening, ours, torchs)
    _checks.close()
    return torchs()


def _open_another(opening: Opening, ours: Callable[[], Any], torchs: Callable[[], Any]) -> Any:
    world = runtime.find_world()
    if world is None:  # its default group was left to torch
        return torchs()
    group = _same_members[0](opening, ours, torchs)
    if world.rank in opening.ranks:  # as Gloo's members connect
        limit = opening.timeout.total_seconds()
        meet_makers(f"new_group {opening.name}", sorted(opening.ranks), limit)
    return group


def _start_world(
    folder: Path, limit: float, store: object, rank: int, world_size: int
) -> RunningWorld:
    """Start a world of the ranks that share `store`; they await each other `limit` seconds."""
    variables = {
        **group_world.make_variables(store, rank, world_size),
        "SYNCPRIMS_DIR": str(folder),
        "SYNCPRIMS_JOIN_TIMEOUT": str(limit),
    }
    _same_members[:] = [SameMembers(folder / f"shared-{variables['SYNCPRIMS_RUN_ID']}")]
    for context in (
        as_gloo(),
        replaced((sys, "exit", _report_before(sys.exit))),
        replaced_init_barrier(meet_makers),
    ):
        _checks.enter_context(context)
    world = runtime.join_as(variables)
    if not rank:
        log(folder, "")
    return world


def _report_before(exit_: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return `sys.exit`, before which a rank reports what its launcher has caught."""

    @functools.wraps(exit_)
    def report_and_exit(status: str | int | None = None, /) -> NoReturn:
        """Launchers show the failure of the process that ends first: a consequence comes later."""
        error, world = sys.exc_info()[1], runtime.find_world()
        if reason(SystemExit(status)) and error is not None and world is not None:
            runtime.leave_group_world(world)
            if any(isinstance(link, PeerFailed) for link in chain_of(error)):
                time.sleep(_LATER)
        exit_(status)

    return report_and_exit
