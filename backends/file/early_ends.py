"""Records of ranks whose process ended before it joined, for the ranks that wait for it.

A rank that has joined has a slot, which shows how it ends. Before that, only its launcher knows the
rank: `syncprims run` records the end of each rank. Under another launcher, a rank that ends without
a call records that itself. A reader has to check such a record, since a run id may be used again,
and since any program that a rank starts inherits the variables of the rank. The record counts only
if writer and reader run the same program, have the same parent, and lived at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import SyncError, describe_exit

from .processes import ProcessIdentity, ProcessWatch, stat_fields

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

_PREFIX = "ended-"  # then the rank
_TIME_TO_END = 0.2  # seconds for a process that has recorded its own end


class EarlyEnd(NamedTuple):
    """One record."""

    launcher: list[int]  #: the identity of the process that has started the rank
    how: str | None  #: the process ended, if the launcher is the writer
    process: list[int]  #: else the identity of the process,
    program: str  #: what it runs,
    time: int  #: and when it was about to end, in clock ticks since boot

    @classmethod
    def seen(cls, how: str) -> EarlyEnd:
        """Return the record of a process that this one has started."""
        return cls([*ProcessIdentity.own()], how, [], "", 0)

    @classmethod
    def own(cls) -> EarlyEnd | None:
        """Return the record of this process; None where the system knows too little."""
        launcher = _own_launcher()
        if launcher is None:
            return None
        now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        return cls(launcher, None, [*ProcessIdentity.own()], _own_program(), now)

    def describe(self) -> str | None:
        """Return how the process ended; None if the record need not be of this run."""
        if self.how is not None:
            return self.how
        one_launch = self.launcher == _own_launcher() and self.program == _own_program()
        if not one_launch or self.time < ProcessIdentity.own().started:
            return None
        watch = ProcessWatch(ProcessIdentity(*self.process))
        try:
            watch.has_ended(_TIME_TO_END)
            status = watch.exit_status()
        finally:
            watch.close()
        return "" if status is None else describe_exit(status)

    def is_void(self) -> bool:
        """Return whether the launcher is gone: no rank that it has started needs the record."""
        return ProcessIdentity(*self.launcher).is_gone(ProcessIdentity.own().namespace)


def record_early_end(run: PrivateDirectory, rank: int, end: EarlyEnd) -> None:
    """Record in the directory of a run how the process of `rank` has ended; under its lock."""
    name = f"{_PREFIX}{rank}"
    run.write(f"{name}.new", json.dumps(end).encode())
    os.rename(f"{name}.new", name, src_dir_fd=run.fd, dst_dir_fd=run.fd)


def describe_early_end(world: PrivateDirectory, rank: int) -> str | None:
    """Return how the process of `rank` ended, of the run that `world` belongs to; None if unknown.

    It is empty if only the fact is known, and not the manner.
    """
    end = _read(world, f"../{_PREFIX}{rank}")
    return None if end is None else end.describe()


def early_ends(run: PrivateDirectory) -> dict[int, EarlyEnd]:
    """Return the records in the directory of a run, by rank."""
    found: dict[int, EarlyEnd] = {}
    for name in run.names():
        rank = name.removeprefix(_PREFIX)
        if rank != name and rank.isdecimal() and (end := _read(run, name)) is not None:
            found[int(rank)] = end
    return found


def remove_early_ends(run: PrivateDirectory) -> None:
    """Remove all records in the directory of a run; under its lock."""
    for name in run.names():
        if name.startswith(_PREFIX):
            run.remove(name)


def _read(directory: PrivateDirectory, name: str) -> EarlyEnd | None:
    with contextlib.suppress(OSError, SyncError, ValueError, TypeError):
        return EarlyEnd(*json.loads(directory.read(name)))
    return None


def _own_launcher() -> list[int] | None:
    pid = os.getppid()
    fields = stat_fields(pid)
    # Its pid namespace cannot be read if it is another user's, as SLURM's is.
    return [pid, int(fields[19]), ProcessIdentity.own().namespace] if fields else None


def _own_program() -> str:
    return hashlib.blake2b(
        "\0".join(sys.orig_argv).encode(errors="replace"), digest_size=8
    ).hexdigest()
