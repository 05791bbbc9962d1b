"""A board that spans hosts: notes meet in each host's shared memory, then at the store.

The ranks of one host post to a board of their own, as if they were alone. The rank that posts the
last note there contributes all of them to the store. A rank that waits asks the store for the
decision about the round and writes it down for the others. Neither role is fixed: both steps are
idempotent, and any waiting rank repeats them after a delay. So a rank that is stopped, busy or gone
delays no other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from syncprims import errors
from syncprims.errors import Failure, PeerFailed
from syncprims.interface import Board, Label, Note, Status, WaitView

from ..file.backend import FileBackend
from ..file.board import (
    FIRST_NAP,
    LONGEST_NAP,
    NAPS,
    YIELD_FOR,
    SharedMemoryBoard,
    SpinPolicy,
)
from ..file.description import HostReport
from ..file.liveness import Liveness
from ..file.memory import make_fence
from .decisions import (
    COMPLETE,
    END,
    VERDICT,
    Decisions,
    Log,
    MemberEnd,
    Store,
    decode_notes,
    read_key,
)
from .engines import GlooEngine
from .host_state import ELSEWHERE, Heartbeat, HostState
from .rendezvous import Placement
from .store import StoreEndpoint, StoreGone, StoreLink, StoreProbe, first_line

_CONTRIBUTE_ANYWAY = 0.02  # seconds until a waiting rank does what the last to post should have
_CONTRIBUTE_AGAIN = 1.0  # and until a contribution may have been lost
# Looks at a round's log after a contribution, divided by the number of hosts, before a rank waits:
# mostly the other hosts come soon.
_LOOKS = 16
_ASK = 0.002  # seconds after which a waiting rank announces its wait
# Seconds after which a rank asks the store, too, if one before it should have; doubled each time.
_ASK_ANYWAY = 1.0
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 1.0  # between two looks at the hosts that are missing
_LAST_LOOK = 1.0  # at most, before absent ranks are named
_LOOK_PER_HOST = 0.002  # at least, so that many hosts do not overload the store
_MOST_LOOKED_AT = 8  # missing hosts at a time
_NOTE_LIMIT = 64 * 1024  # bytes; larger notes would overload the store


class HostConnection(NamedTuple):
    """The links of the boards of one rank to its host and to the store."""

    liveness: Liveness
    local: FileBackend  #: of the ranks of this host
    placement: Placement
    host: int  #: this one
    store_host: int  #: that of the rank that serves the store, if one does
    endpoint: StoreEndpoint
    requests: StoreLink  #: for what the store answers at once
    waits: StoreLink  #: for waiting
    heartbeat: Heartbeat
    probe: StoreProbe

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host; that with index `n` is process ``local.members[n]`` there."""
        return self.placement.hosts[self.host].ranks

    def wake_host(self) -> None:
        """Wake all ranks of this host that sleep, this one included."""
        for process in self.local.members:
            self.liveness.doorbell.wake(process)


class TwoLevelBoard(Board):
    """The board of `members` on several hosts, seen from one of them."""

    note_limit = _NOTE_LIMIT
    seen_outside = True

    def __init__(
        self,
        members: Sequence[int],
        file: str,
        local: SharedMemoryBoard,
        connection: HostConnection,
        interfaces: str | None,
    ) -> None:
        """Open the board in `file`; under the run's lock. Its engine uses these `interfaces`."""
        super().__init__(members, local.name)
        self.local = local  #: of the members on this host
        #: Of these, the rank of each process.
        self.local_processes = dict(zip(local.processes, local.members, strict=True))
        count, index = len(local.members), local.members.index(local.rank)
        self._state = HostState(connection.liveness, file, count, index)
        self._connection = connection
        self._prefix = f"{connection.placement.token}/{file}"
        hosts: dict[int, list[int]] = {}  # host -> its members, by their index
        for number, member in enumerate(self.members):
            hosts.setdefault(connection.placement.host_of[member], []).append(number)
        self._hosts = {host: [self.members[n] for n in hosts[host]] for host in hosts}
        self.decisions = Decisions(self._prefix, hosts)
        self._elsewhere: dict[int, bytes] = {}  # decisions that are too large for the host state
        self._last: dict[int, Label] = {}  # of the last round, by member
        self._asked_for = 0  # the latest round whose decision this rank has requested
        self._announces_now = 0  # the round for which it announces its wait without a pause
        self._awaited = 0  # the round that the link's thread waits for now; 0: none
        self._contributed: dict[int, float] = {}  # by this rank: rounds, and when
        self._waiting_for, self._waiting_since = 0, 0.0
        self._spin_policy = SpinPolicy()
        self._next_look, self._look_every = 0.0, _FIRST_LOOK
        self._ended: dict[int, MemberEnd] = {}
        self._verdict: bytes | None = None
        self._wait = WaitView(0)
        self._fence = make_fence()
        placement = connection.placement
        self.engine = GlooEngine(
            connection.endpoint,
            f"{self._prefix}/gloo",
            self.members.index(local.rank),
            [placement.hosts[placement.host_of[member]].name for member in self.members],
            interfaces,
            connection.heartbeat.limit,
        )

    # -- post -----------------------------------------------------------------------------------

    def post(self, note: Note) -> None:
        """Post on this host; if that was its last note, contribute all of them."""
        number = self.posted = self.posted + 1
        try:
            self.local.post(note)
        except (OSError, ValueError):
            self.posted = number - 1
            raise
        # Two ranks that post at the same time must not both miss the other's note: the loads come
        # after this rank's store. (If they do miss it, one of them waits, and finds out.)
        self._fence()
        if self.local.is_full(number):
            self._contribute(number)
        if self._waiting_for == number:  # a look for a verdict came before, and is no wait for it
            self._waiting_for = 0

    def _contribute(self, number: int, *, again: bool = False) -> None:
        notes = self.local.notes(number)
        if self._state.cut.verdict(number) is not None:
            return  # this host will never pass the round, and the others need not either
        if notes is None or self.now() < self._contributed.get(number, 0.0) + _CONTRIBUTE_AGAIN:
            return
        self._contributed[number] = self.now()

        host = self._connection.host

        def contribute(store: Store) -> None:
            if self.collected >= number:
                return  # its log may have been removed
            if again:  # most likely another rank has done it, and the log should not grow
                log = self.decisions.read(store, number)
                if host in log.notes:
                    self._state.contributed = number
                    self._share_decision_of(store, number, log)
                    return
            decision = self.decisions.contribute(store, number, host, notes)
            self._state.contributed = number
            if decision is not None:
                self._share(number, decision)  # first: ranks wait for it
                self.decisions.remove_old(store, number)
                return
            for _ in range(_LOOKS // len(self._hosts)):
                if (decision := self.decisions.read(store, number).decision) is not None:
                    self._share(number, decision)
                    return
            # At once: hosts that in turn come too late for these looks would lose 2 ms each time.
            self._announces_now = number
            self._connection.wake_host()

        self._connection.requests.submit(contribute)

    # -- collect --------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Sleep until the oldest uncollected round is decided."""
        number = self.collected + 1
        now = self.now()
        until = math.inf if timeout is None else now + timeout
        nap, naps, woken = FIRST_NAP, 0, False
        self._begin_wait(number, now)
        self._state.set_waiting(number)
        try:
            while True:
                decision = self._decision(number)
                # The decision first: a rank that cuts its host off looks for it once more.
                if self._state.cut.verdict(number) is not None:
                    return None
                if decision is not None:
                    self._spin_policy.record(now - self._waiting_since)
                    return self._take(number, decision)
                if now >= until:
                    return None
                if now - self._waiting_since < YIELD_FOR and not self._spin_policy.sleeps_left:
                    os.sched_yield()
                    now = self.now()
                    continue
                if (woken or naps == NAPS) and self.local.is_in_vain(number):
                    return None
                naps = naps % NAPS + 1
                self._help(number, now)
                woken = self._connection.liveness.doorbell.sleep(min(nap, until - now))
                nap, now = min(2 * nap, LONGEST_NAP), self.now()
        finally:
            with contextlib.suppress(ValueError):  # closed meanwhile: a signal handler forked
                self._state.set_waiting(0)

    def _decision(self, number: int) -> bytes | None:
        decision = self._state.decision(number)
        if decision == ELSEWHERE:
            decision = self._elsewhere.get(number)
            if decision is None:
                self._request_decision(number)
        return decision

    def _take(self, number: int, decision: bytes) -> Sequence[Note] | None:
        """Return the notes in a decision, and count the round; None if it is another decision."""
        if decision[:1] != COMPLETE:
            return None
        notes = decode_notes(decision[1:], self.local.posted_note(number))
        self._last = {m: note.label for m, note in zip(self.members, notes, strict=True)}
        for old in [n for n in list(self._elsewhere) if n <= number]:  # a link may add one
            self._elsewhere.pop(old, None)
        for old in [n for n in self._contributed if n <= number]:
            del self._contributed[old]
        self.collected = number
        self.local.advance(number)
        awaited = self._awaited
        if awaited and awaited + self.depth < number:
            # This rank waits for a decision that it knows, and that may have been removed.
            self._connection.requests.submit(lambda store: self.decisions.release(store, awaited))
        return notes

    def _begin_wait(self, number: int, now: float) -> None:
        """Count time from now, unless this rank waits for this round already."""
        if self._waiting_for != number:
            self._waiting_for, self._waiting_since = number, now
            self._spin_policy.count_wait()
            self._look_every = max(_FIRST_LOOK, _LOOK_PER_HOST * len(self._hosts))
            self._next_look = now + self._look_every

    def _help(self, number: int, now: float) -> None:
        """Do what this host needs while its ranks wait, if no other rank does it."""
        self._begin_wait(number, now)
        waited = now - self._waiting_since
        late = waited >= _CONTRIBUTE_ANYWAY and self._state.contributed < number
        due = number <= self.posted and (late or waited >= _CONTRIBUTE_AGAIN)
        if due and self.local.is_full(number):
            self._contribute(number, again=True)
        others = self._state.waiting_before(number)
        patience = _ASK_ANYWAY * 2 ** min(others, 5) if others else _ASK
        if waited < patience and self._announces_now != number:
            return
        self._request_decision(number)
        if now >= self._next_look and self._connection.requests.idle:
            most = max(_LONGEST_LOOK, _LOOK_PER_HOST * len(self._hosts))
            self._look_every = min(most, 2 * self._look_every)
            self._next_look = now + self._look_every
            self._connection.requests.submit(self._look_at(number))

    def _look_at(self, number: int) -> Callable[[Any], None]:
        # The state of this host is read here: the link's thread must not use the liveness entries.
        here = {rank: self.local.status(rank) for rank in self.local.members}
        return lambda store: self._look_around(store, number, here)

    def inform(self) -> None:
        """Look at the other hosts now: a deadline has passed, and absent ranks will be named."""
        with contextlib.suppress(StoreGone, ValueError):  # it is gone; or closed meanwhile
            self._connection.requests.ask(self._look_at(self.collected + 1), _LAST_LOOK)

    def _request_decision(self, number: int) -> None:
        if self._asked_for >= number:
            return
        self._asked_for = number

        def wait(store: Store) -> None:
            if self._asked_for != number or self.collected >= number:
                return  # known meanwhile, and soon removed
            self._awaited = number
            try:
                decision = self.decisions.announce(store, number, self._connection.host)
                if decision is None:  # the host that decides the round will notify this one
                    decision = self.decisions.wait(store, number)
                if decision is not None:
                    self._share(number, decision)
            finally:
                self._awaited = 0

        self._connection.waits.submit(wait)

    def _share(self, number: int, decision: bytes) -> None:
        """Publish the decision about a round to all ranks of this host."""
        if number > self.collected:
            if not self._state.publish_decision(number, decision):
                self._elsewhere[number] = decision
            self._connection.wake_host()

    def _share_decision_of(self, store: Store, number: int, log: Log) -> None:
        """Publish the decision in a log, if there is one; its host may have been stopped before."""
        if log.decision is not None:
            self._share(number, log.decision)
            self.decisions.notify(store, number, log)

    # -- what is known of the others ------------------------------------------------------------

    def _look_around(self, store: Store, number: int, here: Mapping[int, Status]) -> None:
        """Learn which members have not come to a round, and publish to other hosts about this."""
        connection = self._connection
        log = self.decisions.read(store, number)
        if log.decision is not None:
            self._share_decision_of(store, number, log)
            self.decisions.remove_old(store, number)
            return
        seen: dict[str, list[Any]] = {}
        mine = here[self.local.rank].label
        for host, data in log.notes.items():
            for rank, note in zip(self._hosts[host], decode_notes(data), strict=True):
                if note.label is not mine and note.label != mine:
                    seen[str(rank)] = [number, _text(note.label)]
        missing = [h for h in self._hosts if h not in log.notes and h != connection.host]
        turn = int(self.now()) % max(1, len(missing))
        looked_at = (missing[turn:] + missing[:turn])[:_MOST_LOOKED_AT]
        connection.heartbeat.look(store, looked_at)
        for host in looked_at:
            seen |= json.loads(read_key(store, f"{self._prefix}/host/{host}") or b"{}")
        if connection.host not in log.notes:
            own = {str(rank): [s.rounds, _text(s.label)] for rank, s in here.items()}
            store.set(f"{self._prefix}/host/{connection.host}", json.dumps(own))
        silent = {str(host): connection.heartbeat.silence(host) for host in looked_at}
        self._state.publish_report(number, HostReport(list(log.notes), seen, silent))

    def status(self, rank: int) -> Status:
        """Return what is known of `rank`: exact on this host, the latest report on others."""
        host = self._connection.placement.host_of[rank]
        if host == self._connection.host:
            return self.local.status(rank)  # which knows more than the store
        end = self._ended.get(rank)
        number = self.collected + 1
        report = self._state.report(number)
        rounds, label = self.collected, self._last.get(rank)
        seen = report.last_seen(rank)
        if seen is not None and seen[0] >= rounds:
            rounds, label = seen
        elif host in report.come:
            rounds, label = number, self.local.status(self.local.rank).label
        if end is not None:
            return Status(end.rounds, label, end.state, end.detail, end.failure.encode())
        why = self._why_lost(host, report.silent.get(str(host), 0.0))
        return Status(rounds, label, "lost" if why else "alive", why)

    def _why_lost(self, host: int, silence: float) -> str:
        """Return why the ranks of `host` must be considered lost, empty if they need not."""
        connection = self._connection
        name, limit = connection.placement.hosts[host].name, connection.heartbeat.limit
        if silence >= limit:
            what = f"host {name} has given no sign of life for {silence:.0f} s: it is gone or cut"
            why = "off, or all its ranks are killed, stopped, or in C code that holds Python's lock"
            return f"{what} {why} (SYNCPRIMS_HEARTBEAT allows more)"
        store_host = connection.store_host
        if store_host not in (host, connection.host) and store_host in self._hosts:
            return ""  # nothing is known of it: the store is on another host that is unreachable
        store = f"the store at {connection.endpoint.address}, which leads to host {name},"
        for link in (connection.requests, connection.waits):
            if link.broken is not None:
                return f"{store} is gone: {first_line(link.broken)}"
        silence = connection.requests.silent_for
        if not connection.probe.is_cut_off(silence):
            return ""
        return f"{store} has not answered for {silence:.0f} s, nor has its host"

    def publish_wait(self, wait: WaitView) -> None:
        """Record on this host what this rank waits for."""
        self._wait = wait
        self.local.publish_wait(wait)

    def describe(self) -> tuple[str, int, str, Sequence[Any], str]:
        """Return what a :class:`RankDescription` has of this board; on the link's thread."""
        label = self.local.posted_note(self.posted).label
        text = label.encode().decode("latin-1")
        ranks = errors.format_ranks(self.members)
        return ranks, self.posted, text, self._wait[:3], self.name

    # -- abort ----------------------------------------------------------------------------------

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless that has completed.

        The store decides. If it does not answer, this host breaks the board for itself alone.
        """
        number, connection = self.collected + 1, self._connection
        requests, heartbeat = connection.requests, connection.heartbeat
        try:
            if connection.waits.broken is not None:
                raise StoreGone
            patience = max(heartbeat.every, heartbeat.limit - requests.silent_for)
            decision = requests.ask(
                lambda store: self.decisions.abort(store, number, connection.host, verdict),
                patience,
            )
        except StoreGone:
            self._cut_off(number, verdict)
        else:
            self._share(number, decision)
        connection.wake_host()

    def _cut_off(self, number: int, verdict: bytes) -> None:
        """Break the board for this host, unless it knows how the round ended.

        The others may pass that round. They learn of this as soon as the store answers: it is the
        decision about the first round that is not complete then.
        """
        self._state.cut.abort(number, verdict)
        if self._state.cut.verdict(number) is None:
            if self._decision(number) is not None:
                return
            # Other ranks here know that it is complete, and its notes are where no rank can read
            # them now. So this rank raises, and the host passes no later round.
            self._state.cut.abort(number + 1, verdict)
            self._verdict = verdict
        failure = PeerFailed.from_failure(Failure.of(self.local.rank, errors.load(verdict)))
        text = errors.dump(failure).decode()
        end = MemberEnd(self.local.rank, self.posted, "failed", failure=text)
        self._connection.requests.submit(lambda store: self.publish_end(store, end))

    def verdict(self) -> bytes | None:
        """Return the verdict that covers the oldest uncollected round, if there is one."""
        if self._verdict is None:
            number = self.collected + 1
            decision = self._decision(number) or b""
            if not decision:  # this rank may be waiting for something else than the notes
                self._help(number, self.now())
            self._verdict = self._state.cut.verdict(number)
            if self._verdict is None and decision[:1] == VERDICT:
                self._verdict = decision[1:]
            elif decision[:1] == END:
                end = MemberEnd(*json.loads(decision[1:]))
                self._ended[end.rank] = end
        return self._verdict

    @property
    def is_broken(self) -> bool:
        """True once this rank has seen a verdict here; unlike :meth:`verdict`, it requests none."""
        return self._verdict is not None

    # -- ends -----------------------------------------------------------------------------------

    def publish_end(self, store: Store, end: MemberEnd) -> None:
        """End every member's wait for one that has ended; on the link's thread."""
        # A rank that finished has left its notes; without a rank that did not, no round completes.
        first = end.rounds + 1 if end.state == "finished" else self.collected + 1
        self.decisions.end(store, first, self._connection.host, end)

    def close(self) -> None:
        """Unmap the shared memory; the host's own board is closed by its backend."""
        if self.engine is not None:
            self.engine.close()
        self._state.close()


def _text(label: Label | None) -> str | None:
    return None if label is None else label.encode().decode("latin-1")
