"""What the facts and the measures mean, and what to do about it: a pure function."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    Machines = dict[str, list[dict[str, Any]]]

_LITTLE_ROOM = 64 << 20  # bytes: what a container is given for shared memory, unless told otherwise
_SLOW_BARRIER = 200.0  # microseconds, of ranks that share memory and have a processor each
_SLOW_NETWORK_BARRIER = 20_000.0  # microseconds, over hosts
_SLOW_MEMORY, _SLOW_NETWORK = 0.2, 0.1  # GB/s
_BAD_CLOCK = 0.05  # seconds


class Verdict(NamedTuple):
    """One thing that is wrong (a problem) or worth knowing (a note), and its cure."""

    level: Literal["problem", "note"]
    text: str
    cure: str


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    """Return what is to be said of a job, problems first."""
    machines = by_machine(found["ranks"])
    said = [
        *_versions(found["ranks"]),
        *_memory(found["ranks"], machines),
        *_processors(machines),
        *_threads(machines),
        *_room(found["ranks"]),
        *_round_trips(found, machines),
        *_bandwidth(found),
        *_clocks(found),
        *_devices(found, machines),
        *_alone(found),
    ]
    return sorted(said, key=lambda one: one.level != "problem")


def by_machine(ranks: list[dict[str, Any]]) -> Machines:
    """Return the facts of the ranks of each machine, in the order of their lowest ranks."""
    machines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for facts in ranks:
        machines[facts["machine"]].append(facts)
    return dict(machines)


def listed(ranks: list[int]) -> str:
    """Return ranks as ``0-3, 8``."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(last or first) == rank - 1:
            parts[-1] = f"{first}-{rank}"
        else:
            parts.append(str(rank))
    return ", ".join(parts)


def _of(facts: list[dict[str, Any]]) -> str:
    numbers = [one["rank"] for one in facts]
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _problem(text: str, cure: str) -> Verdict:
    return Verdict("problem", text, cure)


def _note(text: str, cure: str) -> Verdict:
    return Verdict("note", text, cure)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _versions(ranks: list[dict[str, Any]]) -> Iterator[Verdict]:
    for name in ("python", *ranks[0]["versions"]):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for facts in ranks:
            release = facts["python"] if name == "python" else facts["versions"][name]
            groups[release or "none"].append(facts)
        if len(groups) > 1:
            shown = "; ".join(f"{release} on {_of(those)}" for release, those in groups.items())
            yield _problem(
                f"{name} differs: {shown}",
                f"install the same {name} everywhere, best by starting all ranks from one "
                f"environment or image",
            )


def _memory(ranks: list[dict[str, Any]], machines: Machines) -> Iterator[Verdict]:
    for those in machines.values():
        memories: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for facts in those:
            memories[facts["memory"]].append(facts)
        nodes = sorted({facts["node"] for facts in those})
        if len(memories) > 1:
            yield _problem(
                f"{' and '.join(_of(part) for part in memories.values())} run on one machine, but "
                f"do not share its memory: they are in containers of their own, and everything "
                f"between them takes the network",
                "start the containers with --ipc=host, or all ranks of a machine in one",
            )
        elif len(nodes) > 1:
            yield _note(
                f"nodes {listed(nodes)} are one machine: between them the network is taken",
                "start all ranks of a machine as one node",
            )
    for node in sorted({facts["node"] for facts in ranks}):
        those = [facts for facts in ranks if facts["node"] == node]
        if len({facts["machine"] for facts in those}) > 1:
            yield _problem(
                f"{_of(those)} are told that they are one node, and run on several machines",
                "correct the launcher's local ranks (LOCAL_WORLD_SIZE and its like)",
            )


def _processors(machines: Machines) -> Iterator[Verdict]:
    for those in machines.values():
        host, there = those[0]["host"], processors_of(those)
        if len(those) > there:
            yield _note(
                f"{_of(those)} share {_count(there, 'processor')} of host {host}: a round takes as "
                f"long as the system needs to change between them",
                "start fewer ranks, or take more processors",
            )
        if those[0]["load"] > there + len(those):
            yield _note(
                f"host {host} is busy with something else: a load of {those[0]['load']:.1f} on "
                f"{_count(there, 'processor')}",
                "look again when it is not: the figures above suffer from it",
            )


def _threads(machines: Machines) -> Iterator[Verdict]:
    for those in machines.values():
        host, there = those[0]["host"], processors_of(those)
        threads = sum(facts["threads"] or facts["processors"] for facts in those)
        each = max(1, there // len(those))
        cure = f"syncprims run --threads {each}, or OMP_NUM_THREADS={each} for every rank"
        if len(those) > 1 and threads > max(there, len(those)):
            yield _problem(
                f"{_of(those)} start {threads} threads of their math libraries on "
                f"{_count(there, 'processor')} of host {host}",
                cure,
            )
        elif all(facts["threads"] for facts in those) and threads * 2 <= there:
            yield _note(
                f"{_of(those)} start {_count(threads, 'thread')} in all, and host {host} has "
                f"{there} processors: the others may idle",
                cure,
            )


def processors_of(those: list[dict[str, Any]]) -> int:
    """Return how many processors the ranks of one machine have together."""
    most: int = max(facts["processors"] for facts in those)
    limited = all(facts["processors"] < len(facts["allowed"] or ()) for facts in those)
    if limited or any(facts["allowed"] is None for facts in those):
        return most  # a quota of all together, or a system that binds no process
    allowed: set[int] = set()
    for facts in those:
        allowed.update(facts["allowed"])
    return len(allowed)


def _room(ranks: list[dict[str, Any]]) -> Iterator[Verdict]:
    little = [one for one in ranks if one["room"] is not None and one["room"] < _LITTLE_ROOM]
    if little:
        one = min(little, key=lambda facts: facts["room"])
        where = one["meeting_place"] if one["file_system"] else one["shared_memory"]["path"]
        yield _problem(
            f"{_of(little)} {'have' if len(little) > 1 else 'has'} {one['room'] >> 20} MB left "
            f"where ranks meet ({where}): objects and arrays of that size cannot pass",
            "give the container more (docker run --shm-size=1g), or set SYNCPRIMS_DIR to a "
            "directory with more",
        )


def _round_trips(found: dict[str, Any], machines: Machines) -> Iterator[Verdict]:
    crowded = any(len(those) > processors_of(those) for those in machines.values())
    for row in found["latency"]:
        if row["call"] != "barrier" or found["world_size"] == 1:
            continue
        median = row["median_us"]
        in_memory = row["group"] == "node" or found["num_nodes"] == 1
        if in_memory and median > _SLOW_BARRIER and not crowded:
            yield _problem(
                f"a barrier of ranks that share memory takes {median:.0f} us, and should take "
                f"less than {_SLOW_BARRIER:.0f}",
                "see what else runs on these processors, and whether ranks are bound to the same "
                "one (taskset, cgroups)",
            )
        if not in_memory and median > _SLOW_NETWORK_BARRIER:
            yield _problem(
                f"a barrier over {found['num_nodes']} nodes takes {median / 1e3:.1f} ms",
                "see that MASTER_ADDR is reached by the fast network, and by no VPN",
            )


def _bandwidth(found: dict[str, Any]) -> Iterator[Verdict]:
    rows = [row for row in found["bandwidth"] if row["where"] == "memory"]
    over_hosts = found["num_nodes"] > 1
    best = max((row["gb_per_s"] for row in rows), default=math.inf)
    if best < (_SLOW_NETWORK if over_hosts else _SLOW_MEMORY):
        yield _problem(
            f"arrays travel at {best:.3f} GB/s at best",
            "name the fast network interface: GLOO_SOCKET_IFNAME=eth1 (NCCL_SOCKET_IFNAME)"
            if over_hosts
            else "see what else uses the memory of this host",
        )


def _clocks(found: dict[str, Any]) -> Iterator[Verdict]:
    for row in found["clocks"]:
        if abs(row["ahead_s"]) - row["uncertainty_s"] > _BAD_CLOCK:
            host = found["ranks"][row["rank"]]["host"]
            way = "ahead of" if row["ahead_s"] > 0 else "behind"
            yield _problem(
                f"the clock of host {host} is {abs(row['ahead_s']):.3f} s {way} rank 0's: times "
                f"in logs cannot be compared",
                "run a time service (chrony, ntpd) on every host",
            )


def _devices(found: dict[str, Any], machines: Machines) -> Iterator[Verdict]:
    for those in machines.values():
        gpus = {gpu for facts in those for gpu in facts["gpus"] or ()}
        host = those[0]["host"]
        if gpus and found["backend"] == "file":
            yield _note(
                f"host {host} has CUDA devices, and backend file takes tensors through the hosts' "
                f"memory",
                "syncprims run --gpus all, or --backend torch",
            )
        elif 0 < len(gpus) < len(those):
            yield _problem(
                f"{_of(those)} see {_count(len(gpus), 'CUDA device')} on host {host}: NCCL needs "
                f"one for each",
                f"start {_count(len(gpus), 'rank')} there, or let them see more "
                f"(CUDA_VISIBLE_DEVICES)",
            )


def _alone(found: dict[str, Any]) -> Iterator[Verdict]:
    if found["world_size"] == 1:
        yield _note(
            "this is a world of one: there is nobody to wait for",
            "to look at several ranks: syncprims run -n 4 -m syncprims doctor",
        )
