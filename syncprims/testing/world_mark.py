"""``@pytest.mark.world``: the body of a test runs once per rank.

A test of Hypothesis runs its engine outside, and each example in a world: all ranks get the same
values, and Hypothesis shrinks what fails.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, cast

import pytest

from syncprims._protocol.validation import require
from syncprims._world.registry import load_backend

from . import world_spec
from .errors import StallError
from .private_names import NAMES
from .worlds import explore, run_world

DESCRIPTION = (
    "world(ranks=4, kind='threads', backend=None, schedules=1, seed=None, faults=(), "
    "timeout=60, nodes=1, torch=False, replicas=False): run the body once per rank of a world; "
    "lists of ranks, kinds, backends and schedules make a test of each"
)
_ARGUMENT = "syncprims_world"  # the hidden parameter of tests that run in several worlds
_OPTIONS = re.findall(r"(\w+)=", DESCRIPTION)
_STALLED: pytest.StashKey[str] = pytest.StashKey()  # the first test whose world has stalled


# -- what the mark asks for ------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each world that the mark names, if there are several."""
    mark = metafunc.definition.get_closest_marker("world")
    with contextlib.suppress(TypeError, ValueError, ImportError):  # the test is refused with this
        worlds = _worlds(mark) if mark is not None else {}
        if len(worlds) > 1:
            metafunc.fixturenames.append(_ARGUMENT)
            metafunc.parametrize(_ARGUMENT, [*worlds.values()], ids=[*worlds])


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Fail the collection of tests with a wrong mark."""
    made = yield
    with contextlib.suppress(ImportError):  # the test may be skipped
        for item in _several(made):
            if isinstance(item, pytest.Function):
                _choose_world(item)
    return made


def _choose_world(item: pytest.Function) -> dict[str, Any] | None:
    """Return the options of the world of this test; None without a mark.

    :raises ImportError: if the world needs what is not installed.
    """
    callspec = getattr(item, "callspec", None)
    chosen: dict[str, Any] | None = callspec.params.get(_ARGUMENT) if callspec else None
    for node, mark in item.iter_markers_with_node("world"):
        try:
            worlds = _worlds(mark)
            if chosen is None and len(worlds) > 1:  # it would run in the first one only
                raise ValueError(
                    "a mark of one parameter set, or one that was added to a collected test, can "
                    "name one world only; mark the function to have a test of each"
                )
            return chosen or next(iter(worlds.values()))
        except (TypeError, ValueError) as error:
            given = [*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())]
            _refuse(f"{_find_line(node)}: pytest.mark.world({', '.join(given)}): {error}")
    return None


def _find_line(node: Any) -> str:
    """Return the place of the mark of a test, class or module, or else where that begins."""
    path, number, _ = node.reportinfo()
    with contextlib.suppress(OSError):  # code without a file
        lines = inspect.getsourcelines(node.obj)[0]
        number += next((n for n, line in enumerate(lines) if "mark.world" in line), 0)
    return f"{os.path.relpath(path)}:{number + 1}"


def _worlds(mark: pytest.Mark) -> dict[str, dict[str, Any]]:
    """Return the options of each world that a test is to run in, by name.

    :raises TypeError: if the mark takes no such argument, or no such value.
    :raises ValueError: if there is no such world.
    :raises ImportError: if it needs what is not installed.
    """
    options: dict[str, Any] = {**dict(zip(_OPTIONS, mark.args, strict=False)), **mark.kwargs}
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"there is no argument {name}=; it takes {', '.join(_OPTIONS)}")
    if len(mark.args) > 1:
        raise TypeError("only ranks can be given without a keyword")
    require(options.get("faults", ()), (list, tuple), "faults is a list")
    ranks, kinds = _several(options.pop("ranks", 4)), _several(options.pop("kind", "threads"))
    for name, kind in ("schedules", "threads"), ("backend", "processes"):
        if options.get(name) not in (None, 1) and kind not in kinds:
            raise ValueError(f"{name}= is for worlds of {kind}: say kind={kind!r}")
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
        if chosen.get("backend"):
            load_backend(chosen["backend"])
    return found


def _several(value: object) -> Sequence[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


# -- a test in its world ---------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)  # other plugins replace an async function
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Set the context of the test's worlds, and show what each of their ranks has printed.

    A failure after a world that has stalled says so: its threads may run on, and what it was
    importing may be half done.
    """
    __tracebackhide__ = True
    if item.get_closest_marker("world") is not None:
        if not isinstance(item, pytest.Function) or isinstance(item, NAMES["TestCaseFunction"]):
            _refuse(  # it would run once, and not once per rank
                "pytest.mark.world runs functions, and methods of plain classes: in a "
                "unittest.TestCase, call syncprims.testing.run_world"
            )
        handle = getattr(item.obj, "hypothesis", None)
        if inspect.iscoroutinefunction(getattr(handle, "inner_test", item.obj)):
            _refuse_async()
    reads_output = {"capsys", "capfd", "capsysbinary", "capfdbinary"} & {
        *getattr(item, "fixturenames", ())
    }
    collected = world_spec.RankOutput()
    prefixed = item.config.getoption("capture") == "no"
    make_output: Any = world_spec.PrefixedOutput if prefixed else lambda: collected
    if reads_output:
        make_output = lambda: None  # noqa: E731 - the test itself reads what is printed
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
    try:
        options = _choose_world(pyfuncitem)
    except ImportError as error:
        _refuse(f"pytest.mark.world: {error}")
    if options is None:
        return None
    names = NAMES.of(pyfuncitem, "Function._fixtureinfo").argnames  # pyright: ignore[reportPrivateUsage]
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if "subtests" in arguments and options["kind"] == "processes":
        _refuse(
            "subtests reports to the process of pytest, and the ranks are other processes: a "
            "failure would be lost. Say kind='threads', or make a test of each: "
            "pytest.mark.parametrize"
        )
    set_by_fixture: list[Any] = NAMES.of(
        pyfuncitem.funcargs.get("monkeypatch"), "MonkeyPatch._setitem", []
    )
    before = len(set_by_fixture)
    test: Any = pyfuncitem.obj
    try:
        run = _run_examples if getattr(test, "is_hypothesis_test", False) else _run
        run(options, test, **arguments)
    finally:
        # A variable of a rank's own `os.environ` has gone with the rank: at the end of the test,
        # `monkeypatch` would give the value before to the process.
        if options.get("torch") or options.get("replicas"):
            made = set_by_fixture[before:]
            set_by_fixture[before:] = [one for one in made if one[0] is not os.environ]
    return True


def _run(options: dict[str, Any], body: Callable[..., Any], /, *args: Any, **named: Any) -> None:
    """Call `body` with these arguments on each rank of a world, or of many.

    Decorators of `unittest.mock.patch` are made once for all ranks, as fixtures are. Each rank that
    is a thread would undo those of another.
    """
    __tracebackhide__ = True
    with contextlib.ExitStack() as stack:
        if hasattr(body, "patchings"):
            patched: Any = getattr(body, "__func__", body)
            own = (body.__self__,) if inspect.ismethod(body) else ()
            helper = patched.patchings[0].decoration_helper(patched, (*own, *args), named)
            args, named = stack.enter_context(helper)
            body = patched.__wrapped__
        program = functools.partial(_run_body, body, args, named)
        options = {"schedules": 1, **options}
        if (schedules := options.pop("schedules")) > 1:
            del options["kind"]
            explore(program, schedules=schedules, **options)
        else:
            run_world(program, **options)


def _run_body(body: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Run a body, which must return nothing: what it has not done would be lost."""
    __tracebackhide__ = True
    result = body(*args, **named)
    if inspect.iscoroutine(result):
        result.close()
        _refuse_async()
    if result is not None:
        _refuse(f"the test returned {result!r}, which is no check: assert it")


def _refuse_async() -> NoReturn:
    _refuse(
        "pytest.mark.world runs plain functions: call asyncio.run inside, or anyio.run or trio.run"
    )


def _refuse(why: str) -> NoReturn:
    """Fail the test that runs, or the collection, with these lines."""
    raise pytest.fail.Exception(why, pytrace=False) from None


# -- a test of Hypothesis --------------------------------------------------------------------------


def _run_examples(options: dict[str, Any], test: Any, /, **arguments: Any) -> None:
    """Call a test of Hypothesis, whose engine runs the body with each example in a world.

    All have one seed, since what the engine runs again must do the same. The default deadline is
    for a body, and not for a world on a busy machine.
    """
    __tracebackhide__ = True
    hypothesis: Any = sys.modules["hypothesis"]
    function, body = getattr(test, "__func__", test), test.hypothesis.inner_test
    asked, default = function._hypothesis_internal_use_settings, hypothesis.settings.default
    settings = hypothesis.settings(
        parent=asked,
        deadline=None if asked.deadline == default.deadline else asked.deadline,
        # A test of each world has an instance of its class, as one of each parameter.
        suppress_health_check={
            *asked.suppress_health_check, hypothesis.HealthCheck.differing_executors
        },
    )  # fmt: skip
    fixed = {**options, "seed": str(world_spec.choose_seed(options.get("seed")))}

    @functools.wraps(body)
    def run_example(*args: Any, **named: Any) -> None:
        __tracebackhide__ = True
        _run(fixed, body, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test.hypothesis, "inner_test", run_example)
        patch.setattr(function, "_hypothesis_internal_use_settings", settings)
        test(**arguments)
