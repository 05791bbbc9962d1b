"""Hosts on one machine: each with its own network, shared memory, name and processes.

The hosts are network namespaces that a bridge connects; only root may create them. The kernel
removes them with their processes, so no interface and no mount is left in the namespaces of the
machine.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

import syncprims
from support.rank_environment import PATIENCE, clean_environ
from support.rank_worlds import fork

# Python 3.11 has no such call.
from syncprims._system.processes import load_libc

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables

PORT = "29400"  # networks are private, so runs do not collide
_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")

_HOST = """
mount -t tmpfs -o mode=1777 private /dev/shm && mount -t tmpfs private "$1" && hostname "$2" &&
ip link set lo up && echo ready && read go && shift 2 && exec "$@"
"""


def why_not() -> str | None:
    """Return why hosts cannot be created here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make network namespaces"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts are made with {', '.join(absent)}, not installed here (iproute2)"
    tried = subprocess.run(
        ["unshare", "-m", "-u", "-n", "-p", "-f", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode()[:80]}"


class Ended(NamedTuple):
    """The exit code and output of the agent of one host."""

    code: int
    said: str


class Host:
    """A host: a shell that waits for a command, and the processes that it starts."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.address = f"10.77.0.{number + 1}"
        self.folder = folder / f"host-{number}"
        self.private = self.folder / "private"
        self.private.mkdir(parents=True)
        self._log = (self.folder / "log").open("w+b")
        self.agent: subprocess.Popen[bytes] | None = None
        self.killed = False
        self.pid = 0  # of its first process, in the namespace of the machine
        self._ranks: list[int] = []  # processes of the machine, each the parent of a rank
        self._variables: dict[str, str] = {}

    def start(self, command: list[str], variables: Mapping[str, str]) -> None:
        """Create the namespaces; the command waits for :meth:`go`."""
        clean = clean_environ("MASTER_PORT", "XDG_RUNTIME_DIR")
        clean |= {"TMPDIR": str(self.private), "OMP_NUM_THREADS": "1", **variables}
        self._variables = clean
        flags = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        name = f"host{self.number}"
        self.agent = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", _HOST, "sh", str(self.private), name, *command],
            env=clean,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + PATIENCE
        while b"ready" not in (self.folder / "log").read_bytes():
            assert self.agent.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "no namespaces"
            time.sleep(0.005)
        pid = self.agent.pid
        self.pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def go(self) -> None:
        """Run the command."""
        assert self.agent is not None
        assert self.agent.stdin is not None
        self.agent.stdin.write(b"go\n")
        self.agent.stdin.close()

    def add_rank(self, script: Path, variables: Mapping[str, str]) -> None:
        """Run a script in a process of this host that is forked from here, with torch imported."""

        def run() -> None:
            for fd in (1, 2):
                os.dup2(self._log.fileno(), fd)
            os.chdir(self.folder)
            sys.argv = [str(script)]
            runpy.run_path(str(script), run_name="__main__")
            syncprims.shutdown()  # as at the exit of Python, which `fork` skips

        def enter() -> None:
            names = ("net", "uts", "pid", "mnt")
            opened = [os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY) for name in names]
            assert not any(load_libc().setns(namespace, 0) for namespace in opened)
            _, status = os.waitpid(fork(run, {**self._variables, **variables}), 0)
            assert status == 0

        self._ranks.append(fork(enter, os.environ))

    def is_over(self) -> bool:
        """Return whether no rank of this host can report any more."""
        if not self._ranks:
            return self.agent is not None and self.agent.poll() not in (None, 0)
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return all(os.waitid(os.P_PID, pid, flags) for pid in self._ranks)

    def kill(self) -> None:
        """Kill every process of the host at once, by killing its first one."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, deadline: float) -> Ended:
        """Wait for the end of the agent, or of the ranks, and return it."""
        assert self.agent is not None
        while self._ranks and not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            left = max(0.1, deadline - time.monotonic())
            code = self.end() if self._ranks else self.agent.wait(left)
        except subprocess.TimeoutExpired:
            self.end()
            code = -999
        return Ended(code, (self.folder / "log").read_text(errors="replace"))

    def end(self) -> int:
        """Kill all processes that still run; return the highest exit code of a rank."""
        if self.agent is not None and self.agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.agent.kill()
            self.agent.wait()
        if self.agent is not None and self.agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.agent.stdin.close()
        self._log.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._ranks]
        self._ranks.clear()
        return max(codes, default=0)


class Network:
    """Several hosts on one bridge, with ranks on each."""

    def __init__(self, hosts: int, ranks_per_host: int, folder: Path) -> None:
        self.hosts = [Host(number, folder) for number in range(hosts)]
        self.folder = folder
        self._ranks = ranks_per_host
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])

    def run(self, source: str, *, agents: bool = True, **variables: str) -> None:
        """Start `source` on all ranks of all hosts. `rank`, `report` and all names are there.

        With `agents`, the agents of torchrun start them. Otherwise they are forked, far faster.
        """
        script = self.folder / "script.py"
        script.write_text(_HEAD.format(folder=str(self.folder)) + textwrap.dedent(source))
        if agents:
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}"]
            command += [f"--nproc-per-node={self._ranks}", f"--master-port={PORT}"]
            command += [f"--master-addr={self.hosts[0].address}", "--node-rank={host}", str(script)]
            self.start(command, **variables)
            return
        self.start(["sleep", "infinity"], **variables)
        store = {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": PORT}
        for rank in range(self._ranks * len(self.hosts)):
            own = make_rank_variables(rank, self._ranks * len(self.hosts), len(self.hosts))
            own |= {"SYNCPRIMS_BACKEND": "torch", "SYNCPRIMS_RUN_ID": "test"}
            self.hosts[rank // self._ranks].add_rank(script, own | store)

    def start(self, command: list[str], **variables: str) -> None:
        """Start a command on all hosts, with each host's number in place of ``{host}``."""
        for host in self.hosts:
            host.start([word.replace("{host}", str(host.number)) for word in command], variables)
            self._plug_in(host)
        for host in self.hosts:
            host.go()

    def _plug_in(self, host: Host) -> None:
        name, switch = f"v{host.number}", str(self._switch.pid)
        inside = ["nsenter", "-t", str(host.pid), "-n", "ip"]
        if host.number == 0:
            self._at_switch("link", "add", "br0", "type", "bridge")
            self._at_switch("link", "set", "br0", "up")
        veth = ["ip", "link", "add", name, "netns", switch, "type", "veth", "peer"]
        _do([*veth, "name", "eth0", "netns", str(host.pid)])
        self._at_switch("link", "set", name, "master", "br0")
        self._at_switch("link", "set", name, "up")
        _do([*inside, "addr", "add", f"{host.address}/24", "dev", "eth0"])
        _do([*inside, "link", "set", "eth0", "up"])

    def _at_switch(self, *arguments: str) -> None:
        _do(["nsenter", "-t", str(self._switch.pid), "-n", "ip", *arguments])

    def cut(self, host: Host) -> None:
        """Cut the link of a host: what is sent there is lost, and no process is notified."""
        self._at_switch("link", "set", f"v{host.number}", "down")

    def cut_between(self, one: Host, other: Host) -> None:
        """Lose all that two hosts send to each other: to a hardware address that nobody has."""
        for host, peer in ((one, other), (other, one)):
            inside = ["nsenter", "-t", str(host.pid), "-n", "ip", "neigh", "replace", peer.address]
            _do([*inside, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0"])

    def mend(self, host: Host) -> None:
        """Restore the link of a host."""
        self._at_switch("link", "set", f"v{host.number}", "up")

    def await_reports(self, *names: str) -> None:
        """Return when ranks have reported all these names."""
        deadline = time.monotonic() + PATIENCE
        over = False
        while not all((self.folder / name).exists() for name in names):
            for host in self.hosts:
                log = (host.folder / "log").read_text(errors="replace")
                assert not over, log
                assert time.monotonic() < deadline, log
            time.sleep(0.005)
            over = all(host.is_over() for host in self.hosts)

    def report_of(self, rank: int) -> str:
        """Return the last report of a rank."""
        path = self.folder / f"end-{rank}"
        if not path.exists():
            logs = "\n".join((h.folder / "log").read_text(errors="replace") for h in self.hosts)
            raise AssertionError(f"rank {rank} has reported nothing:\n{logs}")
        return path.read_text()

    def wait(self) -> list[Ended]:
        """Wait for all agents, and return their ends."""
        deadline = time.monotonic() + PATIENCE
        return [host.wait(deadline) for host in self.hosts]

    def close(self) -> None:
        """Kill all processes that still run."""
        for host in self.hosts:
            host.end()
        self._switch.kill()
        self._switch.wait()


_HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from syncprims import *
rank = get_rank()
folder = Path({folder!r})

def report(name, text=""):
    new = folder / f".{{name}}-{{rank}}"
    new.write_text(str(text))
    new.rename(folder / f"{{name}}-{{rank}}")

def outcome(call):
    begin = time.monotonic()
    try:
        call()
        said = "passed"
    except SyncError as error:
        said = f"{{type(error).__name__}} {{getattr(error, 'rank', None)}}\\n{{error}}"
    report("end", f"{{time.monotonic() - begin:.3f}} {{said}}")

"""


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextlib.contextmanager
def network(hosts: int, ranks_per_host: int, folder: Path) -> Generator[Network]:
    """Create hosts, and remove them at the end."""
    made = Network(hosts, ranks_per_host, folder)
    try:
        yield made
    finally:
        made.close()
