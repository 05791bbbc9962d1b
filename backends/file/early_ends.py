"""Records of ranks whose process ended, for the ranks that wait for them to join.

A rank that has joined a world has a liveness entry there, which shows how it ends. In a world that
it has not joined, only its launcher knows the rank: `syncprims run` records the end of each rank.
So a rank under `syncprims run` records that it has joined: its world may be gone before it ends.

Under another launcher, a rank that ends without a world records that itself. A reader has to check
such a record, since a run id may be used again, and since any program that a rank starts inherits
the variables of the rank. The record counts only if writer and reader run the same program, have
the same parent, and lived at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from syncprims._system.processes import ProcessIdentity, ProcessWatch, stat_fields
from syncprims.errors import SyncError, describe_exit

from .private_dir import PrivateDirectory

_PREFIX = "rank-"  # then its number
_TICKS = os.sysconf("SC_CLK_TCK")  # in a second
_TIME_TO_END = 5.0  # seconds for a process that has recorded its own end; then it may run on


class EarlyEnd(NamedTuple):
    """The end of a rank that another rank waits for."""

    how: str  #: empty if only the fact is known
    joined: bool  #: an earlier world of the run
    failure: bytes = b""  #: what it has raised, if that is known


class RankRecord(NamedTuple):
    """One record."""

    launcher: list[int]  #: the identity of the process that has started the rank
    how: str | None = None  #: the process ended, if the launcher is the writer
    joined: bool = False  #: the rank has joined a world
    process: Sequence[int] = ()  #: if it records its own end: the identity of the process,
    program: str = ""  #: what it runs,
    time: int = 0  #: and when it was about to end, in clock ticks since boot
    failure: str = ""  #: what the process has raised, as :func:`errors.dump` writes it

    @classmethod
    def seen(cls, how: str) -> RankRecord:
        """Return the record of a process that this one has started, and that has ended."""
        return cls([*ProcessIdentity.own()], how)

    @classmethod
    def own(cls, *, joined: bool, ends: bool) -> RankRecord | None:
        """Return the record of this process; None where the system knows too little."""
        launcher = _own_launcher()
        if launcher is None or not ends:
            return None if launcher is None else cls(launcher, joined=joined)
        process = [*ProcessIdentity.own()]
        return cls(launcher, None, joined, process, _own_program(), _now())

    def find_end(self) -> EarlyEnd | None:
        """Return how the process ended; None if that is not known, or need not be of this run."""
        if self.how is not None:
            return EarlyEnd(self.how, self.joined, self.failure.encode())
        if not self.process:
            return None  # the launcher will say it
        one_launch = self.launcher == _own_launcher() and self.program == _own_program()
        if not one_launch or self.time < ProcessIdentity.own().started:
            return None
        watch = ProcessWatch(ProcessIdentity(*self.process))
        try:
            if (
                watch.fd >= 0
                and not watch.has_ended()
                and _now() - self.time < _TIME_TO_END * _TICKS
            ):
                return None  # it is about to, and then its exit code is known
            status = watch.exit_status()
        finally:
            watch.close()
        how = "" if status is None else describe_exit(status)
        return EarlyEnd(how, self.joined, self.failure.encode())

    def is_void(self) -> bool:
        """Return whether the launcher is gone: no rank that it has started needs the record."""
        return ProcessIdentity(*self.launcher).is_gone(ProcessIdentity.own().namespace)


def record_rank(run: PrivateDirectory, rank: int, record: RankRecord) -> None:
    """Write the record of `rank` into the directory of a run; under its lock."""
    name = f"{_PREFIX}{rank}"
    earlier = _read(run, name)
    if earlier is not None and earlier.joined and not earlier.is_void():
        record = record._replace(joined=True)
    run.replace(name, json.dumps(record).encode())


def find_early_end(world: PrivateDirectory, rank: int) -> EarlyEnd | None:
    """Return how `rank` ended, of the run that `world` belongs to; None if that is not known."""
    record = _read(world, f"../{_PREFIX}{rank}")
    return None if record is None else record.find_end()


def read_records(run: PrivateDirectory) -> dict[int, RankRecord]:
    """Return the records in the directory of a run, by rank."""
    found: dict[int, RankRecord] = {}
    for name in run.names():
        rank = name.removeprefix(_PREFIX)
        if rank != name and rank.isdecimal() and (record := _read(run, name)) is not None:
            found[int(rank)] = record
    return found


def remove_records(run: PrivateDirectory) -> None:
    """Remove all records in the directory of a run; under its lock."""
    for name in run.names():
        if name.startswith(_PREFIX):
            run.remove(name)


def _read(directory: PrivateDirectory, name: str) -> RankRecord | None:
    with contextlib.suppress(OSError, SyncError, ValueError, TypeError):
        return RankRecord(*json.loads(directory.read(name)))
    return None


def _now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def _own_launcher() -> list[int] | None:
    pid = os.getppid()
    fields = stat_fields(pid)
    # Its pid namespace cannot be read if it is another user's, as SLURM's is.
    return [pid, int(fields[19]), ProcessIdentity.own().namespace] if fields else None


def _own_program() -> str:
    return hashlib.blake2b(
        "\0".join(sys.orig_argv).encode(errors="replace"), digest_size=8
    ).hexdigest()
