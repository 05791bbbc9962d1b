"""A board that spans hosts: notes meet in each host's shared memory, then at the store.

The ranks of one host post to a board of their own, as if they were alone. Whoever posts the last
note there brings all of them to the store, and one of those who wait asks the store for the round's
fate and writes it down for the others. Neither is an office: a rank that is stopped, busy or gone
holds nobody up, since what it would have done another does after a while, to the same effect.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims.interface import Board, Label, Note, Status

from .decisions import COMPLETE, END, VERDICT, End, Fates, decode_notes
from .host_state import ELSEWHERE, Relay
from .store_link import StoreGone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..file.board import SlotBoard
    from ..file.liveness import Seats
    from .heartbeat import Heartbeat
    from .store_link import StoreLink

_FIRST_NAP, _LONGEST_NAP = 0.002, 0.05  # should nobody ring
_BRING_ANYWAY = 0.02  # seconds after which a waiting rank does what the last to post should have
_BRING_AGAIN = 1.0  # and after which it may be that nothing of it has arrived
_ASK_ANYWAY = 1.0  # or what a waiting rank before it should have; doubled for each such
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 1.0  # between two looks at the hosts that are missing
_LAST_LOOK = 1.0  # at most, before absent ranks are named
_LOOK_PER_HOST = 0.002  # at least, so that many hosts do not crowd the store
_MOST_LOOKED_AT = 8  # missing hosts at a time
_NOTE_LIMIT = 64 * 1024  # bytes; what is larger would crowd the store


class Ties(NamedTuple):
    """What ties the boards of one rank to its host and to the store."""

    seats: Seats
    host: int  #: this one
    host_of: Mapping[int, int]  #: of each rank of the world
    names: Sequence[str]  #: of the hosts
    store: str  #: its address, for messages
    speaker: StoreLink  #: for what is answered at once
    waiter: StoreLink  #: for waiting
    heartbeat: Heartbeat
    ring: Callable[[], None]  #: wake all ranks of this host that sleep, oneself included


class TwoLevelBoard(Board):
    """The board of `members` on several hosts, seen from one of them."""

    note_limit = _NOTE_LIMIT

    def __init__(
        self, members: Sequence[int], local: SlotBoard, relay: Relay, prefix: str, ties: Ties
    ) -> None:
        super().__init__(members)
        self.local = local  #: of the members on this host
        self._relay = relay
        self._ties = ties
        self._prefix = prefix
        self._hosts: dict[int, list[int]] = {}  # host -> its members
        for member in self.members:
            self._hosts.setdefault(ties.host_of[member], []).append(member)
        place = {member: index for index, member in enumerate(self.members)}
        self.fates = Fates(prefix, {h: [place[m] for m in ms] for h, ms in self._hosts.items()})
        self._elsewhere: dict[int, bytes] = {}  # fates that are too large for the relay
        self._last: dict[int, Label] = {}  # what members came for in the last round
        self._asked_for = 0  # the latest round whose fate this rank has asked the store for
        self._awaited = 0  # the round that the waiter's thread waits for at this moment; 0: none
        self._brought: dict[int, float] = {}  # rounds that this rank has brought, and when
        self._waiting_for, self._waiting_since = 0, 0.0
        self._next_look, self._look_every = 0.0, _FIRST_LOOK
        self._ended: dict[int, End] = {}
        self._verdict: bytes | None = None
        # Taken at all times: to give it back and take it again orders stores before loads.
        self._fence = threading.Lock()
        self._fence.acquire()

    # -- post -----------------------------------------------------------------------------------

    def post(self, note: Note) -> None:
        """Post on this host; if that was its last note, bring them all to the store."""
        number = self.posted = self.posted + 1
        try:
            self.local.post(note)
        except (OSError, ValueError):
            self.posted = number - 1
            raise
        # Two that post at one time must not both miss the other's note: after one's own store come
        # the loads. (Should they, one of them waits, and finds out.)
        self._fence.release()
        self._fence.acquire()
        if self.local.is_full(number):
            self._bring(number)

    def _bring(self, number: int) -> None:
        notes = self.local.notes(number)
        if notes is None or self.now() < self._brought.get(number, 0.0) + _BRING_AGAIN:
            return
        self._brought[number] = self.now()

        def bring(store: Any) -> None:
            fate = self.fates.bring(store, number, self._ties.host, notes)
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._relay.brought = number
                if fate is not None:
                    self._spread(number, fate)

        self._ties.speaker.submit(bring)

    # -- collect --------------------------------------------------------------------------------

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Wait for the fate of the oldest uncollected round, asleep."""
        number = self.collected + 1
        begin = now = self.now()
        nap, slept = _FIRST_NAP, False
        self._relay.wait_for(number)
        try:
            while True:
                fate = self._fate(number)
                if fate is not None:
                    return self._take(number, fate)
                if self._relay.is_cut() is not None or (slept and self.local.in_vain(number)):
                    return None
                if timeout is not None and now - begin >= timeout:
                    return None
                self._attend(number, now)
                left = nap if timeout is None else min(nap, timeout - (now - begin))
                self._ties.seats.bells.sleep(left)
                slept, nap, now = True, min(2 * nap, _LONGEST_NAP), self.now()
        finally:
            with contextlib.suppress(ValueError):  # closed meanwhile, by a handler that has forked
                self._relay.wait_for(0)

    def _fate(self, number: int) -> bytes | None:
        fate = self._relay.fate(number)
        if fate == ELSEWHERE:
            fate = self._elsewhere.get(number)
            if fate is None:
                self._ask_for(number)
        return fate

    def _take(self, number: int, fate: bytes) -> Sequence[Note] | None:
        """Return the notes in a fate, and count the round; None if it is another fate."""
        if fate[:1] != COMPLETE:
            return None
        notes = decode_notes(fate[1:], self.local.own(number))
        self._last = {m: note.label for m, note in zip(self.members, notes, strict=True)}
        for old in [n for n in list(self._elsewhere) if n <= number]:  # the links add to it
            self._elsewhere.pop(old, None)
        for old in [n for n in self._brought if n <= number]:
            del self._brought[old]
        self.collected = number
        self.local.advance(number)
        if 0 < self._awaited < number:
            self._release(self._awaited)
        return notes

    def _attend(self, number: int, now: float) -> None:
        """Do for this host what is to be done while waiting, if it falls to this rank."""
        if self._waiting_for != number:
            self._waiting_for, self._waiting_since = number, now
            self._look_every = max(_FIRST_LOOK, _LOOK_PER_HOST * len(self._hosts))
            self._next_look = now + self._look_every
        waited = now - self._waiting_since
        late = waited >= _BRING_ANYWAY and self._relay.brought < number
        due = number <= self.posted and (late or waited >= _BRING_AGAIN)
        if due and self.local.is_full(number):
            self._bring(number)
        others = self._relay.before_me(number)
        if others and waited < _ASK_ANYWAY * 2 ** min(others, 5):
            return
        self._ask_for(number)
        if now >= self._next_look and self._ties.speaker.idle:
            most = max(_LONGEST_LOOK, _LOOK_PER_HOST * len(self._hosts))
            self._look_every = min(most, 2 * self._look_every)
            self._next_look = now + self._look_every
            self._ties.speaker.submit(self._look_at(number))

    def _look_at(self, number: int) -> Callable[[Any], None]:
        # The state of this host is read here: the link's thread must not touch the seats.
        here = {rank: self.local.status(rank) for rank in self.local.members}
        return lambda store: self._look_around(store, number, here)

    def inform(self) -> None:
        """Look around now, whatever it costs: a deadline has passed, and absent ranks are named."""
        with contextlib.suppress(StoreGone):
            self._ties.speaker.ask(self._look_at(self.collected + 1), _LAST_LOOK)

    def _ask_for(self, number: int) -> None:
        if self._asked_for >= number:
            return
        self._asked_for = number

        def wait(store: Any) -> None:
            if self._asked_for != number or self.collected >= number:
                return  # known meanwhile, and soon removed
            self._awaited = number
            try:
                if self.collected < number:
                    fate = self.fates.wait(store, number)
                    with contextlib.suppress(ValueError):  # closed meanwhile
                        self._spread(number, fate)
            finally:
                self._awaited = 0

        self._ties.waiter.submit(wait)

    def _release(self, number: int) -> None:
        """End this rank's own wait for a fate that it knows, and that may have been removed."""
        if number + self.depth < self.collected:
            self._ties.speaker.submit(lambda store: self.fates.release(store, number))

    def _spread(self, number: int, fate: bytes) -> None:
        """Let all ranks of this host know the fate of a round."""
        if number > self.collected:
            self._relay.publish(number, fate)
            if self._relay.fate(number) == ELSEWHERE:
                self._elsewhere[number] = fate
            self._ties.ring()

    # -- what is known of the others ------------------------------------------------------------

    def _look_around(self, store: Any, number: int, here: Mapping[int, Status]) -> None:
        """Learn who has not come to a round yet, and tell the other hosts about this one."""
        ties = self._ties
        brought = self.fates.brought(store, number)
        if len(brought) == len(self._hosts):
            # Whoever was counted last is stopped or gone, or was never counted: do it instead.
            fate = self.fates.complete(store, number, brought)
            with contextlib.suppress(ValueError):  # closed meanwhile
                assert fate is not None, "all have brought theirs"
                self._spread(number, fate)
            return
        seen: dict[str, list[Any]] = {}
        mine = here[self.local.here].label
        for host, data in brought.items():
            for rank, note in zip(self._hosts[host], decode_notes(data), strict=True):
                if note.label is not mine and note.label != mine:
                    seen[str(rank)] = [number, _text(note.label)]
        missing = [h for h in self._hosts if h not in brought and h != ties.host]
        turn = int(self.now()) % max(1, len(missing))
        looked_at = (missing[turn:] + missing[:turn])[:_MOST_LOOKED_AT]
        ties.heartbeat.look(store, looked_at)
        for host in looked_at:
            key = f"{self._prefix}/host/{host}"
            if store.check([key]):
                seen |= _read_seen(store.get(key))
        if ties.host not in brought:
            told = {str(r): [s.rounds, _text(s.label)] for r, s in here.items()}
            store.set(f"{self._prefix}/host/{ties.host}", _write_seen(told))
        silent = {str(h): ties.heartbeat.silence(h) for h in looked_at}
        news = {"here": list(brought), "seen": seen, "silent": silent}
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._relay.tell(number, news)

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`: exact on this host, as last heard of on others."""
        ties = self._ties
        host = ties.host_of[rank]
        end = self._ended.get(rank)
        if host == ties.host:
            return self.local.status(rank)  # which knows more than what was said of it
        number = self.collected + 1
        news = self._relay.news(number)
        rounds, label = self.collected, self._last.get(rank)
        told = news.get("seen", {}).get(str(rank))
        if told is not None and told[0] >= rounds:
            rounds, label = told[0], _label(told[1])
        elif host in news.get("here", ()):
            rounds, label = number, self.local.status(self.local.here).label
        if end is not None:
            return Status(end.rounds, label, end.state, end.detail, end.failure.encode())  # type: ignore[arg-type]
        gone = self._gone(host, news.get("silent", {}).get(str(host), 0.0))
        return Status(rounds, label, "lost" if gone else "alive", gone)

    def _gone(self, host: int, silence: float) -> str:
        """Return why the ranks of `host` must be taken for lost, empty if they need not."""
        ties = self._ties
        name = ties.names[host]
        if silence >= ties.heartbeat.limit:
            return f"host {name} has given no sign of life for {silence:.0f} s"
        store_host = ties.host_of[0]
        if host != store_host and ties.host != store_host and store_host in self._hosts:
            return ""  # nothing is known of it: the store is on another host that cannot be reached
        for link in (ties.speaker, ties.waiter):
            if link.broken is not None:
                why = str(link.broken).partition("\n")[0]
                return f"the store at {ties.store}, which leads to host {name}, is gone: {why}"
        silence = ties.speaker.silent_for
        if silence >= ties.heartbeat.limit:
            return (
                f"the store at {ties.store}, which leads to host {name}, has not answered for "
                f"{silence:.0f} s"
            )
        return ""

    # -- abort ----------------------------------------------------------------------------------

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless it completes after all."""
        number = self.collected + 1
        ties = self._ties
        try:
            if ties.speaker.silent_for >= ties.heartbeat.limit or ties.waiter.broken is not None:
                raise StoreGone
            fate = ties.speaker.ask(
                lambda store: self.fates.abort(store, number, verdict), ties.heartbeat.limit
            )
        except StoreGone:
            self._verdict = self._relay.cut(verdict)  # then this host goes by itself
        else:
            if fate[:1] == VERDICT:
                self._verdict = fate[1:]
            if self._relay.fate(number) is None:
                self._spread(number, fate)
        ties.ring()

    def verdict(self) -> bytes | None:
        """Return the verdict that bars the oldest uncollected round, if there is one."""
        if self._verdict is None:
            number = self.collected + 1
            fate = self._fate(number) or b""
            if not fate:  # maybe this rank waits for something else than the notes
                self._attend(number, self.now())
            if fate[:1] == VERDICT:
                self._verdict = fate[1:]
            elif fate[:1] == END:
                end = End.decode(fate[1:])
                self._ended[end.rank] = end
            if fate[:1] != COMPLETE and self._verdict is None:
                self._verdict = self._relay.is_cut()
        return self._verdict

    def is_torn(self) -> bool:
        """Tell whether this rank has met a verdict here; unlike :meth:`verdict`, ask nobody."""
        return self._verdict is not None

    # -- ends -----------------------------------------------------------------------------------

    def say_end(self, store: Any, end: End) -> None:
        """Let nobody wait at this board for a member that has ended; on the link's thread."""
        # A rank that goes in peace has left its notes; without one that does not, nobody goes on.
        first = end.rounds + 1 if end.state == "finished" else self.collected + 1
        self.fates.end(store, first, end)

    def rounds_of(self, rank: int) -> int:
        """Return how many rounds a member on this host has posted to."""
        return self.local.rounds_of(rank)

    def close(self) -> None:
        """Let go of the shared memory; the host's own board is closed by its backend."""
        if self.engine is not None:
            self.engine.close()
        self._relay.close()


def _text(label: Label | None) -> str | None:
    return None if label is None else label.encode().decode("latin-1")


def _label(text: str | None) -> Label | None:
    return None if text is None else Label.decode(text.encode("latin-1"))


def _write_seen(seen: dict[str, list[Any]]) -> bytes:
    import json

    return json.dumps(seen).encode()


def _read_seen(data: bytes) -> dict[str, list[Any]]:
    import json

    return dict(json.loads(data))
