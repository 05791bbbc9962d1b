"""The pytest plugin: ``@pytest.mark.world`` runs a test's body once per rank.

Loaded by pytest at every start, wherever this package is installed: so it imports next to nothing
until a test asks for a world, and neither torch nor numpy even then.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_ARGUMENT = "syncprims_world"  # the hidden parameter of tests that run in several worlds
_OPTIONS = ("ranks", "kind", "backend", "schedules", "seed", "faults", "timeout", "start", "nodes")
_SEED = pytest.StashKey[object]()
_SESSION: pytest.StashKey[Any] = pytest.StashKey()


class Wanted(NamedTuple):
    """One world that a test is to run in."""

    ranks: int
    kind: str
    backend: str | None  #: of processes
    schedules: int  #: of threads
    name: str

    def __str__(self) -> str:
        return self.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--world-seed``."""
    group = parser.getgroup("syncprims", "worlds of ranks (syncprims)")
    group.addoption(
        "--world-seed",
        metavar="SEED",
        help="the schedule of worlds of threads, as a failure's report prints it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and read the seed."""
    config.addinivalue_line(
        "markers",
        "world(ranks=4, kind='threads', backend=None, schedules=1, seed=None, faults=(), "
        "timeout=60, start=None, nodes=1): run the body once per rank of a world; lists of ranks, "
        "kinds, backends and schedules make a test of each",
    )
    text = config.getoption("world_seed")
    if text is None:
        return
    from .schedules import Seed

    try:
        config.stash[_SEED] = Seed.read(text)
    except ValueError as error:
        raise pytest.UsageError(f"--world-seed: {error}") from None


# -- once per session ------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    """Be counted among the workers: the last one to end clears away what was made once."""
    from . import once

    config = session.config
    if not hasattr(config, "_tmp_path_factory"):
        return  # pytest's own plugin for directories is off: there is no place
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)

    def folder() -> Path:
        base = Path(cast("Any", config)._tmp_path_factory.getbasetemp())
        run = "session"
        if worker is not None:
            base, run = base.parent, worker["testrunuid"]  # all workers' own stand side by side
        return base / f"syncprims-once-{run}"

    here = once.Session(folder, "main" if worker is None else worker["workerid"])
    config.stash[_SESSION] = once.session.set(here)
    if worker is not None:
        here.begin()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Be counted no more."""
    from . import once

    here = once.session.get()
    token = session.config.stash.get(_SESSION, None)
    if here is not None and token is not None:
        once.session.reset(token)
        here.end()


# -- one test for each world -----------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world that the marker names, if there are several."""
    mark = metafunc.definition.get_closest_marker("world")
    if mark is None:
        return
    found = _worlds(mark)
    if len(found) > 1:
        metafunc.fixturenames.append(_ARGUMENT)
        metafunc.parametrize(_ARGUMENT, found, ids=str)


def _worlds(mark: pytest.Mark) -> list[Wanted]:
    options = _options(mark)
    ranks, kinds = _several(options.get("ranks", 4)), _several(options.get("kind", "threads"))
    backends, tried = _several(options.get("backend")), _several(options.get("schedules", 1))
    if any(type(count) is not int or count < 1 for count in tried):
        raise pytest.UsageError(f"{mark}: schedules= is how many to try, at least 1")
    found: list[Wanted] = []
    for kind, count in itertools.product(kinds, ranks):
        # What the other kind of world takes would make the same test again.
        of_kind = ([None], tried) if kind == "threads" else (backends, [1])
        for backend, schedules in itertools.product(*of_kind):
            name = f"{kind}-{count}"
            name += f"-{backend}" if len(of_kind[0]) > 1 else ""
            name += f"-{schedules}" if len(of_kind[1]) > 1 else ""
            found.append(Wanted(count, kind, backend, schedules, name))
    if not found:
        raise pytest.UsageError(f"{mark}: no world to run in")
    return found


def _options(mark: pytest.Mark) -> dict[str, Any]:
    options: dict[str, Any] = {**dict(zip(_OPTIONS, mark.args, strict=False)), **mark.kwargs}
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown or len(mark.args) > 1:
        what = f"no {unknown[0]!r}" if unknown else "only ranks without its name"
        raise pytest.UsageError(f"pytest.mark.world takes {', '.join(_OPTIONS)}, and {what}")
    return options


def _several(value: Any) -> Sequence[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


# -- a test in its world ---------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Tell worlds which test they are in, and show what each of their ranks has printed."""
    __tracebackhide__ = True
    if item.get_closest_marker("world") is not None:
        _refuse_unittest(item)
    from .ambient import Ambient, ambient
    from .output import Collected, Prefixed, by_rank

    reads_output = {"capsys", "capfd", "capsysbinary", "capfdbinary"} & {
        *getattr(item, "fixturenames", ())
    }
    collected: list[Collected] = []

    def sink() -> Any:
        if reads_output:
            return None  # the test itself looks at what is printed
        if item.config.getoption("capture") == "no":
            return Prefixed()
        collected.append(Collected())
        return collected[-1]

    token = ambient.set(Ambient(item.config.stash.get(_SEED, None), item.nodeid, sink))  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        ambient.reset(token)
        for rank, stream, text in by_rank(collected):
            item.add_report_section("call", f"{stream} rank {rank}", text)


def _refuse_unittest(item: pytest.Item) -> None:
    """Fail a test that would run once, and not once per rank."""
    __tracebackhide__ = True
    unittest = sys.modules.get("unittest")
    cls: Any = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function) or (
        unittest is not None and cls is not None and issubclass(cls, unittest.TestCase)
    ):
        pytest.fail(
            "pytest.mark.world runs functions, and methods of plain classes: in a "
            "unittest.TestCase, call syncprims.testing.run_world",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on every rank, with the fixtures that have been made for the test."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("world")
    if mark is None:
        return None
    from .marked import run_marked

    names = pyfuncitem._fixtureinfo.argnames  # pyright: ignore[reportPrivateUsage]
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    wanted: Any = (
        pyfuncitem.callspec.params.get(_ARGUMENT) if hasattr(pyfuncitem, "callspec") else None
    )
    run_marked(pyfuncitem.obj, arguments, wanted or _worlds(mark)[0], _options(mark))
    return True
