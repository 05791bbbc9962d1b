"""A world as one of its ranks sees it: who takes part, and the groups they meet in."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from syncprims import errors
from syncprims._protocol.deadlock import DeadlockDetector
from syncprims._protocol.round_sequence import RoundSequence
from syncprims._protocol.rounds import Rounds
from syncprims._protocol.validation import whole_number
from syncprims.errors import (
    ConfigurationError,
    Failure,
    PeerFailed,
    SyncError,
    SyncTimeout,
    name_ranks,
)
from syncprims.interface import Note

from .group import Group
from .version import version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from syncprims._protocol.trace_file import Recorder
    from syncprims._protocol.traced_rounds import TracedRounds
    from syncprims.interface import Backend, Board, Settings, Topology

#: Where the backend cannot tell a dead rank from a slow one, a wait ends after this many seconds.
BLIND_TIMEOUT = 1800.0


class World:
    """All ranks of one run, and this process's place among them. Made by :func:`init`."""

    def __init__(
        self,
        backend: Backend,
        backend_name: str,
        settings: Settings,
        topology: Topology,
        *,
        end: Callable[[World, BaseException | None], None],
    ) -> None:
        """Take a seat; :meth:`join` then meets the others. A `with` block calls `end`."""
        self.topology = topology
        self._end = end
        self.backend_name = backend_name
        self.settings = settings
        self.extras: dict[str, Any] = {}  #: what belongs to this world and to no module
        self._backend = backend
        self._deadlocks = DeadlockDetector(backend)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._traced: list[TracedRounds] = []
        self._recorder: Recorder | None = None
        if settings.trace is not None:
            from syncprims._protocol.trace_file import Recorder  # not before it is asked for

            self._recorder = Recorder(settings.trace, settings.trace_limit, topology)
        self._nodes: list[int] = []
        self.timeout = settings.timeout
        if self.timeout is None and not backend.detects_death:
            self.timeout = BLIND_TIMEOUT
        self.group = self._make_group(range(topology.world_size))  #: of all ranks

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

    @property
    def meeting_place(self) -> str:
        """Where the ranks find each other; empty if there is nothing to say."""
        return self._backend.meeting_place

    @property
    def node_group(self) -> Group:
        """The ranks of this node. Its rounds never wait for another node."""
        if self.num_nodes == 1:
            return self.group
        return self._make_group([r for r, n in enumerate(self._nodes) if n == self.node_rank])

    def __repr__(self) -> str:
        return (
            f"<syncprims.World rank {self.rank} of {self.world_size}, backend {self.backend_name}>"
        )

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(self, error)

    def new_group(self, ranks: Sequence[int]) -> Group:
        """Return the group of `ranks`, having met all ranks of the world: the same for the same."""
        members = _members(ranks, self.world_size)
        # Also for one that exists: a rank that asks for another one would be known by nothing else.
        rounds = self.group._rounds  # pyright: ignore[reportPrivateUsage]
        note = rounds.note("group", name_ranks(members))

        def make(sequence: RoundSequence) -> Group:
            try:
                group = self._make_group(members)
            except (OSError, SyncError) as error:  # or the others would wait for this rank in it
                sequence.fail(error)
                raise
            sequence.meet()
            return group

        return RoundSequence.run(rounds, note, self.timeout, make)

    def join(self) -> None:
        """Meet all ranks for the first time, and check that they agree on what this run is.

        :raises SyncTimeout: naming the ranks that did not come in time.
        :raises ConfigurationError: on all ranks, if they disagree.
        """
        import json  # slow to import: not before a world starts

        top = self.topology
        mine = {
            "syncprims": version(),
            "backend": self.backend_name,
            "world size": top.world_size,
            "run id": top.run_id,
            "SYNCPRIMS_PICKLE": self.settings.pickle,
        }
        rounds = self.group._rounds  # pyright: ignore[reportPrivateUsage]
        trace = self._recorder.run if self._recorder is not None else None
        words = json.dumps([mine, top.node_rank, trace]).encode()
        note = Note(rounds.note("init").label, payload=words)
        try:
            notes = rounds.meet(note, self.settings.join_timeout)
        except SyncTimeout as error:
            place = self._backend.meeting_place
            where = f" in {place}" if place else ""
            more = (
                f"This rank waits with backend {self.backend_name!r}{where}, run id "
                f"{top.run_id!r}: a rank that was started with others never meets it."
            )
            error.args = (f"{error}\n{more}",)
            raise
        said = [json.loads(other.payload) for other in notes]
        self._nodes = [node for _, node, _ in said]
        for fact, value in mine.items():
            values = [facts[fact] for facts, *_ in said]
            if any(other != value for other in values):
                shown = ", ".join(f"rank {rank}: {v!r}" for rank, v in enumerate(values))
                raise ConfigurationError(
                    f"the ranks disagree about {fact}, at {note.label}: {shown}; start all ranks "
                    f"from one installation with the same settings",
                    rank=self.rank,
                    call=str(note.label),
                    arrived=list(range(self.world_size)),
                )
        if self._recorder is not None:
            # One name for all: that of the first who has one.
            self._recorder.open(next(run for *_, run in said if run is not None))

    def open_process_group(self) -> bool:
        """Tell whether ``torch.distributed``'s default group runs; it does where the backend can.

        Collective: all ranks call it. What the program has initialized itself stays, and is its
        own; what is opened here ends with the world.
        """
        if self.world_size == 1 or not self._backend.has_process_group:
            return False
        rounds = self.group._rounds  # pyright: ignore[reportPrivateUsage]
        note = rounds.note("open_process_group")

        def open_(sequence: RoundSequence) -> None:
            sequence.meet()
            sequence.run_watched(self._backend.open_process_group, lambda: None)
            sequence.meet()  # or one that leaves at once breaks what others still connect to

        RoundSequence.run(rounds, note, self.timeout, open_)
        return True

    def adopt(self, timeout: float | None) -> World:
        """Take over a timeout that the program names after a test has started its world."""
        if timeout is not None:
            self.timeout = timeout
            for group in self._groups.values():
                group.adopt(timeout)
        return self

    def close_with(self, why: Callable[[], SyncError]) -> None:
        """Make every later call of every group raise ``why()``."""
        for group in self._groups.values():
            group.close_with(why)

    def leave(self, error: BaseException | None) -> None:
        """Close the backend, leaving `error` as the reason if there is one."""
        failure = None
        if error is not None:
            failed = PeerFailed.from_failure(Failure.of(self.rank, error))
            failure = errors.dump(failed)
        self._report(failure)
        if self._recorder is not None:
            now = max(rounds.end() for rounds in self._traced)
            self._recorder.leave(error, now)
        self._backend.close(failure)

    def _report(self, failure: bytes | None) -> None:
        """Leave the reason where the launcher looks; a good end takes back an earlier one."""
        path = self.settings.error_file
        if path is None:
            return
        # If it cannot be done, the launcher still has the exit code and stderr.
        with contextlib.suppress(OSError):
            if failure is None:
                os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
                return
            with open(f"{path}.new", "wb") as file:  # noqa: PTH123
                file.write(failure)
            os.replace(f"{path}.new", path)  # noqa: PTH105

    def abandon(self) -> None:
        """Drop the backend without a word, in a forked child."""
        if self._recorder is not None:
            self._recorder.abandon()
        self._backend.abandon()

    def _make_group(self, ranks: Sequence[int]) -> Group:
        members = tuple(ranks)
        if members not in self._groups:
            rounds = None
            if self.rank in members:
                board = self._backend.board(members)
                # The first round of all ranks is the start, which no user has asked for.
                own = int(len(members) == self.world_size)
                rounds = self._make_rounds(board, own)
            self._groups[members] = Group(members, self.rank, rounds, self.timeout)
        return self._groups[members]

    def _make_rounds(self, board: Board, own: int) -> Rounds:
        facts = board, self.rank, self.settings, self._deadlocks, self.local_rank, own
        if self._recorder is None:
            return Rounds(*facts)
        from syncprims._protocol.traced_rounds import TracedRounds

        rounds = TracedRounds(self._recorder, *facts)
        self._traced.append(rounds)
        return rounds


def _members(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    members = tuple(
        sorted(whole_number(r, "a group is made of ranks, whole numbers") for r in ranks)
    )
    bad = [rank for rank in members if not 0 <= rank < world_size]
    if not members or bad or len(set(members)) != len(members):
        raise ValueError(
            f"group({list(members)}): a group is made of different ranks from 0 to {world_size - 1}"
        )
    return members
