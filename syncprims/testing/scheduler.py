"""One rank at a time, in an order that a seed decides.

A rank gives up its turn where it waits for a round, or completes one. There the schedule decides
who is next: the thread wakes that rank and sleeps, which is one thread switch per change of ranks;
there is no thread above the ranks. As only one rank runs, nothing here needs a lock, and passing
the turn orders the memory accesses of both threads, also without a global interpreter lock.

A rank that has the turn may wait outside of the library, in Python or in C, for what another rank
or thread does there: a lock, a file, a socket. Nothing tells that but the system: a rank that uses
no processor for some time has lost the turn. As soon as it is back in Python, it waits until it has
the turn again. So one rank runs at a time, but a seed does not decide when that one came back
(`undecided`).

A rank may have threads of its own, which run when they like. Such a thread has a turn too, but only
inside a call of the library. While one may still make a call, no rank counts as stuck, and time
passes as it does elsewhere. A thread that only another one can wake makes none.

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
import math
import random
import re
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import NamedTuple, Protocol

from syncprims._protocol.call_site import describe_users_line
from syncprims._protocol.deadlock import DEADLOCK_SEARCH
from syncprims._protocol.threads import (
    Activity,
    busy_threads,
    look_at_threads,
    threads_that_may_call,
    waiting_threads,
    waits_for_thread,
)
from syncprims.errors import ConcurrentCall

from .errors import WorldAborted
from .orders import Mode, OrderSchedule
from .rank_threads import (
    StartedThreads,
    call_when_back,
    find_state,
    forget_to_call,
    rank_threads,
)

_PATIENCE = 0.1  # seconds in which a rank with the turn uses no processor, before it loses it
_LEAST_PATIENCE = 0.005  # for one that loses it again and again, as it polls
_USED = 0.2  # the part of a time that a rank uses a processor, if it makes progress
_LONGEST_PAUSE = 0.05  # seconds between two looks at the thread that has the turn
_OTHERS = 0.5  # seconds that threads of no rank have to wake a rank that waits for a thread
_DEBUGGERS = ("bdb", "pdb", "pydevd")
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


def is_in_debugger(frame: FrameType) -> bool:
    """Return whether a debugger runs there."""
    outer: FrameType | None = frame
    while outer and str(outer.f_globals.get("__name__")).split(".")[0] not in _DEBUGGERS:
        outer = outer.f_back
    return outer is not None


def _never() -> bool:
    """Return False: a rank sleeps until its time."""
    return False


class RankThread(threading.Thread):
    """The thread of a rank: a daemon; threads that it starts are not, unless they ask for it.

    A thread inherits this from the one that starts it, and a rank is the main thread elsewhere.
    """

    turn: _Turn | None = None
    state: int | None = None  #: Python's own state of the thread, by its address

    def run(self) -> None:
        """Run the rank."""
        self._daemonic = False
        # A world that is given up may raise it here when the rank has just ended. No context
        # manager: it could come at the start of `__exit__`.
        try:  # noqa: SIM105
            super().run()
        except WorldAborted:
            pass
        forget_to_call(self)


class _Turn:
    """The state of one thread, and the block in which the thread is inside a board."""

    def __init__(self, scheduler: Scheduler, rank: int, *, own: bool) -> None:
        self._scheduler = scheduler
        self.rank = rank
        self.own = own  #: the rank's own thread, and not one that the program has started
        self.thread: threading.Thread | None = None
        self.lock: threading.Lock = threading.Lock()
        self.lock.acquire()  # released when the thread gets the turn
        self.waits = own  #: for the turn; a rank's own thread begins with that
        self.ready: Callable[[], bool] | None = None
        self.until: float = math.inf
        self.done = False
        self.substitute: int | None = None  #: the thread that makes a call in place of the own one
        self.patience: float = _PATIENCE
        self.depth: int = 0  #: above 0 inside of boards

    @property
    def halted(self) -> bool:
        """Whether the rank has ended, or a fault has stopped it: its threads do nothing more."""
        return self.done or (self.sleeps and self.until == math.inf)

    @property
    def sleeps(self) -> bool:
        """Whether nothing but the time ends this wait."""
        return self.ready is _never

    @property
    def outside(self) -> bool:
        """Whether the rank has lost the turn, and is not back."""
        return not (self.waits or self.done or self._scheduler.holds(self)) and self.own

    def able(self, now: float) -> bool:
        if not self.waits:
            return False
        return self.ready is None or self.until <= now or self.ready()

    def __enter__(self) -> _Turn:
        if self.depth:
            self.depth += 1
        else:
            self._scheduler.come(self, 1)
            self.patience = _PATIENCE
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.substitute = None
            if not self.own:
                self._scheduler.go(self)


class _Rest(NamedTuple):
    """What the thread with the turn did at a look at it, outside of the boards."""

    holder: _Turn
    steps: int
    since: float
    first: Activity  #: at that time
    last: Activity  #: at the latest look


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
        self._rest: _Rest | None = None  # of the holder
        #: Where ranks have first lost the turn while others could go on: no seed decided that.
        self.undecided: dict[int, str] = {}
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
            turn.thread = key[1]
            self._turns.append(turn)
        return turn

    def holds(self, turn: _Turn) -> bool:
        """Return whether this thread has the turn."""
        return self._holder is turn

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
        while owner == rank and self._holder is own and not own.depth and not self.aborted:
            assert own.thread is not None
            before = Activity.of(own.thread)
            time.sleep(_LOOK_EVERY)  # it is about to wait, or to make a call
            now = Activity.of(own.thread)
            if (now.call, now.runs) == (before.call, before.runs) and not own.depth:
                own.substitute = ident
                return own
        if self.aborted:
            raise WorldAborted
        raise ConcurrentCall(
            f"a thread of rank {owner} ({threading.current_thread().name!r}) makes a call, and "
            f"the rank's own thread runs at the same time. In this world ranks are threads, and "
            f"use the globals of torch.distributed in turns. Wait for the thread at once: "
            f"join(), result(). Or run the world with kind='processes'",
            rank=owner,
        )

    def come(self, turn: _Turn, depth: int = 0) -> None:
        """Return when this thread has the turn, so many boards deeper."""
        turn.depth += 1  # first: a thread that waits for this lock does not rest
        with self._passing:
            turn.waits = self._holder is not turn
        if turn.waits:
            self._await(turn)
        turn.depth += depth - 1

    def _look_at_holder(self) -> None:
        """Pass the turn on if the thread that has it rests outside of the boards.

        It rests if it waits for another thread, or has used no processor for some time.
        """
        with self._passing:
            holder, now, rest = self._holder, time.monotonic(), self._rest
            if holder is None or holder.depth or holder.thread is None:
                return
            activity = Activity.of(holder.thread)
            if rest is None or rest[:2] != (holder, self.steps):
                self._rest = _Rest(holder, self.steps, now, activity, activity)
                return
            self._rest = rest._replace(last=activity)
            waits = activity == rest.last and waits_for_thread(holder.thread, activity)
            passed = now - rest.since
            if activity.runs_now or activity.used - rest.first.used > _USED * passed * 1e9:
                self._rest = None
                return
            able = any(other.able(self._now) for other in self._turns)
            if not (waits or (able and passed > holder.patience)) or self._needs_turn(holder):
                return
            # From now on it waits where it makes a call. Has it made one just before?
            self._holder = None
            self._stop_when_back(holder)
            last, activity = activity, Activity.of(holder.thread)
            if (last.call, last.runs) != (activity.call, activity.runs):
                self._holder = holder
                forget_to_call(holder.thread)
                return
            holder.patience = max(_LEAST_PATIENCE, holder.patience / 2)
            if able:
                self.undecided.setdefault(holder.rank, self.describe_outside(holder))
        self.pass_on()

    def _needs_turn(self, holder: _Turn) -> bool:
        """Return whether a rank that rests must keep the turn.

        It is in a debugger; or a thread of it may make a call for it, with its globals.
        """
        ident = holder.thread.ident if holder.thread else None
        if look_at_threads(is_in_debugger).get(ident or 0):
            return True
        mine = {t.ident for t in threading.enumerate() if t in self.threads[holder.rank].started}
        return self._enter_rank is not None and bool(mine & threads_that_may_call())

    def _stop_when_back(self, holder: _Turn) -> None:
        def stop() -> None:
            if not holder.depth:  # else it is about to look itself whether it has the turn
                self.come(holder)

        if isinstance(holder.thread, RankThread):
            call_when_back(holder.thread, holder.thread.state, stop)

    def describe_outside(self, turn: _Turn) -> str:
        """Return where a rank waits that has lost the turn."""
        lines = look_at_threads(describe_users_line)
        line = lines.get((turn.thread and turn.thread.ident) or 0, "")
        return f"waits outside of the library, at {line}"

    def go(self, turn: _Turn) -> None:
        """Pass the turn on, if this thread has it, which leaves the boards."""
        if not self._give_up(turn):
            return
        awaited = not turn.own or any(other.outside for other in self._turns)
        if not awaited or any(other.able(self._now) for other in self._turns):
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

    def _who_may_come(self) -> str | None:
        """Return whether a "rank" may still make a call, else a "helper", a thread of one, or "".

        If no thread of ranks goes on but by another one, that may be one of the "others". None if
        all wait in calls.
        """
        outside = [turn for turn in self._turns if turn.outside]
        # Those of a rank that has ended, or that a fault has stopped, make no more calls.
        living = [turn.rank for turn in self._turns if turn.own and not turn.halted]
        turns = list(self._by_thread.items())  # a thread that comes now adds its own
        callers = {thread: turn.waits for (rank, thread), turn in turns if rank in living}
        helpers = [
            thread
            for thread in threading.enumerate()
            if thread in callers or any(thread in self.threads[rank].started for rank in living)
            if not isinstance(thread, RankThread)
        ]
        if not outside and not helpers:
            return None
        may_call = threads_that_may_call()
        if any(self._idents.get(turn.rank) in {None, *may_call} for turn in outside):
            return "rank"
        goes_on = busy_threads() - waiting_threads()
        if any(self._find_left(rank, goes_on) for rank in list(self._leaving)):
            return "helper"  # it may end, and let the rank leave
        # In a world with globals of ranks, a thread makes calls only for a rank that waits for it.
        if self._enter_rank is None or outside:
            for thread in helpers:
                is_here = thread is threading.current_thread() or thread.ident in may_call
                if is_here and not callers.get(thread):
                    return "helper"
        ranks = {turn.thread for turn in self._turns}
        others = [t for t in threading.enumerate() if t not in ranks and t not in helpers]
        return "others" if outside and any(t.ident in may_call for t in others) else ""

    def _find_left(self, rank: int, idents: set[int | None]) -> list[threading.Thread]:
        """Return the threads for which Python would wait at the exit of `rank`.

        They are this one, or of these.
        """
        idents = {*idents, threading.get_ident()}
        living = [t for t in threading.enumerate() if t in self.threads[rank].started]
        return [thread for thread in living if thread.ident in idents and not thread.daemon]

    def describe_locked(self) -> dict[int, str]:
        """Return where each rank waits that waits in no call."""
        texts = {turn.rank: self.describe_outside(turn) for turn in self._turns if turn.outside}
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
        turn.thread = thread
        if isinstance(thread, RankThread):
            thread.turn, thread.state = turn, find_state()
        self._idents[rank] = threading.get_ident()
        turn.depth = 1
        self._await(turn)
        turn.depth = 0

    def add(self, thread: threading.Thread) -> None:
        """Start `thread`, a rank one of the late ones."""
        turn = self._turns[self._late.pop(0)]
        turn.done, turn.waits = False, True
        contextvars.Context().run(thread.start)  # it is not a thread of the rank that runs now

    def leave(self, rank: int) -> None:
        """End the turns of `rank`; called by its own thread."""
        turn = self._turns[rank]
        turn.depth += 1  # it is not outside any more
        turn.done = True
        turn.waits = False
        self.go(turn)

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
        pause = _LOOK_EVERY
        while not turn.lock.acquire(timeout=pause):
            pause = min(2 * pause, _LONGEST_PAUSE)
            if not self.aborted:
                self._look_at_holder()
        if self.aborted:
            raise WorldAborted
        if self._enter_rank is not None:
            self._enter_rank(turn.rank)

    def _choose(self, current: _Turn | None) -> _Turn | None:
        """Return the thread that has the turn now, or None when all are done."""
        standstill = time.monotonic()
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
            begin = time.monotonic()
            comer = self._who_may_come()
            if comer == "others" and begin > standstill + _OTHERS:
                comer = ""
            # A thread that may come ends no sleep of a rank, so that need not last as long.
            first = min(self._turns, key=lambda turn: turn.until)
            if comer and not (comer == "helper" and first.sleeps and first.until < math.inf):
                time.sleep(_LOOK_EVERY)
                if comer == "helper":  # it may sleep for long
                    self._now += time.monotonic() - begin
                looks = 0
                continue
            # Only a second look is certain. In the first one, a thread that was still to do
            # something may have ended before it was looked at, and have let a rank go on.
            looks += 1
            if looks < 2:
                if comer is not None:
                    time.sleep(_LOOK_EVERY)
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
