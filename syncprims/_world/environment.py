"""Who am I? A mapping of environment variables becomes a :class:`Topology`.

Pure: nothing here reads ``os.environ``. The complete set of variables is taken from *one* launcher,
the first in :data:`LAUNCHERS` that speaks; variables are never mixed across launchers. What a
second launcher says must fit with the first, or both are named in an error: a rank that guesses its
place wrong hangs the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import ConfigurationError
from syncprims.interface import Settings, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(NamedTuple):
    """The names under which one launcher tells a process its place."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: str
    node_rank: str | None = None
    num_nodes: tuple[str, ...] = ()
    run_id: tuple[str, ...] = ()  #: together they tell this run, and this restart, from all others
    needs: tuple[str, ...] = ()  #: it only speaks where one of these is set

    @property
    def names(self) -> set[str]:
        """The variables by which it says who a process is, and among how many."""
        return {self.rank, *self.world_size, self.local_rank, self.local_world_size}

    def speaks(self, environ: Mapping[str, str]) -> bool:
        """Tell whether this launcher started the process (or half of it)."""
        if self.needs and not any(name in environ for name in self.needs):
            return False
        return any(name in environ for name in self.names)


LAUNCHERS = (
    Launcher(
        "syncprims",
        rank="SYNCPRIMS_RANK",
        world_size=("SYNCPRIMS_WORLD_SIZE",),
        local_rank="SYNCPRIMS_LOCAL_RANK",
        local_world_size="SYNCPRIMS_LOCAL_WORLD_SIZE",
        node_rank="SYNCPRIMS_GROUP_RANK",
        num_nodes=("SYNCPRIMS_GROUP_WORLD_SIZE",),
    ),
    Launcher(
        "torchrun",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes=("GROUP_WORLD_SIZE",),
        # The id is "none" unless one was asked for; the rendezvous address tells runs apart then.
        run_id=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        "SLURM",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        run_id=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        # A batch script and an interactive shell also have SLURM_NTASKS, but nobody started
        # that many processes. Only a step has.
        needs=("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    ),
    Launcher(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        # OMPI_COMM_WORLD_NODE_RANK is the rank *within* the node, not the node's.
        run_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "PALS",
        rank="PALS_RANKID",
        world_size=("PMI_SIZE", "PALS_SIZE"),
        local_rank="PALS_LOCAL_RANKID",
        local_world_size="PALS_LOCAL_SIZE",
        node_rank="PALS_NODEID",
        run_id=("PALS_APID",),
        needs=("PALS_RANKID",),
    ),
    Launcher(
        "MPICH",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        run_id=("PMI_JOBID", "PMI_ID_NAMESPACE"),
        needs=("PMI_RANK", "PMI_SIZE"),
    ),
    Launcher(
        "LSF",
        rank="JSM_NAMESPACE_RANK",
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
        run_id=("LSB_JOBID", "JSM_NAMESPACE"),
    ),
)

_INTERACTIVE_JOBS = ("bash", "interactive")
_RESOURCE_MANAGERS = ("SLURM", "Open MPI", "PALS", "MPICH", "LSF")


def detect(environ: Mapping[str, str]) -> Topology:
    """Return this process's place, as the innermost launcher in `environ` gives it.

    With no launcher it is a world of one.

    :raises ConfigurationError: if a launcher's set is incomplete or not made of numbers, or if two
        launchers contradict each other.
    """
    chosen: tuple[Launcher, Topology] | None = None
    heard: set[str] = set()  # PALS says its size by MPICH's variable: then it is no half of MPICH's
    for launcher in LAUNCHERS:
        if not launcher.speaks(environ) or _is_interactive(launcher, environ):
            continue
        if launcher.names & environ.keys() <= heard:
            continue
        heard |= launcher.names
        found = launcher, _read(launcher, environ)
        if chosen is None:
            chosen = found
        elif chosen[0].name == "SLURM" and _started_one_per_node(chosen[1], within=found[1]):
            chosen = found  # mpirun starts its daemons as a SLURM step, one per node
        else:
            _check_agreement(environ, *chosen, *found)
    if chosen is None:
        return Topology(run_id=environ.get("SYNCPRIMS_RUN_ID") or None)
    return chosen[1]


def _is_interactive(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    # `srun -n 4 bash -c ...` has that name, too, but then its step says how many there are.
    named = launcher.name == "SLURM" and environ.get("SLURM_JOB_NAME") in _INTERACTIVE_JOBS
    return named and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Topology:
    """Return what `launcher` says; local numbers it leaves out mean a single host."""
    size_name = next((n for n in launcher.world_size if n in environ), launcher.world_size[0])
    absent = [name for name in (launcher.rank, size_name) if name not in environ]
    if absent:
        names = (launcher.rank, size_name, launcher.local_rank, launcher.local_world_size)
        present = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise ConfigurationError(
            f"half a set of {launcher.name} variables: {present} without {' and '.join(absent)}; "
            f"set {' and '.join(absent)} too, or unset the others"
        )
    rank, world_size = _number(environ, launcher.rank), _number(environ, size_name)
    node_rank = None
    if launcher.node_rank is not None and launcher.node_rank in environ:
        node_rank = _number(environ, launcher.node_rank)
    nodes_name = next((name for name in launcher.num_nodes if name in environ), None)
    num_nodes = None if nodes_name is None else _number(environ, nodes_name)

    local_world_size = _local_world_size(launcher, environ, node_rank or 0)
    if local_world_size is None:
        local_world_size = world_size if num_nodes is None else -(-world_size // max(1, num_nodes))
    if launcher.local_rank in environ:
        local_rank = _number(environ, launcher.local_rank)
    else:
        local_rank = rank % max(1, local_world_size)
    if num_nodes is None:
        num_nodes = max(-(-world_size // max(1, local_world_size)), (node_rank or 0) + 1)
    if node_rank is None:
        node_rank = min(rank // max(1, local_world_size), num_nodes - 1)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher=launcher.name,
        run_id=_run_id(launcher, environ),
    )
    _check_possible(topology)
    return topology


def _check_possible(place: Topology) -> None:
    for index, i, size, n in (
        ("rank", place.rank, "world_size", place.world_size),
        ("local_rank", place.local_rank, "local_world_size", place.local_world_size),
        ("node_rank", place.node_rank, "num_nodes", place.num_nodes),
    ):
        if not 0 <= i < n:
            raise ConfigurationError(
                f"{place.launcher} says {index}={i} and {size}={n}: {index} must be from 0 to "
                f"{size} - 1; correct its variables"
            )
    if max(place.local_world_size, place.num_nodes) > place.world_size:
        raise ConfigurationError(
            f"{place.launcher} says local_world_size={place.local_world_size} and "
            f"num_nodes={place.num_nodes}, which do not fit into world_size={place.world_size}; "
            f"correct its variables"
        )


def _local_world_size(launcher: Launcher, environ: Mapping[str, str], node_rank: int) -> int | None:
    value = environ.get(launcher.local_world_size)
    if value is None:
        return None
    if launcher.name != "SLURM":
        return _number(environ, launcher.local_world_size)
    # "2(x3),1": three nodes with two tasks each, then one with one.
    import re  # slow to import, and only SLURM needs it

    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{launcher.local_world_size}={value!r} is no list of task counts as in '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node_rank] if node_rank < len(counts) else None


def _run_id(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return what tells this run from others: the user's word, or all that the launcher knows."""
    own = environ.get("SYNCPRIMS_RUN_ID") or None
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if own is not None:
        return f"{own}-{restart}" if restart != "0" else own
    parts = [environ[name] for name in launcher.run_id if name in environ]
    return f"{launcher.name}-{'-'.join(parts)}" if parts else None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"{name}={environ[name]!r} is not a whole number; correct or unset it"
        ) from None


def _started_one_per_node(outer: Topology, within: Topology) -> bool:
    """Tell whether `outer` may have started one task on each node of `within`.

    Resource managers are used that way, to start another launcher; the others start the ranks.
    """
    return outer.launcher in _RESOURCE_MANAGERS and outer.world_size == within.num_nodes


def _check_agreement(
    environ: Mapping[str, str], inner: Launcher, a: Topology, outer: Launcher, b: Topology
) -> None:
    """Accept an outer launcher that says the same, or that started one task per node."""
    same = (a.rank, a.world_size) == (b.rank, b.world_size)
    if same or _started_one_per_node(b, within=a):
        return

    def says(launcher: Launcher) -> str:
        names = (launcher.rank, *launcher.world_size)
        return " ".join(f"{name}={environ[name]}" for name in names if name in environ)

    raise ConfigurationError(
        f"two launchers contradict each other: {inner.name} says {says(inner)}, "
        f"{outer.name} says {says(outer)}; unset the variables of the one that did not start this "
        f"process"
    )


def place_variables() -> set[str]:
    """Return every variable by which any launcher tells a process its place.

    What only describes the job stays out: users' scripts read it.
    """
    names: set[str] = {"SYNCPRIMS_RUN_ID", *LAUNCHERS[1].run_id, *LAUNCHERS[1].num_nodes}
    for launcher in LAUNCHERS:
        names |= {launcher.rank, *launcher.world_size, launcher.local_rank}
        names |= {launcher.local_world_size, launcher.node_rank or launcher.rank}
    return names


def rank_variables(rank: int, world_size: int, num_nodes: int = 1) -> dict[str, str]:
    """Return what tells a process that it is `rank` of `world_size`, on nodes of equal size.

    In our names and in torchrun's, since users' scripts read those.
    """
    local = world_size // num_nodes
    values: dict[str, str] = {}
    for launcher in LAUNCHERS[:2]:
        values[launcher.rank] = str(rank)
        values[launcher.world_size[0]] = str(world_size)
        values[launcher.local_rank] = str(rank % local)
        values[launcher.local_world_size] = str(local)
        if launcher.node_rank is not None:
            values[launcher.node_rank] = str(rank // local)
        values[launcher.num_nodes[0]] = str(num_nodes)
    return values


def claims_of_size(environ: Mapping[str, str]) -> dict[str, int]:
    """Return every world size above one that any variable in `environ` claims, by its name."""
    claims: dict[str, int] = {}
    for launcher in LAUNCHERS:
        if not launcher.speaks(environ) or _is_interactive(launcher, environ):
            continue
        for name in launcher.world_size:
            if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
                claims[name] = int(environ[name])
    return claims


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings in `environ`.

    :raises ConfigurationError: if a value is not what its variable takes.
    """
    default = Settings()
    pickle = environ.get("SYNCPRIMS_PICKLE", "1")
    if pickle not in ("0", "1"):
        raise ConfigurationError(f"SYNCPRIMS_PICKLE={pickle!r}: it takes 0 or 1")
    return Settings(
        timeout=_seconds(environ, "SYNCPRIMS_TIMEOUT"),
        join_timeout=_seconds(environ, "SYNCPRIMS_JOIN_TIMEOUT") or default.join_timeout,
        warn_after=_seconds(environ, "SYNCPRIMS_WARN_AFTER") or default.warn_after,
        directory=environ.get("SYNCPRIMS_DIR") or None,
        runtime_directory=environ.get("XDG_RUNTIME_DIR") or None,
        pickle=pickle == "1",
        store=_store(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        heartbeat=_seconds(environ, "SYNCPRIMS_HEARTBEAT") or default.heartbeat,
        gloo_interfaces=environ.get("GLOO_SOCKET_IFNAME") or None,
        error_file=environ.get("SYNCPRIMS_ERROR_FILE") or None,
        trace=environ.get("SYNCPRIMS_TRACE") or None,
        trace_limit=_mebibytes(environ, "SYNCPRIMS_TRACE_LIMIT") or default.trace_limit,
        mixed_precision=environ.get("SYNCPRIMS_MIXED_PRECISION") or None,
    )


def _mebibytes(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 1 << 20):
        raise ConfigurationError(f"{name}={value!r}: it takes a number of MiB from 1 up")
    return int(value) << 20


def _store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where ranks of several hosts meet: what torch's variables say, or SLURM's imply."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address and port:
        return address, _number(environ, "MASTER_PORT")
    if LAUNCHERS[2].speaks(environ) and not _is_interactive(LAUNCHERS[2], environ):
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in names if environ.get(name)), None)
        job = environ.get("SLURM_JOB_ID", "0")
        if nodes is not None and job.isdecimal():
            # Of its own for every job on a node; below the ports that systems give away.
            own = 15000 + int(job) % 10000
            return address or _first_node(nodes), _number(environ, "MASTER_PORT") if port else own
    return None


def _first_node(nodes: str) -> str:
    """Return the first of SLURM's node names: node007 of ``node[007-010,3],gpu1``."""
    import re  # slow to import, and only SLURM needs it

    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None, "it matches anything"
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigurationError(f"{name}={value!r}: it takes a number of seconds above 0")
    return seconds
