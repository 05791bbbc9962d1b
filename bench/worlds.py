"""Measure what a unit test of four ranks costs, and how soon a skipped barrier is told.

    python bench/worlds.py [--quick]

The same body everywhere: 4 ranks, 20 barriers. Ours are worlds of threads and of processes, called
directly and as marked tests, with all that pytest does around them. The peers start their ranks as
their manuals say; what their children import counts, since every such test pays for it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from table import head, row

import syncprims as sp
from syncprims.testing import DeadlockError, explore, run_world

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, ROUNDS = 4, 20

TESTS = """
import json, os, time
import pytest
import syncprims as sp

@pytest.mark.world(ranks=4, kind=["threads", "processes"])
@pytest.mark.parametrize("number", range({count}))
def test_passing(number):
    for _ in range(20):
        sp.barrier()
"""

CONFTEST = """
import json, os, time
import pytest

times = {}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    begin = time.perf_counter()
    result = yield
    kind = "threads" if "threads" in item.name else "processes"
    times.setdefault(kind, []).append((time.perf_counter() - begin) * 1e3)
    return result

def pytest_sessionfinish(session):
    with open("times.json", "w") as file:
        json.dump(times, file)
"""

PEERS = {
    "torchrun": """
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.barrier()
dist.destroy_process_group()
""",
    "spawn + Gloo": """
import os, tempfile, time
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number, store):
    dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=4)
    for _ in range(20):
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (os.path.join(folder, "store"),), nprocs=4)
    print("took", time.perf_counter() - begin)
""",
    "debug_launcher": """
import time
import accelerate, torch.distributed as dist
from accelerate import PartialState, debug_launcher

def rank():
    state = PartialState(cpu=True)
    for _ in range(20):
        state.wait_for_everyone()

if __name__ == "__main__":
    begin = time.perf_counter()
    debug_launcher(rank, num_processes=4)
    print("took", time.perf_counter() - begin)
""",
}


def passing() -> None:
    for _ in range(ROUNDS):
        sp.barrier()


def skipping() -> None:
    sp.barrier("start")
    if sp.is_main():
        sp.barrier("loaded")


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Return the milliseconds of each call, the first left out."""
    found: list[float] = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return found[1:]


def told(kind: Any) -> Callable[[], None]:
    def call() -> None:
        try:
            run_world(skipping, RANKS, kind=kind)
        except DeadlockError:
            return
        raise AssertionError("nobody noticed")

    return call


def as_marked_tests(count: int) -> dict[str, list[float]]:
    """Return the milliseconds of whole tests, fixtures and reports included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_passing.py").write_text(TESTS.format(count=count))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
    return {kind: times[1:] for kind, times in found.items()}


def peer(name: str, times: int) -> list[float]:
    """Return the milliseconds of a peer's world; empty if it is not installed."""
    needs = "accelerate" if name == "debug_launcher" else "torch"
    if find_spec(needs) is None:
        return []
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "peer.py"
        script.write_text(PEERS[name])
        command = [sys.executable, str(script)]
        if name == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        for _ in range(times):
            begin = time.perf_counter()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took = time.perf_counter() - begin  # of torchrun all counts: it is the command
            for line in done.stdout.splitlines():
                if line.startswith("took "):
                    took = float(line.split()[1])
            found.append(took * 1e3)
    return found


def schedules_per_second(count: int) -> float:
    begin = time.perf_counter()
    explore(passing, RANKS, schedules=count)
    return count / (time.perf_counter() - begin)


def shown(times: list[float]) -> str:
    if not times:
        return "not installed"
    return f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"


def section(worlds: int, peers: int) -> list[str]:
    """Return all of it as a section of the results."""
    marked = as_marked_tests(worlds)
    direct = {
        kind: timed(functools.partial(run_world, passing, RANKS, kind=kind), worlds)
        for kind in ("threads", "processes")
    }
    return [
        "",
        "## A unit test of four ranks",
        "",
        f"{RANKS} ranks, {ROUNDS} barriers; medians and ranges of {worlds} worlds, peers {peers}.",
        *head("by", "a passing test", "aim"),
        row("`run_world(kind='threads')`", shown(direct["threads"]), "<= 5 ms"),
        row("a marked test in threads, pytest included", shown(marked["threads"]), "<= 5 ms"),
        row("`run_world(kind='processes')`", shown(direct["processes"]), "<= 150 ms"),
        row("a marked test in processes, pytest included", shown(marked["processes"]), "<= 150 ms"),
        *(row(name, shown(peer(name, peers)), "") for name in PEERS),
        "",
        "The peers' defaults wait 30 minutes for a skipped barrier (that was not waited for here).",
        *head("a skipped barrier is told", "after", "aim"),
        row("in threads", shown(timed(told("threads"), worlds)), "< 10 ms"),
        row("in processes", shown(timed(told("processes"), worlds)), "< 250 ms"),
        "",
        f"Schedules explored per second: {schedules_per_second(20 * worlds):.0f} (aim: 300).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure unit tests of four ranks.")
    parser.add_argument("--quick", action="store_true", help="try everything, in a minute")
    quick = parser.parse_args().quick
    print("\n".join(section(5, 1) if quick else section(50, 3)))


if __name__ == "__main__":
    main()
