"""`reform`: the ranks that are left decide, once, who the world of the next epoch is.

A rank that calls it leaves all rounds, publishes its call, and waits until every other rank of the
epoch has called too, or has provably ended. Then any of them proposes the members, and the first
proposal is the decision for all. It is made by a single act, which the backend provides
(:meth:`Backend.decide`): so at most one membership is decided, whichever ranks end meanwhile, and
no process is ever waited for that has ended. To refuse (too few ranks, or the time is up) is a
decision, too.

The members then meet in the first round of the new epoch. If one of them ends before that, the
others go on with the next epoch: so :func:`reform` returns in a world in which all have met.

An exception of a signal handler may end the call anywhere. The next call goes on from there: with
the decision if this rank has not begun that epoch, and else with the next vote.
"""

from __future__ import annotations

import binascii
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import errors
from syncprims._protocol.call_site import describe_call
from syncprims.errors import Failure, PeerFailed, PeerLost, SyncError, SyncTimeout
from syncprims.interface import Awaited

from .world import JOINER, Epoch, Member

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncprims.interface import Backend

    from .world import Change, RunningWorld


def _name(epoch: int) -> str:
    return f"epoch-{epoch}"


def _encode(decision: Epoch | SyncError) -> str:
    said: Any = decision
    if isinstance(decision, SyncError):
        said = errors.dump(decision).decode()
    return binascii.b2a_base64(json.dumps(said).encode(), newline=False).decode()


def _decode(value: str) -> Epoch | SyncError:
    said = json.loads(binascii.a2b_base64(value))
    if isinstance(said, str):
        return errors.load(said.encode())
    number, size_before, members = said
    return Epoch(number, size_before, [Member(*member) for member in members])


class _Terms(NamedTuple):
    """The request of one rank in one call."""

    call: str  #: as messages show it
    min_ranks: int
    begin: float  #: when it was called
    deadline: float


def reform(world: RunningWorld, min_ranks: int, timeout: float | None) -> Change:
    """As :func:`syncprims.reform`."""
    call, now = describe_call(), world.rounds.board.now
    if not world.backend.can_reform:
        raise errors.BackendUnavailable(
            f"reform() does not work on backend {world.backend_name!r}: restart the run from a "
            f"checkpoint, as `syncprims run --max-restarts` does. The backends 'file' and 'torch' "
            f"support it"
        )
    begin = now()
    terms = _Terms(call, min_ranks, begin, math.inf if timeout is None else begin + timeout)
    left = f"rank {world.rank} has left this world: it has called {call}"
    _begin_next(world, terms, PeerLost(left, rank=world.rank, call=call))
    change = _meet(world, terms)
    assert change is not None
    return change


def _begin_next(world: RunningWorld, terms: _Terms, error: SyncError) -> None:
    """Leave the present epoch, with `error` for those that wait in it, and begin the next one."""
    if world.decided is None or world.decided.number <= world.epoch:
        standing = world.leave_rounds(error)
        if world.decided is None or world.have_met():
            members = [Member(p, rank, 0) for rank, p in enumerate(world.backend.members)]
            world.decided = Epoch(world.epoch, world.world_size, members)
        world.decided = _Vote(world, terms, standing).hold()
    epoch = world.decided  # perhaps of a call that was interrupted before it began that epoch
    topology = epoch.topology(world.backend.process, world.topology)

    def why() -> SyncError:
        if world.epoch >= epoch.number:
            return errors.WorldClosed(
                "reform() has made a new world, and this belongs to the one before: make groups, "
                "process groups and what was built on them again"
            )
        interrupted = "reform() was interrupted, and this rank is in no world: call it again"
        return errors.WorldClosed(interrupted)

    world.begin_epoch(epoch, topology, why)


def _meet(world: RunningWorld, terms: _Terms) -> Change | None:
    """Meet the members of the epoch that was decided, or, if one is lost before, of a later one."""
    while True:
        try:
            world.join()
        except (PeerLost, PeerFailed) as error:
            _begin_next(world, terms, error)
            continue
        except BaseException as error:  # the others, which wait for this rank, vote again
            world.leave_rounds(PeerFailed.from_failure(Failure.of(world.rank, error), terms.call))
            raise
        if world.decided is not None:  # else it has just started
            world.change = world.decided.change(world.backend.process)
            world.decided = None
        return world.change


def is_joining(backend: Backend) -> bool:
    """Return whether this process replaces a lost rank, and waits for a `reform` of the others."""
    return backend.can_reform and backend.process not in backend.members


def await_admission(backend: Backend) -> Epoch:
    """Return the epoch in which this process replaces a lost rank; its topology is changed.

    :raises PeerLost: if all ranks end instead.
    """
    number, members = 1, backend.members

    def is_decided_or_over() -> bool:
        ended = all(backend.state(process) not in ("alive", "unknown") for process in members)
        return ended or bool(backend.decide(_name(number)))

    while True:
        backend.wait(is_decided_or_over, math.inf, Awaited("reform"))
        value = backend.decide(_name(number))
        if not value:
            raise PeerLost("all ranks of the run ended while this process waited to join it")
        epoch, number = _decode(value), number + 1
        if isinstance(epoch, Epoch):
            members = epoch.processes
            if backend.process in members:
                topology = epoch.topology(backend.process, backend.topology)
                backend.enter(epoch.number, members, topology)
                return epoch


def join_epoch(world: RunningWorld) -> None:
    """Meet the ranks of the epoch in which this process starts, or of a later one."""
    now = world.rounds.board.now()
    if world.epoch:
        terms = _Terms("init", 1, now, math.inf)
    else:  # it does not go on alone: its run may be over, and it a replacement that comes too late
        terms = _Terms("init", 2, now, now + world.settings.join_timeout)
    _meet(world, terms)


class _Vote:
    """One rank's part in the decision about the next epoch."""

    def __init__(self, world: RunningWorld, terms: _Terms, standing: SyncError) -> None:
        self._world = world
        self._backend = world.backend
        self._now = world.rounds.board.now
        self._call, least, self._begin, self._deadline = terms
        self._standing = standing  # why the world is over
        self._warn_every = world.settings.warn_after
        # Epochs that were refused have a number, too, and no rank of this world waits for them.
        self._number = world.epoch + 1
        while value := self._backend.decide(_name(self._number)):
            if isinstance(_decode(value), Epoch):
                break
            self._number += 1
        self._mine = json.dumps([self._number, world.rounds_completed(), least]).encode()

    def hold(self) -> Epoch:
        """Return the decision, once there is one.

        :raises SyncTimeout: on all ranks that have called, if one that lives has not.
        :raises PeerLost: on all of them, if fewer are left than one of them accepts.
        """
        backend = self._backend
        backend.publish("reform", self._mine)
        warn_at = self._begin + self._warn_every
        if self._deadline == math.inf and self._world.rounds.board.virtual_time:
            warn_at = math.inf  # such a wait lasts forever
        decision: Epoch | SyncError | None = None
        while decision is None:  # it waits before each look: so a rank that has called is seen
            now = self._now()
            if now >= warn_at:
                self._warn(now)
                self._warn_every *= 2
                warn_at = now + self._warn_every
            until = min(self._deadline, warn_at)
            backend.wait(self._can_decide, until, Awaited("reform", missing=self._absent))
            decision = self._look()
        if isinstance(decision, SyncError):
            raise decision
        if backend.process not in decision.processes:  # between hosts: one cut off has come back
            raise errors.Evicted(
                f"{self._call} came too late: the other ranks have made a new world without this "
                f"host, whose heartbeat they missed. End this process: if it continued, there "
                f"would be two runs",
                rank=self._world.rank,
                call=self._call,
            )
        return decision

    def _can_decide(self) -> bool:
        # Asked again and again, so what is found soonest comes first.
        decided = bool(self._backend.decide(_name(self._number)))
        return decided or not any(map(self._is_absent, self._backend.members))

    def _look(self) -> Epoch | SyncError | None:
        """Return the decision; make it if this rank knows enough, and no other one has made it."""
        mine, absent = "", self._absent()
        if not absent or self._now() >= self._deadline:
            mine = _encode(self._timeout(absent) if absent else self._propose())
        value = self._backend.decide(_name(self._number), mine)
        return _decode(value) if value else None

    def _calls(self) -> dict[int, tuple[int, int]]:
        """Return rounds and `min_ranks` of the living members that have called, by process."""
        found: dict[int, tuple[int, int]] = {}
        for process in self._backend.members:
            if self._has_called(process) and self._backend.state(process) == "alive":
                _, rounds, least = json.loads(self._call_of(process))
                found[process] = rounds, least
        return found

    def _call_of(self, process: int) -> bytes:
        own = process == self._backend.process
        return self._mine if own else self._backend.published("reform", process)

    def _has_called(self, process: int) -> bool:
        # Each rank asks this of all others, again and again, so nothing is decoded.
        return self._call_of(process).startswith(b"[%d," % self._number)

    def _is_absent(self, process: int) -> bool:
        living = ("alive", "unknown")
        return not self._has_called(process) and self._backend.state(process) in living

    def _absent(self) -> list[int]:
        """Return the members that live and have not called."""
        return [process for process in self._backend.members if self._is_absent(process)]

    def _propose(self) -> Epoch | SyncError:
        before = self._world.decided
        assert before is not None
        calls = self._calls()
        ranks = {member.process: member.rank for member in before.members}
        members = [Member(p, ranks[p], rounds) for p, (rounds, _) in calls.items()]
        # In the order before; those that joined an epoch whose ranks never met are the last.
        members.sort(key=lambda member: (member.rank is None, member.rank or 0))
        room = self._backend.capacity - len(members)
        members += [Member(process, None, JOINER) for process in self._backend.arrived()[:room]]
        epoch = Epoch(self._number, before.size_before, members)
        least = max(least for _, least in calls.values())
        lost = epoch.change(self._backend.process).lost
        if len(members) < least:
            why = f"needs {least} ranks, and {len(members)} are left"
            way_on = "Restart the run from a checkpoint, or accept fewer with min_ranks"
        elif self._is_ended_by_an_agent(lost, epoch):
            why = "does not work under torchrun, whose agent now ends all ranks of its host"
            way_on = "Start the ranks with `syncprims run --elastic`, SLURM or Kubernetes instead"
        else:
            return epoch
        return PeerLost(
            f"{self._call} {why}: ranks {list(lost)} have ended. {way_on}.\n{self._standing}",
            call=self._call,
            missing=list(lost),
            rank=lost[0] if lost else None,
        )

    def _is_ended_by_an_agent(self, lost: Sequence[int], epoch: Epoch) -> bool:
        """Return whether an agent of torchrun has lost a rank, and so ends others that are left."""
        world = self._world
        if not world.settings.agent_store or world.topology.launcher != "torchrun":
            return False  # an agent's store: else an operator set torchrun's variables
        nodes = world.nodes
        if not nodes:
            return False  # these ranks have not met
        left = [member.rank for member in epoch.members if member.rank is not None]
        return not {nodes[rank] for rank in lost}.isdisjoint(nodes[rank] for rank in left)

    def _timeout(self, absent: Sequence[int]) -> SyncTimeout:
        waited = self._now() - self._begin
        ranks = self._ranks(absent)
        lines = "\n".join(self._last_seen(rank) for rank in ranks)
        return SyncTimeout(
            f"{self._call} timed out after {waited:.3g} s: ranks {ranks} live and have not called "
            f"it, so no new world was made\n{lines}\n"
            f"Every rank that lives must call reform(), or end.",
            call=self._call,
            missing=ranks,
            arrived=self._ranks(self._calls()),
            waited=waited,
        )

    def _ranks(self, processes: Iterable[int]) -> list[int]:
        return sorted(map(self._backend.members.index, processes))

    def _last_seen(self, rank: int) -> str:
        label = self._world.rounds.board.status(rank).label
        return f"  rank {rank} was last seen in {label or 'no call'}"

    def _warn(self, now: float) -> None:
        import logging  # slow to import, and only a long wait needs it

        ranks = self._ranks(self._absent())
        lines = "".join(f"; {self._last_seen(rank).strip()}" for rank in ranks)
        logging.getLogger("syncprims").warning(
            f"still waiting for ranks {ranks} at {self._call} for {now - self._begin:.0f} s{lines}"
        )
