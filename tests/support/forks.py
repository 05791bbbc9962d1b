"""Make it cheap to fork a process of pytest, which has imported torch and much more."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import signal
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import torch

# Python has no such system call.
from syncprims._system.processes import load_libc

# A backend is imported before the forks, so not again in each rank.
from syncprims._world.registry import load_backend

# It is read once before the forks, not in each rank.
from syncprims._world.world import version

_HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25  # Linux has it since 6.1; other systems refuse it
_OWN_MEMORY = re.compile(r"^(\w+)-(\w+) rw-p \S+ \S+ 0 +(?:\[heap\])?$", re.MULTILINE)


def prepare_forks() -> None:
    """Import what every rank would import by itself, and make the memory of this process cheap.

    A rank that is killed at a random moment is then killed in a call, and not in an import.
    """
    torch.set_num_threads(1)  # ranks share the processors
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports many modules
    for backend in ("file", "torch"):
        load_backend(backend)
    importlib.import_module("syncprims._data.comparison")
    version()
    # The limit of a test's time is a handler of SIGALRM, and not for the processes that it starts.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))
    gc.collect()
    gc.freeze()  # a collection in a rank would copy all memory that holds objects
    _use_huge_pages()
    if sys.version_info >= (3, 14):  # where the first lock of several processes starts a process
        resource_tracker.ensure_running()


def _use_huge_pages() -> None:
    """Move this process's memory to huge pages: a fork copies an entry for every page."""
    with contextlib.suppress(FileNotFoundError):  # only Linux has /proc
        maps = Path("/proc/self/maps").read_text()
        advise, size = load_libc().madvise, ctypes.c_size_t(_HUGE_PAGE)
        for begin, end in _OWN_MEMORY.findall(maps):
            first = -(-int(begin, 16) // _HUGE_PAGE) * _HUGE_PAGE
            for page in range(first, int(end, 16) - _HUGE_PAGE + 1, _HUGE_PAGE):
                advise(ctypes.c_void_p(page), size, _MADV_COLLAPSE)  # it fails if it is not in use
