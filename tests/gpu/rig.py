"""Run every check of `checks.py` on one device: each in ranks of its own, forked from this process.

    python tests/gpu/rig.py [-d cuda|cpu] [-k PART_OF_A_NAME] [-j JOBS] [--write]

It needs no pytest plugin and no installation: ``PYTHONPATH`` may name the library. A check that
fails, crashes or hangs ends alone, with its stacks. With ``--write`` the results go to
``bench/GPU.md``. This process never asks CUDA for anything: its forks could not use a device then.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
LIMIT = 50.0  # seconds until a rank writes its stacks and ends
_NOTES: dict[str, Any] = {}


class Skip(Exception):
    """A check cannot say anything here, for this reason."""


class World(NamedTuple):
    """The ranks of a check: a backend, how many, and those that are killed in it."""

    backend: str
    ranks: int
    killed: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend}-{self.ranks}"


class Check(NamedTuple):
    """A function that each rank of a world calls."""

    function: Callable[[], object]
    world: World
    alone: bool  #: no other check runs meanwhile

    def __str__(self) -> str:
        return f"{self.function.__name__} [{self.world}]"


CHECKS: list[Check] = []


def check(
    *worlds: str, killed: tuple[int, ...] = (), alone: bool = False
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a function as a check on each of these worlds, as ``"file-2"``."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        for name in worlds:
            backend, _, ranks = name.rpartition("-")
            CHECKS.append(Check(function, World(backend, int(ranks), killed), alone))
        return function

    return add


def note(**figures: Any) -> None:
    """Add what this rank has measured to the report of its check."""
    _NOTES.update(figures)


class Running:
    """A check that runs: its processes, and where they write."""

    def __init__(self, what: Check, folder: Path, device: str) -> None:
        from support.rank_worlds import Kind, environment, fork

        self.check, self.folder = what, folder
        (meet := folder / "meet").mkdir(mode=0o700)
        (folder / "shared").mkdir()
        self.begin = time.monotonic()
        self.ended: set[int] = set()
        backend, ranks, _ = what.world
        if backend == "nccl" and device == "cpu":
            backend = "torch"
        kind, run = Kind(backend, ranks), uuid.uuid4().hex
        more = {"GPU_CHECKS_DEVICE": device, "GPU_CHECKS_SHARED": str(folder / "shared")}
        self.pids = {
            fork(
                partial(_be_rank, what.function, folder / f"{rank}"),
                environment(kind, rank, meet, run, **more, OMP_NUM_THREADS="1"),
            ): rank
            for rank in range(ranks)
        }

    def has_ended(self) -> bool:
        """Return whether all ranks have; those that are far too late are killed."""
        for pid, rank in self.pids.items():
            if rank not in self.ended and os.waitpid(pid, os.WNOHANG)[0] == pid:
                self.ended.add(rank)
        late = time.monotonic() > self.begin + LIMIT + 5
        for pid, rank in self.pids.items():
            if late and rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
        return len(self.ended) == len(self.pids)

    def result(self) -> dict[str, Any]:
        """Return the name, how it ended, in how many seconds, and what the ranks wrote."""
        world = self.check.world
        found, said = {}, []
        for rank in range(world.ranks):
            file, log = self.folder / f"{rank}.json", self.folder / f"{rank}.log"
            log_text = log.read_text(errors="replace")[-6000:] if log.exists() else ""
            found[rank] = json.loads(file.read_text()) if file.exists() else {"how": "died"}
            if rank in world.killed and found[rank]["how"] == "died":
                found[rank] = {"how": "pass"}
            if found[rank]["how"] not in ("pass", "skip"):
                text = f"{found[rank].get('text', 'it ended without a result')}\n{log_text}"
                said.append(f"-- rank {rank}:\n{text}")
        hows = [one["how"] for one in found.values()]
        how = "fail" if said else "skip" if "skip" in hows else "pass"
        skipped = next((one["text"] for one in found.values() if one["how"] == "skip"), "")
        return {
            "name": str(self.check), "how": how, "seconds": time.monotonic() - self.begin,
            "text": "\n".join(said) or skipped, "notes": found[0].get("notes", {}),
        }  # fmt: skip


def _be_rank(function: Callable[[], object], path: Path) -> None:
    """Call the function as a rank, and write how it ended."""
    log = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    import syncprims

    how, text = "pass", ""
    try:
        function()
        syncprims.shutdown()  # as at the exit of Python, which a fork does not reach
    except Skip as reason:
        how, text = "skip", str(reason)
    except BaseException:
        how, text = "fail", traceback.format_exc()
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"how": how, "text": text, "notes": _NOTES}))
    part.rename(path.with_suffix(".json"))


def run(checks: list[Check], device: str, jobs: int, deadline: float) -> list[dict[str, Any]]:
    """Run the checks, at most so many at one time; return their results."""
    results: list[dict[str, Any]] = []
    waiting, running = sorted(checks, key=lambda one: one.alone), list[Running]()
    with tempfile.TemporaryDirectory(prefix="syncprims-gpu-") as root:
        while waiting or running:
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                results.append(found := one.result())
                print(f"{found['how']:5}{found['seconds']:6.1f} s  {found['name']}", end="")
                print(f"  {found['notes'] or ''}", flush=True)
                if found["text"]:
                    print(found["text"], flush=True)
            room = len(running) < jobs and not any(one.check.alone for one in running)
            if waiting and room and not (waiting[0].alone and running):
                if time.monotonic() > deadline:
                    late = "not started: the time was over"
                    results += [
                        {"name": str(c), "how": "skip", "text": late, "seconds": 0, "notes": {}}
                        for c in waiting
                    ]
                    waiting.clear()
                    continue
                folder = Path(root, uuid.uuid4().hex)
                folder.mkdir()
                running.append(Running(waiting.pop(0), folder, device))
            else:
                time.sleep(0.01)
    return results


def about_machine(*, gpu: bool) -> Mapping[str, str]:
    """Return versions, and what the device is; only in a rank, since it asks CUDA."""
    import torch

    about = {"Python": platform.python_version(), "torch": torch.__version__}
    if gpu:
        found = torch.cuda.get_device_properties(0)
        about["device"] = f"{torch.cuda.device_count()} x {found.name}"
        about["memory"] = f"{found.total_memory / 2**30:.0f} GiB"
        about["CUDA"] = str(torch.version.cuda)
        about["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return about


def page(results: list[dict[str, Any]]) -> str:
    """Return the page of these results."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("syncprims")
    except PackageNotFoundError:
        own = "from a checkout"
    about, timed = {"syncprims": own}, []
    lines = []
    for one in sorted(results, key=lambda one: str(one["name"])):
        notes = dict(one["notes"])
        about |= notes.pop("about", {})
        timed += notes.pop("timed", [])
        more = "; ".join(f"{key} {value}" for key, value in notes.items())
        why = str(one["text"]).splitlines()[0][:100] if one["how"] == "skip" else more
        lines.append(f"| {one['name']} | {one['how']} | {one['seconds']:.1f} | {why} |")
    counts = {how: sum(r["how"] == how for r in results) for how in ("pass", "fail", "skip")}
    return "\n".join([
        "# On a GPU", "",
        "`make gpu` writes this page. Each check has its own ranks; those of one GPU share it.", "",
        *(f"- {key}: {value}" for key, value in about.items()), "",
        f"{counts['pass']} checks passed, {counts['fail']} failed, {counts['skip']} were skipped.",
        "",
        "## A training step", "",
        "Medians of interleaved rounds in one process. The ratio is to the bare loop of the same",
        "round.", "",
        "| ranks | loop | step, us | to the bare loop |", "|---|---|---|---|",
        *(f"| {a} | {b} | {c:.0f} | {d:.3f} |" for a, b, c, d in timed), "",
        "## Checks", "", "| check | | s | |", "|---|---|---|---|", *lines, "",
    ])  # fmt: skip


def interleave(
    steps: dict[str, Callable[[], None]], sync: Callable[[], None], turns: int
) -> list[Any]:
    """Return rows of a loop's name, its median step in us, and its median ratio to the first."""
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(turns):
        for name, step in steps.items():
            sync()
            begin = time.perf_counter()
            for _ in range(20):
                step()
            sync()
            if number >= 3:  # the first ones warm up
                rounds[name].append((time.perf_counter() - begin) / 20e-6)
    bare = next(iter(rounds.values()))
    ratio = statistics.median
    return [
        [name, statistics.median(times), ratio(a / b for a, b in zip(times, bare, strict=True))]
        for name, times in rounds.items()
    ]


def main() -> int:
    """Run the checks that the command line names; return how many failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-d", "--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("-k", "--name", default="")
    parser.add_argument("-j", "--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds - LIMIT
    import_module("checks")  # all that ranks need is imported once, before the forks
    chosen = [one for one in CHECKS if args.name in str(one)]
    begin = time.monotonic()
    results = run(chosen, args.device, args.jobs, deadline)
    if args.write:
        (HERE.parent.parent / "bench" / "GPU.md").write_text(page(results))
    failed = [one["name"] for one in results if one["how"] == "fail"]
    print(f"{len(results)} checks in {time.monotonic() - begin:.0f} s; failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.modules["rig"] = sys.modules["__main__"]
    sys.exit(min(main(), 100))
