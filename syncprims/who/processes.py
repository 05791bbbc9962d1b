"""What other processes of this host do, as far as the system shows it without stopping them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import linecache
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from syncprims._system.processes import find_descendants, stat_fields

#: System calls in which processes wait: by number, on these processors. The first argument of those
#: in `_WITH_FILE` is a descriptor.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv",
        20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept",
        44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl",
        73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 217: "getdents64", 230:
        "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat",
        270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 61: "getdents64", 63: "read",
        64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6",
        73: "ppoll", 79: "newfstatat", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip
_WITH_FILE = {
    "read", "write", "pread64", "pwrite64", "readv", "writev", "connect", "accept", "sendto",
    "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync", "fdatasync", "getdents64",
}  # fmt: skip
_INSTALLED = r"/site-packages/|/lib/python3|^<"  # files that are not the user's program
_OF_TORCH = r"/torch/(distributed|nn/parallel|autograd|cuda)/"  # files of its collectives
_LONGEST_PATH = 256  # bytes
#: Methods in C that wait for the others' collectives, by the system call that they wait in.
_WAITS_IN_C = {"futex": "wait", "poll": "wait|get", "recvfrom": "wait|get"}
_WAITS_ON_DEVICE = "wait|item|tolist|cpu|synchronize"  # where NCCL has queued the collectives
_MOST_STACKS = 64  # of one look
_STACK_TIMEOUT = 5.0  # seconds


class ProcessSample(NamedTuple):
    """A process at one moment."""

    state: str = "?"  #: a letter, as in ps(1): R, S, D, T, ...
    seconds: float = 0.0  #: of processor time, so far
    at: float = 0.0  #: when that was read, by :func:`time.monotonic`
    syscall: str = ""  #: the system call it is in, and on which file
    channel: str = ""  #: the function of the kernel it waits in
    main_seconds: float = 0.0  #: of processor time of its main thread, so far
    switches: int = 0  #: how often that has begun to wait, so far

    @property
    def beside(self) -> float:
        """The processor time of its other threads."""
        return self.seconds - self.main_seconds

    def goes_on(self, now: ProcessSample, *, may_spin: bool) -> bool:
        """Return whether the main thread, which was in one line at both times, has gone on.

        One that waits for others never wakes, and computes nothing unless it spins for a device.
        """
        most = 0.05 + 0.02 * (now.at - self.at)
        computes = now.main_seconds - self.main_seconds > most
        return now.switches - self.switches > 1 or (computes and not may_spin)


class StackLine(NamedTuple):
    """Where the main thread of a process is."""

    place: str  #: a function and a line of the user's program
    collective: str = ""  #: the function of torch that it has called there, to wait for others

    def __str__(self) -> str:
        return self.place + (f", in {self.collective} of torch" if self.collective else "")


def sample(pid: int) -> ProcessSample:
    """Return what the system says about a process now; an empty sample if it says nothing."""
    try:
        fields = stat_fields(pid)
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        main = stat_fields(f"{pid}/task/{pid}")
        main_seconds = (int(main[11]) + int(main[12])) / os.sysconf("SC_CLK_TCK")
        status = _read(f"/proc/{pid}/task/{pid}/status").partition("\nvoluntary_ctxt_switches:")[2]
        switches = int(status.split()[0])
    except (ValueError, IndexError):
        return ProcessSample()
    channel = _read(f"/proc/{pid}/wchan").removeprefix("0")  # it waits in none
    call, at = _system_call(pid), time.monotonic()
    return ProcessSample(fields[0].decode(), seconds, at, call, channel, main_seconds, switches)


def find_started(joined: Iterable[int], ranks: Iterable[int]) -> dict[int, int]:
    """Return the processes of ranks that have not joined, which the launcher of others started."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for launcher in {int(stat_fields(pid)[1]) for pid in joined} - {0, 1}:
            for pid in sorted(find_descendants(launcher)):
                variables = _read(f"/proc/{pid}/environ").split("\0")
                for rank in ranks:
                    if f"RANK={rank}" in variables:
                        found.setdefault(rank, pid)
    return found


def count_restarts(pids: Iterable[int]) -> int | None:
    """Return how often the ranks were started again, as a variable of these processes says."""
    for pid in pids:
        for variable in _read(f"/proc/{pid}/environ").split("\0"):
            name, _, value = variable.partition("=")
            if name in ("SYNCPRIMS_RESTART", "TORCHELASTIC_RESTART_COUNT") and value.isdecimal():
                return int(value)
    return None


def share(before: ProcessSample, now: ProcessSample) -> float | None:
    """Return the share of a processor that a process has used between two samples."""
    if "?" in (before.state, now.state) or now.at <= before.at:
        return None
    return round((now.seconds - before.seconds) / (now.at - before.at), 2)


def _system_call(pid: int) -> str:
    """Return the system call that a process is in; empty if it runs, or that cannot be read."""
    number, *arguments = _read(f"/proc/{pid}/syscall").split() or [""]
    if not number.isdecimal():
        return ""
    name = _CALLS.get(platform.machine(), {}).get(int(number), f"system call {number}")
    with contextlib.suppress(OSError, ValueError):
        if name in _WITH_FILE and arguments:
            file = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")  # noqa: PTH115
            return f"{name} on {file}"
        if name == "openat":  # such as a FIFO that nobody else has opened
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
                memory.seek(int(arguments[1], 16))
                return f"{name} of {os.fsdecode(memory.read(_LONGEST_PATH).partition(bytes(1))[0])}"
    return name


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()  # names and variables are any bytes
    except OSError:
        return ""


# -- Python stacks ----------------------------------------------------------------------------


def find_py_spy() -> str | None:
    """Return the program that reads the stacks of Python processes; None if it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def uses_torch(pid: int) -> bool:
    """Return whether a process has loaded torch."""
    return "libtorch" in _read(f"/proc/{pid}/maps")


def may_spin(pid: int, collective: str = "") -> bool:
    """Return whether a process may compute while it waits for others: NCCL looks at a device.

    Not in a backward pass, which launches kernels.
    """
    names = (_read(f"{thread}/comm") for thread in Path(f"/proc/{pid}/task").glob("*"))
    return not collective.endswith("backward") and any("pt_nccl" in name for name in names)


def python_lines(pids: Iterable[int]) -> dict[int, StackLine]:
    """Return where in the user's program these processes are, if that is known.

    py-spy reads their memory and does not stop them. Only the first few processes are read.
    """
    program, some = find_py_spy(), list(pids)[:_MOST_STACKS]
    if program is None or not some:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(some)) as pool:
        lines = pool.map(partial(_python_line, program), some)
        return {pid: line for pid, line in zip(some, lines, strict=True) if line}


def _python_line(program: str, pid: int) -> StackLine | None:
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_STACK_TIMEOUT, check=False)
        threads = json.loads(done.stdout)
        main = next((one for one in threads if one["thread_name"] == "MainThread"), threads[0])
        line = innermost(main["frames"])
        leaf = main["frames"][0]
        if line and not line.collective and not re.search(_INSTALLED, leaf["filename"]):
            source = linecache.getline(f"/proc/{pid}/root{leaf['filename']}", leaf["line"])
            calls = _WAITS_ON_DEVICE if may_spin(pid) else _WAITS_IN_C.get(_system_call(pid))
            waits = calls and re.search(rf"\.({calls})\(", source)
            if waits and uses_torch(pid):
                line = line._replace(collective=waits[1])
        return line
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        return None


def innermost(frames: Sequence[Any]) -> StackLine | None:
    """Return the innermost frame that is of the user's program; else the innermost one."""
    # What stands below this ran when multiprocessing forked. An idle worker has nothing else.
    begun = [n for n, one in enumerate(frames) if one["name"].endswith("Process._bootstrap")]
    own = frames[: begun[0]] if begun else frames
    theirs = [one for one in own if not re.search(_INSTALLED, one["filename"])]
    theirs = theirs or ([] if begun else list(frames))
    if not theirs:
        return None
    name = re.sub(r".*/", "", theirs[0]["filename"])
    called = [
        one for one in frames[: frames.index(theirs[0])] if not one["name"].endswith("wrapper")
    ]
    torchs = [one["name"] for one in called if re.search(_OF_TORCH, one["filename"])]
    while called and called[0]["filename"].endswith("torch/_ops.py"):
        del called[0]
    if not called or not re.search(_OF_TORCH, called[0]["filename"]):
        torchs = []  # as in a forward pass that DDP wraps: it computes
    place = f"{theirs[0]['name']} ({name}:{theirs[0]['line']})"
    return StackLine(place, torchs[-1] if torchs else "")
