"""Measure the time of a unit test of four ranks, and how soon a skipped barrier is reported.

    python bench/measure.py --only worlds

The test body is always the same: 4 ranks, 20 barriers. Our worlds use threads and processes. They
are called directly and as marked tests, including the work of pytest. The peers start their ranks
as their manuals say. The imports of their children count, because every such test needs them.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from table import Seen, head, row, short, span

import syncprims as sp
from syncprims.testing import DeadlockError, explore, run_world

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scale import Scale

RANKS, ROUNDS = 4, 20
KINDS: tuple[Literal["threads", "processes"], ...] = ("threads", "processes")
PASSING, SKIPPED = "a passing test", "a skipped barrier"

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
    """Return the milliseconds of each call except the first."""
    found: list[float] = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return found[1:]


def skip_barrier(kind: Any) -> Callable[[], None]:
    def call() -> None:
        try:
            run_world(skipping, RANKS, kind=kind)
        except DeadlockError:
            return
        raise AssertionError("the skipped barrier was not reported")

    return call


def as_marked_tests(count: int) -> dict[str, list[float]]:
    """Return the milliseconds of whole tests, including fixtures and reports."""
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
    """Return the milliseconds of a peer's world; empty if the peer is not installed."""
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
            took = time.perf_counter() - begin  # for torchrun the whole command counts
            for line in done.stdout.splitlines():
                if line.startswith("took "):
                    took = float(line.split()[1])
            found.append(took * 1e3)
    return found


def explored(count: int) -> float:
    """Return the milliseconds per schedule, averaged over `count` of them."""
    begin = time.perf_counter()
    explore(passing, RANKS, schedules=count)
    return (time.perf_counter() - begin) / count * 1e3


def measure(scale: Scale) -> dict[str, Any]:
    """Return the milliseconds of passing tests, and of tests in which a rank skips a barrier."""
    worlds, peers = scale.worlds
    seen = Seen()
    print("unit tests: ours", file=sys.stderr, flush=True)
    for kind, times in as_marked_tests(worlds).items():
        seen.add(RANKS, f"a marked test in {kind}", {PASSING: times})
    for kind in KINDS:
        name = f"run_world(kind='{kind}')"
        call = functools.partial(run_world, passing, RANKS, kind=kind)
        seen.add(RANKS, name, {PASSING: timed(call, worlds)})
        seen.add(RANKS, name, {SKIPPED: timed(skip_barrier(kind), worlds)})
    seen.add(RANKS, "explore()", {"a schedule": [explored(20 * worlds)]})
    for name in PEERS:
        print(f"unit tests: {name}", file=sys.stderr, flush=True)
        times = peer(name, peers)
        if times:
            seen.add(RANKS, name, {PASSING: times})
        else:
            seen.lack(RANKS, name, (PASSING,), "not installed")
    return {**seen.stored(), "worlds": scale.worlds}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen, (worlds, peers) = Seen.restored(data), data["worlds"]

    def table(operation: str) -> list[str]:
        names = [name for _, name, what in seen.names() if what == operation]
        found = head("by", f"{operation}, ms", "range")
        for name in names:
            times = seen.figures(RANKS, name, operation)
            found.append(row(f"`{name}`", short(statistics.median(times)), span(times)))
        return found

    schedule = seen.median(RANKS, "explore()", "a schedule")
    return [
        "",
        "## A unit test of four ranks",
        "",
        f"{RANKS} ranks, {ROUNDS} barriers. Medians and ranges of {worlds} worlds, peers {peers}.",
        "The time of a marked test includes the work of pytest.",
        *table(PASSING),
        "",
        "With their defaults, peers wait 30 minutes for a skipped barrier (not measured here).",
        *table(SKIPPED),
        "",
        f"Schedules explored per second: {1e3 / schedule:.0f}." if schedule else "",
    ]
