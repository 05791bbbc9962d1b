"""One rank at a time, in an order that a seed decides.

A rank gives up its turn where it waits for a round, or completes one. There the schedule decides
who is next: the thread wakes that rank and sleeps, which is one thread switch per change of ranks;
there is no thread above the ranks. As only one rank runs, nothing here needs a lock, and passing
the turn orders the memory accesses of both threads, also without a global interpreter lock.

A rank may have threads of its own, which run when they like. Such a thread has a turn too, but only
inside a call of the library. It takes the turn from a rank that is busy elsewhere, since that may
be waiting for it. So with them a seed does not decide the order. While one may still make a call,
no rank counts as stuck, and time passes as it does elsewhere. A thread that only another one can
wake makes none (`waiting_threads`); of one that sleeps, or that waits for a lock alone, nobody
knows.

A rank may wait outside of the library for what another one does there, such as a file. So where it
waits for an event with a time limit, or sleeps at one line again and again, another rank that is
able to run gets the turn; then a seed does not decide the order.

Time is virtual: it stands still while any rank can continue, and else jumps to the next deadline.
If there is no deadline either, no rank can ever continue, for certain.

Equal seeds give equal schedules, on every Python and platform. PCT is from Burckhardt, Kothari,
Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs"
(ASPLOS 2010): every rank has a random priority, the highest that can run does, and at `depth - 1`
random steps the priority of the running rank becomes the lowest. A bug that needs `depth` orderings
to occur is found by one schedule with a probability of at least
``1 / (ranks * steps ** (depth - 1))``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import random
import re
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

from syncprims._protocol.deadlock import DEADLOCK_SEARCH
from syncprims._protocol.threads import busy_threads, threads_that_may_call, waiting_threads
from syncprims.errors import ConcurrentCall

from .errors import WorldAborted
from .orders import Mode, OrderSchedule
from .rank_threads import Replacement, StartedThreads, rank_threads

T = TypeVar("T")
_event_wait = threading.Event.wait
_TAKE_AFTER = 0.01  # seconds without a step, after which a thread takes the turn from a busy rank
_LOOK_AT_HOLDER = 0.1  # seconds after which a rank looks whether the thread with the turn waits
_POLLS = 3  # waits at one line, without a step, that are polling and no pause
_HELPER = "syncprims-schedule"  # the name of a thread that passes the turn on
_LOOK_EVERY = 0.002  # seconds between two looks for a thread that may come


class Schedule(Protocol):
    """Picks the rank that continues."""

    exact: bool  #: it explores all orders, and has to know what ranks access

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return one of `able`; called at every step, where a rank gives up its turn.

        :param current: the rank that had the turn, or None if it cannot continue.
        """
        ...

    def access(self, rank: int, thing: Hashable, mode: Mode) -> None:
        """Take notice that `rank`, which has the turn, accesses something that ranks share."""


class _SeededSchedule:
    """Takes no notice of what ranks access."""

    exact = False

    def access(self, rank: int, thing: Hashable, mode: Mode) -> None:
        """Do nothing."""


class RandomSchedule(_SeededSchedule):
    """Picks any rank that can continue, each with equal probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return one of `able`."""
        return able[int(self._random() * len(able))]


class PCTSchedule(_SeededSchedule):
    """Picks the rank of the highest priority; priorities change at a few random steps."""

    def __init__(self, seed: int, ranks: int, steps: int, depth: int) -> None:
        source = random.Random(seed)
        order = list(range(ranks))
        source.shuffle(order)
        self._priority = [depth + place for place in order]
        changes = [1 + int(source.random() * steps) for _ in range(depth - 1)]
        self._changes = {step: depth - 1 - i for i, step in enumerate(changes)}
        self._step = 0

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return the one of `able` with the highest priority."""
        self._step += 1
        lower = self._changes.get(self._step)
        if lower is not None:
            highest = max(able, key=self._priority.__getitem__)
            self._priority[highest if current is None else current] = lower
        return max(able, key=self._priority.__getitem__)


class Seed(NamedTuple):
    """The seed of a schedule, which is short enough for a command line."""

    number: int
    depth: int = 0  #: of PCT; 0 is a random schedule
    steps: int = 0  #: of PCT: about how many the program has
    #: Instead: the steps at which the turn passes to another rank than usual, and these ranks.
    order: tuple[tuple[int, int], ...] | None = None

    def __str__(self) -> str:
        if self.order is not None:
            return "-".join(["order", *(f"{step}.{rank}" for step, rank in self.order)])
        return f"pct{self.depth}-{self.steps}-{self.number}" if self.depth else str(self.number)

    @classmethod
    def read(cls, text: int | str) -> Seed:
        """Return the seed that `text` represents.

        :raises ValueError: if it is neither a number nor a seed that a report has printed.
        """
        given = str(text).strip()
        if re.fullmatch(r"order(-\d{1,9}\.\d{1,6})*", given):
            pairs = (pair.split(".") for pair in given.split("-")[1:])
            return cls(0, order=tuple((int(step), int(rank)) for step, rank in pairs))
        found = re.fullmatch(r"(?:pct([1-9]\d{0,3})-(\d{1,12})-)?(\d{1,20})", given)
        if found is None:
            raise ValueError(
                f"seed={text!r}: a seed is a number, pct<depth>-<steps>-<number>, or order-..."
            )
        depth, steps, number = found.groups()
        return cls(int(number), int(depth or 0), int(steps or 0))

    def schedule(self, ranks: int) -> Schedule:
        """Return the schedule of this seed."""
        if self.order is not None:
            return OrderSchedule(dict(self.order))
        if self.depth:
            return PCTSchedule(self.number, ranks, max(1, self.steps), self.depth)
        return RandomSchedule(self.number)


def _never() -> bool:
    """Return False: a rank sleeps until its time."""
    return False


class RankThread(threading.Thread):
    """The thread of a rank: a daemon; threads that it starts are not, unless they ask for it.

    A thread inherits this from the one that starts it, and a rank is the main thread elsewhere.
    """

    turn: _Turn | None = None

    def run(self) -> None:
        """Run the rank."""
        self._daemonic = False
        # A world that is given up may raise it here when the rank has just ended. No context
        # manager: it could come at the start of `__exit__`.
        try:  # noqa: SIM105
            super().run()
        except WorldAborted:
            pass


class _Turn:
    """The state of one thread, and the block in which the thread is inside a board."""

    def __init__(self, scheduler: Scheduler, rank: int, *, own: bool) -> None:
        self._scheduler = scheduler
        self.rank = rank
        self.own = own  #: the rank's own thread, and not one that the program has started
        self.lock: threading.Lock = threading.Lock()
        self.lock.acquire()  # released when the thread gets the turn
        self.waits = own  #: for the turn; a rank's own thread begins with that
        self.ready: Callable[[], bool] | None = None
        self.until: float = math.inf
        self.done = False
        self.substitute: int | None = None  #: the thread that makes a call in place of the own one
        self._depth = 0
        self._polls: tuple[Hashable, int] = (None, 0)  # where, and how often in a row
        self.on_loan: list[None] = []  #: has an item while another rank may take the turn

    @property
    def halted(self) -> bool:
        """Whether the rank has ended, or a fault has stopped it: its threads do nothing more."""
        return self.done or (self.sleeps and self.until == math.inf)

    @property
    def sleeps(self) -> bool:
        """Whether nothing but the time ends this wait."""
        return self.ready is _never

    @property
    def inside(self) -> bool:
        return self._depth > 0

    def able(self, now: float) -> bool:
        if not self.waits:
            return False
        return self.ready is None or self.until <= now or self.ready()

    def wait_outside(self, wait: Callable[[], T], polled_from: FrameType | None) -> T:
        """Return what ``wait()`` returns, with the turn, which is on loan meanwhile.

        If it is a pause, `polled_from` is where it is made, and only polling lends the turn.
        """
        if polled_from is not None:
            place = polled_from.f_code, polled_from.f_lineno, self._scheduler.steps
            self._polls = place, self._polls[1] + 1 if self._polls[0] == place else 1
            if self._polls[1] < _POLLS:
                return wait()
        self.on_loan.append(None)
        try:
            return wait()
        finally:
            if not self.end_loan():
                self._scheduler.come(self)

    def end_loan(self) -> bool:
        """Return whether the turn was on loan until now: the rank or one other gets it."""
        try:
            self.on_loan.pop()
        except IndexError:
            return False
        return True

    def __enter__(self) -> _Turn:
        if not self._depth:
            self._scheduler.come(self)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.substitute = None
            if not self.own:
                self._scheduler.go(self)


def _lending(original: Callable[..., Any], *, pause: bool) -> Callable[..., Any]:
    """Return `original` as ranks call it, which wait by it outside of the library."""

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        turn = getattr(threading.current_thread(), "turn", None)
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        if (
            turn is None
            or turn.inside
            or turn.on_loan
            or (caller and caller.f_globals.get("__name__", "").startswith("syncprims."))
            or (original is _event_wait and len(args) + len(named) == 1)
        ):
            # The library's own wait, as for a world that a rank starts; or one that only another
            # thread ends, as that for the start of a thread.
            return original(*args, **named)
        wait = functools.partial(original, *args, **named)
        return turn.wait_outside(wait, caller if pause else None)

    return call


def _find_waits() -> list[tuple[Any, str, Any]]:
    waits: list[tuple[Any, str, bool]] = [
        (time, "sleep", True),
        (selectors.DefaultSelector, "select", True),  # of event loops
        (select, "select", False),
        (threading.Event, "wait", False),
        (sys.modules.get("multiprocessing.connection"), "wait", False),
    ]
    return [
        (owner, name, _lending(getattr(owner, name), pause=pause))
        for owner, name, pause in waits
        if inspect.isroutine(getattr(owner, name, None))  # not a mock, which counts its calls
    ]


#: While worlds of threads run.
waits_lend_turn: Replacement = Replacement(_find_waits)


class Scheduler:
    """Passes the turn among `ranks`.

    ``break_standstill(forever)`` is called when no rank can continue, for some time or forever. It
    returns whether it has enabled a rank to continue; otherwise the world is aborted if it would
    last forever.

    The last `late` ranks start with :meth:`add`, if at all.

    With `enter_rank`, ranks have globals of their own: it is called with each rank that gets the
    turn. Then a thread of a rank may only make a call while the rank's own thread waits for it.
    """

    def __init__(
        self,
        ranks: int,
        schedule: Schedule,
        break_standstill: Callable[[bool], bool],
        enter_rank: Callable[[int], None] | None = None,
        late: int = 0,
    ) -> None:
        self.steps: int = 0  #: decisions made
        self.aborted: bool = False
        #: Those that each rank has started.
        self.threads: list[StartedThreads] = [StartedThreads() for _ in range(ranks)]
        self.finished: threading.Event = threading.Event()
        self._turns = [_Turn(self, rank, own=True) for rank in range(ranks)]
        self._late = list(range(ranks - late, ranks))  # ranks that start later, if at all
        for rank in self._late:
            self._turns[rank].done, self._turns[rank].waits = True, False
        # By rank and thread. Not by the thread's number: a new thread has that of an ended one.
        self._by_thread: dict[tuple[int, threading.Thread], _Turn] = {}
        self._leaving: set[int] = set()  # ranks that wait for their threads to end
        self._holder: _Turn | None = None  # of the turn; None while no thread can have it
        self._passing = threading.Lock()  # held while the holder changes
        self._schedule = schedule
        self.exact: bool = schedule.exact  #: all orders are explored: ranks say what they access
        self._choosing = False  # what ranks wait for is looked at
        self._break_standstill = break_standstill
        self._enter_rank = enter_rank
        self._idents: dict[int, int] = {}  # the own thread of each rank
        self._now = 0.0

    # -- called by boards ---------------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def inside(self, rank: int) -> _Turn:
        """Return a context in which this thread of `rank` has the turn, unless it waits."""
        if self._enter_rank is not None:
            return self._check_sole(rank)
        key = rank, threading.current_thread()
        turn = self._by_thread.get(key)
        if turn is None:
            turn = self._by_thread[key] = _Turn(self, rank, own=False)
            self._turns.append(turn)
        return turn

    def step(self, rank: int) -> None:
        """Give the turn to the rank that the schedule picks, and return when it is back."""
        self.wait(rank, None, math.inf)

    def access(self, rank: int, thing: Hashable, mode: Mode) -> None:
        """Record that `rank` accesses something that ranks share, in this mode."""
        if not self._choosing:
            self._schedule.access(rank, thing, mode)

    def wait(self, rank: int, ready: Callable[[], bool] | None, until: float) -> None:
        """Return when ``ready()`` is true or the virtual time is `until`; other ranks run."""
        with self.inside(rank) as turn:
            if self.aborted:
                raise WorldAborted
            turn.ready, turn.until, turn.waits = ready, until, True
            try:
                chosen = self._choose(turn)
                if chosen is not turn:
                    self._pass_to(chosen)
                    self._await(turn)
            finally:
                turn.ready, turn.until, turn.waits = None, math.inf, False

    def sleep(self, rank: int, seconds: float) -> None:
        """Return after so many seconds of virtual time; other ranks run meanwhile."""
        self.wait(rank, _never, self._now + seconds)

    def await_threads(self, rank: int) -> None:
        """Return when `rank` has no thread left for which Python would wait at its exit."""
        if self._find_left(rank, busy_threads()):
            self._leaving.add(rank)
            self.wait(rank, lambda: not self._find_left(rank, busy_threads()), math.inf)
            self._leaving.discard(rank)

    # -- threads that the program has started ----------------------------------------------------

    def _check_sole(self, rank: int) -> _Turn:
        """Return the turn of `rank`, for its own thread or for one that this waits for.

        :raises ConcurrentCall: if both make calls: they need the globals of the rank, which are
            there only while it has the turn.
        """
        own, ident = self._turns[rank], threading.get_ident()
        if ident == (self._idents[rank] if own.substitute is None else own.substitute):
            return own
        mine = rank_threads.get()
        owner = next((r for r, threads in enumerate(self.threads) if threads is mine), rank)
        # Else the globals by which it has found this rank are those of another one.
        while owner == rank and self._holder is own and not own.inside and not self.aborted:
            if self._idents[rank] in waiting_threads(with_limit=True):
                own.substitute = ident
                return own
            time.sleep(_LOOK_EVERY)  # it is about to wait, or to make a call
        if self.aborted:
            raise WorldAborted
        raise ConcurrentCall(
            f"a thread of rank {owner} ({threading.current_thread().name!r}) makes a call, and "
            f"the rank's own thread runs at the same time. In this world ranks are threads, and "
            f"use the globals of torch.distributed in turns. Wait for the thread at once: "
            f"join(), result(). Or run the world with kind='processes'",
            rank=owner,
        )

    def come(self, turn: _Turn) -> None:
        """Return when this thread, which is outside of all boards, has the turn."""
        if self._holder is not turn:
            turn.waits = True
            self._await(turn)

    def _take_from_busy(self, turn: _Turn, steps: int) -> None:
        """Pass the turn on if it is with a thread outside, and has been there since `steps`.

        That one is busy elsewhere, and may wait for the thread that calls this. A rank's own thread
        takes it only from one that waits, in vain or with the turn on loan: nothing else than the
        seed decides among ranks.
        """
        if turn.own and steps != self.steps:
            return
        in_vain = turn.own and not self._who_may_come()
        with self._passing:
            holder = self._holder
            if holder in (None, turn) or holder.inside or steps != self.steps:
                return
            if not (in_vain or any(other.able(self._now) for other in self._turns)):
                return
            if turn.own and not in_vain and (self.exact or not holder.end_loan()):
                return
            self._holder = None
        self.pass_on()

    def go(self, turn: _Turn) -> None:
        """Pass the turn on, where a thread that has it leaves the boards."""
        if not self._give_up(turn):
            return
        if any(other.able(self._now) for other in self._turns):
            self.pass_on()
            return
        # This thread must not wait here: others may wait for what it does next.
        helper = threading.Thread(target=self.pass_on, name=_HELPER, daemon=True)
        contextvars.Context().run(helper.start)  # it is not a rank's

    def _give_up(self, turn: _Turn) -> bool:
        """Take the turn from this thread; return whether it had it and must pass it on."""
        with self._passing:
            if self._holder is not turn or self.aborted:
                return False
            self._holder = None
            return True

    def _who_may_come(self) -> str:
        """Return whether a "rank" may still make a call, else a "helper", a thread of one, or "".

        A rank that is not waiting has lost the turn, since it was busy elsewhere.
        """
        may_call = threads_that_may_call()
        outside = [turn for turn in self._turns if turn.own and not turn.waits and not turn.done]
        if any(self._idents.get(turn.rank) in {None, *may_call} for turn in outside):
            return "rank"
        goes_on = busy_threads() - waiting_threads()
        if any(self._find_left(rank, goes_on) for rank in list(self._leaving)):
            return "helper"  # it may end, and let the rank leave
        if self._enter_rank is not None and not outside:
            return ""  # else a thread may make a call only for a rank that waits for it
        # Those of a rank that has ended, or that a fault has stopped, make no more calls.
        living = [turn.rank for turn in self._turns if turn.own and not turn.halted]
        turns = list(self._by_thread.items())  # a thread that comes now adds its own
        callers = {thread: turn.waits for (rank, thread), turn in turns if rank in living}
        for thread in threading.enumerate():
            if thread not in callers and not any(
                thread in self.threads[rank].started for rank in living
            ):
                continue
            is_here = thread is threading.current_thread() or thread.ident in may_call
            if is_here and not isinstance(thread, RankThread) and not callers.get(thread):
                return "helper"
        return ""

    def _find_left(self, rank: int, idents: set[int]) -> list[threading.Thread]:
        """Return the threads for which Python would wait at the exit of `rank`.

        They are this one, or of these.
        """
        idents = {*idents, threading.get_ident()}
        living = [t for t in threading.enumerate() if t in self.threads[rank].started]
        return [thread for thread in living if thread.ident in idents and not thread.daemon]

    def describe_locked(self) -> dict[int, str]:
        """Return, for each rank that waits in no call, for which of its threads it waits."""
        texts = {
            turn.rank: "it waits for another of its threads, and none goes on"
            for turn in self._turns
            if turn.own and not turn.waits and not turn.done
        }
        for rank in self._leaving:
            names = ", ".join(sorted(t.name for t in self._find_left(rank, busy_threads())))
            texts[rank] = f"it has returned, and its exit waits for its thread {names}"
        return texts

    # -- called by the threads of a world -------------------------------------------------------

    def pass_on(self) -> None:
        """Give the turn, which no thread has, to the thread that the schedule picks."""
        with contextlib.suppress(WorldAborted):
            self._pass_to(self._choose(None))

    def enter(self, rank: int) -> None:
        """Return when `rank` has the turn; called once, by its own thread."""
        thread, turn = threading.current_thread(), self._turns[rank]
        self._by_thread[rank, thread] = turn
        if isinstance(thread, RankThread):
            thread.turn = turn
        self._idents[rank] = threading.get_ident()
        self._await(turn)

    def add(self, thread: threading.Thread) -> None:
        """Start `thread`, a rank one of the late ones."""
        turn = self._turns[self._late.pop(0)]
        turn.done, turn.waits = False, True
        contextvars.Context().run(thread.start)  # it is not a thread of the rank that runs now

    def leave(self, rank: int) -> None:
        """End the turns of `rank`; called by its own thread."""
        turn = self._turns[rank]
        turn.done = True
        turn.waits = False
        if self._give_up(turn):
            self.pass_on()

    def abort(self) -> None:
        """Raise `WorldAborted` on every rank, now or at its next call of the scheduler."""
        self.aborted = True
        for turn in self._turns:
            self._release(turn)
        self.finished.set()

    def ready_ranks(self) -> list[int]:
        """Return the ranks that could continue if they had the turn."""
        return [turn.rank for turn in self._turns if turn.own and turn.able(self._now)]

    # -- passing the turn -----------------------------------------------------------------------

    def _pass_to(self, turn: _Turn | None) -> None:
        if turn is None:
            self.finished.set()
            return
        with self._passing:
            self._holder, turn.waits = turn, False
        self._release(turn)

    def _release(self, turn: _Turn) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already: the world is given up
            turn.lock.release()

    def _await(self, turn: _Turn) -> None:
        """Return when `turn` comes; look at times whether the thread that has it uses it."""
        steps = self.steps
        while not turn.lock.acquire(timeout=_LOOK_AT_HOLDER if turn.own else _TAKE_AFTER):
            if not self.aborted:
                self._take_from_busy(turn, steps)
            steps = self.steps
        if self.aborted:
            raise WorldAborted
        if self._enter_rank is not None:
            self._enter_rank(turn.rank)

    def _choose(self, current: _Turn | None) -> _Turn | None:
        """Return the thread that has the turn now, or None when all are done."""
        looks = 0  # one after another that have found that no thread may come
        while True:
            now = self._now
            self._choosing = True
            able = [turn for turn in self._turns if turn.able(now)]
            self._choosing = False
            if able:
                self.steps += 1
                ranks = sorted({turn.rank for turn in able})
                rank = self._schedule.pick(
                    ranks, current.rank if current is not None and current in able else None
                )
                return next(turn for turn in able if turn.rank == rank)
            if self.aborted:
                raise WorldAborted
            if all(turn.done if turn.own else not turn.waits for turn in self._turns):
                return None
            comer = self._who_may_come()
            # A thread that may come ends no sleep of a rank, so that need not last as long.
            first = min(self._turns, key=lambda turn: turn.until)
            if comer and not (comer == "helper" and first.sleeps and first.until < math.inf):
                begin = time.monotonic()
                time.sleep(_LOOK_EVERY)
                if comer == "helper":  # it may sleep for long
                    self._now += time.monotonic() - begin
                looks = 0
                continue
            # Only a second look is certain. In the first one, a thread that was still to do
            # something may have ended before it was looked at, and have let a rank go on.
            looks += 1
            if looks < 2:
                continue
            looks = 0
            waiting = [turn.until for turn in self._turns if turn.waits]
            deadline = min(waiting, default=math.inf)
            # In a process, too, a deadlock is found before a longer time limit.
            if deadline >= now + DEADLOCK_SEARCH:
                self._choosing = deadline < math.inf  # ranks that go on have accessed nothing
                broken = self._break_standstill(deadline == math.inf)
                self._choosing = False
                if broken:
                    continue
            if deadline == math.inf:
                self.abort()
                raise WorldAborted
            self._now = max(now, deadline)
