"""Hosts on one machine: each with its own network, shared memory, name and processes.

The hosts are network namespaces that a bridge connects; only root may create them. The kernel
removes them with their processes, so no interface and no mount is left in the namespaces of the
machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from support.rank_environment import PATIENCE, clean_environ

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

    def start(self, command: list[str], variables: Mapping[str, str]) -> None:
        """Create the namespaces; the command waits for :meth:`go`."""
        clean = clean_environ("MASTER_PORT", "XDG_RUNTIME_DIR")
        clean |= {"TMPDIR": str(self.private), "OMP_NUM_THREADS": "1", **variables}
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

    def kill(self) -> None:
        """Kill every process of the host at once, by killing its first one."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, deadline: float) -> Ended:
        """Wait for the end of the agent, and return it."""
        assert self.agent is not None
        try:
            code = self.agent.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            code = -999
        return Ended(code, (self.folder / "log").read_text(errors="replace"))

    def end(self) -> None:
        """Kill all processes that still run."""
        if self.agent is not None and self.agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.agent.kill()
            self.agent.wait()
        if self.agent is not None and self.agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.agent.stdin.close()
        self._log.close()


class Network:
    """Several hosts on one bridge, with a torchrun agent on each."""

    def __init__(self, hosts: int, ranks_per_host: int, folder: Path) -> None:
        self.hosts = [Host(number, folder) for number in range(hosts)]
        self.folder = folder
        self._ranks = ranks_per_host
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])

    def run(self, source: str, **variables: str) -> None:
        """Start `source` on all ranks of all hosts. `rank`, `report` and all names are there."""
        script = self.folder / "script.py"
        script.write_text(_HEAD.format(folder=str(self.folder)) + textwrap.dedent(source))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}"]
        command += [f"--nproc-per-node={self._ranks}", f"--master-port={PORT}"]
        command += [f"--master-addr={self.hosts[0].address}", "--node-rank={host}", str(script)]
        self.start(command, **variables)

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
        while not all((self.folder / name).exists() for name in names):
            for host in self.hosts:
                log = (host.folder / "log").read_text(errors="replace")
                assert host.agent is not None
                assert host.killed or host.agent.poll() in (None, 0), log
                assert time.monotonic() < deadline, log
            time.sleep(0.005)

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
