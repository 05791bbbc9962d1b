"""A world as one of its ranks sees it: who takes part, and the groups they meet in.

:class:`World` has what users call. What the rest of the library needs of a world are the methods of
:class:`RunningWorld`, which every world is.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from syncprims import errors
from syncprims._protocol.background import Background
from syncprims._protocol.rounds import Rounds, RoundSequence
from syncprims._protocol.validation import whole_number
from syncprims.errors import ConfigurationError, SyncError
from syncprims.interface import Backend, Board, Note, Settings, Topology

from .group import Group, internals_of
from .nodes import (
    SaidPlace,
    identify_host,
    number_file_systems,
    number_nodes,
    place_on_nodes,
    without_nodes,
)
from .registry import load_offered
from .sequential import MainFirst, waited_for_by

#: Seconds after which a wait ends where the backend cannot distinguish a dead rank from a slow one.
BLIND_TIMEOUT = 1800.0


# -- who is in it ----------------------------------------------------------------------------------

JOINER = -1  #: in place of the number of rounds that a process has completed


class Change(NamedTuple):
    """The result of one :func:`reform`; equal on all ranks, except for `rank_before`."""

    epoch: int  #: its number; the world began with epoch 0
    members: tuple[int | None, ...]  #: by new rank: the rank before, or None for one that joined
    lost: tuple[int, ...]  #: ranks of the world before that are no members any more
    joined: tuple[int, ...]  #: new ranks of the processes that have joined
    rank_before: int | None  #: this process's own; None if it has joined
    furthest: int  #: the lowest of the new ranks that have completed the most rounds
    rounds: tuple[int, ...]  #: by new rank: how many it had completed; less than 0: it has joined


class Member(NamedTuple):
    """A member of an epoch."""

    process: int
    rank: int | None  #: in the last world in which all had met; None if it was not in that
    rounds: int  #: that it has completed; :data:`JOINER` if it has joined


class Epoch(NamedTuple):
    """A decided membership."""

    number: int
    size_before: int  #: of the last world in which all had met
    members: Sequence[Member]  #: by rank

    def change(self, process: int) -> Change:
        """Return what `process` has to know."""
        before = [member.rank for member in self.members]
        rounds = [member.rounds for member in self.members]
        return Change(
            self.number,
            tuple(before),
            tuple(sorted({*range(self.size_before)} - {*before})),
            tuple(rank for rank, old in enumerate(before) if old is None),
            before[self.rank(process)],
            rounds.index(max(rounds)),
            tuple(rounds),
        )

    def rank(self, process: int) -> int:
        """Return the new rank of `process`."""
        return self.processes.index(process)

    def topology(self, process: int, before: Topology) -> Topology:
        """Return the topology of `process`; its hosts are not known yet."""
        topology = before._replace(rank=self.rank(process), world_size=len(self.members))
        return without_nodes(topology)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes of the members, by rank."""
        return tuple(member.process for member in self.members)


class Recorder(Protocol):
    """What records all rounds of a world, as ``SYNCPRIMS_TRACE`` asks."""

    run: str  #: the name of the record; all ranks take that of one of them

    def make_rounds(self, *args: Any) -> Rounds:
        """Return rounds that it records; the arguments are those of :class:`Rounds`."""
        ...

    def release(self, board: Board) -> None:
        """End the record of `board`, whose last round is over."""

    def open(self, run: str | None) -> None:
        """Begin the file of `run`, or of a start that has failed, unless it is begun."""

    def end_epoch(self, board: Board, left: Sequence[int]) -> None:
        """End the record of all boards; of the processes at that of all ranks, these are left."""

    def leave(self, error: BaseException | None) -> None:
        """End the record: this rank leaves its world, because of `error` if that is given."""

    def abandon(self) -> None:
        """Stop writing, in a forked child."""


class World:
    """All ranks of one run, and this process's numbers among them. Made by :func:`init`."""

    def __init__(
        self, backend_name: str, settings: Settings, topology: Topology, extras: dict[str, Any]
    ) -> None:
        self.topology: Topology = topology
        self.backend_name = backend_name
        self.settings = settings
        self.extras = extras  #: what belongs to this world and to no module
        self.timeout: float | None = settings.timeout  #: of a call that names none, in seconds
        self.epoch: int = 0  #: 0, and after each :func:`syncprims.reform` a higher number
        #: What :func:`syncprims.reform` has changed, in this world or before this rank joined it.
        self.change: Change | None = None
        self.group: Group  #: of all ranks

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.topology.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return self.topology.local_world_size

    @property
    def node_rank(self) -> int:
        """This node's number."""
        return self.topology.node_rank

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.topology.num_nodes

    def __repr__(self) -> str:
        return (
            f"<syncprims.World rank {self.rank} of {self.world_size}, backend {self.backend_name}>"
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        raise NotImplementedError

    def open_process_group(self) -> bool:
        """Return True: ``torch.distributed`` has its default group of all ranks now, also of one.

        On the torch backends it is Gloo's or NCCL's. On the others its collectives are rounds of
        this library. Collective: all ranks call it. A group that the program has initialized itself
        stays, and remains the program's; one that is opened here ends with the world.

        :raises BackendUnavailable: if torch is not installed.
        :raises ConfigurationError: in a test whose ranks are threads, without ``torch=True``.
        """
        raise NotImplementedError


class RunningWorld(World):
    """A world with what the rest of the library needs of it."""

    topology: Topology
    timeout: float | None
    epoch: int
    group: Group

    def __init__(
        self,
        backend: Backend,
        backend_name: str,
        settings: Settings,
        topology: Topology,
        extras: dict[str, Any],
        *,
        end: Callable[[World, BaseException | None], None],
        decided: Epoch | None = None,
    ) -> None:
        super().__init__(backend_name, settings, topology, extras)
        self.backend = backend
        self._end = end  # called by the end of a `with` block
        self._recorder = None if settings.trace is None else _make_recorder(settings, backend)
        if self.timeout is None and not backend.detects_death:
            self.timeout = BLIND_TIMEOUT
        self.decided = decided  #: a membership whose ranks have not met yet
        if decided is None:
            self._begin(topology, 0, 0)
        else:
            self._begin(topology, decided.number, decided.members[topology.rank].rounds)

    def _begin(self, topology: Topology, epoch: int, rounds: int) -> None:
        """Begin an epoch, before which this rank has completed so many rounds."""
        self.topology, self.epoch = topology, epoch
        self._rounds_before = rounds
        self.background: Background = Background(self.backend)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._named: list[Rounds] = []  # at boards of their own, beside those of groups
        self._opened = collections.Counter[tuple[tuple[int, ...], str]]()  # boards: members, name
        self.nodes: list[int] = []  #: of each rank, known after the start
        self._file_systems: dict[str, list[int]] = {}  # of each rank, by path
        self._at_end = contextlib.ExitStack()  # closed before this rank leaves
        self.group = self._group_of(range(topology.world_size))
        self.rounds: Rounds = internals_of(self.group).rounds  #: of all ranks

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(self, error)

    def open_process_group(self) -> bool:
        """As :meth:`World.open_process_group`."""
        if not self.backend.has_process_group:
            try:
                load_offered("process group")(self, self._at_end)
            except ImportError as error:
                raise errors.BackendUnavailable(
                    f"open_process_group() needs torch: {errors.install('torch')}"
                ) from error
            return True
        rounds = self.rounds
        note = rounds.note("open_process_group")

        def open_(sequence: RoundSequence) -> None:
            sequence.meet()
            sequence.run_watched(self.backend.open_process_group)
            sequence.meet()  # or one that leaves at once breaks what others still connect to

        RoundSequence.run(rounds, note, self.timeout, open_)
        return True

    # -- groups, and boards beside them ------------------------------------------------------------

    def _group_of(self, ranks: Sequence[int]) -> Group:
        members = tuple(ranks)
        if members not in self._groups:
            backend = self.backend
            rounds = self._make_rounds(members) if self.rank in members else None
            grows = self.settings.elastic and backend.can_reform
            grows = grows and len(members) == self.world_size < backend.capacity
            arrived = backend.arrived if grows else None
            self._groups[members] = Group(members, self.rank, rounds, self.timeout, arrived)
        return self._groups[members]

    def _make_rounds(
        self, members: tuple[int, ...], name: str = "", between: tuple[str, ...] = ()
    ) -> Rounds:
        board = open_board(self.backend, members, name)
        # The first round of all ranks is the start, which no user has asked for.
        library_rounds = int(len(members) == self.world_size and not name)
        make = Rounds if self._recorder is None else self._recorder.make_rounds
        return make(board, self.rank, self.settings, self.background, library_rounds, between)

    def open_rounds(
        self, members: Sequence[int], name: str, between: tuple[str, ...] = ()
    ) -> Rounds:
        """Return this rank's rounds at the board `name` of `members`, which the caller sorts.

        It lasts until :meth:`close_rounds` or the end of the world. If it has been opened before,
        this is another one, and has another name: every member opens it as often as the others.
        Frames of files below the folders `between` stand between the user's line and a call.
        """
        key = tuple(members), name
        earlier = self._opened[key]
        self._opened[key] += 1
        name = f"{name} again {earlier}" if earlier else name
        self._named.append(self._make_rounds(key[0], name, between))
        return self._named[-1]

    def close_rounds(self, rounds: Rounds, why: Callable[[], SyncError]) -> None:
        """Release a board of :meth:`open_rounds`, whose later calls raise ``why()``."""
        rounds.close(why)
        self._named.remove(rounds)
        self.background.deadlocks.remove(rounds.board)
        if self._recorder is not None:
            self._recorder.release(rounds.board)
        self.backend.close_board(rounds.board)

    def join(self) -> None:
        """Meet all ranks for the first time, and check that they agree on what this run is.

        :raises SyncTimeout: naming the ranks that did not come in time.
        :raises ConfigurationError: on all ranks, if they disagree.
        """
        import json  # slow to import

        top, recorder = self.topology, self._recorder
        mine = {
            "syncprims": version() if top.world_size > 1 else "",  # slow to read, for a rank alone
            "backend": self.backend_name,
            "world size": top.world_size,
            "run id": top.run_id,
            "SYNCPRIMS_PICKLE": self.settings.pickle,
            "SYNCPRIMS_STRICT": self.settings.strict,
            "SYNCPRIMS_CHECK_REPLICAS": self.settings.check_replicas,
        }
        rounds = self.rounds
        trace = recorder.run if recorder is not None else None
        backend = self.backend
        host = ""  # where no backend and no second rank has to know it
        if backend.spans_hosts and top.world_size > 1:
            host = backend.host or identify_host()
        payload = json.dumps([mine, [host, top.local_rank, top.node_rank], trace]).encode()
        note = Note(rounds.note("init").label, payload=payload)
        joined = [json.loads(other.payload) for other in self._meet_first(rounds, note)]
        self._check_agreement(note, [facts for facts, *_ in joined])
        nodes = number_nodes([SaidPlace(*said) for _, said, _ in joined])
        self.nodes = [node for node, _ in nodes]
        self.topology = place_on_nodes(top, nodes)
        backend.topology = self.topology
        if recorder is not None:
            # One name for all: that of the first rank that has one.
            recorder.open(next(run for *_, run in joined if run is not None))

    def _meet_first(self, rounds: Rounds, note: Note) -> Sequence[Note]:
        """Return the notes of all ranks; the error of a timeout says where this rank waits."""
        try:
            return rounds.meet(note, self.settings.join_timeout)
        except errors.SyncTimeout as error:
            place = self.backend.meeting_place
            where = f" in {place}" if place else ""
            more = (
                f"This rank waits with backend {self.backend_name!r}{where}, run id "
                f"{self.topology.run_id!r}: a rank that was started with others never meets it."
            )
            error.args = (f"{error}\n{more}",)
            raise

    def _check_agreement(self, note: Note, of_ranks: Sequence[dict[str, Any]]) -> None:
        """Accept facts that are the same on all ranks."""
        for fact, value in of_ranks[self.rank].items():
            values = [facts[fact] for facts in of_ranks]
            if any(other != value for other in values):
                shown = ", ".join(f"rank {rank}: {v!r}" for rank, v in enumerate(values))
                raise ConfigurationError(
                    f"the ranks disagree about {fact}, at {note.label}: {shown}; start all ranks "
                    f"from one installation with the same settings",
                    rank=self.rank,
                    call=str(note.label),
                    arrived=list(range(self.world_size)),
                )

    def make_group(self, ranks: Sequence[int]) -> Group:
        """Return the group of `ranks`, having met all ranks of the world: the same for the same."""
        if not hasattr(ranks, "__iter__"):
            raise TypeError(f"group({ranks!r}): a group takes a list of ranks, as group([0, 1])")
        members = sorted(whole_number(r, "a group is made of ranks, whole numbers") for r in ranks)
        size = self.world_size
        if not members or len(set(members).intersection(range(size))) != len(members):
            raise ValueError(
                f"group({members}): a group is made of different ranks from 0 to {size - 1}"
            )
        # Also for a group that exists: else a rank that asks for another one would go unnoticed.
        rounds = self.rounds
        note = rounds.note("group", errors.name_ranks(members))

        def make(sequence: RoundSequence) -> Group:
            # If one rank cannot make it, the others would wait for that rank in it.
            return sequence.agree(lambda: self._group_of(members))

        return RoundSequence.run(rounds, note, self.timeout, make)

    def node_group(self) -> Group:
        """Return the group of this node's ranks. Its rounds never wait for another node."""
        if self.num_nodes == 1:
            return self.group
        return self._group_of([r for r, n in enumerate(self.nodes) if n == self.node_rank])

    def main_first_on_node(self, name: str | None, timeout: float | None) -> MainFirst:
        """Return the block that the first rank of each node runs first."""
        return self._main_first_in_parts(self.nodes, name, timeout)

    def main_first_at(
        self, path: str | os.PathLike[str], name: str | None, timeout: float | None
    ) -> MainFirst:
        """Return the block that one rank runs first for each file system that has `path`.

        :raises ConfigurationError: if the directory is not usable, or if this is the first call for
            it and is in a block that other ranks wait in.
        """
        if self.num_nodes == 1:
            return self.main_first_on_node(name, timeout)
        key = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - pathlib is slow to import
        if key not in self._file_systems:
            rounds = self.rounds
            if waited_for_by(rounds) is not None:
                raise ConfigurationError(
                    f"main_first(at={key!r}): all ranks find out together which hosts share it, "
                    f"and the others wait in another main_first(); enter one with this path before "
                    f"that"
                )
            self._file_systems[key] = RoundSequence.run(
                rounds,
                rounds.note("main_first(at)", name),
                math.inf if timeout is None else timeout,
                lambda sequence: number_file_systems(sequence, key, self.nodes),
            )
        return self._main_first_in_parts(self._file_systems[key], name, timeout)

    def _main_first_in_parts(
        self, parts: list[int], name: str | None, timeout: float | None
    ) -> MainFirst:
        """Return the block that the first rank of each part runs first, given the part of each."""

        def first_of_parts(ranks: set[int]) -> Rounds | None:
            inside = {parts[rank] for rank in ranks}
            if len(ranks) != sum(map(parts.count, inside)):
                return None  # of one part, only some ranks come to the inner block
            return internals_of(self._group_of(sorted(map(parts.index, inside)))).rounds

        own = [rank for rank, part in enumerate(parts) if part == parts[self.rank]]
        return MainFirst(internals_of(self._group_of(own)).rounds, name, timeout, first_of_parts)

    def own_group(self) -> Group:
        """Return the group of this rank alone. Its rounds wait for no other rank."""
        return self._group_of([self.rank])

    def set_timeout(self, timeout: float) -> None:
        """Make `timeout`, in seconds, the default of every later call of every group."""
        self.timeout = timeout
        for group in self._groups.values():
            internals_of(group).timeout = timeout

    # -- for `reform` ------------------------------------------------------------------------------

    def rounds_completed(self) -> int:
        """Return how many rounds of all ranks this one has completed, in all epochs."""
        return self._rounds_before + self.rounds.board.collected

    def set_rounds_completed(self, rounds: int) -> None:
        """Count as many rounds as the rank whose state this one has taken over."""
        self._rounds_before += rounds - self.rounds_completed()

    def have_met(self) -> bool:
        """Return whether all ranks have met in this epoch, whose rounds this rank has left."""
        board = self.rounds.board
        return board.collected > 0 or board.verdict() is None  # a complete round is not broken

    def leave_rounds(self, error: SyncError) -> SyncError:
        """Break every group of this rank with `error`, and return why that of all ranks is broken.

        A rank that waits in one of them for this rank raises it.
        """
        verdict = errors.dump(error)
        self.backend.abort_process_group()
        groups = [g for g in self._groups.values() if g is not self.group and self.rank in g.ranks]
        for rounds in (*self._named, *(internals_of(group).rounds for group in groups)):
            rounds.abort(verdict)
        return errors.load(self.rounds.abort(verdict))

    def begin_epoch(self, epoch: Epoch, topology: Topology, why: Callable[[], SyncError]) -> None:
        """Make this rank one of a new epoch; whatever belongs to the one before raises ``why()``.

        After an exception, the world is as it was, but closed, and the same call goes on.
        """
        self.close(why)
        with contextlib.suppress(Exception):  # what a lost rank leaves behind may fail to end
            self._at_end.close()
        new = copy.copy(self)
        if self._recorder is not None:
            self._recorder.end_epoch(self.rounds.board, epoch.processes)
        self.backend.enter(epoch.number, epoch.processes, topology)
        new._begin(topology, epoch.number, epoch.members[topology.rank].rounds)
        vars(self).update(vars(new))  # at once

    # -- the end -----------------------------------------------------------------------------------

    def close(self, why: Callable[[], SyncError]) -> None:
        """Make every later call of every group raise ``why()``."""
        for group in self._groups.values():
            own = internals_of(group)
            own.is_silent = False
            if self.rank in group.ranks:
                own.rounds.close(why)
        for rounds in self._named:
            rounds.close(why)

    def leave(self, error: BaseException | None) -> None:
        """Close the backend; `error` is the reason that the others raise, if there is one."""
        failure = dump_failure(self.rank, error)
        with contextlib.suppress(Exception):  # whatever it is, the rank leaves
            self._at_end.close()
        if self.settings.error_file is not None:
            report_failure(self.settings.error_file, failure)
        if self._recorder is not None:
            self._recorder.leave(error)
        self.backend.close(failure)

    def publish_activity(self, text: str) -> None:
        """Make `text` what others say about this rank while it is in no call."""
        self.backend.publish("activity", text.encode(errors="replace"))

    def abandon(self) -> None:
        """Release the backend without notifying the others, in a forked child."""
        if self._recorder is not None:
            self._recorder.abandon()
        self.backend.abandon()


# -- its parts, and its end ------------------------------------------------------------------------


def open_board(backend: Backend, members: Sequence[int], name: str) -> Board:
    """Return a board of `backend`, which need not know names if it is asked for none."""
    return backend.board(members, name) if name else backend.board(members)


def _make_recorder(settings: Settings, backend: Backend) -> Recorder:
    """Return what records all rounds, as ``SYNCPRIMS_TRACE`` asks.

    :raises ConfigurationError: if this installation cannot trace.
    """
    try:
        recorder = load_offered("recorder")  # not before it is asked for
    except ImportError as error:
        raise ConfigurationError(
            f"SYNCPRIMS_TRACE={settings.trace} asks for a trace, and this installation cannot "
            f"write one: {error}; install all of syncprims, or unset SYNCPRIMS_TRACE"
        ) from error
    made: Recorder = recorder(settings.trace, settings.trace_limit, backend)
    return made


def report_failure(path: str, failure: bytes | None) -> None:
    """Write why a rank has failed where the launcher looks; None removes an earlier reason."""
    # If it cannot be written, the launcher still has the exit code and stderr.
    with contextlib.suppress(OSError):
        if failure is None:
            os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
            return
        with open(f"{path}.new", "wb") as file:  # noqa: PTH123
            file.write(failure)
        os.replace(f"{path}.new", path)  # noqa: PTH105


def report_to_torchrun(path: str, error: BaseException) -> None:
    """Write `error` where torchrun's agent looks, in its format, unless the program has done so."""
    failure = errors.Failure.of(0, error)
    # The agent shows the failure with the lowest second. One that only follows may be reported
    # before its cause, and gets a later one.
    at = int(time.time()) + (5 if failure.consequence and not failure.handled else 0)
    about = {"py_callstack": failure.traceback, "timestamp": str(at)}
    import json

    text = json.dumps({"message": {"message": failure.headline, "extraInfo": about}})
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def dump_failure(rank: int, error: BaseException | None) -> bytes | None:
    """Return what others raise because of `error` of this rank, if there is one."""
    if error is None:
        return None
    return errors.dump(errors.PeerFailed.from_failure(errors.Failure.of(rank, error)))


@functools.cache  # reading it takes as long as a hundred barriers
def version() -> str:
    """Return the installed release, as ranks compare it when they meet."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import: not at start

    try:
        return version("syncprims")
    except PackageNotFoundError:  # a bare checkout on the path
        return "unknown"
