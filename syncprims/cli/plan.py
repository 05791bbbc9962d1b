"""From what was said to what is started: a pure function, tried without starting anything."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims._world.backends import load_backend
from syncprims._world.launchers import list_rank_variables
from syncprims._world.settings import read_settings
from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import Topology

from .options import BY_KEY, Options

if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_TORCH = ("torch", "gloo", "nccl")
_DEFAULT_PORT = 29500  # torchrun's own
#: Where the math libraries look for a number of threads; the first is read by nearly all.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
#: Keys of which the flags' one puts aside the file's other.
_SAME = (
    ("ranks", "num_processes"),
    ("gpus", "multi_gpu"),
    ("cpu", "gpus"),
    ("cpu", "multi_gpu"),
    ("rendezvous", "main_process_ip"),
    ("rendezvous", "main_process_port"),
)


class Plan(NamedTuple):
    """What to start on this machine."""

    command: list[str]  #: of one rank
    ranks: int  #: on this machine
    variables: dict[str, str]  #: that all ranks get, beside those that are there already
    #: the command that starts torchrun instead, where there are several nodes
    handed_over: list[str]


def merged(above: Mapping[str, Any], below: Mapping[str, Any]) -> Options:
    """Return what `above` (the flags) says, and `below` (the file) where it says nothing.

    Two names for one thing are one thing: ``--num-processes`` overrides the file's ``ranks``.
    """
    hidden = {other for pair in _SAME for key in pair if key in above for other in pair}
    if "script" in above:
        hidden |= {"args", "module"}  # they belong to the file's script
    lower = {key: value for key, value in below.items() if key not in hidden}
    return Options(**{**lower, **above})


def planned(said: Options, environ: Mapping[str, str], processors: int, seen: int | None) -> Plan:
    """Return what to start, on a machine with so many processors and `seen` CUDA devices.

    :raises ConfigurationError: if what was said contradicts itself or `environ`, or is not enough.
    :raises BackendUnavailable: if the backend needs torch, and it is not installed.
    """
    if said.script is None:
        raise ConfigurationError(
            "nothing to run: name a script, as in `syncprims run -n 4 train.py`, or -m and a module"
        )
    gpus = _gpus(said, environ)
    ranks, nodes = _size(said, gpus)
    variables = {"SYNCPRIMS_BACKEND": _backend(said, environ, ranks, nodes, gpus)}
    if said.cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus is not None:
        count = seen if gpus == ("all",) else len(gpus)
        if count is not None and count < ranks:
            raise ConfigurationError(
                f"{ranks} ranks on {count} CUDA device{'s' * (count != 1)}: every rank needs one "
                f"of its own; start fewer ranks, or name more devices with --gpus"
            )
        if gpus != ("all",):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    for key, name in (
        ("mixed_precision", "SYNCPRIMS_MIXED_PRECISION"),
        ("timeout", "SYNCPRIMS_TIMEOUT"),
        ("trace", "SYNCPRIMS_TRACE"),
    ):
        value = getattr(said, key)
        if value is not None:
            text = str(value).removesuffix(".0") if key == "timeout" else value
            _agree(key, text, name, environ)
            variables[name] = text
    variables |= _threads(said, environ, ranks, processors)
    module = ["-m"] if said.module else []
    command = [sys.executable, "-u", *module, said.script, *said.args]
    handed_over = _torchrun(said, ranks, nodes, environ) if nodes > 1 else []
    if nodes == 1:
        _refuse_on_one_node(said)
    return Plan(command, ranks, variables, handed_over)


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a launcher that `plan` is handed over to.

    What an outer launcher said of this process's place holds for us, and not for our ranks.
    """
    outer = list_rank_variables() - {"SYNCPRIMS_RUN_ID"}
    return {**{k: v for k, v in environ.items() if k not in outer}, **plan.variables}


# -- one decision each -------------------------------------------------------------------------


def _gpus(said: Options, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    gpus = said.gpus or (("all",) if said.multi_gpu else None)
    if said.cpu and gpus is not None:
        raise ConfigurationError("--cpu contradicts --gpus (or --multi_gpu); drop one of them")
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus not in (None, ("all",)) and named is not None:
        assert gpus is not None
        allowed = [part.strip() for part in named.split(",")]
        strange = [gpu for gpu in gpus if gpu not in allowed]
        if strange:
            raise ConfigurationError(
                f"--gpus {','.join(gpus)} contradicts CUDA_VISIBLE_DEVICES={named}, which does not "
                f"have {', '.join(strange)}; name some of those, or unset it"
            )
    return gpus


def _size(said: Options, gpus: tuple[str, ...] | None) -> tuple[int, int]:
    """Return the number of ranks on each node, and the number of nodes."""
    nodes = said.nodes or 1
    ranks = said.ranks
    if said.num_processes is not None:
        each, rest = divmod(said.num_processes, nodes)
        if rest:
            raise ConfigurationError(
                f"--num_processes {said.num_processes} counts the ranks of all nodes, and cannot "
                f"be shared out evenly to {nodes}; --ranks N counts those of each node"
            )
        if ranks not in (None, each):
            raise ConfigurationError(
                f"--ranks {ranks} (on each node) contradicts --num_processes {said.num_processes} "
                f"(on all {nodes}); drop one of them"
            )
        ranks = each
    if ranks is None and gpus not in (None, ("all",)):
        assert gpus is not None
        ranks = len(gpus)
    if ranks is None:
        raise ConfigurationError("how many ranks? say it with -n, as in `syncprims run -n 4 ...`")
    return ranks, nodes


def _backend(
    said: Options,
    environ: Mapping[str, str],
    ranks: int,
    nodes: int,
    gpus: tuple[str, ...] | None,
) -> str:
    if said.backend is not None:
        _agree("backend", said.backend, "SYNCPRIMS_BACKEND", environ)
    named = said.backend or environ.get("SYNCPRIMS_BACKEND") or None
    default = "file" if nodes == 1 else "torch"
    if gpus is not None:
        default = "nccl"  # torch would do without devices where there are none, and say nothing
    name = named or default
    if name == "auto":
        return name
    # Told once, and not by every rank.
    if name in _BY_TORCH or nodes > 1:
        if find_spec("torch") is None:
            why = f"backend {name!r} needs torch" if nodes == 1 else "several nodes need torchrun"
            raise BackendUnavailable(
                f"{why}, and torch is not installed: pip install 'syncprims[torch]', or run on one "
                f"machine with --backend file"
            )
        if name in _BY_TORCH:
            return name
    cls = load_backend(name)
    if nodes > 1 and not cls.spans_hosts:
        raise ConfigurationError(
            f"backend {name!r} joins the ranks of one host, and --nodes says {nodes}; choose one "
            f"that spans hosts, as torch does"
        )
    launcher = "syncprims run" if nodes == 1 else "torchrun"
    place = Topology(0, ranks * nodes, 0, ranks, 0, nodes, launcher, run_id="to be named")
    cls.check(place, read_settings(environ))
    return name


def _threads(
    said: Options, environ: Mapping[str, str], ranks: int, processors: int
) -> dict[str, str]:
    if said.threads is not None:
        return dict.fromkeys(THREAD_VARIABLES, str(said.threads))
    if environ.get("OMP_NUM_THREADS") or ranks == 1:
        return {}  # somebody has said it, or the rank is alone here and may have all
    # Every rank's math library would start a thread per processor.
    return {"OMP_NUM_THREADS": str(max(1, processors // ranks))}


def _torchrun(said: Options, ranks: int, nodes: int, environ: Mapping[str, str]) -> list[str]:
    host, port = _rendezvous(said, nodes)
    line = [sys.executable, "-m", "torch.distributed.run"]
    line += ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if said.max_restarts:
        line += ["--max-restarts", str(said.max_restarts)]
    if said.node_rank is not None and said.rdzv_backend != "c10d":
        if said.node_rank >= nodes:
            raise ConfigurationError(
                f"--node-rank {said.node_rank} with --nodes {nodes}: it is from 0 to {nodes - 1}"
            )
        line += ["--node-rank", str(said.node_rank)]
        line += ["--master-addr", host, "--master-port", str(port)]
    elif said.rdzv_backend == "static":
        raise ConfigurationError("--rdzv_backend static needs --node-rank on every node")
    else:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        name = environ.get("SYNCPRIMS_RUN_ID") or "syncprims"
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", name]
    assert said.script is not None
    return [*line, *(["-m"] if said.module else []), said.script, *said.args]


def _rendezvous(said: Options, nodes: int) -> tuple[str, int]:
    if said.rendezvous is not None:
        if said.main_process_ip not in (None, said.rendezvous[0]):
            raise ConfigurationError(
                f"--rendezvous {said.rendezvous[0]}:{said.rendezvous[1]} contradicts "
                f"--main_process_ip {said.main_process_ip}; drop one of them"
            )
        return said.rendezvous
    if said.main_process_ip is None:
        raise ConfigurationError(
            f"{nodes} nodes have to meet: say where with --rendezvous HOST:PORT, an address of "
            f"node 0 and a free port there, the same on every node"
        )
    return said.main_process_ip, said.main_process_port or _DEFAULT_PORT


def _refuse_on_one_node(said: Options) -> None:
    if said.node_rank:
        raise ConfigurationError(
            f"--node-rank {said.node_rank} says that there are several nodes; --nodes says how many"
        )
    if said.max_restarts:
        raise ConfigurationError(
            f"--max-restarts {said.max_restarts} on one node: only torchrun starts ranks again. "
            f"Use `torchrun --max-restarts {said.max_restarts} --nproc-per-node N ...`, under "
            f"which the script runs as it is"
        )


def _agree(key: str, value: str, name: str, environ: Mapping[str, str]) -> None:
    there = environ.get(name) or None
    if there not in (None, value):
        raise ConfigurationError(
            f"{BY_KEY[key].flag} {value} contradicts {name}={there}; drop one of them"
        )
