"""Launches by `syncprims run`, as a user makes them, for the tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from support.rank_environment import PATIENCE, Ended, clean_environ

HEAD = "import os, signal, subprocess, sys, time\nfrom syncprims import *\n"


def command(*words: str) -> list[str]:
    """Return the command line of a launch."""
    return [sys.executable, "-m", "syncprims", "run", *words]


def find_processes(script: Path) -> list[str]:
    """Return the command lines of the living processes that name `script`."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(script) in text:
                found.append(text)
    return found


def await_condition(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Launches:
    """Launches of one script."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.environ = {**clean_environ(), "OMP_NUM_THREADS": "1"}

    def write(self, source: str) -> None:
        """Make `source` the script; it can use all public names."""
        self.script.write_text(HEAD + textwrap.dedent(source))

    def run(
        self, source: str, *flags: str, n: int = 3, args: Sequence[str] = (), **variables: str
    ) -> Ended:
        """Run `source` on `n` ranks, with `args` of its own; nothing may be left of them."""
        self.write(source)
        done = subprocess.run(
            command("-n", str(n), *flags, str(self.script), *args),
            env={**self.environ, **variables},
            cwd=self.script.parent,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        assert not find_processes(self.script), "a process outlived its launcher"
        return Ended(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def start(
        self, source: str, *flags: str, n: int = 2, **variables: str
    ) -> Generator[subprocess.Popen[str]]:
        """Start `source` on `n` ranks; in the end, nothing may be left of them."""
        self.write(source)
        with subprocess.Popen(
            command("-n", str(n), *flags, str(self.script)),
            env={**self.environ, **variables},
            cwd=self.script.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            try:
                yield launcher
            finally:
                launcher.kill()
        await_condition(lambda: not find_processes(self.script), "a process outlived its launcher")
