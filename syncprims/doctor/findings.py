"""What the facts and measurements of a job mean, and what to do about it: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

from syncprims.errors import format_ranks

Rows = list[dict[str, Any]]

_LITTLE_SPACE = 64 << 20  # bytes: a container's shared memory by default
_SLOW_BARRIER = 200.0  # microseconds, of ranks that share memory and have a processor each
_SLOW_NETWORK_BARRIER = 20_000.0  # microseconds, over hosts
_SLOW_MEMORY, _SLOW_NETWORK = 0.2, 0.1  # GB/s
_BAD_CLOCK = 0.05  # seconds


class Finding(NamedTuple):
    """One thing that is wrong (a problem) or worth knowing (a note), and its cure."""

    level: Literal["problem", "note"]
    text: str
    cure: str


_problem, _note = partial(Finding, "problem"), partial(Finding, "note")


def findings(job: dict[str, Any]) -> list[Finding]:
    """Return all findings about the result of `examine`, problems first."""
    found = [*_versions(job["ranks"]), *_nodes(job["ranks"]), *_room(job["ranks"])]
    machines = grouped(job["ranks"], "machine")
    for ranks in machines:
        found += [*_machine(ranks), *_devices(ranks, job["backend"])]
    crowded = any(len(ranks) > processor_count(ranks) for ranks in machines)
    found += [*_latency(job, crowded=crowded), *_bandwidth(job), *_clocks(job)]
    if job["world_size"] == 1:
        found.append(
            _note(
                "this is a world of one: there is no other rank to wait for",
                "to look at several ranks: syncprims run -n 4 -m syncprims doctor",
            )
        )
    return sorted(found, key=lambda one: one.level != "problem")


def grouped(ranks: Rows, key: str) -> list[Rows]:
    """Return the facts of ranks that have the same `key` together, in the order of lowest ranks."""
    groups: dict[Any, Rows] = {}
    for facts in ranks:
        groups.setdefault(facts[key], []).append(facts)
    return list(groups.values())


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-3, 8``."""
    return format_ranks(sorted(numbers)).replace(",", ", ")


def processor_count(ranks: Rows) -> int:
    """Return how many processors the ranks of one machine have together."""
    most: int = max(facts["processors"] for facts in ranks)
    limited = all(facts["processors"] < len(facts["allowed"] or ()) for facts in ranks)
    if limited or any(facts["allowed"] is None for facts in ranks):
        return most  # a quota of all together, or a system that binds no process
    return len({processor for facts in ranks for processor in facts["allowed"]})


def _names(ranks: Rows) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(facts['rank'] for facts in ranks)}"


def count_of(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


# -- what ranks are and have -------------------------------------------------------------------


def _versions(ranks: Rows) -> Iterator[Finding]:
    facts = [{**one["versions"], **one} for one in ranks]
    for name in ("python", *ranks[0]["versions"]):
        groups = grouped(facts, name)
        if len(groups) > 1:
            shown = "; ".join(f"{one[0][name] or 'none'} on {_names(one)}" for one in groups)
            yield _problem(
                f"{name} differs: {shown}",
                f"install the same {name} everywhere, best by starting all ranks from one "
                f"environment or image",
            )


def _nodes(ranks: Rows) -> Iterator[Finding]:
    for members in grouped(ranks, "node"):
        if len(grouped(members, "machine")) > 1:
            yield _problem(
                f"{_names(members)} are one node by their variables, and run on several machines",
                "correct the launcher's local ranks (LOCAL_WORLD_SIZE and its like)",
            )


def _room(ranks: Rows) -> Iterator[Finding]:
    little = [one for one in ranks if one["free"] is not None and one["free"] < _LITTLE_SPACE]
    if little:
        one = min(little, key=lambda facts: facts["free"])
        where = one["meeting_place"] if one["file_system"] else one["shared_memory"]["path"]
        yield _problem(
            f"{_names(little)} {'have' if len(little) > 1 else 'has'} {one['free'] >> 20} MB left "
            f"where ranks meet ({where}): objects and arrays of that size cannot pass",
            "give the container more (docker run --shm-size=1g), or set SYNCPRIMS_DIR to a "
            "directory with more",
        )


def _machine(ranks: Rows) -> Iterator[Finding]:
    """Return what is to be said of the ranks of one machine: memory, processors, threads."""
    names, host, processors = _names(ranks), ranks[0]["host"], processor_count(ranks)
    memories = grouped(ranks, "memory")
    nodes = {facts["node"] for facts in ranks}
    if len(memories) > 1:
        yield _problem(
            f"{' and '.join(map(_names, memories))} run on one machine, but do not share "
            f"its memory: they are in different containers, and use the network between them",
            "start the containers with --ipc=host, or all ranks of a machine in one",
        )
    elif len(nodes) > 1:
        yield _note(
            f"nodes {listed(nodes)} are one machine, and use the network between them",
            "start all ranks of a machine as one node",
        )
    if len(ranks) > processors:
        yield _note(
            f"{names} share {count_of(processors, 'processor')} of host {host}: in each round the "
            f"system has to switch between them",
            "start fewer ranks, or take more processors",
        )
    if ranks[0]["load"] > processors + len(ranks):
        yield _note(
            f"host {host} is busy with something else: a load of {ranks[0]['load']:.1f} on "
            f"{count_of(processors, 'processor')}",
            "look again when it is not: the figures above suffer from it",
        )
    threads = sum(facts["threads"] or facts["processors"] for facts in ranks)
    each = max(1, processors // len(ranks))
    cure = f"syncprims run --threads {each}, or OMP_NUM_THREADS={each} for every rank"
    if len(ranks) > 1 and threads > max(processors, len(ranks)):
        yield _problem(
            f"{names} start {threads} threads of their math libraries on "
            f"{count_of(processors, 'processor')} of host {host}",
            cure,
        )
    elif all(facts["threads"] for facts in ranks) and threads * 2 <= processors:
        yield _note(
            f"{names} start {count_of(threads, 'thread')} in all, and host {host} has "
            f"{processors} processors: the others may idle",
            cure,
        )


def _devices(ranks: Rows, backend: str) -> Iterator[Finding]:
    gpus = {gpu for facts in ranks for gpu in facts["gpus"] or ()}
    host = ranks[0]["host"]
    if gpus and backend == "file":
        yield _note(
            f"host {host} has CUDA devices, and backend file copies tensors through the hosts' "
            f"memory",
            "syncprims run --gpus all, or --backend torch",
        )
    elif 0 < len(gpus) < len(ranks):
        yield _problem(
            f"{_names(ranks)} see {count_of(len(gpus), 'CUDA device')} on host {host}: NCCL needs "
            f"one for each",
            f"start {count_of(len(gpus), 'rank')} there, or make more visible "
            f"(CUDA_VISIBLE_DEVICES)",
        )


# -- what was measured -------------------------------------------------------------------------


def _latency(job: dict[str, Any], *, crowded: bool) -> Iterator[Finding]:
    barriers = [row for row in job["latency"] if row["call"] == "barrier"]
    for row in barriers if job["world_size"] > 1 else ():
        median = row["median_us"]
        in_memory = row["group"] == "node" or job["num_nodes"] == 1
        if in_memory and median > _SLOW_BARRIER and not crowded:
            yield _problem(
                f"a barrier of ranks that share memory takes {median:.0f} us, and should take "
                f"less than {_SLOW_BARRIER:.0f}",
                "see what else runs on these processors, and whether ranks are bound to the same "
                "one (taskset, cgroups)",
            )
        if not in_memory and median > _SLOW_NETWORK_BARRIER:
            yield _problem(
                f"a barrier over {job['num_nodes']} nodes takes {median / 1e3:.1f} ms",
                "check that MASTER_ADDR is reached by the fast network, and not by a VPN",
            )


def _bandwidth(job: dict[str, Any]) -> Iterator[Finding]:
    rates = [row["gb_per_s"] for row in job["bandwidth"] if row["where"] == "memory"]
    slow, cure = _SLOW_MEMORY, "see what else uses the memory of this host"
    if job["num_nodes"] > 1:
        slow = _SLOW_NETWORK
        cure = "name the fast network interface: GLOO_SOCKET_IFNAME=eth1 (NCCL_SOCKET_IFNAME)"
    best = max(rates, default=math.inf)
    if best < slow:
        yield _problem(f"arrays travel at {best:.3f} GB/s at best", cure)


def _clocks(job: dict[str, Any]) -> Iterator[Finding]:
    for row in job["clocks"]:
        if abs(row["ahead_s"]) - row["uncertainty_s"] > _BAD_CLOCK:
            host = job["ranks"][row["rank"]]["host"]
            way = "ahead of" if row["ahead_s"] > 0 else "behind"
            yield _problem(
                f"the clock of host {host} is {abs(row['ahead_s']):.3f} s {way} rank 0's: times "
                f"in logs cannot be compared",
                "run a time service (chrony, ntpd) on every host",
            )
