"""Which rank is this process? A launcher's environment variables become a :class:`Topology`.

Nothing here reads ``os.environ``: callers pass a mapping. All variables are taken from *one*
launcher, the first of :data:`LAUNCHERS` that is present; variables of two launchers are never
mixed. A second launcher must agree with the first, else the error names both: a rank with a wrong
number makes the others hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import ConfigurationError
from syncprims.interface import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(NamedTuple):
    """The variables in which one launcher gives a process its place; several are alternatives."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: str
    node_rank: str = ""
    num_nodes: tuple[str, ...] = ()
    run_id: tuple[str, ...] = ()  #: together they identify this run and this restart
    needs: tuple[str, ...] = ()  #: the launcher is present only where one of these is set

    @property
    def required(self) -> set[str]:
        """The variables that say which rank a process is, and of how many."""
        return {self.rank, *self.world_size, self.local_rank, self.local_world_size}

    @property
    def variables(self) -> list[str]:
        """All variables that are read; rank and world size come first."""
        names = self.rank, *self.world_size, self.local_rank, self.local_world_size, self.node_rank
        return [name for name in dict.fromkeys([*names, *self.num_nodes, *self.run_id]) if name]

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher has set its variables, or some of them."""
        if self.needs and not any(name in environ for name in self.needs):
            return False
        return any(name in environ for name in self.required)


_OURS = Launcher(
    "syncprims",
    rank="SYNCPRIMS_RANK",
    world_size=("SYNCPRIMS_WORLD_SIZE",),
    local_rank="SYNCPRIMS_LOCAL_RANK",
    local_world_size="SYNCPRIMS_LOCAL_WORLD_SIZE",
    node_rank="SYNCPRIMS_GROUP_RANK",
    num_nodes=("SYNCPRIMS_GROUP_WORLD_SIZE",),
)
_TORCHRUN = Launcher(
    "torchrun",
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes=("GROUP_WORLD_SIZE",),
    # The id is "none" unless the user has set one; then the rendezvous address identifies the run.
    run_id=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
)
_SLURM = Launcher(
    "SLURM",
    rank="SLURM_PROCID",
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
    node_rank="SLURM_NODEID",
    num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    run_id=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    # A batch script and an interactive shell also have SLURM_NTASKS, but are one process. Only a
    # step has so many.
    needs=("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
)
LAUNCHERS = (
    _OURS,
    _TORCHRUN,
    _SLURM,
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


def detect(environ: Mapping[str, str]) -> Topology:
    """Return this process's place, as the innermost launcher in `environ` gives it.

    Without a launcher it is a world of one.

    :raises ConfigurationError: if a launcher's set is incomplete or not made of numbers, or if two
        launchers contradict each other.
    """
    chosen: tuple[Launcher, Topology] | None = None
    seen: set[str] = set()  # PALS gives its size in MPICH's variable, which is no half of MPICH's
    for launcher in _find_launchers(environ):
        if launcher.required & environ.keys() <= seen:
            continue
        seen |= launcher.required
        found = launcher, _read_topology(launcher, environ)
        if chosen is None:
            chosen = found
        elif chosen[0] is _SLURM and _started_one_per_node(chosen[1], found[1]):
            chosen = found  # mpirun starts its daemons as a SLURM step, one per node
        else:
            _check_agreement(environ, *chosen, *found)
    if chosen is None:
        return Topology(run_id=environ.get("SYNCPRIMS_RUN_ID") or None)
    return chosen[1]


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM has started this process as one of its tasks."""
    return _SLURM in _find_launchers(environ)


def list_rank_variables() -> set[str]:
    """Return every variable in which any launcher gives a process its place.

    What only describes the job is not among them: users' scripts read it.
    """
    names = {"SYNCPRIMS_RUN_ID", *_TORCHRUN.run_id, *_TORCHRUN.num_nodes}
    return names.union(*({*one.required, one.node_rank} for one in LAUNCHERS)) - {""}


def make_rank_variables(rank: int, world_size: int, num_nodes: int = 1) -> dict[str, str]:
    """Return the variables of `rank` of `world_size`, on nodes of equal size.

    In our names and in torchrun's, since users' scripts read those.
    """
    local = world_size // num_nodes
    numbers = rank, world_size, rank % local, local, rank // local, num_nodes
    values: dict[str, str] = {}
    for one in (_OURS, _TORCHRUN):
        names = one.rank, *one.world_size, one.local_rank, one.local_world_size, one.node_rank
        values |= zip((*names, *one.num_nodes), map(str, numbers), strict=True)
    return values


def find_world_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Return every world size above one that a launcher's variable claims, by its name."""
    names = [name for launcher in _find_launchers(environ) for name in launcher.world_size]
    sizes = {name: int(environ[name]) for name in names if environ.get(name, "").isdecimal()}
    return {name: size for name, size in sizes.items() if size > 1}


def read_number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number that a variable holds.

    :raises ConfigurationError: if it is none.
    """
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"{name}={environ[name]!r} is not a whole number; correct or unset it"
        ) from None


def _find_launchers(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that are present; an interactive shell of SLURM is no step of it."""
    shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    # `srun -n 4 bash -c ...` has such a name, too, but then its step says that there are several.
    shell = shell and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    return [one for one in LAUNCHERS if one.is_present(environ) and not (shell and one is _SLURM)]


def _read_topology(launcher: Launcher, environ: Mapping[str, str]) -> Topology:
    """Return what `launcher` says; local numbers that it leaves out mean a single host."""

    def number(*names: str) -> int | None:
        return next((read_number(environ, name) for name in names if name in environ), None)

    size_name = next((n for n in launcher.world_size if n in environ), launcher.world_size[0])
    absent = [name for name in (launcher.rank, size_name) if name not in environ]
    if absent:
        names = (launcher.rank, size_name, launcher.local_rank, launcher.local_world_size)
        present = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise ConfigurationError(
            f"half a set of {launcher.name} variables: {present} without {' and '.join(absent)}; "
            f"set {' and '.join(absent)} too, or unset the others"
        )
    rank, world_size = read_number(environ, launcher.rank), read_number(environ, size_name)
    node_rank, num_nodes = number(launcher.node_rank), number(*launcher.num_nodes)
    if launcher is _SLURM:
        local_world_size = _read_tasks_on_node(environ, node_rank or 0)
    else:
        local_world_size = number(launcher.local_world_size)
    if local_world_size is None:
        local_world_size = -(-world_size // max(1, num_nodes or 1))
    per_node = max(1, local_world_size)
    local_rank = number(launcher.local_rank)
    if num_nodes is None:
        num_nodes = max(-(-world_size // per_node), (node_rank or 0) + 1)
    place = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank % per_node if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=min(rank // per_node, num_nodes - 1) if node_rank is None else node_rank,
        num_nodes=num_nodes,
        launcher=launcher.name,
        run_id=_read_run_id(launcher, environ),
    )
    _check_range(launcher, environ, place)
    return place


def _check_range(launcher: Launcher, environ: Mapping[str, str], place: Topology) -> None:
    """Accept numbers of which each is possible, and which fit together."""

    def says(field: str) -> str:
        """Return ``RANK=3``; a number that no variable gives has its name in `Topology`."""
        names: str | tuple[str, ...] = getattr(launcher, field)
        names = (names,) if isinstance(names, str) else names
        found = [f"{name}={environ[name]}" for name in names if name in environ]
        return found[0] if found else f"{field}={getattr(place, field)}"

    for index, size in (
        ("rank", "world_size"),
        ("local_rank", "local_world_size"),
        ("node_rank", "num_nodes"),
    ):
        if not 0 <= getattr(place, index) < getattr(place, size):
            a, b = says(index), says(size)
            raise ConfigurationError(
                f"{launcher.name} says {a} and {b}: {a.partition('=')[0]} must be at least 0 and "
                f"less than {b.partition('=')[0]}; correct them"
            )
    if max(place.local_world_size, place.num_nodes) > place.world_size:
        raise ConfigurationError(
            f"{launcher.name} says {says('local_world_size')} and {says('num_nodes')}, which do "
            f"not fit into {says('world_size')}; correct them"
        )


def _read_tasks_on_node(environ: Mapping[str, str], node_rank: int) -> int | None:
    """Return how many tasks SLURM has started on a node, if it says so.

    It writes ``2(x3),1`` for three nodes with two tasks each, and then one with one.
    """
    value = environ.get(_SLURM.local_world_size)
    if value is None:
        return None
    import re  # slow to import, and only SLURM needs it

    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{_SLURM.local_world_size}={value!r} is no list of task counts as in '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node_rank] if node_rank < len(counts) else None


def _read_run_id(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return what identifies this run: the user's own id, or all that the launcher knows."""
    own = environ.get("SYNCPRIMS_RUN_ID") or None
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if own is not None:
        return f"{own}-{restart}" if restart != "0" else own
    parts = [environ[name] for name in launcher.run_id if name in environ]
    return f"{launcher.name}-{'-'.join(parts)}" if parts else None


def _started_one_per_node(outer: Topology, inner: Topology) -> bool:
    """Return whether `outer` may have started one task on each node of `inner`.

    Resource managers are used that way, to start another launcher; the first two start the ranks.
    """
    starts_ranks = outer.launcher in (_OURS.name, _TORCHRUN.name)
    return not starts_ranks and outer.world_size == inner.num_nodes


def _check_agreement(
    environ: Mapping[str, str], inner: Launcher, a: Topology, outer: Launcher, b: Topology
) -> None:
    """Accept an outer launcher that says the same, or that started one task per node."""
    if (a.rank, a.world_size) == (b.rank, b.world_size) or _started_one_per_node(b, a):
        return

    def says(launcher: Launcher) -> str:
        names = (launcher.rank, *launcher.world_size)
        return " ".join(f"{name}={environ[name]}" for name in names if name in environ)

    raise ConfigurationError(
        f"two launchers contradict each other: {inner.name} says {says(inner)}, "
        f"{outer.name} says {says(outer)}; unset the variables of the one that did not start this "
        f"process"
    )
