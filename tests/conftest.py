from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Literal

import filelock
import pytest
from support import ROOT
from support.forks import prepare_forks
from support.pages import write_files
from support.rank_worlds import Kind, Ranks, Scripts, Signs

# A public call would start the world that the test says is not there.
from syncprims._world import runtime

HERE = Path(__file__).parent

#: Every Python that a test starts imports `sitecustomize` from here.
STARTUP = str(HERE / "support" / "startup")
if STARTUP not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])
# At each connection to a store, torch asks a name server for the name of the peer. If a server is
# busy, this takes 5 s; without any, torch warns.
os.environ |= {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# For each pytest that a test starts, as pyproject.toml says for this one.
_UNUSED = "asyncio", "hypothesispytest", "repeat", "rerunfailures", "trio"
os.environ["PYTEST_ADDOPTS"] = " ".join(f"-p no:{plugin}" for plugin in _UNUSED)

# `nohup`, and a shell without job control, start processes that ignore these, and so would ranks.
for _number, _action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)

#: Every behaviour is tested on each of these: real processes, a third-party backend, and threads.
KINDS = [
    Kind("single", 1),
    *(Kind(backend, ranks) for backend in ("file", "mine", "threads") for ranks in (1, 2, 4)),
    Kind("torch", 2),
    Kind("torch", 4, hosts=2),
]


def pytest_configure(config: pytest.Config) -> None:
    """Give a session a directory for what torch, torchrun and killed processes leave in /tmp."""
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        Path(folder.name).chmod(0o755)  # other users come to some
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def pytest_collection_finish() -> None:
    """Prepare this process for the forks of its tests."""
    prepare_forks()


def _target(descriptor: Path) -> str:
    with contextlib.suppress(OSError):  # the one that lists the directory is closed by now
        return str(descriptor.readlink())
    return ""


# The first DataLoader with workers sets the handler of SIGCHLD, and keeps it. SIGALRM belongs to
# the time limit of each test.
_KEPT = set(signal.Signals) - {signal.SIGCHLD, signal.SIGALRM}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the long loops of `make soak` take their time, and skip what this user cannot do."""
    for item in items:
        if os.geteuid() != 0 and item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.timeout(7200))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Generator[None]:
    """Fail a test that changes this process.

    As by a variable, thread, descriptor, process, handler of a signal or closed world.
    """

    def state() -> tuple[dict[str, str], set[str], str, dict[int, object], str]:
        environ = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        threads = {thread.name for thread in threading.enumerate()}
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        found = children.read_text() if children.exists() else ""
        return environ, threads, found, {n: signal.getsignal(n) for n in _KEPT}, str(Path.cwd())

    def descriptors() -> Counter[str]:
        return Counter(map(_target, Path("/dev/fd").iterdir()))

    before, opened = state(), descriptors()
    yield
    after, left = state(), descriptors()
    if (after, left) != (before, opened):
        gc.collect()  # frees what frames of exceptions hold, also those of earlier tests
        after, left = state(), descriptors()
    assert after == before
    assert left.total() <= opened.total(), f"left open: {left - opened}"
    assert runtime._state.ended is None


@pytest.fixture(scope="session")
def backend_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the backend of docs/backends.md once per session, in a private directory."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    site, source = root / "backend-site", root / "backend-source"
    with filelock.FileLock(root / "backend-site.lock"):
        if not site.exists():
            write_files(ROOT / "docs/backends.md", source)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
            command += ["--no-build-isolation", "--disable-pip-version-check"]
            command += ["--root-user-action=ignore", "--target", str(site), str(source)]
            subprocess.run(command, check=True)
    return site


@pytest.fixture
def meeting_place(tmp_path: Path) -> Path:
    """The directory of a world, with mode 0700."""
    path = tmp_path / "meet"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def alone(meeting_place: Path) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that runs a program on the only rank of a new process."""
    return lambda program: Ranks(Kind("single", 1), meeting_place).run(program)[0]


#: What these show, the others nearly always show as well.
RARE = ("file-1", "mine-1", "threads-1", "mine-4", "torch-2")


def parameters(kinds: list[Kind]) -> list[Any]:
    """Return the kinds as parameters of tests; `make soak` tries the rare ones, too."""
    soak = pytest.mark.soak
    return [pytest.param(k, id=str(k), marks=[soak] * (str(k) in RARE)) for k in kinds]


@pytest.fixture(params=parameters(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """A backend and a world size."""
    found: Kind = request.param
    return found


@pytest.fixture
def world(kind: Kind, meeting_place: Path, request: pytest.FixtureRequest) -> Generator[Ranks]:
    """A world on every backend and of every size; real processes, except for `threads`."""
    if kind.backend == "threads" and request.node.get_closest_marker("in_processes"):
        pytest.skip("needs processes: kills, signals, real time or variables of one rank")
    site = request.getfixturevalue("backend_site") if kind.backend == "mine" else None
    ranks = Ranks(kind, meeting_place, site)
    yield ranks
    ranks.check_nothing_left()


@pytest.fixture
def signs(tmp_path: Path) -> Signs:
    """Signals between ranks that do not use the library."""
    folder = tmp_path / "signs"
    folder.mkdir()
    return Signs(folder)


@pytest.fixture
def scripts(meeting_place: Path, tmp_path: Path) -> Scripts:
    """Three ranks of the file backend, each a separate Python process."""
    return Scripts(Kind("file", 3), meeting_place, tmp_path)


in_processes = pytest.mark.in_processes
soak = partial(pytest.param, marks=pytest.mark.soak)  # parameters that `make soak` tries
WorldKind = Literal["threads", "processes"]
both_kinds = pytest.mark.parametrize("kind", ["threads", "processes"])


def on_every_rank(program: Callable[..., None]) -> Callable[..., None]:
    """Run a test on every rank of a world, and not around one."""

    def test(world: Ranks, **others: Any) -> None:
        world.run(partial(program, **others) if others else program)

    place = Parameter("world", Parameter.POSITIONAL_OR_KEYWORD)
    own = signature(program).parameters.values()
    test.__signature__ = Signature([place, *own])  # type: ignore[attr-defined]
    test.__doc__ = program.__doc__
    return test


def seeds(daily: list[range], soak: range) -> pytest.MarkDecorator:
    """Parametrize by seeds: those of every day, and those of `make soak`, so many in each test."""
    parts = [range(first, first + soak.step) for first in soak]
    long = [pytest.param(part, marks=pytest.mark.soak) for part in parts]
    return pytest.mark.parametrize("seeds", [*daily, *long], ids=str)


def several(*ranks: int) -> pytest.MarkDecorator:
    """Parametrize by worlds with more than one rank."""
    kinds = [kind for kind in KINDS if kind.ranks in (ranks or (2, 4))]
    return pytest.mark.parametrize("kind", parameters(kinds), indirect=True)
