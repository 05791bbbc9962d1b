"""Measure ``torch.distributed`` on this library, beside Gloo, and its programs under test.

    python bench/measure.py --only c10d

One program calls ``torch.distributed`` for both. Gloo's ranks are started by torchrun, and ours by
`syncprims run`. The tests of a DDP program run in worlds of threads and of forked processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
from catalogue import C10D, OURS
from table import Seen, head, row, short, span
from worlds import KINDS, timed

from syncprims.testing import run_world

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scale import Scale

RANKS, FAULTY = 4, 2
PASSING = "a passing DDP test"
LIBRARIES = {OURS: jobs.C10D["syncprims"], "Gloo": jobs.C10D["Gloo"]}


def ddp_test() -> None:
    """Open a group, wrap a model, train three steps and destroy the group."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def kill(rank: int) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def skip(rank: int) -> None:
    """Skip the call, and make the next one."""
    import torch.distributed as dist

    dist.barrier()


def wrong_shape(rank: int) -> None:
    """Reduce a tensor of another shape."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(5))


FAULTS = {"a kill": kill, "a skipped call": skip, "a wrong shape": wrong_shape}


def until_named(fault: Callable[[int], None], folder: Path) -> float:
    """Return the milliseconds from a fault of one rank until all others have raised its error."""

    def program() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(4))
        dist.barrier()
        place = folder / str(rank)
        try:
            if rank == FAULTY:
                place.write_text(repr(time.monotonic()))
                fault(rank)
            dist.all_reduce(torch.ones(4))
        except Exception:
            if rank != FAULTY:
                place.write_text(repr(time.monotonic()))
            raise

    with contextlib.suppress(Exception):
        run_world(program, RANKS, torch=True, kind="processes")
    times = {path.name: float(path.read_text()) for path in folder.iterdir()}
    if len(times) != RANKS:
        raise AssertionError(f"{fault.__name__}: only ranks {sorted(times)} have raised")
    return (max(times.values()) - times[str(FAULTY)]) * 1e3


def measure(scale: Scale) -> dict[str, Any]:
    """Return the times of calls beside Gloo, of DDP tests, and until a fault is named."""
    seen = Seen()
    plan = {"what": "control", "seconds": scale.seconds}
    for count in scale.c10d:
        for _ in range(scale.runs):  # in turn, so that a slow minute affects all
            for name, kind in LIBRARIES.items():
                print(f"c10d, {count} ranks: {name}", file=sys.stderr, flush=True)
                try:
                    found = jobs.run(kind, count, json.dumps(plan))
                    seen.add(count, name, json.loads(found[-1]))
                except jobs.NoFigures as error:
                    seen.lack(count, name, C10D, str(error))
    worlds = scale.worlds[0]
    if all(seen.median(count, OURS, "barrier") for count in scale.c10d):
        for world in KINDS:
            print(f"c10d: tests in {world}", file=sys.stderr, flush=True)

            def test(world: Any = world) -> None:
                run_world(ddp_test, RANKS, torch=True, kind=world)

            seen.add(RANKS, f"in {world}", {PASSING: timed(test, worlds)})
        for name, fault in FAULTS.items():
            found_ms: list[float] = []
            for _ in range(worlds):
                with tempfile.TemporaryDirectory() as folder:
                    found_ms.append(until_named(fault, Path(folder)))
            seen.add(RANKS, OURS, {name: found_ms})
    return {**seen.stored(), "runs": scale.runs, "worlds": worlds}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found = [
        "",
        "## torch.distributed",
        "",
        "One program, with `init_process_group` of either backend. Transfers are a send and its",
        "receive, there and back. A step of DDP is that of a model with so many parameters.",
        f"Medians and ranges of {data['runs']} runs.",
    ]
    for ranks in [ranks for ranks in seen.ranks() if seen.figures(ranks, "Gloo", "barrier")]:
        found += ["", f"### torch.distributed at {ranks} ranks, microseconds per call"]
        found += head("by", "call", "median", "range", "times ours")
        for operation, call in C10D.items():
            found += seen.rows(ranks, operation, dict.fromkeys((OURS, "Gloo"), call))
    found += ["", f"### A DDP program of {RANKS} ranks under test, milliseconds", ""]
    found += [
        f"Medians and ranges of {data['worlds']} worlds. A test opens the group, wraps a model,",
        "trains three steps and destroys the group. The time of a fault begins at the rank that",
        "has it, and ends when all others have raised its error, in worlds of processes.",
    ]
    found += head("what", "median", "range")
    for ranks, library, operation in seen.names():
        if operation == PASSING or operation in FAULTS:
            times = seen.figures(ranks, library, operation)
            what = f"{operation}, ranks {library}" if operation == PASSING else operation
            found.append(row(what, short(statistics.median(times)), span(times)))
    return found
