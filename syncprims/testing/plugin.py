"""The pytest plugin: ``@pytest.mark.world`` runs the body of a test once per rank.

Pytest loads it at every start, wherever this package is installed: it must import neither torch nor
numpy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from _pytest.runner import runtestprotocol

from . import world_spec
from .errors import StallError
from .once_per_session import session_folder
from .outcomes import results_of
from .scheduler import Seed
from .worlds import explore, run_once, run_world

_ARGUMENT = "syncprims_world"  # the hidden parameter of tests that run in several worlds
_OPTIONS = (
    "ranks", "kind", "backend", "schedules", "seed", "faults", "timeout", "nodes", "torch",
    "replicas",
)  # fmt: skip
_SUITES: pytest.StashKey[Any] = pytest.StashKey()
_STALLED: pytest.StashKey[str] = pytest.StashKey()  # the first test whose world has stalled
_RAISED = pytest.StashKey[BaseException]()  # by a test that is written for torchrun, on this rank
_LONGEST = 300.0  # seconds of real time for such a test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--world-seed`` and ``--syncprims-worlds``."""
    group = parser.getgroup("syncprims", "worlds of ranks (syncprims)")
    group.addoption(
        "--world-seed",
        metavar="SEED",
        help="the schedule of worlds of threads, as a failure's report prints it",
    )
    for value in ("", "=threads", "=processes"):
        group.addoption(  # no optional value: that would be the path that follows
            f"--syncprims-worlds{value}",
            action="store_const",
            const=value[1:] or "processes",
            help="run the ranks of a suite's own launchers in worlds (of processes, if not said)",
            dest="syncprims_worlds",
        )
    group.addoption(
        "--syncprims-worlds-ranks",
        type=int,
        metavar="N",
        help="run each test on N ranks, with all its fixtures, as torchrun -m pytest does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, check the seed, and say where values of the session are."""
    config.addinivalue_line(
        "markers",
        "world(ranks=4, kind='threads', backend=None, schedules=1, seed=None, faults=(), "
        "timeout=60, nodes=1, torch=False, replicas=False): run the body once per rank of a world; "
        "lists of ranks, kinds, backends and schedules make a test of each",
    )
    text = config.getoption("world_seed")
    if text is not None:
        try:
            Seed.read(text)
        except ValueError as error:
            raise pytest.UsageError(f"--world-seed: {error}") from None

    def find_folder() -> Path:
        base: Path = cast("Any", config)._tmp_path_factory.getbasetemp()
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        if worker is None:
            return base / "syncprims-once"
        return base.parent / f"syncprims-once-{worker['testrunuid']}"  # that of all workers

    token = session_folder.set(find_folder)
    config.add_cleanup(lambda: session_folder.reset(token))
    ranks = config.getoption("syncprims_worlds_ranks")
    if ranks is not None and ranks < 1:
        raise pytest.UsageError(f"--syncprims-worlds-ranks={ranks}: it takes a number of ranks")
    kind = config.getoption("syncprims_worlds")
    if kind is not None:
        filters = [*warnings.filters]  # of pytest: torch adds its own
        try:
            # These import torch.
            if kind == "threads":
                from .torch_worlds.suites import SuiteThreads

                suites: Any = SuiteThreads()
            else:
                from .torch_worlds.suite_processes import SuiteProcesses

                suites = SuiteProcesses(filters)
        except ImportError as error:
            raise pytest.UsageError(f"--syncprims-worlds needs torch: {error}") from None
        config.stash[_SUITES] = suites
        config.add_cleanup(suites.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Serve the suite, which has imported what it uses.

    Here, since pytest records warnings until the end of the collection.
    """
    suites = session.config.stash.get(_SUITES, None)
    if suites is not None and not session.config.pluginmanager.hasplugin("dsession"):
        suites.start()
    return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many launches of a suite ran in worlds, and why others did not."""
    suites = config.stash.get(_SUITES, None)
    if suites is not None and not config.pluginmanager.hasplugin("dsession"):  # of pytest-xdist
        terminalreporter.section("launches in worlds of syncprims")
        for line in suites.report():
            terminalreporter.line(line)


# -- one test for each world -----------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each world that the marker names, if there are several."""
    mark = metafunc.definition.get_closest_marker("world")
    worlds: dict[str, dict[str, Any]] = {}
    if mark is not None:
        with contextlib.suppress(TypeError, ValueError, ImportError):  # the test fails with this
            worlds = _worlds(mark)
    if len(worlds) > 1:
        metafunc.fixturenames.append(_ARGUMENT)
        metafunc.parametrize(_ARGUMENT, [*worlds.values()], ids=[*worlds])


def _worlds(mark: pytest.Mark) -> dict[str, dict[str, Any]]:
    """Return the options of each world that a test is to run in, by name.

    :raises TypeError: if the marker takes no such argument, or no such value.
    :raises ValueError: if there is no such world.
    """
    options: dict[str, Any] = {**dict(zip(_OPTIONS, mark.args, strict=False)), **mark.kwargs}
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"there is no argument {name}=; it takes {', '.join(_OPTIONS)}")
    if len(mark.args) > 1:
        raise TypeError("only ranks can be given without a keyword")
    ranks, kinds = _several(options.pop("ranks", 4)), _several(options.pop("kind", "threads"))
    backends, tried = _several(options.pop("backend", None)), _several(options.pop("schedules", 1))
    if any(type(count) is not int or count < 1 for count in tried):
        raise ValueError("schedules= is the number of schedules to try, at least 1")
    found: dict[str, dict[str, Any]] = {}
    for kind, count in itertools.product(kinds, ranks):
        # Without the options of the other kind of world: they would make the same test again.
        option, values = ("schedules", tried) if kind == "threads" else ("backend", backends)
        for value in values:
            name = f"{kind}-{count}" + (f"-{value}" if len(values) > 1 else "")
            found[name] = {**options, "ranks": count, "kind": kind, option: value}
    if not found:
        raise ValueError("there is no world to run in")
    for chosen in found.values():
        spec = {name: value for name, value in chosen.items() if name != "schedules"}
        spec["seed"] = world_spec.choose_seed(spec.get("seed"))
        world_spec.WorldSpec(lambda: None, **spec)
    return found


def _several(value: object) -> Sequence[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


# -- a test that is written for torchrun -----------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """With ``--syncprims-worlds-ranks``, run the test and its fixtures on each rank."""
    ranks = item.config.getoption("syncprims_worlds_ranks")
    if ranks is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_on_ranks(item, ranks):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Note what a test has raised first, in the process of its rank."""
    if item.config.getoption("syncprims_worlds_ranks") is not None and call.excinfo is not None:
        first: Any = call.excinfo.traceback.cut(path=item.path)[0]  # without the frames of pytest
        item.stash.setdefault(_RAISED, call.excinfo.value.with_traceback(first._rawentry))


def _run_on_ranks(item: pytest.Item, ranks: int) -> list[pytest.TestReport]:
    """Run a test with all its fixtures once per rank, and return its reports.

    They are those of rank 0, or that of the first failure.
    """
    config: Any = item.config

    def program() -> Any:
        _capture_no_more(config)
        reports = runtestprotocol(item, log=False, nextitem=None)
        if any(report.failed for report in reports):
            raise item.stash.get(_RAISED, None) or AssertionError(  # a plugin has made it fail
                "\n".join(str(report.longrepr) for report in reports if report.failed)
            )
        hook = config.hook.pytest_report_to_serializable
        return [hook(config=config, report=report) for report in reports]

    output = world_spec.RankOutput()
    token = world_spec.test_context.set(world_spec.TestContext(None, item.nodeid, lambda: output))
    info: Any = pytest.CallInfo

    def run() -> Any:
        ended = run_once(
            world_spec.WorldSpec(program, ranks, "processes", torch=True, timeout=_LONGEST)
        )
        return results_of(ended, "", equal_rounds=False)

    try:
        call = info.from_call(run, "call")
    finally:
        world_spec.test_context.reset(token)
    if call.excinfo is None:
        reports: list[Any] = call.result[0]
        hook = config.hook.pytest_report_from_serializable
        return [hook(config=config, data=report) for report in reports]
    report = pytest.TestReport.from_item_and_call(item, call)
    for (rank, stream), text in sorted(output.texts.items()):
        if text:
            report.sections.append((f"Captured {stream} rank {rank}", text))
    return [report]


def _capture_no_more(config: Any) -> None:
    """End pytest's capture in this process: its file is that of all ranks, which have their own."""
    manager = config.pluginmanager.getplugin("capturemanager")
    streams, fds = (sys.stdout, sys.stderr), [os.dup(fd) for fd in (1, 2)]
    manager.stop_global_capturing()
    manager._method = "no"
    manager.start_global_capturing()
    for fd, kept in enumerate(fds, 1):
        os.dup2(kept, fd)
        os.close(kept)
    sys.stdout, sys.stderr = streams


# -- a test in its world ---------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Set the context of the test's worlds, and show what each of their ranks has printed.

    A failure after a world that has stalled says so: its threads may run on, and what it was
    importing may be half done.
    """
    __tracebackhide__ = True
    if item.get_closest_marker("world") is not None:
        import unittest  # slow to import, and only marked tests need it

        cls: Any = getattr(item, "cls", None)
        if not isinstance(item, pytest.Function) or (cls and issubclass(cls, unittest.TestCase)):
            _refuse(  # it would run once, and not once per rank
                "pytest.mark.world runs functions, and methods of plain classes: in a "
                "unittest.TestCase, call syncprims.testing.run_world"
            )
        # Here, since pytest-asyncio replaces the function later.
        if inspect.iscoroutinefunction(item.obj):
            _refuse("pytest.mark.world runs plain functions: call asyncio.run inside")
    reads_output = {"capsys", "capfd", "capsysbinary", "capfdbinary"} & {
        *getattr(item, "fixturenames", ())
    }
    collected = world_spec.RankOutput()

    def make_output() -> world_spec.RankOutput | None:
        if reads_output:
            return None  # the test itself reads what is printed
        return (
            world_spec.PrefixedOutput() if item.config.getoption("capture") == "no" else collected
        )

    seed = item.config.getoption("world_seed")
    token = world_spec.test_context.set(world_spec.TestContext(seed, item.nodeid, make_output))
    try:
        return (yield)
    except Exception as error:
        stalled = item.config.stash.get(_STALLED, "")
        if isinstance(error, StallError):
            item.config.stash.setdefault(_STALLED, item.nodeid)
        elif stalled:
            text = f"A world has stalled in this process before, in {stalled}. "
            item.add_report_section("call", "syncprims", f"{text}See that first.\n")
        raise
    finally:
        world_spec.test_context.reset(token)
        for (rank, stream), text in sorted(collected.texts.items()):
            item.add_report_section("call", f"{stream} rank {rank}", text)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on every rank, with the fixtures that have been made for the test."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("world")
    if mark is None:
        return None
    try:
        worlds = _worlds(mark)
    except (TypeError, ValueError, ImportError) as error:
        _refuse(f"pytest.mark.world: {error}")
    names = pyfuncitem._fixtureinfo.argnames  # pyright: ignore[reportPrivateUsage]
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    callspec = getattr(pyfuncitem, "callspec", None)
    chosen: dict[str, Any] | None = callspec.params.get(_ARGUMENT) if callspec else None
    if chosen is None and len(worlds) > 1:
        _refuse(  # it would run in the first one only
            "pytest.mark.world: a mark of one parameter set, or one that was added to a collected "
            "test, can name one world only; mark the function to have a test of each"
        )
    options = dict(chosen or next(iter(worlds.values())))
    kind, schedules = options.pop("kind"), options.pop("schedules", 1)
    if kind == "processes":
        if "subtests" in arguments:
            _refuse(
                "subtests reports to the process of pytest, and the ranks are other processes: a "
                "failure would be lost. Say kind='threads', or make a test of each: "
                "pytest.mark.parametrize"
            )
        run_world(
            functools.partial(_without_result, pyfuncitem.obj, arguments), kind=kind, **options
        )
        return True
    with _patched_once(pyfuncitem.obj, arguments) as body, _own_variables(pyfuncitem, options):
        program = functools.partial(_without_result, body, arguments)
        if schedules > 1:
            explore(program, schedules=schedules, **options)
        else:
            run_world(program, **options)
    return True


@contextlib.contextmanager
def _patched_once(
    body: Callable[..., Any], arguments: dict[str, Any]
) -> Generator[Callable[..., Any]]:
    """Return a body without the decorators of `unittest.mock.patch`, which hold within the block.

    They are made once for all ranks, as fixtures are. Each rank that is a thread would undo those
    of another.
    """
    patched: Any = getattr(body, "__func__", body)
    if not hasattr(patched, "patchings"):
        yield body
        return
    own = (body.__self__,) if inspect.ismethod(body) else ()
    helper = patched.patchings[0].decoration_helper(patched, own, arguments)
    with helper as (positional, named):
        arguments.update(named)
        yield functools.partial(patched.__wrapped__, *positional)


@contextlib.contextmanager
def _own_variables(item: pytest.Function, options: dict[str, Any]) -> Generator[None]:
    """Within the block, let `monkeypatch` forget which variables it has set for ranks.

    Where a rank that is a thread has its own ``os.environ``, they are gone with the rank: at the
    end of the test, the values before would be set for the process.
    """
    monkeypatch: Any = item.funcargs.get("monkeypatch")
    before = len(monkeypatch._setitem) if monkeypatch is not None else 0
    try:
        yield
    finally:
        if monkeypatch is not None and (options.get("torch") or options.get("replicas")):
            made = monkeypatch._setitem[before:]
            monkeypatch._setitem[before:] = [one for one in made if one[0] is not os.environ]


def _refuse(why: str) -> NoReturn:
    """Fail the test that runs, with this one line."""
    raise pytest.fail.Exception(why, pytrace=False) from None


def _without_result(body: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Run a body and drop its result, with which a world of processes could fail."""
    __tracebackhide__ = True
    body(**arguments)
