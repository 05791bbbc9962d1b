"""The worlds that run on this host, seen from outside: what each rank does now.

Nothing has to be switched on in the job, and reading does not slow it down. Every look is compared
with the look before: the report contains only what both have seen.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from syncprims._system.processes import find_descendants
from syncprims._world.runtime import get_settings
from syncprims.errors import BackendUnavailable, ConfigurationError, name_ranks
from syncprims.interface import Status

from . import processes
from .finding import (
    MOST_NAMED,
    NOTABLE,
    BoardView,
    Finding,
    RankWait,
    WorldView,
    judge,
    subject,
)
from .processes import ProcessSample, StackLine, may_spin

if TYPE_CHECKING:
    from .worlds import WorldReader

_PAUSE = 0.1  # seconds between the two looks of `who`
_BUSY = 0.5  # of a processor: such a process computes
_MOST_WORKERS = 4  # processes of a rank that are looked at
_ALONE = ("running", "uninterruptible", "stopped")  # states of ranks that are in no call of ours
_MOVES = 0.05  # of a processor: threads that carry data use more
_STACKS_EVERY = 2.0  # seconds between two readings of Python stacks


#: What a rank does, or how it has ended; elsewhere: it is on another host.
RankState = Literal[
    "absent", "joining", "running", "waiting", "stopped", "uninterruptible",
    "finished", "failed", "lost", "elsewhere",
]  # fmt: skip


class RankReport(NamedTuple):
    """What one rank does."""

    rank: int
    pid: int | None  #: as this process sees it; None if it does not
    state: RankState
    call: str | None  #: the call that it is in or, if it runs, was seen in last
    name: str | None  #: of that call
    site: str | None  #: the ``file:line`` of that call
    group: list[int] | None  #: whose call it is; None if it is the world's own
    round: int  #: how many rounds of that group it has taken part in, with the one under way
    rounds: int  #: the same, of all its groups
    waiting_s: float | None  #: how long it has waited in that call; None if it does not
    behind: int  #: how many rounds others of that group are ahead
    processor: float | None  #: the share of a processor that it used last
    doing: str  #: what the system, or py-spy, says about it


class WorldReport(NamedTuple):
    """A world, or its part on this host."""

    run_id: str
    backend: str
    world_size: int
    ranks: list[RankReport]
    finding: Finding
    path: str  #: the directory in which the ranks of this host meet
    last_barrier: str | None  #: with a name, that all have passed
    restart: int | None  #: how often the run was started again, if the launcher says it
    idle_s: float | None  #: for how long no round was completed; None if no call shows that


class _Look(NamedTuple):
    """What one look has seen in a world."""

    view: WorldView
    at: float
    samples: Mapping[int, ProcessSample]


@dataclass
class _Kept:
    """What is kept of a world from one look to the next."""

    before: _Look | None = None
    clocks: dict[int, float] = field(default_factory=dict[int, float])  #: of ranks of other hosts
    lines: dict[int, StackLine] = field(default_factory=dict[int, StackLine])  #: of processes
    lines_at: float = -math.inf
    #: The ranks in collectives of torch: line and rounds of each, and the first look at it there.
    in_torch: dict[int, tuple[Any, ProcessSample]] = field(default_factory=dict[int, Any])


def who(
    which: str | int | os.PathLike[str] | None = None,
    *,
    stuck_after: float = 30.0,
    all_hosts: bool = False,
) -> list[WorldReport]:
    """Return what every rank of the worlds on this host does, and what each world waits for.

    `which` is a run id, a directory in which ranks meet, or the pid of a rank or of its launcher;
    None takes all worlds of this user. A wait of at least `stuck_after` seconds makes a finding
    `stuck`. With `all_hosts`, what ranks of other hosts do is read from the store of the run. The
    job is not touched: nothing is written, locked, signalled or stopped.

    :raises ConfigurationError: if there is no such world, or it belongs to another user.
    :raises BackendUnavailable: on a system where worlds cannot be read.
    """
    with contextlib.closing(Observation(which, stuck_after, all_hosts)) as observation:
        observation.look()
        time.sleep(observation.pause)
        return observation.look()


@dataclass
class Observation:
    """Finds worlds, as :func:`who`, and looks at them repeatedly."""

    which: str | int | os.PathLike[str] | None
    stuck_after: float
    all_hosts: bool = False
    pause: float = _PAUSE  #: seconds between two looks, at least
    refused: Sequence[str] = ()  #: directories that this user may not read
    _kept: dict[str, _Kept] = field(default_factory=dict[str, _Kept])  # by world

    def __post_init__(self) -> None:
        self._readers = () if self.which is None else self._find()

    def look(self) -> list[WorldReport]:
        """Return what the worlds do now; none once all have ended."""
        if self.which is None:
            self.close()
            self._readers = self._find()
        reports: list[WorldReport] = []
        worlds: dict[str, _Kept] = {}
        for reader in self._readers:
            view = reader.read()
            if view is not None and (self.which is not None or _lives(view)):
                kept = worlds[reader.path] = self._kept.get(reader.path) or _Kept()
                unknown = [r for r, one in view.states.items() if one.state == "unknown"]
                if unknown and view.pids:
                    started = processes.find_started(view.pids.values(), unknown)
                    view = view._replace(pids={**view.pids, **started})
                if self.all_hosts and view.store:
                    view = self._add_other_hosts(view, kept)
                samples = {rank: processes.sample(pid) for rank, pid in view.pids.items()}
                look = _Look(view, time.monotonic(), samples)
                before, kept.before = kept.before or look, look
                report = self._report(reader.path, kept, before, look)
                if report.finding.kind in ("moving", "lost", "failed"):
                    report = self._look_into_torch(report, kept, before, look)
                reports.append(report)
        self._kept = worlds
        return reports

    def _add_other_hosts(self, view: WorldView, kept: _Kept) -> WorldView:
        from .worlds import add_other_hosts

        self.pause = max(self.pause, 1.5 * view.store[-1])  # until each has published again
        before = kept.before.view.others if kept.before else None
        return add_other_hosts(view, before, kept.clocks)

    def close(self) -> None:
        """Release what is open."""
        for reader in self._readers:
            reader.close()
        self._readers = ()

    # -- finding --------------------------------------------------------------------------------

    def _find(self) -> Sequence[WorldReader]:
        try:
            from .worlds import find_worlds
        except (ImportError, AttributeError) as error:  # of Windows
            what = f"running worlds cannot be read here: {error}"
            raise BackendUnavailable(f"{what}. They can on Linux and macOS") from error
        which, settings = self.which, get_settings()
        if which is None:
            readers, self.refused = find_worlds(settings)
            return readers
        text = os.fspath(which) if isinstance(which, os.PathLike) else str(which)
        if isinstance(which, os.PathLike) or os.sep in text or Path(text).is_dir():
            where = f"in {text}"
            readers, refused = find_worlds(settings, path=str(Path(text).absolute()))
        else:
            where = f"with run id {text!r}"
            may_be_pid = text.isdecimal() and len(text) <= 7  # digits: no pid has more
            readers, refused = find_worlds(settings)
            readers = [*_of_run(readers, text, whole=may_be_pid)]
            if may_be_pid and not readers:
                pids = [int(text), *find_descendants(int(text))]
                readers, _ = find_worlds(settings, pids=pids)
                # Where their open files are not listed, the world says which processes it has.
                readers = readers or _of_processes(find_worlds(settings)[0], pids)
                if not readers:
                    raise _no_rank(int(text))
        if not readers:
            more = f". {explain_refused(refused)}" if refused else ""
            what = f"no world runs {where} on this host; `syncprims who` shows those that do"
            raise ConfigurationError(what + more)
        return readers

    # -- reporting ------------------------------------------------------------------------------

    def _report(self, path: str, kept: _Kept, before: _Look, now: _Look) -> WorldReport:
        view, waits = now.view, _common_waits(before, now)
        seen = {*view.pids, *view.others}
        held = {rank for rank, wait in waits.items() if not wait.in_background}
        awaited: set[int] = set()  # visible ranks that others wait for: stopped, or not in a wait
        for wait in waits.values():
            if wait.seconds >= min(NOTABLE, self.stuck_after):
                for rank in wait.missing or wait.board.members:
                    stopped = rank in view.pids and now.samples[rank].state in "Tt"
                    if stopped or (wait.missing and rank in seen and rank not in held):
                        awaited.add(rank)
        if awaited and time.monotonic() - kept.lines_at >= _STACKS_EVERY:
            local = [rank for rank in sorted(awaited) if rank in view.pids]
            running = [view.pids[rank] for rank in local if now.samples[rank].state not in "TtZ"]
            kept.lines, kept.lines_at = self._read_lines(running), time.monotonic()
        rows = [
            _report_rank(
                rank, before, now, waits.get(rank), kept.lines if rank in awaited else None
            )
            for rank in range(view.world_size)
        ]
        doing = {row.rank: row.doing for row in rows if row.rank in awaited and row.doing}
        doing |= {rank: f"is {what}" for rank, what in doing.items() if rank in view.others}
        barrier = next((b.last_barrier for b in view.boards if view.begins_at(b)), None)
        waited = max((wait.seconds for wait in waits.values()), default=None)
        last_barrier = None if barrier is None else str(barrier)
        restarts = processes.count_restarts(view.pids.values())
        idle_s = 0.0 if _rounds(now) != _rounds(before) else waited and round(waited, 3)
        finding = judge(view, waits, doing, self.stuck_after)
        return WorldReport(*view[:3], rows, finding, path, last_barrier, restarts, idle_s)

    def _look_into_torch(
        self, report: WorldReport, kept: _Kept, before: _Look, now: _Look
    ) -> WorldReport:
        """Return the report of a world, some of whose ranks stand in collectives of torch.

        Nothing but their lines shows that. A rank stands there if it was in the same line at the
        look before, and has not gone on meanwhile.
        """
        known, kept.in_torch = kept.in_torch, {}
        pids = {row.rank: row.pid for row in report.ranks if row.state in _ALONE and row.pid}
        if not any(map(processes.uses_torch, pids.values())):
            return report
        lines = self._read_lines(pids.values())
        if not lines and report.finding.kind == "moving":
            why = "whether one waits in torch is not seen, since py-spy cannot read them here"
            text = f"no rank waits in a call of this library; {why}"
            return report._replace(finding=report.finding._replace(text=text))
        stands, waited = kept.in_torch, dict[int, float]()
        for rank, pid in pids.items():
            line, sample = lines.get(pid), now.samples[rank]
            if line is not None and line.collective:
                at = line, report.ranks[rank].rounds
                old, since = known.get(rank, (None, sample))
                spins = may_spin(pid, line.collective)
                stays = at == old and not since.goes_on(sample, may_spin=spins)
                stands[rank] = at, since if stays else sample
                waited[rank] = sample.at - stands[rank][1].at
        if not any(waited.values()):
            return report
        longest = max(waited, key=lambda rank: (waited[rank], -rank))
        collective = lines[pids[longest]].collective
        inside = [rank for rank in stands if lines[pids[rank]].collective == collective]
        outside = [
            row for row in report.ranks if row.rank not in inside and row.state != "elsewhere"
        ]
        if not outside and any(
            now.samples[rank].beside - stands[rank][1].beside > _MOVES * waited[rank]
            for rank in inside
        ):
            return report  # other threads of theirs carry the data
        doing = {r: _describe(r, before, now, lines.get(pid)) for r, pid in pids.items()}
        text = subject(inside) if outside else "all ranks here have"
        text += f" been in {collective} of torch for {waited[longest]:.1f} s or longer"
        if outside:
            text += f", and {name_ranks([row.rank for row in outside])} not"
        for row in outside[:MOST_NAMED]:
            text += f"\n  rank {row.rank}: {doing.get(row.rank) or row.state}"
        if report.finding.kind != "moving":
            text = f"{report.finding.text}\n{text}"
        faults = [row.rank for row in outside if row.rank not in stands]
        stuck = waited[longest] >= self.stuck_after
        return report._replace(
            ranks=[row._replace(doing=doing.get(row.rank, row.doing)) for row in report.ranks],
            finding=Finding("torch", faults, text, waited[longest], stuck),
        )

    def _read_lines(self, pids: Iterable[int]) -> dict[int, StackLine]:
        """Return the lines of these processes, each with that of a process that it has started."""
        running = list(pids)
        workers = {pid: sorted(find_descendants(pid))[:_MOST_WORKERS] for pid in running}
        lines = processes.python_lines([*running, *itertools.chain(*workers.values())])
        for pid in running:
            line = lines.get(pid, StackLine("C"))
            for worker in [one for one in workers[pid] if one in lines][:1]:
                if not line.collective:  # as of a loader
                    lines[pid] = StackLine(f"{line}; its process {worker} is in {lines[worker]}")
        return lines


def _describe(rank: int, before: _Look, now: _Look, line: StackLine | None) -> str:
    """Return what the process of a rank does, and in which line, as a sentence goes on."""
    earlier, sample = before.samples.get(rank, ProcessSample()), now.samples[rank]
    doing = _activity(now.view.pids[rank], earlier, sample, processes.share(earlier, sample))
    return f"{doing}, in {line}" if doing and line else doing


def _activity(pid: int, before: ProcessSample, now: ProcessSample, used: float | None) -> str:
    """Return what a process does, as a sentence about a rank goes on."""
    if now.state in "Tt":
        return f"is stopped by a signal, or by a debugger (kill -CONT {pid})"
    if now.state == "D" == before.state:
        return f"is in uninterruptible sleep: {now.syscall or now.channel or 'slow storage?'}"
    if now.state == "R" or (used or 0.0) >= _BUSY:
        return "computes" if used is None else f"computes ({used:.0%} of a processor)"
    if now.syscall or now.channel:
        where = f" ({now.channel})" if now.syscall and now.channel else ""
        return f"sleeps in {now.syscall or now.channel}{where}"
    return "sleeps" if now.state == "S" else ""


def _rounds(look: _Look) -> list[list[int]]:
    return [[one.rounds for one in board.statuses.values()] for board in look.view.boards]


def _lives(view: WorldView) -> bool:
    return bool(view.problem) or any(one.state == "alive" for one in view.states.values())


def _common_waits(before: _Look, now: _Look) -> dict[int, RankWait]:
    """Return the longest wait of each rank that both looks have seen.

    A wait that began before the first look, and is the same at the second, has lasted all the time
    in between. So the missing notes were missing all the time while this rank waited. If none is
    missing, it is about to go on.
    """
    old = {board.at: board.waits for board in before.view.boards}
    found: dict[int, RankWait] = {}
    for board in now.view.boards:
        absent: dict[int, list[int]] = {}  # by round
        for rank, wait in board.waits.items():
            if wait.number not in absent:
                statuses = board.statuses.items()
                absent[wait.number] = [r for r, one in statuses if one.rounds < wait.number]
            missing, seconds = absent[wait.number], max(0.0, now.at - wait.since)
            same = old.get(board.at, {}).get(rank) == wait
            longer = rank not in found or seconds > found[rank].seconds
            if same and longer and (missing or wait.for_data):
                found[rank] = RankWait(board, wait.number, seconds, sorted(missing))
    return found


def _report_rank(
    rank: int,
    before: _Look,
    now: _Look,
    wait: RankWait | None,
    lines: Mapping[int, StackLine] | None,
) -> RankReport:
    """Return what a rank does; `lines` of processes are given if others wait for it."""
    view, pid = now.view, now.view.pids.get(rank)
    earlier = before.samples.get(rank, ProcessSample())
    sample = now.samples.get(rank, ProcessSample())
    used = processes.share(earlier, sample)
    known = view.states[rank].state if rank in view.states else None
    state: RankState = "elsewhere"
    if known == "unknown":
        state = "absent"
    elif known == "alive":
        if sample.state in "Tt":
            state = "stopped"
        elif not any(
            all(one.rounds for one in board.statuses.values())
            for board in view.boards
            if view.begins_at(board)
        ):
            state = "joining"
        elif wait is not None:
            state = "waiting"
        else:
            state = "uninterruptible" if sample.state == "D" == earlier.state else "running"
    elif known is not None:
        state = known
    doing = ""
    if rank in view.hosts and (state == "elsewhere" or rank in view.others):
        doing = f"on host {view.hosts[rank]}"
    if about := view.others.get(rank):
        doing += f" (pid {about.pid})"
        if state == "elsewhere":
            doing += ": it is stopped, or in C code that holds Python's lock, or has ended"
        elif line := processes.innermost(about.frames):
            doing += f", in {line}"
    if pid is not None and lines is not None:
        doing = _describe(rank, before, now, lines.get(pid))
    board = wait.board if wait is not None else _latest_board(rank, before.view, view)
    status = board.statuses[rank] if board is not None else view.states.get(rank, Status())
    label, number, behind, group = status.label, status.rounds, 0, None
    if board is not None:
        number -= view.begins_at(board)
        behind = max(one.rounds for one in board.statuses.values()) - status.rounds
        group = None if view.begins_at(board) else list(board.members)
    call, name, site = (None,) * 3 if label is None else (label.kind, label.name, label.site)
    rounds = sum(one.statuses[rank].rounds for one in view.boards if rank in one.statuses)
    waiting_s = None if wait is None else round(wait.seconds, 3)
    counts = max(0, number), rounds, waiting_s, max(0, behind)
    return RankReport(rank, pid, state, call, name, site, group, *counts, used, doing)


def _latest_board(rank: int, before: WorldView, now: WorldView) -> BoardView | None:
    """Return the board of a rank's last call, as far as that is known.

    One at which it has made a call since the first look; else one at which others wait for it; else
    that of all ranks.
    """
    old = {b.at: b.statuses[rank].rounds for b in before.boards if rank in b.statuses}

    def relevance(board: BoardView) -> int:
        rounds = board.statuses[rank].rounds
        if rounds > old.get(board.at, 0):
            return 2
        return int(any(rounds < wait.number for wait in board.waits.values()))

    theirs = [board for board in now.boards if rank in board.statuses]
    return max(theirs, key=relevance, default=None)


# -- what is not found ------------------------------------------------------------------------


def _of_run(readers: Sequence[WorldReader], run_id: str, *, whole: bool) -> Sequence[WorldReader]:
    """Return the readers of a run, and close the others; a part of its id is enough if not `whole`.

    Unless several run ids begin with it.
    """
    ids = {reader: view.run_id for reader in readers if (view := reader.read()) is not None}
    longer = {one for one in ids.values() if one.startswith(run_id)}
    if not whole and run_id not in longer and len(longer) == 1:
        run_id = longer.pop()
    chosen = [reader for reader in ids if ids[reader] == run_id]
    for reader in readers:
        if reader not in chosen:
            reader.close()
    return chosen


def _of_processes(readers: Sequence[WorldReader], pids: Iterable[int]) -> Sequence[WorldReader]:
    """Return the readers of worlds of these ranks and launchers, and close the others."""
    from .worlds import launcher_of

    chosen: list[WorldReader] = []
    for reader in readers:
        view = reader.read()
        ranks = () if view is None else view.pids.values()
        if {*ranks, launcher_of(reader.path)}.isdisjoint(pids):
            reader.close()
        else:
            chosen.append(reader)
    return chosen


def _no_rank(pid: int) -> ConfigurationError:
    """Return the error for a process that is in no world which this user can see."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        what = f"there is no run with id {pid}, and no process {pid}"
        return ConfigurationError(f"{what}; `syncprims who` shows the worlds of this host")
    if os.geteuid() not in (0, owner):
        what = f"process {pid} belongs to user {owner}"
        return ConfigurationError(f"{what}: only that user, or root, can see its world")
    what = f"process {pid} is no rank of a world, and has started none"
    return ConfigurationError(f"{what}: it made no call yet, has left, or shares no files")


def explain_refused(refused: Sequence[str]) -> str:
    """Return why some worlds are not shown."""
    more = " and more" if len(refused) > 4 else ""
    return f"{', '.join(refused[:4])}{more} belong to other users: only they, or root, see them"
