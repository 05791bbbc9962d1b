"""Worlds of real processes for the tests: forked functions, and started scripts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch  # noqa: F401 - imported once, before ranks fork, because it takes seconds

import syncprims
from support.rank_environment import PATIENCE as PATIENCE
from support.rank_environment import Ended, clean_environ, free_port

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables
from syncprims.testing.world_spec import WorldSpec
from syncprims.testing.worlds import run_once


class Kind(NamedTuple):
    """A backend and a world size, and a number of hosts: each is simulated by its own directory."""

    backend: str
    ranks: int
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.backend}-{self.ranks}" + (f"-on-{self.hosts}" if self.hosts > 1 else "")


def environment(kind: Kind, rank: int, directory: Path, run_id: str, **more: str) -> dict[str, str]:
    """Return the environment of one rank, without variables of other launchers."""
    own = make_rank_variables(rank, kind.ranks, kind.hosts) if kind.backend != "single" else {}
    if kind.hosts > 1:
        directory = directory / f"host-{rank * kind.hosts // kind.ranks}"
        directory.mkdir(mode=0o700, exist_ok=True)
    return {
        **clean_environ(),
        **own,
        "SYNCPRIMS_BACKEND": kind.backend,
        "SYNCPRIMS_RUN_ID": run_id,
        "SYNCPRIMS_DIR": str(directory),
        "SYNCPRIMS_JOIN_TIMEOUT": "100",
        **more,
    }


_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class ServedStore(NamedTuple):
    """A store that a process serves, as the agent of torchrun does."""

    port: int
    pid: int

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which ranks find it."""
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # served by this process, not by a rank
        }


@contextlib.contextmanager
def served_store() -> Generator[ServedStore]:
    """Serve a store in a separate process."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield ServedStore(int(server.stdout.readline()), server.pid)
        finally:
            server.kill()  # a test that failed may have left it stopped


def fork(body: Callable[[], object], variables: Mapping[str, str]) -> int:
    """Run `body` in a forked child with exactly these variables, and return its pid.

    Its exit code is 0, or 1 if `body` raised. Exit hooks of the parent do not run in it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside xdist's thread
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(variables)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def await_end(pid: int) -> None:
    """Wait until the process `pid` has ended."""
    eye = os.pidfd_open(pid)
    try:
        assert select.select([eye], [], [], PATIENCE)[0], f"process {pid} does not end"
    finally:
        os.close(eye)


#: A program that closes the streams in its first argument and executes the rest, as daemons start
#: other programs.
CLOSING = (
    "import json, os, sys\n"
    "for number in json.loads(sys.argv[1]): os.close(number)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


#: A program that runs with all descriptors below 1024 in use. `select` supports none above.
CROWDED = (
    "import os, resource, sys\n"
    "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))\n"
    "while os.open(os.devnull, os.O_RDONLY) < 1023: pass\n"
)


def skip_unless_crowded() -> None:
    """Skip a test that needs :data:`CROWDED` where the limit of descriptors is too low."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"a process here has {hard} descriptors at most, and none above 1023")


class Died(Exception):
    """A rank ended without a result."""


class Signs:
    """Signals between ranks without the library: each sign is a file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, sign: object) -> None:
        """Give this sign."""
        (self._folder / f"{sign}").touch()

    def given(self, *signs: object) -> bool:
        """Return whether all of these signs are given."""
        return all((self._folder / f"{sign}").exists() for sign in signs)

    def wait(self, *signs: object) -> None:
        """Wait until all of these signs are given."""
        deadline = time.monotonic() + PATIENCE
        while not self.given(*signs):
            assert time.monotonic() < deadline, f"of {signs}, not all were given"
            time.sleep(0.001)

    def gather(self, mine: object, *signs: object) -> None:
        """Give the sign `mine`, then wait until all of these are given."""
        self.give(mine)
        self.wait(*signs)


class Ranks:
    """Run a function on every rank of a world, each in a forked process."""

    def __init__(
        self, kind: Kind, directory: Path, site: Path | None = None, patience: float = PATIENCE
    ) -> None:
        self.kind = kind
        self._patience = patience  # seconds after which the ranks count as hanging
        self.ranks = kind.ranks
        self.directory = directory
        self._site = site
        self._killed = False

    def run(self, program: Callable[[], Any], **variables: str) -> list[Any]:
        """Return the result of each rank; if any raised, raise the exception of the lowest one."""
        return self._results(self.outcomes(program, start=True, **variables))

    def run_alone(self, program: Callable[[], Any], **variables: str) -> list[Any]:
        """Return the result of each rank of a program that starts the world itself."""
        return self._results(self.outcomes(program, start=False, **variables))

    def _results(self, outcomes: list[Any]) -> list[Any]:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(
        self, program: Callable[[], Any], *, start: bool = True, **variables: str
    ) -> list[Any]:
        """Return the result or exception of each rank. With `start`, a world is started first."""
        if self.kind.backend == "threads":
            return self._threads(program, variables)
        run_id = uuid.uuid4().hex
        if self.kind.hosts > 1:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o777)  # also for ranks that drop their privileges
            files = [Path(folder, str(rank)) for rank in range(self.ranks)]
            pids = [
                fork(
                    partial(self._be_rank, program, file, start),
                    environment(self.kind, rank, self.directory, run_id, **variables),
                )
                for rank, file in enumerate(files)
            ]
            codes = self._await_ends(pids)
            return [
                pickle.loads(file.read_bytes()) if file.exists() else Died(f"exit code {code}")
                for file, code in zip(files, codes, strict=True)
            ]

    def _threads(self, program: Callable[[], Any], variables: Mapping[str, str]) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            run = run_once(WorldSpec(program, self.ranks, timeout=self._patience))
        assert not run.gave_up, run.stacks
        return [o.error if o.error is not None else o.result for o in run.outcomes]

    def _be_rank(self, program: Callable[[], Any], file: Path, start: bool) -> None:
        faulthandler.dump_traceback_later(self._patience - 10, exit=True)
        if self._site is not None:
            sys.path.insert(0, str(self._site))
        outcome: Any
        try:
            with syncprims.init() if start else contextlib.nullcontext():
                outcome = program()
            if not start:
                syncprims.shutdown()  # as at the exit of Python, which `os._exit` skips
        except BaseException as error:
            error.add_note(traceback.format_exc())
            outcome = error
        try:
            data = pickle.dumps(outcome)
        except Exception:
            data = pickle.dumps(Died(repr(outcome)))
        new = file.with_suffix(".new")
        new.write_bytes(data)
        new.rename(file)

    def _await_ends(self, pids: Sequence[int]) -> list[int]:
        """Return the exit codes of these processes; kill all if some do not end in time."""
        deadline = time.monotonic() + self._patience
        codes: dict[int, int] = {}
        try:
            while living := [pid for pid in pids if pid not in codes]:
                for pid in living:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[pid] = os.waitstatus_to_exitcode(status)
                if time.monotonic() > deadline:
                    raise AssertionError(f"ranks {[pids.index(pid) for pid in living]} hang")
                time.sleep(0.0005)
        finally:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._killed = self._killed or any(code < 0 for code in codes.values())
        return [codes[pid] for pid in pids]

    def check_nothing_left(self) -> None:
        """Assert that the worlds removed their files, except those of killed worlds."""
        hosts = list(self.directory.glob("host-*"))
        folders = hosts or [self.directory]
        found = [p.name for folder in folders for p in folder.iterdir()]
        left = [name for name in found if not name.startswith("mine-")]
        assert not left or self._killed, left


class Scripts:
    """Start a script on every rank, in separate Python processes without a launcher."""

    def __init__(self, kind: Kind, directory: Path, folder: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.script = folder / "script.py"
        self._folder = folder

    def start(self, source: str, **variables: str) -> list[subprocess.Popen[str]]:
        """Start `source` on all ranks. It can use `rank` and all public names."""
        head = "from syncprims import *\nimport os, signal, sys, time\nrank = get_rank()\n"
        self.script.write_text(head + textwrap.dedent(source))
        run_id = variables.pop("run_id", uuid.uuid4().hex)
        return [
            subprocess.Popen(
                [sys.executable, "-u", str(self.script)],
                env=environment(self.kind, rank, self.directory, run_id, **variables),
                cwd=self._folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(self.kind.ranks)
        ]

    def run(self, source: str, **variables: str) -> list[Ended]:
        """Start `source` on all ranks and wait until they end."""
        return self.wait(self.start(source, **variables))

    def wait(self, processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
        """Wait until all ranks end, and kill late ones."""
        deadline = time.monotonic() + PATIENCE
        ended: list[Ended] = []
        try:
            for process in processes:
                left = max(0.1, deadline - time.monotonic())
                out, err = process.communicate(timeout=left)
                ended.append(Ended(process.returncode, out, err))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return ended
