"""What the facts and the measures mean, and what to do about it: a pure function."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal, NamedTuple

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
        *_room(found["ranks"]),
        *_round_trips(found, machines),
        *_bandwidth(found),
        *_clocks(found),
        *_devices(found, machines),
        *_alone(found),
    ]
    return sorted(said, key=lambda one: one.level != "problem")


def by_machine(ranks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
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


def _versions(ranks: list[dict[str, Any]]) -> list[Verdict]:
    said: list[Verdict] = []
    for name in ("python", *ranks[0]["versions"]):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for facts in ranks:
            release = facts["python"] if name == "python" else facts["versions"][name]
            groups[release or "none"].append(facts)
        if len(groups) > 1:
            shown = "; ".join(f"{release} on {_of(those)}" for release, those in groups.items())
            said.append(
                Verdict(
                    "problem",
                    f"{name} differs: {shown}",
                    f"install the same {name} everywhere, best by starting all ranks from one "
                    f"environment or image",
                )
            )
    return said


def _memory(
    ranks: list[dict[str, Any]], machines: dict[str, list[dict[str, Any]]]
) -> list[Verdict]:
    said: list[Verdict] = []
    for those in machines.values():
        memories: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for facts in those:
            memories[facts["memory"]].append(facts)
        if len(memories) > 1:
            shown = " and ".join(_of(part) for part in memories.values())
            said.append(
                Verdict(
                    "problem",
                    f"{shown} run on one machine, but do not share its memory: they are in "
                    f"containers of their own, and everything between them takes the network",
                    "start the containers with --ipc=host, or all ranks of a machine in one",
                )
            )
        elif len({facts["node"] for facts in those}) > 1:
            nodes = listed(sorted({facts["node"] for facts in those}))
            said.append(
                Verdict(
                    "note",
                    f"nodes {nodes} are one machine: between them the network is taken",
                    "start all ranks of a machine as one node",
                )
            )
    for node in sorted({facts["node"] for facts in ranks}):
        those = [facts for facts in ranks if facts["node"] == node]
        if len({facts["machine"] for facts in those}) > 1:
            said.append(
                Verdict(
                    "problem",
                    f"{_of(those)} are told that they are one node, and run on several machines",
                    "correct the launcher's local ranks (LOCAL_WORLD_SIZE and its like)",
                )
            )
    return said


def _processors(machines: dict[str, list[dict[str, Any]]]) -> list[Verdict]:
    said: list[Verdict] = []
    for those in machines.values():
        there = processors_of(those)
        threads = sum(facts["threads"] or facts["processors"] for facts in those)
        each = max(1, there // len(those))
        cure = f"syncprims run --threads {each}, or OMP_NUM_THREADS={each} for every rank"
        if len(those) > there:
            said.append(
                Verdict(
                    "note",
                    f"{_of(those)} share {there} processor{'s' * (there > 1)} of host "
                    f"{those[0]['host']}: a round takes as long as the system needs to change "
                    f"between them",
                    "start fewer ranks, or take more processors",
                )
            )
        if those[0]["load"] > there + len(those):
            said.append(
                Verdict(
                    "note",
                    f"host {those[0]['host']} is busy with something else: a load of "
                    f"{those[0]['load']:.1f} on {there} processor{'s' * (there > 1)}",
                    "look again when it is not: the figures above suffer from it",
                )
            )
        if len(those) > 1 and threads > max(there, len(those)):
            said.append(
                Verdict(
                    "problem",
                    f"{_of(those)} start {threads} threads of their math libraries on {there} "
                    f"processor{'s' * (there > 1)} of host {those[0]['host']}",
                    cure,
                )
            )
        elif all(facts["threads"] for facts in those) and threads * 2 <= there:
            said.append(
                Verdict(
                    "note",
                    f"{_of(those)} start {threads} thread{'s' * (threads > 1)} in all, and host "
                    f"{those[0]['host']} has {there} processors: the others may idle",
                    cure,
                )
            )
    return said


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


def _room(ranks: list[dict[str, Any]]) -> list[Verdict]:
    little = [
        facts for facts in ranks if facts["room"] is not None and facts["room"] < _LITTLE_ROOM
    ]
    if not little:
        return []
    one = min(little, key=lambda facts: facts["room"])
    has = "have" if len(little) > 1 else "has"
    where = one["meeting_place"] if one["file_system"] else one["shared_memory"]["path"]
    return [
        Verdict(
            "problem",
            f"{_of(little)} {has} {one['room'] >> 20} MB left where they meet ({where}): objects "
            f"and arrays of that size cannot pass",
            "give the container more (docker run --shm-size=1g), or set SYNCPRIMS_DIR to a "
            "directory with more",
        )
    ]


def _round_trips(found: dict[str, Any], machines: dict[str, list[dict[str, Any]]]) -> list[Verdict]:
    said: list[Verdict] = []
    crowded = any(len(those) > processors_of(those) for those in machines.values())
    for row in found["latency"]:
        if row["call"] != "barrier" or found["world_size"] == 1:
            continue
        median = row["median_us"]
        in_memory = row["group"] == "node" or found["num_nodes"] == 1
        if in_memory and median > _SLOW_BARRIER and not crowded:
            said.append(
                Verdict(
                    "problem",
                    f"a barrier of ranks that share memory takes {median:.0f} us, and should take "
                    f"less than {_SLOW_BARRIER:.0f}",
                    "see what else runs on these processors, and whether ranks are bound to the "
                    "same one (taskset, cgroups)",
                )
            )
        if not in_memory and median > _SLOW_NETWORK_BARRIER:
            said.append(
                Verdict(
                    "problem",
                    f"a barrier over {found['num_nodes']} nodes takes {median / 1e3:.1f} ms",
                    "see that MASTER_ADDR is reached by the fast network, and by no VPN",
                )
            )
    return said


def _bandwidth(found: dict[str, Any]) -> list[Verdict]:
    rows = [row for row in found["bandwidth"] if row["where"] == "memory"]
    if not rows:
        return []
    over_hosts = found["num_nodes"] > 1
    best = max(row["gb_per_s"] for row in rows)
    if best >= (_SLOW_NETWORK if over_hosts else _SLOW_MEMORY):
        return []
    cure = "see what else uses the memory of this host"
    if over_hosts:
        cure = "name the fast network interface: GLOO_SOCKET_IFNAME=eth1 (NCCL_SOCKET_IFNAME)"
    return [Verdict("problem", f"arrays travel at {best:.3f} GB/s at best", cure)]


def _clocks(found: dict[str, Any]) -> list[Verdict]:
    said: list[Verdict] = []
    for row in found["clocks"]:
        apart = abs(row["ahead_s"]) - row["uncertainty_s"]
        if apart > _BAD_CLOCK:
            host = found["ranks"][row["rank"]]["host"]
            way = "ahead of" if row["ahead_s"] > 0 else "behind"
            said.append(
                Verdict(
                    "problem",
                    f"the clock of host {host} is {abs(row['ahead_s']):.3f} s {way} rank 0's: "
                    f"times in logs cannot be compared",
                    "run a time service (chrony, ntpd) on every host",
                )
            )
    return said


def _devices(found: dict[str, Any], machines: dict[str, list[dict[str, Any]]]) -> list[Verdict]:
    said: list[Verdict] = []
    for those in machines.values():
        gpus = {gpu for facts in those for gpu in facts["gpus"] or ()}
        host = those[0]["host"]
        if not gpus:
            continue
        if found["backend"] == "file":
            said.append(
                Verdict(
                    "note",
                    f"host {host} has CUDA devices, and backend file takes tensors through the "
                    f"hosts' memory",
                    "syncprims run --gpus all, or --backend torch",
                )
            )
        elif len(gpus) < len(those):
            said.append(
                Verdict(
                    "problem",
                    f"{_of(those)} see {len(gpus)} CUDA device{'s' * (len(gpus) > 1)} on host "
                    f"{host}: NCCL needs one for each",
                    f"start {len(gpus)} ranks there, or let them see more (CUDA_VISIBLE_DEVICES)",
                )
            )
    return said


def _alone(found: dict[str, Any]) -> list[Verdict]:
    if found["world_size"] > 1:
        return []
    return [
        Verdict(
            "note",
            "this is a world of one: there is nobody to wait for",
            "to look at several ranks: syncprims run -n 4 -m syncprims doctor",
        )
    ]
