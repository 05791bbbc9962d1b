"""A rank that did not return did not pass, whatever the code of its exception does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import pytest
from conftest import both_kinds

import syncprims as sp
from syncprims.testing import explore, run_world

ENDS: dict[str, BaseException] = {
    "error": ValueError("of its own"),
    "exit": SystemExit(3),
    "exit with 0": SystemExit(0),
    "interrupt": KeyboardInterrupt(),
}


def _raise(error: BaseException, *_: object) -> NoReturn:
    raise error.with_traceback(None)


def _recurse(*_: object) -> Any:
    return _recurse()


#: What the code of an exception may do where others only look at it.
DEEDS: dict[str, Callable[..., Any]] = {
    **{f"raises {name}": partial(_raise, error) for name, error in ENDS.items()},
    "recurses": _recurse,
    "returns nothing": lambda *_: None,
    "returns a number": lambda *_: 5,
}
METHODS = (
    "__str__", "__repr__", "__eq__", "__hash__", "__bool__", "__len__", "__reduce__",
    "__reduce_ex__", "__getstate__", "__setstate__", "__getattribute__", "__getattr__",
    "__setattr__", "__format__", "with_traceback", "add_note",
)  # fmt: skip
PROPERTIES = (
    "__class__", "__traceback__", "__cause__", "__context__", "__suppress_context__", "__notes__",
    "__dict__", "args", "code", "exceptions", "message",
)  # fmt: skip
OTHER_BASES = (
    BaseException, ExceptionGroup, SystemExit, AssertionError, sp.SyncError, sp.PeerFailed,
)  # fmt: skip


class Case(NamedTuple):
    """An exception, and a part of what the world says of it: no other case has it."""

    make: Callable[[], BaseException]
    shown: str


def _hostile(base: type[BaseException], name: str, deed: str) -> Case:
    title = f"{base.__name__}Of{name}"
    value: Any = property(DEEDS[deed]) if name in PROPERTIES else DEEDS[deed]
    kind = type(title, (base,), {name: value, "__module__": __name__})
    args = ("several", [ValueError("inner")]) if issubclass(base, BaseExceptionGroup) else ("text",)
    return Case(lambda: kind(*args), title)


class _MetaOfNames(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise ValueError("no name")
        return super().__getattribute__(name)


class Unnamed(Exception, metaclass=_MetaOfNames):
    """A class that does not say its name."""


class Exits(Exception):
    """A class whose pickle ends the process that loads it."""

    def __new__(cls, *args: object) -> Any:
        if len(args) == 1:
            sys.exit(0)
        return super().__new__(cls, *args)


def _nested(depth: int) -> BaseException:
    error: BaseException = ValueError(f"inner of {depth}")
    for _ in range(depth):
        error = BaseExceptionGroup("g", [error])
    return error


def _chained(depth: int, attribute: str) -> BaseException:
    error = first = ValueError(f"{depth} links of {attribute}")
    for number in range(depth):
        setattr(error, attribute, KeyError(number))
        error = getattr(error, attribute)
    return first


def _circular() -> BaseException:
    one, other = ValueError("in a circle"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def _exit_with(title: str, make_code: Callable[[], object]) -> BaseException:
    kind: type[BaseException] = type(title, (SystemExit,), {})
    return kind(make_code())


def _cases_of(deed: str) -> Iterator[Case]:
    for name in (*METHODS, *PROPERTIES):
        yield _hostile(Exception, name, deed)
    for base in OTHER_BASES:
        for name in ("__str__", "__class__", "with_traceback", "exceptions"):
            yield _hostile(base, name, deed)
    for name in ("__str__", "__repr__", "__bool__", "__eq__", "__class__", "__int__"):
        code, title = _hostile(Exception, name, deed), f"ExitsWith{name}"
        yield Case(partial(_exit_with, title, code.make), title)


def _other_cases() -> Iterator[Case]:
    yield Case(Unnamed, "Unnamed")
    yield Case(partial(Exits, "text", 1), "Exits")
    codes: tuple[object, ...] = ("Hostile", "", [], 0.0)
    for code in codes:
        title = f"ExitsWithA{type(code).__name__}{code}"
        yield Case(partial(_exit_with, title, lambda code=code: code), title)  # type: ignore[misc]
    for depth in (10, 900, 5000):
        yield Case(partial(_nested, depth), f"inner of {depth}")
        for link in ("__cause__", "__context__"):
            yield Case(partial(_chained, depth, link), f"{depth} links of {link}")
    yield Case(_circular, "in a circle")


CASES = {deed: [*_cases_of(deed)] for deed in DEEDS} | {"others": [*_other_cases()]}
AT_ONCE = 8  # cases in one world, each of them on a rank


def said_by(error: BaseException) -> str:
    """Return the types and texts of an exception and of all in it, with their notes."""
    parts = [type.__getattribute__(type(error), "__name__")]
    with contextlib.suppress(BaseException):
        parts += error.__notes__
    with contextlib.suppress(BaseException):
        parts.append(str(error))
    with contextlib.suppress(BaseException):
        parts += map(said_by, cast("Any", error).exceptions)
    return " ".join(parts)


def check(cases: Sequence[Case], run: Callable[[Callable[[], None], int], object]) -> None:
    def body() -> None:
        sp.barrier()  # so no rank waits for one that fails
        rank = sp.get_rank()
        if rank < len(cases):
            raise cases[rank].make()

    text = ""
    try:
        run(body, max(2, len(cases)))
    except BaseException as error:
        text = said_by(error)
    assert not [case.shown for case in cases if case.shown not in text], text


@both_kinds
@pytest.mark.parametrize("deed", CASES)
def test_no_rank_passes_that_raises(deed: str, kind: Any) -> None:
    for first in range(0, len(CASES[deed]), AT_ONCE):
        check(
            CASES[deed][first : first + AT_ONCE],
            lambda body, ranks: run_world(body, ranks, kind=kind),
        )


@pytest.mark.parametrize("deed", CASES)
def test_no_certificate_is_given_where_a_rank_raises(deed: str) -> None:
    for case in CASES[deed]:
        check([case], lambda body, ranks: explore(body, ranks, strategy="all"))


class _Result:
    def __init__(self, deed: Callable[..., Any]) -> None:
        self._deed = deed

    def __reduce__(self) -> Any:
        return self._deed(self)


@pytest.mark.parametrize("deed", DEEDS)
def test_no_rank_passes_whose_result_cannot_travel(deed: str) -> None:
    with pytest.raises(TypeError, match="returns a _Result, which cannot be sent"):
        run_world(lambda: _Result(DEEDS[deed]), 2, kind="processes")


@both_kinds
@pytest.mark.parametrize("deed", DEEDS)
def test_who_waits_for_it_hears_of_it(deed: str, kind: Any) -> None:
    case = _hostile(Exception, "__class__", deed)

    def body() -> None:
        if sp.get_rank():
            raise case.make()
        with pytest.raises(sp.PeerFailed, match=case.shown):
            sp.barrier()

    with pytest.raises(BaseException, match=case.shown):
        run_world(body, 2, kind=kind)
