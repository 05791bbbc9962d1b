"""A world as one of its ranks sees it: who takes part, and the groups they meet in.

:class:`World` has what users call. What the rest of the library needs of a world are the functions
below it, which use its private members.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncprims import errors
from syncprims._protocol.background import Background
from syncprims._protocol.call_site import NoteCache
from syncprims._protocol.deadlock import DeadlockDetector
from syncprims._protocol.rounds import DEADLOCK_SEARCH, Rounds, RoundSequence
from syncprims._protocol.validation import whole_number
from syncprims.errors import ConfigurationError, SyncError
from syncprims.interface import Awaited, Backend, Board, Note, Settings, Topology

from .group import Group, close_group, rounds_of
from .nodes import SaidPlace, identify_host, number_nodes, place_on_nodes, without_nodes
from .registry import load_offered
from .sequential import MainFirst

#: Seconds after which a wait ends where the backend cannot distinguish a dead rank from a slow one.
BLIND_TIMEOUT = 1800.0
_SEARCH_EVERY = 0.25  # seconds between two searches for a deadlock


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


class World:
    """All ranks of one run, and this process's numbers among them. Made by :func:`init`."""

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
        self.topology: Topology = topology
        self.backend_name = backend_name
        self.settings = settings
        self.extras = extras  #: what belongs to this world and to no module
        self._end = end  # called by the end of a `with` block
        self._backend = backend
        self._recorder: Any = None if settings.trace is None else _make_recorder(settings, topology)
        self.timeout = settings.timeout  #: of a call that names none, in seconds
        if self.timeout is None and not backend.detects_death:
            self.timeout = BLIND_TIMEOUT
        #: What :func:`syncprims.reform` has changed, in this world or before this rank joined it.
        self.change: Change | None = None
        self.decided = decided  #: a membership whose ranks have not met yet
        epoch, rounds = (
            (decided.number, decided.members[topology.rank].rounds) if decided else (0, 0)
        )
        self._begin(topology, epoch, rounds)

    def _begin(self, topology: Topology, epoch: int, rounds: int) -> None:
        """Begin an epoch, before which this rank has completed so many rounds."""
        backend = self._backend
        self.topology = topology
        self.epoch = epoch  #: 0, and after each :func:`syncprims.reform` a higher number
        self._rounds_before = rounds
        self._deadlocks = DeadlockDetector(backend)
        self._background = Background(backend)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._named: list[Rounds] = []  # at boards of their own, beside those of groups
        self._opened = collections.Counter[tuple[tuple[int, ...], str]]()  # boards: members, name
        self._nodes: list[int] = []  # of each rank, known after the start
        self._at_end = contextlib.ExitStack()  # closed before this rank leaves
        self.group: Group = self._make_group(range(topology.world_size))  #: of all ranks
        elastic = self.settings.elastic and backend.can_reform
        if elastic and topology.world_size < backend.capacity:
            rounds_of(self.group).may_join = backend.arrived

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
        self._end(self, error)

    def open_process_group(self) -> bool:
        """Return True: ``torch.distributed`` has its default group of all ranks now, also of one.

        On the torch backends it is Gloo's or NCCL's. On the others its collectives are rounds of
        this library. Collective: all ranks call it. A group that the program has initialized itself
        stays, and remains the program's; one that is opened here ends with the world.

        :raises BackendUnavailable: if torch is not installed.
        :raises ConfigurationError: in a test whose ranks are threads, without ``torch=True``.
        """
        if not self._backend.has_process_group:
            try:
                load_offered("process group")(self, self._at_end)
            except ImportError as error:
                raise errors.BackendUnavailable(
                    f"open_process_group() needs torch: {errors.install('torch')}"
                ) from error
            return True
        rounds = rounds_of(self.group)
        note = rounds.note("open_process_group")

        def open_(sequence: RoundSequence) -> None:
            sequence.meet()
            sequence.run_watched(self._backend.open_process_group)
            sequence.meet()  # or one that leaves at once breaks what others still connect to

        RoundSequence.run(rounds, note, self.timeout, open_)
        return True

    def _make_group(self, ranks: Sequence[int]) -> Group:
        members = tuple(ranks)
        if members not in self._groups:
            rounds = self._make_rounds(members) if self.rank in members else None
            self._groups[members] = Group(members, self.rank, rounds, self.timeout)
        return self._groups[members]

    def _make_rounds(self, members: tuple[int, ...], name: str = "") -> Rounds:
        board = open_board(self._backend, members, name)
        # The first round of all ranks is the start, which no user has asked for.
        library_rounds = int(len(members) == self.world_size and not name)
        return Rounds(
            board,
            self.rank,
            self.settings,
            self._deadlocks,
            self._background,
            self.local_rank,
            library_rounds,
            self._recorder and self._recorder.observe(board, self.rank),
        )


def _make_recorder(settings: Settings, topology: Topology) -> Any:
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
    return recorder(settings.trace, settings.trace_limit, topology)


# -- for the rest of the library -----------------------------------------------------------------


def open_board(backend: Backend, members: Sequence[int], name: str) -> Board:
    """Return a board of `backend`, which need not know names if it is asked for none."""
    return backend.board(members, name) if name else backend.board(members)


def open_rounds(
    world: World, members: Sequence[int], name: str, between: tuple[str, ...] = ()
) -> Rounds:
    """Return this rank's rounds at the board `name` of `members`, which the caller sorts.

    It lasts until :func:`close_rounds` or the end of the world. If it has been opened before, this
    is another one, and has another name: every member opens it as often as the others. Frames of
    files below the folders `between` stand between the user's line and a call.
    """
    key = tuple(members), name
    earlier = world._opened[key]
    world._opened[key] += 1
    rounds = world._make_rounds(key[0], f"{name} again {earlier}" if earlier else name)
    if between:
        rounds.note = NoteCache(between).note
    world._named.append(rounds)
    return rounds


def close_rounds(world: World, rounds: Rounds, why: Callable[[], SyncError]) -> None:
    """Release a board of :func:`open_rounds`, where this rank's later calls raise ``why()``."""
    rounds.close(why)
    world._named.remove(rounds)
    world._deadlocks.remove(rounds.board)
    if world._recorder is not None:
        world._recorder.release(rounds.board)
    world._backend.close_board(rounds.board)


def background_of(world: World) -> Background:
    """Return what every wait of this rank goes on with."""
    return world._background


def wait_any(
    world: World,
    rounds: Sequence[Rounds],
    ready: Callable[[], bool],
    timeout: float | None,
    call: str = "a wait for any rank",
) -> bool:
    """Return as :meth:`Backend.wait` of the world's backend; transfers go on meanwhile.

    Without a timeout, it ends with an aborted board if this rank is in a deadlock.

    :param call: that waits, as messages show it.
    """
    boards = [one.board for one in rounds]
    board, deadlocks = rounds_of(world.group).board, world._deadlocks
    now, search_at = board.now, math.inf
    if timeout is None and not board.virtual_time:
        search_at = now() + DEADLOCK_SEARCH
    found: SyncError | None = None

    def is_over() -> bool:
        nonlocal search_at, found
        if ready():
            return True
        if now() < search_at:
            return False
        search_at = now() + _SEARCH_EVERY
        states = {rank: board.status(rank).state for board in boards for rank in board.members}
        living = [rank for rank, state in states.items() if state in ("alive", "unknown")]
        found = deadlocks.search_any([rank for rank in living if rank != world.rank], call)
        if found is not None:
            for board in boards:
                board.abort(errors.dump(found))
        return found is not None

    try:
        until = math.inf if timeout is None else now() + timeout
        came = world._background.wait(is_over, until, Awaited(call, boards))
        return came and found is None
    finally:
        deadlocks.end_wait()


def join_world(world: World) -> None:
    """Meet all ranks for the first time, and check that they agree on what this run is.

    :raises SyncTimeout: naming the ranks that did not come in time.
    :raises ConfigurationError: on all ranks, if they disagree.
    """
    top, recorder = world.topology, world._recorder
    mine = {
        "syncprims": version(),
        "backend": world.backend_name,
        "world size": top.world_size,
        "run id": top.run_id,
        "SYNCPRIMS_PICKLE": world.settings.pickle,
        "SYNCPRIMS_STRICT": world.settings.strict,
    }
    rounds = rounds_of(world.group)
    trace = recorder.run if recorder is not None else None
    backend = world._backend
    host = ""  # where no backend and no second rank has to know it
    if backend.spans_hosts and top.world_size > 1:
        host = backend.host or identify_host()
    payload = json.dumps([mine, [host, top.local_rank, top.node_rank], trace]).encode()
    note = Note(rounds.note("init").label, payload=payload)
    joined = [json.loads(other.payload) for other in _meet_first(world, rounds, note)]
    _check_agreement(world, note, [facts for facts, *_ in joined])
    nodes = number_nodes([SaidPlace(*said) for _, said, _ in joined])
    world._nodes = [node for node, _ in nodes]
    world.topology = place_on_nodes(top, nodes)
    backend.topology = world.topology
    rounds.local_rank = world.local_rank
    if recorder is not None:
        recorder.topology = world.topology
        # One name for all: that of the first rank that has one.
        recorder.open(next(run for *_, run in joined if run is not None))


def _meet_first(world: World, rounds: Rounds, note: Note) -> Sequence[Note]:
    """Return the notes of all ranks; the error of a timeout says where this rank waits."""
    try:
        return rounds.meet(note, world.settings.join_timeout)
    except errors.SyncTimeout as error:
        place = world._backend.meeting_place
        where = f" in {place}" if place else ""
        more = (
            f"This rank waits with backend {world.backend_name!r}{where}, run id "
            f"{world.topology.run_id!r}: a rank that was started with others never meets it."
        )
        error.args = (f"{error}\n{more}",)
        raise


def _check_agreement(world: World, note: Note, of_ranks: Sequence[dict[str, Any]]) -> None:
    """Accept facts that are the same on all ranks."""
    for fact, value in of_ranks[world.rank].items():
        values = [facts[fact] for facts in of_ranks]
        if any(other != value for other in values):
            shown = ", ".join(f"rank {rank}: {v!r}" for rank, v in enumerate(values))
            raise ConfigurationError(
                f"the ranks disagree about {fact}, at {note.label}: {shown}; start all ranks "
                f"from one installation with the same settings",
                rank=world.rank,
                call=str(note.label),
                arrived=list(range(world.world_size)),
            )


def make_group(world: World, ranks: Sequence[int]) -> Group:
    """Return the group of `ranks`, having met all ranks of the world: the same for the same."""
    if not hasattr(ranks, "__iter__"):
        raise TypeError(f"group({ranks!r}): a group takes a list of ranks, as group([0, 1])")
    members = sorted(whole_number(r, "a group is made of ranks, whole numbers") for r in ranks)
    size = world.world_size
    if not members or len(set(members).intersection(range(size))) != len(members):
        raise ValueError(
            f"group({members}): a group is made of different ranks from 0 to {size - 1}"
        )
    # Also for a group that exists: else a rank that asks for another one would go unnoticed.
    rounds = rounds_of(world.group)
    note = rounds.note("group", errors.name_ranks(members))

    def make(sequence: RoundSequence) -> Group:
        # If one rank cannot make it, the others would wait for that rank in it.
        return sequence.agree(lambda: world._make_group(members))

    return RoundSequence.run(rounds, note, world.timeout, make)


def get_node_group(world: World) -> Group:
    """Return the group of this node's ranks. Its rounds never wait for another node."""
    if world.num_nodes == 1:
        return world.group
    return world._make_group([r for r, n in enumerate(world._nodes) if n == world.node_rank])


def main_first_on_node(world: World, name: str | None, timeout: float | None) -> MainFirst:
    """Return the block that the first rank of each node runs first."""
    first = sorted(map(world._nodes.index, {*world._nodes}))
    rounds = rounds_of(get_node_group(world))
    among_nodes = (lambda: rounds_of(world._make_group(first))) if len(first) > 1 else None
    return MainFirst(rounds, name, timeout, among_nodes)


def get_own_group(world: World) -> Group:
    """Return the group of this rank alone. Its rounds wait for no other rank."""
    return world._make_group([world.rank])


def set_world_timeout(world: World, timeout: float) -> None:
    """Make `timeout`, in seconds, the default of every later call of every group."""
    world.timeout = timeout
    for group in world._groups.values():
        group._timeout = timeout


# -- for `reform` ---------------------------------------------------------------------------------


def process_number(world: World) -> int:
    """Return this process's number among all that the run ever has: its rank, if none was lost."""
    return world._backend.process


def rounds_completed(world: World) -> int:
    """Return how many rounds of all ranks this one has completed, in all epochs."""
    return world._rounds_before + rounds_of(world.group).board.collected


def set_rounds_completed(world: World, rounds: int) -> None:
    """Count as many rounds as the rank whose state this one has taken over."""
    world._rounds_before += rounds - rounds_completed(world)


def have_met(world: World) -> bool:
    """Return whether all ranks have met in this epoch, whose rounds this rank has left."""
    board = rounds_of(world.group).board
    return board.collected > 0 or board.verdict() is None  # a complete round is not broken


def leave_rounds(world: World, error: SyncError) -> SyncError:
    """Break every group of this rank with `error`, and return why that of all ranks is broken.

    A rank that waits in one of them for this rank raises it.
    """
    verdict = errors.dump(error)
    world._backend.abort_process_group()
    groups = [g for g in world._groups.values() if g is not world.group and world.rank in g.ranks]
    for rounds in (*world._named, *map(rounds_of, groups)):
        rounds.abort(verdict)
    return errors.load(rounds_of(world.group).abort(verdict))


def begin_epoch(
    world: World, epoch: Epoch, topology: Topology, why: Callable[[], SyncError]
) -> None:
    """Make this rank one of a new epoch; whatever belongs to the one before raises ``why()``.

    After an exception, the world is as it was, but closed, and the same call goes on.
    """
    close_world(world, why)
    with contextlib.suppress(Exception):  # what a lost rank leaves behind may fail to end
        world._at_end.close()
    new = copy.copy(world)
    if world._recorder is not None:
        run = world._recorder.run.partition("-epoch-")[0]
        world._recorder.leave(None)
        new._recorder = _make_recorder(world.settings, topology)
        new._recorder.run = f"{run}-epoch-{epoch.number}"
    world._backend.enter(epoch.number, epoch.processes, topology)
    new._begin(topology, epoch.number, epoch.members[topology.rank].rounds)
    vars(world).update(vars(new))  # at once


# -- the end ---------------------------------------------------------------------------------------


def close_world(world: World, why: Callable[[], SyncError]) -> None:
    """Make every later call of every group raise ``why()``."""
    for group in world._groups.values():
        close_group(group, why)
    for rounds in world._named:
        rounds.close(why)


def has_torch_engine(world: World) -> bool:
    """Return whether a default group of this world is one of Gloo or NCCL."""
    return world._backend.has_process_group


def leave_world(world: World, error: BaseException | None) -> None:
    """Close the backend; `error` is the reason that the others raise, if there is one."""
    failure = _encode(world.rank, error)
    with contextlib.suppress(Exception):  # whatever it is, the rank leaves
        world._at_end.close()
    if world.settings.error_file is not None:
        _report_end(world.settings.error_file, failure)
    if world._recorder is not None:
        world._recorder.leave(error)
    world._backend.close(failure)


def publish_activity(world: World, text: str) -> None:
    """Make `text` what others say about this rank while it is in no call."""
    world._backend.publish("activity", text.encode(errors="replace"))


def abandon_world(world: World) -> None:
    """Release the backend without notifying the others, in a forked child."""
    if world._recorder is not None:
        world._recorder.abandon()
    world._backend.abandon()


def report_failure(path: str, rank: int, error: BaseException | None) -> None:
    """Write why `rank` has failed where the launcher looks; None removes an earlier reason."""
    _report_end(path, _encode(rank, error))


def report_to_torchrun(path: str, error: BaseException) -> None:
    """Write `error` where torchrun's agent looks, in its format, unless the program has done so."""
    failure = errors.Failure.of(0, error)
    # The agent shows the failure with the lowest second. One that only follows gets a later one.
    at = int(time.time()) + (failure.consequence and not failure.handled)
    about = {"py_callstack": failure.traceback, "timestamp": str(at)}
    text = json.dumps({"message": {"message": failure.headline, "extraInfo": about}})
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def _encode(rank: int, error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    return errors.dump(errors.PeerFailed.from_failure(errors.Failure.of(rank, error)))


def _report_end(path: str, failure: bytes | None) -> None:
    """Write the reason where the launcher looks; a normal end removes an earlier one."""
    # If it cannot be written, the launcher still has the exit code and stderr.
    with contextlib.suppress(OSError):
        if failure is None:
            os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
            return
        with open(f"{path}.new", "wb") as file:  # noqa: PTH123
            file.write(failure)
        os.replace(f"{path}.new", path)  # noqa: PTH105


@functools.cache  # reading it takes as long as a hundred barriers
def version() -> str:
    """Return the installed release, as ranks compare it when they meet."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import: not at start

    try:
        return version("syncprims")
    except PackageNotFoundError:  # a bare checkout on the path
        return "unknown"
