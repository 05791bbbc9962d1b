"""Which rank is this process? A launcher's environment variables become a :class:`Topology`.

Nothing here reads ``os.environ``: callers pass a mapping. All variables are taken from *one*
launcher; variables of two launchers are never mixed. Where two launchers say different things, the
one that clearly started inside the other counts, else the error names both, and
``SYNCPRIMS_LAUNCHER`` says which one counts: a rank with a wrong number makes the others hang.

A number that the launcher does not say is :data:`UNKNOWN`, and never computed from the others by
assuming that all nodes are equal. Who shares a host is known once the world has met.

Other launchers come from packages: ``SYNCPRIMS_LAUNCHER=NAME`` calls the function that the entry
point NAME of the group ``syncprims.launchers`` names. It takes the environment as a mapping, and
returns this process's :class:`Topology`. Only the variable makes it count: ranks must not choose
differently because a package is installed on some hosts only.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from syncprims.errors import ConfigurationError
from syncprims.interface import UNKNOWN, Topology

_NUMBERS = Topology._fields[:6]  # rank and world size, the same on its node, and the node's


class Launcher(NamedTuple):
    """The variables in which one launcher describes a process.

    Of several for one number, separated by spaces, the first that is set counts.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str = ""
    num_nodes: str = ""
    run_id: str = ""  #: together they identify this run
    restarts: str = ""  #: how often this run was started again
    needs: str = ""  #: the launcher is present only where one of these is set
    agent: str = ""  #: a variable that the launcher itself sets, and users who set ranks do not

    @property
    def key(self) -> str:
        """Its name as ``SYNCPRIMS_LAUNCHER`` takes it."""
        return _key(self.name)

    def names(self, *fields: str) -> list[str]:
        """Return the variables of these fields."""
        return [name for field in fields for name in getattr(self, field).split()]

    @property
    def required(self) -> list[str]:
        """The variables that say which rank a process is, and of how many."""
        return self.names(*_NUMBERS[:4])

    @property
    def variables(self) -> list[str]:
        """All variables that are read; rank and world size come first."""
        return [*dict.fromkeys(self.names(*_NUMBERS, "run_id", "restarts"))]

    def find(self, environ: Mapping[str, str], field: str) -> str | None:
        """Return the variable that gives a number here; None if none does."""
        return next((name for name in self.names(field) if name in environ), None)

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher has set its variables, or some of them."""
        if self.needs and not self.find(environ, "needs"):
            return False
        return any(name in environ for name in self.required)

    def says(self, environ: Mapping[str, str]) -> str:
        """Return which rank this process is, and of how many, in the launcher's variables."""
        names = self.names("rank", "world_size")
        shown = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        return f"{self.name} says {shown}"


_OURS = Launcher(
    "syncprims",
    rank="SYNCPRIMS_RANK",
    world_size="SYNCPRIMS_WORLD_SIZE",
    local_rank="SYNCPRIMS_LOCAL_RANK",
    local_world_size="SYNCPRIMS_LOCAL_WORLD_SIZE",
    node_rank="SYNCPRIMS_GROUP_RANK",
    num_nodes="SYNCPRIMS_GROUP_WORLD_SIZE",
    restarts="TORCHELASTIC_RESTART_COUNT",
    agent="SYNCPRIMS_RUN_ID",
)
_TORCHRUN = Launcher(
    "torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes="GROUP_WORLD_SIZE",
    # The id is "none" unless the user has set one; then the port of the store identifies the run.
    # Its address does not: agents may have different names for it.
    run_id="TORCHELASTIC_RUN_ID MASTER_PORT",
    restarts="TORCHELASTIC_RESTART_COUNT",
    agent="TORCHELASTIC_RUN_ID",
)
_SLURM = Launcher(
    "SLURM",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
    node_rank="SLURM_NODEID",
    num_nodes="SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
    run_id="SLURM_JOB_ID SLURM_STEP_ID",
    restarts="SLURM_RESTART_COUNT",
    # A batch script and an interactive shell also have SLURM_NTASKS, but are one process. Only a
    # step has so many.
    needs="SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST",
)
_MPICH = Launcher(
    "MPICH",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    run_id="PMI_JOBID PMI_ID_NAMESPACE",
    needs="PMI_RANK PMI_SIZE",
)
LAUNCHERS = (
    _OURS,
    _TORCHRUN,
    _SLURM,
    Launcher(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        # OMPI_COMM_WORLD_NODE_RANK is the rank *within* the node, not the node's.
        run_id="PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    ),
    _MPICH,
)


class Detection(NamedTuple):
    """Which launcher counts, and what the variables of each one are to it."""

    topology: Topology
    roles: dict[str, str]  #: by name, of the launchers that are present


def detect(environ: Mapping[str, str]) -> Topology:
    """Return this process's topology, as the launcher that counts gives it.

    Without a launcher it is a world of one.

    :raises ConfigurationError: if a launcher's set is incomplete or not made of numbers, or if two
        launchers contradict each other.
    """
    return explain(environ).topology


def explain(environ: Mapping[str, str]) -> Detection:
    """Return what :func:`detect` does, and why.

    :raises ConfigurationError: as :func:`detect`.
    """
    asked = environ.get("SYNCPRIMS_LAUNCHER") or None
    if asked is not None:
        return _detect_named(environ, asked)
    chosen: tuple[Launcher, Topology] | None = None
    outside: list[Topology] = []  # of those that have started the chosen one
    roles: dict[str, str] = {}
    for launcher in _find_launchers(environ):
        found = launcher, _read_topology(launcher, environ)
        if chosen is None:
            chosen = found
            continue
        if found[1][:2] in [topology[:2] for topology in (chosen[1], *outside)]:
            roles[launcher.name] = "says the same"
            continue
        inner, outer = chosen, found
        if not _is_inside(environ, *inner, *outer):
            inner, outer = found, chosen
            if not _is_inside(environ, *inner, *outer):
                raise ConfigurationError(
                    f"two launchers contradict each other: {chosen[0].says(environ)}, "
                    f"{launcher.says(environ)}; unset the variables of the one that did not start "
                    f"this process, or name the one that did: "
                    f"SYNCPRIMS_LAUNCHER={chosen[0].key} or {launcher.key}"
                )
        chosen = inner
        outside.append(outer[1])
        roles[outer[0].name] = f"started {inner[0].name}, which started this process"
    if chosen is None:
        return Detection(_alone(environ), {})
    return Detection(chosen[1], roles | {chosen[0].name: "decides"})


def _detect_named(environ: Mapping[str, str], asked: str) -> Detection:
    names = [one.key for one in LAUNCHERS]
    why = f"SYNCPRIMS_LAUNCHER={asked} decides"
    if _key(asked) == "none":
        return Detection(_alone(environ), {})
    if _key(asked) not in names:
        topology = _read_by_entry_point(environ, asked, names)
        return Detection(topology, {topology.launcher: why})
    launcher = LAUNCHERS[names.index(_key(asked))]
    if not any(name in environ for name in launcher.required):
        raise ConfigurationError(
            f"SYNCPRIMS_LAUNCHER={asked}, and {launcher.name} has not started this process: "
            f"{' and '.join(launcher.variables[:2])} are not set; start it with {launcher.name}, "
            f"or unset SYNCPRIMS_LAUNCHER"
        )
    return Detection(_read_topology(launcher, environ), {launcher.name: why})


def _read_by_entry_point(environ: Mapping[str, str], name: str, known: list[str]) -> Topology:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    points = [point for point in entry_points(group="syncprims.launchers") if point.name == name]
    if len({point.value for point in points}) != 1:
        raise ConfigurationError(
            f"SYNCPRIMS_LAUNCHER={name!r}: {len(points)} packages provide a launcher of this name; "
            f"it takes {', '.join(known)}, none, or the name of one entry point of the group "
            f"syncprims.launchers"
        )
    said = points[0].load()(environ)
    if not isinstance(said, Topology) or not 0 <= said.rank < said.world_size:
        raise ConfigurationError(
            f"SYNCPRIMS_LAUNCHER={name}: {points[0].value} returned {said!r}; it must return a "
            f"syncprims.interface.Topology with a rank below its world_size"
        )
    run_id = environ.get("SYNCPRIMS_RUN_ID") or said.run_id
    return said._replace(launcher=name, run_id=run_id)


def _alone(environ: Mapping[str, str]) -> Topology:
    return Topology(run_id=environ.get("SYNCPRIMS_RUN_ID") or None)


def _key(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "").replace("-", "")


def is_started_by_rank(environ: Mapping[str, str]) -> bool:
    """Return whether the parent of this process has been started with the same place, as a rank."""
    names = {name for one in LAUNCHERS for name in one.required if name in environ}
    return bool(_is_started_with(os.getppid(), environ, names))


def _is_started_with(pid: int, environ: Mapping[str, str], names: Collection[str]) -> bool | None:
    """Return whether a process was started with these variables; None if that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - slow to import
            theirs = file.read().split(b"\0")
    except OSError:  # of another user, as SLURM's daemon is
        return None
    return all(os.fsencode(f"{name}={environ[name]}") in theirs for name in names)


def list_rank_variables() -> set[str]:
    """Return every variable in which any launcher describes a process.

    What only describes the job is not among them: users' scripts read it.
    """
    names = {"SYNCPRIMS_RUN_ID", "SYNCPRIMS_LAUNCHER", "MASTER_ADDR", *_TORCHRUN.variables}
    names.add("TORCHELASTIC_USE_AGENT_STORE")
    return names.union(*(launcher.names(*_NUMBERS[:5]) for launcher in LAUNCHERS))


def make_rank_variables(rank: int, world_size: int, num_nodes: int = 1) -> dict[str, str]:
    """Return the variables of `rank` of `world_size`, on nodes of equal size.

    In our names and in torchrun's, since users' scripts read those.
    """
    local = world_size // num_nodes
    numbers = rank, world_size, rank % local, local, rank // local, num_nodes
    values: dict[str, str] = {}
    for launcher in (_OURS, _TORCHRUN):
        values |= zip(launcher.names(*_NUMBERS), map(str, numbers), strict=True)
    return values


def find_world_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Return every world size above one that a launcher's variable claims, by its name."""
    asked = _key(environ.get("SYNCPRIMS_LAUNCHER") or "")
    count = [one for one in _find_launchers(environ) if asked in ("", one.key)]
    names = [name for launcher in count for name in launcher.names("world_size")]
    sizes = {name: int(environ[name]) for name in names if environ.get(name, "").isdecimal()}
    return {name: size for name, size in sizes.items() if size > 1}


def find_spread(environ: Mapping[str, str], topology: Topology) -> str:
    """Return what says that the ranks are on several hosts; empty if nothing does."""
    if topology.num_nodes > 1:
        return f"{topology.launcher} started {topology.num_nodes} nodes"
    if 0 < topology.local_world_size < topology.world_size:
        return (
            f"{topology.launcher} started {topology.local_world_size} of {topology.world_size} "
            f"ranks on this one, so there are at least 2 nodes"
        )
    if topology.num_nodes == UNKNOWN and topology.launcher == _TORCHRUN.name:
        # Kubernetes starts one rank in each pod.
        pods, address = environ.get("PET_NNODES", ""), environ.get("MASTER_ADDR", "localhost")
        if pods.isdecimal() and int(pods) > 1:
            return f"PET_NNODES={pods}"
        if "KUBERNETES_SERVICE_HOST" in environ and address not in ("localhost", "127.0.0.1"):
            return f"this is a pod of Kubernetes, and MASTER_ADDR={address}"
    return ""


#: Variables that say that there is a job of several processes, and what starts these.
_JOBS = (
    ("SLURM_NTASKS", "srun"),
    ("SLURM_JOB_NUM_NODES", "srun"),
    ("PET_NNODES", "torchrun, which reads it"),
    ("PET_NPROC_PER_NODE", "torchrun, which reads it"),
    ("OMPI_UNIVERSE_SIZE", "mpirun; a container gets its variables only if they are passed on"),
)


def find_half_world(environ: Mapping[str, str], topology: Topology) -> str:
    """Return which variables imply more ranks than a world of one has, and what is missing."""
    if environ.get("SYNCPRIMS_LAUNCHER") or topology.launcher in (_OURS.name, "torch.distributed"):
        return ""
    if topology.launcher == "none":
        for name, starter in _JOBS:
            value = environ.get(name, "1")
            if value not in ("1", "0", "1:1", "cpu", "auto"):
                return f"{name}={value} is set, and this process was not started by {starter}"
        if "JOB_COMPLETION_INDEX" in environ:
            return (
                f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']} is set, and Kubernetes "
                f"does not say how many ranks there are: set RANK, WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT, or start torchrun in each pod"
            )
        return ""
    sizes = find_world_sizes(environ)
    if sizes:
        shown = " and ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{topology.launcher} says so, and {shown}; SYNCPRIMS_LAUNCHER says which counts"
    return ""


def read_number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number that a variable holds.

    :raises ConfigurationError: if the variable is not a whole number.
    """
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"{name}={environ[name]!r} is not a whole number; correct or unset it"
        ) from None


def _find_launchers(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that are present; an interactive shell of SLURM is not a step of it."""
    shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    # `srun -n 4 bash -c ...` has such a name, too, but then its step says that there are several.
    shell = shell and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    return [one for one in LAUNCHERS if one.is_present(environ) and not (shell and one is _SLURM)]


def _read_topology(launcher: Launcher, environ: Mapping[str, str]) -> Topology:
    """Return what `launcher` says."""
    names = {field: launcher.find(environ, field) for field in _NUMBERS}
    absent = [launcher.names(field)[0] for field in _NUMBERS[:2] if names[field] is None]
    if absent:
        present = ", ".join(f"{n}={environ[n]}" for n in launcher.required if n in environ)
        raise ConfigurationError(
            f"half a set of {launcher.name} variables: {present} without {' and '.join(absent)}; "
            f"set {' and '.join(absent)} too, or unset the others. If the program starts the other "
            f"ranks itself, it has to initialize torch.distributed before the first call"
        )
    tasks = names.pop("local_world_size") if launcher is _SLURM else None
    numbers = {field: read_number(environ, name) for field, name in names.items() if name}
    rank, world_size = numbers["rank"], numbers["world_size"]
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    by_hand = launcher is _TORCHRUN and not {launcher.agent, launcher.local_rank} & environ.keys()
    if by_hand and per_pod not in ("0", "1") and per_pod.isdecimal():
        raise ConfigurationError(
            f"PET_NPROC_PER_NODE={per_pod} and {names['world_size']}={world_size} count {per_pod} "
            f"ranks in each pod, and this process is the only one of its pod: start it with "
            f"torchrun, which reads these variables"
        )
    if tasks is not None:
        numbers |= _read_tasks_on_node(environ[tasks], numbers.get("node_rank"))
    if numbers.get("num_nodes") == 1:
        numbers.setdefault("local_world_size", world_size)
    if world_size == 1 or numbers.get("local_world_size") == world_size:  # all share this host
        here = {"local_rank": rank, "local_world_size": world_size, "node_rank": 0, "num_nodes": 1}
        numbers = here | numbers
    _check_numbers(launcher, environ, numbers)
    said: dict[str, Any] = dict.fromkeys(_NUMBERS, UNKNOWN) | numbers
    topology = Topology(**said, launcher=launcher.name)
    return topology._replace(run_id=_read_run_id(launcher, environ, topology))


def _check_numbers(
    launcher: Launcher, environ: Mapping[str, str], numbers: Mapping[str, int]
) -> None:
    """Accept the numbers of a topology of which each is possible, and which fit together."""

    def says(field: str) -> str:
        """Return ``RANK=3``; a number that no variable gives has its name in `Topology`."""
        name = launcher.find(environ, field)
        return f"{field}={numbers.get(field)}" if name is None else f"{name}={environ[name]}"

    world_size = numbers["world_size"]
    for index, size in zip(_NUMBERS[::2], _NUMBERS[1::2], strict=True):
        known = size if size in numbers else "world_size"
        if index in numbers and not 0 <= numbers[index] < numbers[known]:
            raise ConfigurationError(
                f"{launcher.name} says {says(index)} and {says(known)}: the first must be at least "
                f"0, and less than the second; correct them"
            )
    local, nodes = numbers.get("local_world_size", 1), numbers.get("num_nodes", 1)
    one_host = numbers.get("local_world_size") == world_size
    if max(local, nodes) > world_size or ("num_nodes" in numbers and (nodes == 1) != one_host):
        raise ConfigurationError(
            f"{launcher.name} says {says('local_world_size')} and {says('num_nodes')}, which do "
            f"not fit into {says('world_size')}; correct them"
        )


def _read_tasks_on_node(value: str, node_rank: int | None) -> dict[str, int]:
    """Return how many tasks SLURM has started on a node, if it says so.

    It writes ``2(x3),1`` for three nodes with two tasks each, and then one with one.
    """
    import re  # slow to import, and only SLURM needs it

    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{_SLURM.local_world_size}={value!r} is not a list of task counts as in '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank is None:
        counts = counts if len(set(counts)) == 1 else []
    here = counts[node_rank or 0 :][:1]
    return {"local_world_size": here[0]} if here else {}


def _read_run_id(launcher: Launcher, environ: Mapping[str, str], topology: Topology) -> str | None:
    """Return what identifies this start of this run; None if nothing names the run.

    It is the user's own name, or one made of all that the launcher knows, and another one after
    each restart: an earlier process that still runs must not meet the later ones. But each of
    several agents counts its own restarts, so their ranks would have different names.
    """
    parts = [environ[name] for name in launcher.names("run_id") if name in environ]
    if not parts and launcher is _MPICH and topology.num_nodes == 1:
        parts = _find_starter(environ, launcher.names("rank", "world_size"))
    known = f"{launcher.name}-{'-'.join(parts)}" if parts else None
    run_id = environ.get("SYNCPRIMS_RUN_ID") or known
    restarts = environ.get(launcher.restarts) or "0"
    one_counts = launcher is _SLURM or not find_spread(environ, topology)
    return f"{run_id}-restart{restarts}" if run_id and restarts != "0" and one_counts else run_id


def _find_starter(environ: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return what identifies the process that started all ranks of this host; empty if not known.

    It is the nearest ancestor without the variables of this rank: a script between them has these.
    """
    from syncprims._system.processes import ProcessIdentity, stat_fields  # slow to import

    pid = os.getppid()
    while started := _is_started_with(pid, environ, names):
        pid = int(stat_fields(pid)[1])
    return [str(part) for part in ProcessIdentity.of(pid) or ()] if started is False else []


def _is_inside(
    environ: Mapping[str, str], inner: Launcher, a: Topology, outer: Launcher, b: Topology
) -> bool:
    """Return whether `inner` was clearly started by a task of `outer`, and started this process."""
    # SLURM starts daemons of other launchers, and its shells have the PMI variables of one task.
    if inner is _SLURM:
        return b.world_size == 1 and outer is _MPICH
    has_agent = inner.agent in environ  # then its variables were not set by hand
    if outer in (_OURS, _TORCHRUN):  # which start ranks, and no other launchers in several tasks
        return b.world_size == 1 and (has_agent or outer.agent not in environ)
    if b.world_size == 1 or b.world_size == a.num_nodes:
        return True
    one_per_node = b.local_world_size == 1 and b.num_nodes == b.world_size
    if has_agent:
        # Agents of one run are the tasks of one step; or each task has a run of its own.
        return a.num_nodes == 1 or (one_per_node and a.num_nodes <= b.world_size)
    if UNKNOWN in (a.local_rank, a.local_world_size):
        return False
    # Daemons. Open MPI starts none on its own node, so there may be fewer than nodes.
    return one_per_node and a.world_size > 1
