"""The environment of processes that a test starts as ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# No public call gives a port, or lists the variables of all launchers.
from syncprims._system.host import free_port as free_port
from syncprims._world.launchers import list_rank_variables

#: Seconds after which what a test has started counts as hanging: far more than anything takes on a
#: busy machine, and less than pytest's own limit for a test, whose report says less.
PATIENCE = 240.0


class Ended(NamedTuple):
    """The end of a program."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> list[str]:
        """The lines of the launcher itself."""
        return [line for line in self.err.splitlines() if not line.startswith("[rank ")]


def is_installed(package: str) -> bool:
    """Return whether a package is installed. A folder of tests may have its name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(package)
        return True
    return False


def record_warnings() -> list[str]:
    """Return a list to which this process adds what the library logs from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("syncprims").addHandler(handler)
    return said


def clean_environ(*others: str) -> dict[str, str]:
    """Return this process's variables without the library's, any launcher's, and the `others`."""
    outer = list_rank_variables().union(others)
    return {k: v for k, v in os.environ.items() if k not in outer and "SYNCPRIMS" not in k}


def environ_of_ranks(directory: Path, **more: str) -> dict[str, str]:
    """Return the environment of ranks that meet in `directory`."""
    clean = clean_environ("MASTER_PORT")
    return {**clean, "SYNCPRIMS_DIR": str(directory), "OMP_NUM_THREADS": "1", **more}


def run_python(
    *words: object, cwd: str | Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with these arguments, in a clean environment with these variables."""
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env={**clean_environ(), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_ranks(
    directory: Path, command: Sequence[str | Path], more: Mapping[str, str], *, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command whose ranks meet in `directory`; it must end with exit code `code`."""
    done = subprocess.run(
        command,
        env=environ_of_ranks(directory, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
