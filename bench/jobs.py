"""Start the ranks of one library with a plan, and return their figures."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncprims._world.launchers import list_rank_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from table import Seen

HERE = Path(__file__).parent
PATIENCE = 900.0  # seconds; a job that takes longer has failed


class Kind(NamedTuple):
    """How to start the ranks of one library, and which packages it needs."""

    command: Callable[[int], list[str]]
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


def _find(program: str) -> str | None:
    """Return the path of a program. The directory of this Python comes first."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def _script(name: str) -> str:
    return str(HERE / f"{name}.py")


def _ours(name: str) -> Callable[[int], list[str]]:
    run = [sys.executable, "-m", "syncprims", "run", "-n"]
    return lambda ranks: [*run, str(ranks), _script(name)]


def _mpich(name: str) -> Callable[[int], list[str]]:
    return lambda ranks: [_find("mpiexec") or "mpiexec", "-n", str(ranks), *_mpi(name)]


def _open_mpi(name: str) -> Callable[[int], list[str]]:
    start = ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none"]
    start += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return lambda ranks: [*start, "-n", str(ranks), "env", "MPI4PY_MPIABI=openmpi", *_mpi(name)]


def _mpi(name: str) -> list[str]:
    # The runner of mpi4py aborts all ranks if one raises.
    return [sys.executable, "-m", "mpi4py", _script(name)]


def _torchrun(name: str) -> Callable[[int], list[str]]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return lambda ranks: [*run, str(ranks), _script(name)]


def _plain(name: str) -> Callable[[int], list[str]]:
    return lambda ranks: [sys.executable, _script(name), str(ranks)]


KINDS = {
    "syncprims": Kind(_ours("ours")),
    "pthread": Kind(_plain("peer_pthread"), programs=("cc",)),
    "MPICH": Kind(_mpich("peer_mpi"), ("mpi4py",), ("mpiexec",)),
    "Open MPI": Kind(_open_mpi("peer_mpi"), ("mpi4py",), ("mpirun.openmpi",)),
    "multiprocessing": Kind(_plain("peer_multiprocessing")),
    "Gloo": Kind(_torchrun("peer_gloo"), ("torch",)),
    "Accelerate": Kind(_torchrun("peer_accelerate"), ("torch", "accelerate")),
}


def _hosts(name: str) -> Callable[[int], list[str]]:
    run = [sys.executable, _script("hosts"), "2"]
    return lambda ranks: [*run, str(ranks), _script(name)]


#: The torch backend, and its peer on pretended hosts. `measure.py` does not compare these.
TORCH_KINDS = {
    "syncprims, torchrun": Kind(
        lambda ranks: ["env", "SYNCPRIMS_BACKEND=torch", *_torchrun("ours")(ranks)], ("torch",)
    ),
    "syncprims, two hosts": Kind(_hosts("ours"), ("torch",)),
    "Gloo, two hosts": Kind(_hosts("peer_gloo"), ("torch",)),
}


#: A barrier that does nothing else, by several ways of waiting.
BARE = {"bare barrier": Kind(_plain("bare_barriers"))}
#: The same libraries up to their first barrier.
FIRST_BARRIER = {
    "syncprims": Kind(_ours("first_barrier")),
    "MPICH": Kind(_mpich("first_barrier"), ("mpi4py",), ("mpiexec",)),
    "Open MPI": Kind(_open_mpi("first_barrier"), ("mpi4py",), ("mpirun.openmpi",)),
    "Gloo": Kind(_torchrun("first_barrier"), ("torch",)),
}


def _c10d(start: list[str], backend: str) -> Callable[[int], list[str]]:
    return lambda ranks: [*start, str(ranks), _script("peer_c10d"), backend]


#: One program of torch.distributed, on two backends.
C10D = {
    "syncprims": Kind(
        _c10d([sys.executable, "-m", "syncprims", "run", "-n"], "syncprims"), ("torch",)
    ),
    "Gloo": Kind(
        _c10d(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
            "gloo",
        ),
        ("torch",),
    ),
}


class NoFigures(Exception):
    """A library could not be measured; the text says why."""


def start(
    library: str, ranks: int, plan: dict[str, object], meeting: Path | None = None
) -> dict[str, list[float]]:
    """Run one job and return its figures. Our ranks use the directory `meeting`.

    :raises NoFigures: if it is not installed, or failed.
    """
    out = run({**KINDS, **TORCH_KINDS, **BARE}[library], ranks, json.dumps(plan), meeting)
    figures: dict[str, list[float]] = json.loads(out[-1])
    return figures


def run(kind: Kind, ranks: int, argument: str, meeting: Path | None = None) -> list[str]:
    """Run one job with an argument of its scripts, and return the JSON objects that they print.

    :raises NoFigures: if it is not installed, or failed.
    """
    lacking = [name for name in kind.modules if find_spec(name) is None]
    lacking += [name for name in kind.programs if _find(name) is None]
    if lacking:
        raise NoFigures(f"not installed: {', '.join(lacking)}")
    process = subprocess.Popen(
        [*kind.command(ranks), argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(meeting),
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()  # launchers pass this signal on to their ranks, unlike SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        raise NoFigures(f"failed: no end within {PATIENCE:.0f} s") from None
    found = [line[line.index("{") :] for line in out.splitlines() if "{" in line]
    if process.returncode != 0 or not found:
        print(out, err, sep="\n", file=sys.stderr)
        raise NoFigures(f"failed with exit code {process.returncode}")
    return found


def measure(
    seen: Seen,
    kind: str,
    ranks: int,
    plan: dict[str, object],
    names: Iterable[str],
    library: str | None = None,
) -> None:
    """Run one job and store its figures, or that `names` are missing, under the library's name."""
    print(f"{plan['what']}, {ranks} ranks: {kind}", file=sys.stderr, flush=True)
    try:
        seen.add(ranks, library or kind, start(kind, ranks, plan))
    except NoFigures as error:
        seen.lack(ranks, library or kind, names, str(error))


def _environment(meeting: Path | None) -> dict[str, str]:
    """Return the variables of a job: none of another launcher, and one thread per rank."""
    outer = list_rank_variables()
    clean = {k: v for k, v in os.environ.items() if k not in outer and "SYNCPRIMS" not in k}
    clean.pop("PYTHONPATH", None)
    if meeting is not None:
        clean["SYNCPRIMS_DIR"] = str(meeting)
    return {**clean, "OMP_NUM_THREADS": "1"}
