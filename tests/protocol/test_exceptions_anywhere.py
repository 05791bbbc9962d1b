"""Exceptions at every instruction of every call: later values are right, or calls raise.

One rank of two gets an exception, as from a signal handler, and some get a second one soon after.
Then both go on as a program that catches it and makes the call again.
"""

from __future__ import annotations

import dis
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.rank_worlds import Kind, Ranks

import syncprims as sp

# Behind check_trigger, of which a program has one: here each case has its own.
from syncprims._api.trigger import SelfClearingTrigger
from syncprims._world.runtime import get_world
from syncprims.testing.world_spec import WorldSpec
from syncprims.testing.worlds import run_once

Disturb = Callable[[Callable[[], Any]], Any]

pytestmark = pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="crashes if tracers raise")

#: Whose instructions are interrupted. In a checkout, the backends are elsewhere than the package.
_FOLDERS = tuple(
    f"{import_module(f'syncprims.{name}').__path__[0]}/"
    for name in ("_api", "_data", "_protocol", "_world", "backends")
)


#: Where Python runs signal handlers.
INTERRUPTIBLE = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "SEND"}

#: Functions that must give a lock back. Only handlers interrupt them: a lock that is lost at an
#: instruction that cannot raise would keep a rank from a `reform` for longer than the other waits.
LOCKING = {"_acquire", "_close_all", "_locked", "PrivateDirectory.open_file"}


class Injected(BaseException):
    """An exception from outside."""


#: What is injected: not only what passes all handlers, but also what some of them expect.
ERRORS: tuple[type[BaseException], ...] = (
    Injected,
    TimeoutError,
    ValueError,
    MemoryError,
    RecursionError,
    sp.RankMismatch,
    sp.EncodingError,
    sp.PeerFailed,
)
_ENDS: tuple[type[BaseException], ...] = (sp.SyncError, TypeError, *ERRORS)


class Place(NamedTuple):
    """An instruction of the library."""

    file: str
    function: str
    line: int  #: of the function
    offset: int
    name: str  #: of the instruction

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.function}+{self.offset}"


NOWHERE = Place("", "", 0, 0, "")


class Injector:
    """Raises at the first visit of a place, and again so many instructions later, if `again`.

    Without a place it only records all places, in the order of their first visits. Where a call has
    ended for the library, it raises nothing: Python itself raises there only what an instruction
    raises, and runs signal handlers only at the instructions in :data:`INTERRUPTIBLE`.
    """

    def __init__(
        self, place: Place | None = None, again: int = 0, error: type[BaseException] = Injected
    ) -> None:
        self._place = place
        self._again = again
        self._error = error
        self.places: dict[Place, None] = {}
        self.raised = 0
        self._since = 0
        self._rounds: Any = None
        self._posted = 0
        self.after_end: set[str] = set()  #: instructions between the end of a call and its return

    @property
    def is_as_from_a_handler(self) -> bool:
        """Whether it raises once, where Python runs signal handlers."""
        return self._place is not None and self._place.name in INTERRUPTIBLE and not self._again

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, and raise within it only."""
        self._rounds = get_world().rounds
        self._posted = self._rounds.board.posted
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.setprofile(None)  # first, since it sets the other again
            sys.settrace(None)

    def say_interruptible(self) -> list[str]:
        """Return what is wrong with the instructions after the end of a call, if anything is."""
        found = self.after_end & INTERRUPTIBLE
        return [f"after the end of the call come {found}"] if found else []

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_FOLDERS):
            return None
        if self._place is not None and not self.raised and not self._is_in(frame.f_code):
            return None  # to trace each instruction is slow
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._visit(frame)
        return self._trace

    def _is_in(self, code: CodeType) -> bool:
        """Return whether the place is in this function."""
        assert self._place is not None
        file, function, line, *_ = self._place
        return code.co_firstlineno == line and (code.co_filename, code.co_qualname) == (
            file,
            function,
        )

    def _visit(self, frame: FrameType) -> None:
        code = frame.f_code
        rounds = self._rounds
        name = dis.opname[code.co_code[frame.f_lasti]]
        if not rounds._calls and rounds.board.posted > self._posted:
            self.after_end.add(name)
            return
        if code.co_qualname in LOCKING and name not in INTERRUPTIBLE:
            return
        if self.raised:
            self._since += 1
            if self.raised == 1 and self._again and self._since >= self._again:
                self.raised = 2
                raise self._error("again")
            return
        place = Place(code.co_filename, code.co_qualname, code.co_firstlineno, frame.f_lasti, name)
        if place == self._place:
            self.raised = 1
            raise self._error("once")
        if self._place is None:
            self.places[place] = None

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        # Python ends the tracing when a trace function raises.
        if self.raised == 1 and self._again and sys.gettrace() is None:
            sys.settrace(self._trace)
            upwards: FrameType | None = frame
            while upwards is not None:
                if upwards.f_code.co_filename.startswith(_FOLDERS):
                    upwards.f_trace, upwards.f_trace_opcodes = self._trace, True
                    upwards.f_trace_lines = False
                upwards = upwards.f_back


class Entered:
    """The number of the call that each rank is in, without the library."""

    def __init__(self) -> None:
        # Shared with forked processes; one item is written at once.
        self._numbers = memoryview(mmap.mmap(-1, 4096)).cast("q")

    def enter(self, rank: int, number: int) -> None:
        """Record that `rank` makes call `number`."""
        self._numbers[rank] = number

    def latest(self, rank: int) -> int:
        """Return the last call that `rank` has entered."""
        return self._numbers[rank]


def _main_first(number: int) -> None:
    with sp.main_first():
        pass


def _in_turn(number: int) -> None:
    with sp.in_turn():
        pass


def _differ(number: int) -> str:
    try:
        sp.assert_same((number, sp.get_rank()), "v")
    except sp.RankMismatch as error:
        if "rank 1: " not in str(error):
            raise  # an injected one
        return str(error).partition("rank 1: ")[2][: len(f"({number}, 1)")]
    return "the same"


def _too_large(number: int) -> str:
    try:
        sp.all_reduce(10**400, "mean")
    except OverflowError:
        return "no result"
    return "a result"


_TRIGGERS: dict[tuple[int, int], sp.Trigger] = {}  # each of which is set again and again


def _trigger(number: int, lag: int) -> Any:
    own = _TRIGGERS.setdefault((sp.get_rank(), lag), SelfClearingTrigger(lag=lag))
    own.set(f"step {number}")
    return own.check() and own.reason


class Call(NamedTuple):
    """A call number `i` of the program, and what it returns on all ranks."""

    make: Callable[[int], Any]
    expected: Callable[[int], Any] = lambda _: None
    waits: bool = True  #: for the same call of all others


def _all_equal(value: Any) -> Any:
    """Return what all items of an array are. Calls no Python: the stack may be full."""
    return sorted({*value.tolist()})


CALLS: dict[str, Call] = {
    "barrier": Call(lambda _: sp.barrier()),
    "named barrier": Call(lambda _: sp.barrier("x", timeout=600)),
    "broadcast": Call(lambda i: sp.broadcast([i]), lambda i: [i]),
    "broadcast from 1": Call(lambda i: sp.broadcast([i], 1), lambda i: [i]),
    "broadcast pickle": Call(lambda i: sp.broadcast(slice(i)), slice),
    "broadcast pickle from 1": Call(lambda i: sp.broadcast(slice(i), 1), slice),
    "broadcast array": Call(
        lambda i: _all_equal(sp.broadcast(np.full(9_000, i), 1, out=np.zeros(9_000, int))),
        lambda i: [i],
    ),
    "broadcast out": Call(
        lambda i: _all_equal(sp.broadcast(np.full(9, i), 1, out=np.zeros(9, int))), lambda i: [i]
    ),
    "all_gather": Call(lambda i: sp.all_gather((i, sp.get_rank())), lambda i: [(i, 0), (i, 1)]),
    "all_gather pickle": Call(lambda i: sp.all_gather(slice(i)), lambda i: [slice(i)] * 2),
    "all_gather array": Call(
        lambda i: [_all_equal(x) for x in sp.all_gather(np.full(9_000, i))], lambda i: [[i]] * 2
    ),
    "all_gather arrays": Call(  # of different sizes
        lambda i: [_all_equal(x) for x in sp.all_gather(np.full(600 << sp.get_rank(), i))],
        lambda i: [[i]] * 2,
    ),
    "all_gather text": Call(
        lambda i: [len(x) for x in sp.all_gather(" " * (9_000 + i))], lambda i: [9_000 + i] * 2
    ),
    "broadcast number": Call(lambda i: sp.broadcast(i, 1), lambda i: i),
    "all_reduce": Call(lambda i: sp.all_reduce(i + sp.get_rank()), lambda i: 2 * i + 1),
    "all_reduce numbers": Call(
        lambda i: sp.all_reduce({"a": i, "b": 0.5}), lambda i: {"a": 2 * i, "b": 1.0}
    ),
    "all_reduce unlike": Call(
        lambda i: sp.all_reduce(i if sp.get_rank() else float(i)), lambda i: 2 * i
    ),
    "all_reduce array": Call(
        lambda i: _all_equal(sp.all_reduce(np.full(9_000, i), out=np.zeros(9_000, int))),
        lambda i: [2 * i],
    ),
    "all_reduce small array": Call(
        lambda i: _all_equal(sp.all_reduce(np.full(9, i), out=np.zeros(9, int))), lambda i: [2 * i]
    ),
    "all_reduce small arrays": Call(
        lambda i: [int(x.sum()) for x in sp.all_reduce([np.full(9, i), np.full(2, i)])],
        lambda i: [18 * i, 4 * i],
    ),
    "all_reduce no result": Call(_too_large, lambda _: "no result"),
    "all_reduce arrays": Call(
        lambda i: _all_equal(sp.all_reduce({"a": np.full(9_000, i)})["a"]), lambda i: [2 * i]
    ),
    "any_rank": Call(lambda i: sp.any_rank(i % 2), lambda i: bool(i % 2)),
    "all_ranks": Call(lambda i: sp.all_ranks(i % 2), lambda i: bool(i % 2)),
    "assert_same": Call(lambda i: sp.assert_same(i, "v")),
    "assert_same differs": Call(_differ, lambda i: f"({i}, 1)"),
    "main_first": Call(_main_first, waits=False),
    "in_turn": Call(_in_turn),
    "on_main": Call(lambda i: sp.on_main(share=True)(lambda: i)(), lambda i: i),
    "trigger": Call(lambda i: _trigger(i, 0), lambda i: f"step {i}"),
    "lagging trigger": Call(
        lambda i: _trigger(i, 1), lambda i: f"step {i - 1}" if i > 1 else False, waits=False
    ),
    "group": Call(lambda _: sp.group([0]).ranks, lambda _: (0,)),
}


#: Ends the epoch of the other calls, so it has a program of its own.
REFORM = Call(lambda _: sp.reform())


def _find_call(name: str) -> Call:
    return REFORM if name == "reform" else CALLS[name]


def run_reformed(disturb: Disturb) -> str:
    """Call `reform` by `disturb`, again until it returns, and return ``""`` or what is wrong then.

    An exception never costs a rank its place, and the others its company.
    """
    world, program = sp.current(), [lambda: disturb(lambda: REFORM.make(1)), lambda: REFORM.make(1)]
    for attempt in range(20):
        try:
            change = program[min(attempt, 1)]()
            found = sp.all_gather((change._replace(rank_before=None), world.epoch))
        except sp.SyncTimeout as error:
            return f"one has waited in vain: {error}"
        except _ENDS:
            continue
        own = (change, change.rank_before, sp.get_rank())
        right = found[0] == found[1] == (change._replace(rank_before=None), change.epoch)
        return "" if right and own[1] == own[2] and not change.lost else f"{found}, {own}"
    return "it has no place any more"


_COUNT = 3  # calls of each rank after the one that is disturbed


def run_disturbed(call: Call, disturb: Disturb, entered: Entered, rank: int, base: int = 0) -> str:
    """Make calls, the first one by `disturb`. Return ``""`` or what went wrong.

    What is `entered` are the numbers from `base` on, which no world before has reached.

    A call that raises is made again, as a program does that does not know better. No call may
    return the value of another, or before the others have made the same call.
    """
    if call is REFORM:
        return run_reformed(disturb)
    for number in range(1, _COUNT + 2):
        entered.enter(rank, base + number)
        for attempt in range(2):
            try:
                if number == 1 and not attempt:
                    value = disturb(lambda: call.make(1))
                else:
                    value = call.make(number)
            except _ENDS as error:
                own = isinstance(disturb, Injector) and disturb.is_as_from_a_handler
                if own and isinstance(error, sp.BackendUnavailable):
                    return f"call {number} of rank {rank} raised {error}"  # a lock was not freed
                if attempt:
                    return ""  # torn
                continue
            if value != call.expected(number):
                return f"call {number} of rank {rank} returned {value!r}"
            break
        other = entered.latest(1 - rank) - base
        if call.waits and other < number:
            return f"rank {rank} has left call {number}, and the other one is in {other}"
    return ""


class Disturbance(NamedTuple):
    """Where exceptions are injected: a place, and so many instructions after that."""

    place: Place
    again: int = 0
    error: type[BaseException] = Injected


def disturb_threads(name: str, choose: Callable[[list[Place]], Sequence[Disturbance]]) -> list[str]:
    """Return what goes wrong in worlds of two threads, one for each disturbance of rank 0."""

    recorder = Injector()
    problems = [f"undisturbed: {text}" for text in run_threads(name, recorder) if text]
    for disturbance in choose(list(recorder.places)):
        found = run_threads(name, Injector(*disturbance))
        problems += [f"{disturbance}: {text}" for text in found if text]
    return problems + recorder.say_interruptible()


def run_threads(name: str, disturb: Disturb) -> list[str]:
    """Return what each rank of a world of two threads says, of which rank 0 is disturbed."""
    entered = Entered()
    _TRIGGERS.clear()

    def program() -> str:
        rank = sp.get_rank()
        own = Injector(NOWHERE) if rank else disturb
        return run_disturbed(_find_call(name), own, entered, rank)

    ended = run_once(WorldSpec(program, 2))
    return [str(o.result if o.error is None else repr(o.error)) for o in ended.outcomes]


def with_little_stack(left: int) -> Disturb:
    """Return what makes a call with room for so many further calls of functions."""

    def dive(frames: int, call: Callable[[], Any]) -> Any:
        return dive(frames - 1, call) if frames > 0 else call()

    def disturb(call: Callable[[], Any]) -> Any:
        depth, frame = 0, sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame.f_back is not None:
            depth, frame = depth + 1, frame.f_back
        return dive(sys.getrecursionlimit() - depth - left, call)

    return disturb


def _undisturbed(call: Callable[[], Any]) -> Any:
    return call()


def disturb_processes(
    world: Ranks,
    name: str,
    choose: Callable[[list[Place]], Sequence[Disturbance]],
    **variables: str,
) -> list[str]:
    """As :func:`disturb_threads`, with two processes: one world after another."""
    entered = Entered()

    def program() -> list[str]:
        rank, run_id = int(os.environ["SYNCPRIMS_RANK"]), os.environ["SYNCPRIMS_RUN_ID"]
        recorder = Injector()
        problems: list[str] = []
        todo: list[Disturbance] = []
        number = count = 0
        while number <= count:
            os.environ["SYNCPRIMS_RUN_ID"] = f"{run_id}-{number}"
            _TRIGGERS.clear()
            place = todo[number - 1] if todo and number else Disturbance(NOWHERE)
            injector: Disturb = Injector(*place) if number else recorder
            if rank and number % 4 < 2:
                injector = _undisturbed  # at full speed: it waits for the other, or has gone on
            try:
                with sp.init():
                    sp.barrier()
                    base = 10 * (number + 1)
                    entered.enter(rank, base)
                    while entered.latest(1 - rank) < base:
                        time.sleep(0.0001)  # to yield would keep a processor from the other
                    text = run_disturbed(_find_call(name), injector, entered, rank, base)
                    if not number:
                        todo = [*choose(list(recorder.places))] if rank == 0 else []
                        count = sp.broadcast(len(todo))
            except sp.SyncTimeout as error:  # the other one is late from the world before
                return [*problems, f"before {place} in world {number}: {error}"]
            problems += [f"{place} in world {number}: {text}"] if text else []
            number += 1
        # Rank 1 leaves a block of `in_turn` by another call: what is between is not within a call.
        return problems + ([] if rank else recorder.say_interruptible())

    first, second = world.run_alone(program, **variables)
    return [*first, *second]


_HANDLING = 400  # instructions within which the library has dealt with an exception


def sample(count: int) -> Callable[[list[Place]], list[Disturbance]]:
    """Choose some places at random, half of them with a second exception."""

    def choose(places: list[Place]) -> list[Disturbance]:
        chosen = random.sample(places, min(count, len(places)))
        return [
            Disturbance(
                place, random.randint(1, _HANDLING) if number % 2 else 0, random.choice(ERRORS)
            )
            for number, place in enumerate(chosen)
        ]

    return choose


def every(places: list[Place]) -> list[Disturbance]:
    """Choose all places: once with one exception, and once with a second one soon after."""
    return [
        Disturbance(place, again, random.choice(ERRORS))
        for place in places
        for again in (0, random.randint(1, _HANDLING))
    ]


def every_call(places: list[Place]) -> list[Disturbance]:
    """Choose all places where Python runs signal handlers, once."""
    return [Disturbance(place) for place in places if place.name in INTERRUPTIBLE]


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_anywhere_is_never_a_wrong_value(call: str) -> None:
    assert disturb_threads(call, sample(12)) == []


@pytest.mark.parametrize("backend", ["file", "torch"])
@pytest.mark.parametrize(
    "call", ["barrier", "broadcast array", "all_gather pickle", "all_reduce array"]
)
def test_an_exception_anywhere_in_a_process(call: str, backend: str, meeting_place: Path) -> None:
    assert disturb_processes(Ranks(Kind(backend, 2), meeting_place), call, sample(10)) == []


@pytest.mark.parametrize("backend", ["file", "torch"])
def test_an_exception_anywhere_in_a_reform_ends_no_rank(backend: str, meeting_place: Path) -> None:
    """Where Python runs signal handlers: see the soak for every instruction."""
    choose = sample(40)
    assert disturb_threads("reform", every_call) == []
    assert disturb_processes(Ranks(Kind(backend, 2), meeting_place), "reform", choose) == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="it sees no instruction of that function")
def test_an_exception_while_a_file_is_written_is_not_changed(meeting_place: Path) -> None:
    """A TimeoutError is an OSError, as a full disk is."""

    def choose(places: list[Place]) -> list[Disturbance]:
        writing = [place for place in places if place.function == "PrivateDirectory.write"]
        assert writing
        return [Disturbance(place, 0, TimeoutError) for place in writing]

    assert disturb_processes(Ranks(Kind("file", 2), meeting_place), "all_gather text", choose) == []


def test_a_signal_handler_that_raises_frees_the_lock_of_the_run(meeting_place: Path) -> None:
    def choose(places: list[Place]) -> list[Disturbance]:
        locking = [place for place in places if place.function in ("_acquire", "_locked")]
        where = [place for place in locking if place.name in INTERRUPTIBLE]
        return [Disturbance(place, 0, error) for place in where for error in ERRORS[:2]]

    assert disturb_processes(Ranks(Kind("file", 2), meeting_place), "group", choose) == []


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_without_enough_stack_is_never_a_wrong_value(call: str, every: bool) -> None:
    for left in range(1, 150) if every else random.sample(range(4, 80), 6):
        assert run_threads(call, with_little_stack(left)) == ["", ""], left


@pytest.mark.soak
@pytest.mark.parametrize("call", [*CALLS, "reform"])
def test_an_exception_at_every_instruction_of_threads(call: str) -> None:
    assert disturb_threads(call, every) == []


_PARTS = 12  # of the places in `reform`, which are ten times as many as in other calls


@pytest.mark.soak
@pytest.mark.parametrize(
    ("call", "part", "parts"),
    [*((call, 0, 1) for call in CALLS), *(("reform", part, _PARTS) for part in range(_PARTS))],
)
@pytest.mark.parametrize("backend", ["file", "traced file", "torch"])
def test_anywhere_in_processes(
    call: str, part: int, parts: int, backend: str, meeting_place: Path, tmp_path: Path
) -> None:
    world = Ranks(Kind(backend.split()[-1], 2), meeting_place, patience=1800)
    variables = {"SYNCPRIMS_TRACE": str(tmp_path / "trace")} if "traced" in backend else {}
    choose = lambda places: every(places[part::parts])  # noqa: E731
    assert disturb_processes(world, call, choose, **variables) == []
