"""The contract between the library and its backends.

A :class:`Board` is where one group meets: each rank *posts* a note for its next round and
*collects* the notes of all. A :class:`Backend` makes boards. Everything else (barriers, broadcasts,
flags, failures, deadlines, diagnosis) is written once, on top of these two. Backends move bytes.
They never see an object, a user's function or an environment variable.

The module has three parts: the configuration that a backend is made from, the messages that ranks
post, and the contract itself.
"""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = [  # noqa: RUF022 - in the order of this file
    "UNKNOWN", "Topology", "Settings", "own_device_index",
    "Label", "MARKS", "Mark", "Note",
    "State", "ends_round", "Status", "Window", "WaitView", "Engine", "DeviceEngine",
    "Board", "Topic", "Awaited", "NOTHING", "Backend",
]  # fmt: skip


# -- configuration: what a backend is made from ----------------------------------------------------

#: In place of a number of ranks or nodes on hosts that the launcher does not say. All of them are
#: known once the world has met.
UNKNOWN = -1


class Topology(NamedTuple):
    """The numbers of ranks and nodes in a run, and this process's own, in torchrun's terms.

    Those about hosts, `local_rank` to `num_nodes`, may be :data:`UNKNOWN` before the world has met.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"  #: who started the ranks
    run_id: str | None = None  #: no other run (or restart) has it, where known


class Settings(NamedTuple):
    """The settings of the user. Times are in seconds."""

    #: Of a call that has none. With None, it may wait forever where the backend sees that a
    #: rank has died, and half an hour elsewhere.
    timeout: float | None = None
    join_timeout: float = 300.0  #: for all ranks to come when the world starts
    warn_after: float = 30.0  #: a longer wait logs which ranks it waits for
    directory: str | None = None  #: where the ranks of one host meet, if the user says so
    runtime_directory: str | None = None  #: the system's directory for runtime files, if any
    pickle: bool = True  #: may objects without a safe encoding travel as pickles
    strict: bool = False  #: all ranks must make a call without a user's name from the same line
    store: tuple[str, int] | None = None  #: host and port of the rendezvous store
    agent_store: bool = False  #: torchrun's agent serves it, so that no rank has to
    heartbeat: float = 10.0  #: a host without a sign of life for so long counts as lost
    gloo_interfaces: str | None = None  #: network interfaces for bulk data, separated by commas
    error_file: str | None = None  #: where the launcher looks for why this rank failed
    #: The call that starts the world, and where it is; empty if that is `init` of the program.
    first_call: str = ""
    trace: str | None = None  #: directory in which every round is recorded
    trace_limit: int = 256 << 20  #: bytes of it for each rank; the oldest rounds are dropped
    mixed_precision: str | None = None  #: what `training` computes in, unless a script sets it
    elastic: bool = False  #: a process may join a run that goes on, in place of a lost rank
    dump_after: float = math.inf  #: a longer wait logs where all threads of this rank are
    check_replicas: int = 0  #: after so many steps `training` compares models; 0: never


def own_device_index(current: int, count: int, local_rank: int) -> int:
    """Return which of the `count` devices on a node is a rank's own; `current` is the current one.

    It is the current device, if the program has chosen one. The first device is current by default
    and does not count as chosen: then it is the device of the local rank, and ranks share the
    devices in turn if there are fewer devices than ranks.
    """
    return current or local_rank % max(1, count)


# -- messages: what ranks post ---------------------------------------------------------------------


_compared = attrgetter("kind", "name", "src", "op")


class Label:
    """The call that a rank makes in a round.

    `kind` (the call), `name`, `src` and `op` must agree in a round. `site`, the ``file:line`` of
    the call, is shown and no part of equality: `barrier()` in two branches of an `if` is one
    barrier. Only ``SYNCPRIMS_STRICT=1`` compares the sites of calls that the user has not named.
    `data` is no part of equality, either: it describes what this rank brings to the call, if that
    is not in the payload.
    """

    __slots__ = ("_encoded", "data", "kind", "name", "op", "site", "src")

    def __init__(
        self,
        kind: str,
        name: str | None = None,
        src: int | None = None,
        op: str | None = None,
        site: str = "?",
        data: bytes = b"",
    ) -> None:
        self.kind: str = kind
        self.name: str | None = name
        self.src: int | None = src
        self.op: str | None = op
        self.site: str = site
        self.data: bytes = data
        self._encoded: bytes | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and _compared(self) == _compared(other)

    def __hash__(self) -> int:
        return hash(_compared(self))

    @property
    def call(self) -> str:
        """The call as messages show it: ``broadcast 'weights' from rank 2``."""
        text = self.kind
        if self.name is not None:
            text += f" {self.name!r}"
        if self.op not in (None, "sum"):
            text += f" with op {self.op!r}"
        if self.src is not None:
            text += f" from rank {self.src}"
        return text

    def __str__(self) -> str:
        return f"{self.call} ({self.site})"

    def encode(self) -> bytes:
        """Return the label as bytes; equal labels with equal sites and data give equal bytes."""
        if self._encoded is None:
            parts = (self.kind, self.name, self.src, self.op, self.site)
            text = "\0".join("" if part is None else f"={part}" for part in parts)
            # Names and paths may hold invalid UTF-8, which must come back unchanged.
            encoded = text.encode("utf-8", "surrogatepass")
            self._encoded = encoded + b"\0" + self.data if self.data else encoded
        return self._encoded

    @classmethod
    @functools.lru_cache(maxsize=256)  # each look at the others reads the same ones
    def decode(cls, data: bytes) -> Label:
        """Return the label that :meth:`encode` wrote."""
        parts, about = data.split(b"\0", 5), b""
        if len(parts) > 5:
            about = parts.pop()
        texts = (part[1:].decode("utf-8", "surrogatepass") if part else None for part in parts)
        kind, name, src, op, site = texts
        return cls(kind or "?", name, None if src is None else int(src), op, site or "?", about)


class Mark(IntEnum):
    """The kind of a note. Boards carry it, and each call defines its meaning."""

    NONE = 0
    YES = 1  #: to the question of the call: a flag is set, an object is equal
    MORE = 2  #: something follows the note: arrays, or another round
    INLINE = 3  #: the payload holds all data of the call


MARKS = tuple(Mark)


class Note(NamedTuple):
    """The message that one rank posts to one round."""

    label: Label
    mark: Mark = Mark.NONE
    payload: bytes = b""
    failure: bytes = b""  #: if not empty, this rank failed here: the dumped error

    def encode(self) -> bytes:
        """Return the note as bytes, for backends that carry it whole."""
        label = self.label.encode()
        lengths = b"%d %d %d %d " % (self.mark, len(label), len(self.payload), len(self.failure))
        return lengths + label + self.payload + self.failure

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """Return the note that :meth:`encode` wrote."""
        mark, n_label, n_payload, n_failure, rest = data.split(b" ", 4)
        a, b, c = int(n_label), int(n_payload), int(n_failure)
        label, payload, failure = rest[:a], rest[a : a + b], rest[a + b : a + b + c]
        return cls(Label.decode(label), MARKS[int(mark)], payload, failure)


# -- the contract: what a backend offers -----------------------------------------------------------


_LONGEST_PAUSE = 0.005  # seconds, at most, between two looks of a wait
_INFORM_AFTER = 0.01  # seconds after which the statuses of boards are updated before each look

State = Literal["unknown", "alive", "finished", "failed", "lost"]


def ends_round(state: State, missing: bool) -> bool:
    """Return whether a round never completes, with a member in this state whose note is missing."""
    return state in ("lost", "failed") or (state == "finished" and missing)


class Status(NamedTuple):
    """The state of one member of a board, as far as it is known."""

    rounds: int = 0  #: how many notes it has posted here
    label: Label | None = None  #: of its last note here
    state: State = "unknown"  #: unknown: it never joined, or the backend cannot know
    #: How it ended, where known: ``killed by SIGKILL``, ``exit code 3``. What it does, if alive.
    detail: str = ""
    failure: bytes = b""  #: the error of the member, if it failed


class Window(NamedTuple):
    """Memory that all members of a board share, for arrays in bulk."""

    memory: memoryview
    #: A memory barrier: orders the stores and loads before it before those after it.
    fence: Callable[[], object]


class WaitView(NamedTuple):
    """A wait of one member of a board."""

    number: int  #: of the round; 0 if it does not wait
    since: float = 0.0  #: as :func:`time.monotonic`
    for_data: bool = False  #: the notes of that round are up, and it waits for the call's data
    deadline: float = math.inf  #: in the board's time; readers from outside do not see it


class Engine(ABC):
    """Carries bytes in bulk between the members of a board that share no memory.

    All members call the same method at one time, from a thread of its own, and wait in it. If it
    raises, the data is lost, and the engine is not used again.
    """

    @abstractmethod
    def broadcast(self, data: memoryview, src: int) -> None:
        """Fill `data` with the `data` of member number `src`."""

    @abstractmethod
    def exchange(self, mine: memoryview, theirs: memoryview) -> None:
        """Exchange equal parts, all to all.

        Part i of `mine` goes to member i, and part i of `theirs` comes from it.
        """

    @abstractmethod
    def gather(self, mine: memoryview, all_: memoryview) -> None:
        """All-gather: part i of `all_`, of equal parts, is filled with the `mine` of member i."""

    def obstacle(self) -> str | None:
        """Return why the call under way, or one that has raised, cannot succeed; do not wait.

        It names those that it concerns, and not this member alone. Empty if there is no obstacle;
        None while that is not known. Any thread calls it, again and again. Optional.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; a call under way ends with an error."""


class DeviceEngine(ABC):
    """Carries tensors between accelerators, without a stop in the hosts' memory.

    All members call the same method at one time; the work is queued on the current stream.
    """

    @abstractmethod
    def takes(self, tensor: torch.Tensor, op: str | None = None) -> bool:
        """Return whether such a tensor can be broadcast, or reduced with `op`."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Fill the contiguous `tensor` with the one of member number `src`."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce the contiguous `tensor` in place, to the same bits on all members."""


class Board(ABC):
    """The meeting place of one group, seen from one of its members.

    Round *k* is the *k*-th note of every member. A member may post at most :attr:`depth` notes
    ahead of what it has collected, so that a deferred flag is a collect that comes later.
    """

    depth: int = 8

    # Ability: shared memory.
    #: Memory that all members share from the start, if there is any: equal parts for two rounds in
    #: turn, with at least a cache line for each member. Small values pass through it; arrays pass
    #: through :meth:`window`.
    small_window: Window | None = None

    # Ability: a bulk engine, of boards without shared memory.
    #: Carries bytes between all members. All members have one, or none.
    engine: Engine | None = None
    #: Carries tensors between all members' devices; without it they pass through hosts' memory.
    device_engine: DeviceEngine | None = None
    #: Encoded objects of more bytes travel through the engine and not in a note; arrays do so from
    #: a smaller size on. None on a board with a window, where two transfers of one call would use
    #: the same places.
    note_limit: int | None = None

    # Ability: virtual time, of the worlds of tests.
    #: Whether :attr:`now` stands still while any rank can go on. Then `collect` returns None only
    #: when its time is up or the round can never complete. The library does not call it in
    #: between, and `timeout` may be infinite. It sets :attr:`waiting_since` when a wait begins.
    virtual_time: bool = False
    waiting_since: float = 0.0
    #: Whether a test observes every round: then a barrier of one member is a round, too, and a wait
    #: that cannot end is found soon, without a timeout.
    observed: bool = False

    # Ability: being read from outside; see :meth:`publish_wait`.
    #: Whether `syncprims who` can read the board: the warning of a long wait says so.
    seen_outside: bool = False

    def __init__(self, members: Sequence[int], name: str = "") -> None:
        self.members: tuple[int, ...] = tuple(members)  #: world ranks, ascending
        self.name = name  #: distinguishes the boards of the same members
        # The implementation counts before a note can be seen, and before a round's notes are
        # returned: so an interrupt never finds a count that is too low.
        self.posted: int = 0  #: rounds this rank has posted to
        self.collected: int = 0  #: rounds it has collected

    @abstractmethod
    def post(self, note: Note) -> None:
        """Publish this rank's note for its next round, without waiting.

        :raises OSError: if the note cannot be published (a full disk); then nothing was posted.
        """

    @abstractmethod
    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Return the notes of this rank's oldest uncollected round, in member order.

        Returns None, and the round stays uncollected, when `timeout` seconds have passed, and
        earlier when the round can never complete: the board was aborted at this round or before, a
        member is lost or failed, or one whose note is missing has finished. Every member that
        collects round *k* collects equal notes, and no member collects it before all have posted.
        """

    @abstractmethod
    def status(self, rank: int) -> Status:
        """Return the status of member `rank`, without waiting."""

    @abstractmethod
    def abort(self, verdict: bytes) -> None:
        """Break the board, permanently, at this rank's oldest uncollected round.

        No member passes that round or a later one; rounds before it stay collectable. The first
        verdict stands; if the round has completed meanwhile, nothing happens.
        """

    @abstractmethod
    def verdict(self) -> bytes | None:
        """Return the verdict that breaks this rank's oldest uncollected round, or None."""

    def inform(self) -> None:  # noqa: B027 - optional
        """Update the status of all members: it is about to become a verdict.

        Optional: for boards whose :meth:`status` may lag behind.
        """

    def publish_wait(self, wait: WaitView) -> None:  # noqa: B027 - optional
        """Publish to other processes what this rank waits for; called if that takes a moment.

        Optional: `syncprims who` shows it.
        """

    def window(self) -> Window | None:
        """Return memory that all members share, the same amount on each; None if there is none.

        Optional: without it and without an engine, arrays travel in notes.

        :raises OSError: if there is no space for it.
        """
        return None

    def now(self) -> float:
        """Return this board's time in seconds. Deadlines are measured in it."""
        return time.monotonic()


class Awaited(NamedTuple):
    """What :meth:`Backend.wait` waits for, beside its condition."""

    call: str = ""  #: the user's call that waits, as messages show it
    boards: Sequence[Board] = ()  #: at any of which a note, or a verdict, may end it
    #: Returns the processes that it needs, all of them.
    missing: Callable[[], Sequence[int]] = tuple


NOTHING = Awaited()  #: nothing beside the condition

#: What a process publishes: where its threads wait, its call of `reform`, and what it does outside
#: of calls, which is the `detail` of its status.
Topic = Literal["waits", "reform", "activity"]


class Backend(ABC):
    """One process's part in a world; it makes the boards.

    Made once per process. The constructor joins and may refuse, but does not wait for the others:
    the first round on the world's board does that.

    A process has a number, which it keeps while its rank changes with each epoch. Those that the
    run begins with have their rank's; one that joins later gets the next one. No two processes ever
    have the same.
    """

    name: ClassVar[str]
    spans_hosts: ClassVar[bool] = False  #: can ranks of several hosts meet?
    #: does :meth:`Board.status` distinguish a dead rank from a slow one?
    detects_death: ClassVar[bool] = False
    #: does it open a default group of ``torch.distributed``? Else that has rounds at its boards.
    has_process_group: ClassVar[bool] = False
    #: Ability: the world goes on after a loss, by `reform`. Then it has :meth:`published`,
    #: :meth:`state`, :meth:`arrived` and :meth:`enter`.
    can_reform: ClassVar[bool] = False
    #: Of a backend that spans hosts and knows who shares one: the same for all ranks of this host,
    #: and for no other rank. Without it the library asks the operating system.
    host: str | None = None
    meeting_place: str = ""  #: of the ranks, as text for messages

    def __init__(self, topology: Topology, settings: Settings) -> None:
        #: This process's own numbers. Those about hosts are set once the ranks have met.
        self.topology: Topology = topology
        self.settings: Settings = settings
        self.capacity: int = topology.world_size  #: members at one time, at most
        self.process: int = topology.rank  #: the number of this process
        self.epoch: int = 0  #: the number of the present one
        #: the process of each of its ranks
        self.members: tuple[int, ...] = tuple(range(topology.world_size))

    @classmethod  # noqa: B027 - optional
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Raise the error that the constructor would raise for these arguments, without joining.

        Optional: `syncprims env` calls it, and `syncprims run` before it starts any rank.
        """

    @classmethod  # noqa: B027 - optional
    def record_end(
        cls, topology: Topology, settings: Settings, how: str | None, failure: bytes | None = None
    ) -> None:
        """Record that the process of this rank has ended, for those that wait for it to join.

        `how` it ended, as ``exit code 0``, is what a launcher knows. None says that this process is
        about to end, and has had no world; ``settings.first_call`` is the call that waited for one,
        if there was one. `failure` is what it has raised, as in :meth:`close`. Optional: without it
        they wait until a timeout.
        """

    @classmethod  # noqa: B027 - optional
    def remove_run(cls, topology: Topology, settings: Settings) -> None:
        """Remove the files that a run has left; its processes have ended. Optional."""

    # -- boards ---------------------------------------------------------------------------------

    @abstractmethod
    def board(self, members: Sequence[int], name: str = "") -> Board:
        """Return the board `name` of the group of `members`.

        Boards of other names, or of other members, have rounds of their own. Called once for each
        name on each of the members.
        """

    def close_board(self, board: Board) -> None:  # noqa: B027 - optional
        """Release what this rank holds of `board`; it makes no other call there.

        Others may still collect earlier rounds: what the members share ends with the last one that
        calls this. Optional.
        """

    # -- beside the boards ------------------------------------------------------------------------

    @abstractmethod
    def decide(self, name: str, value: str = "") -> str:
        """Return the decision `name`; if there is none, make it `value`, or return "" without one.

        Neither has white space. One decision holds for all processes of the run, whichever of them
        ends meanwhile: the first one that came.

        :raises OSError: if there is no space for it; then there may be none.
        """

    def publish(self, topic: Topic, value: bytes) -> None:  # noqa: B027 - optional
        """Publish `value`, of at most 4 KB, to the other processes in place of the one before.

        Optional: without it, ranks that wait for each other in different groups wait until a
        timeout.
        """

    def published(self, topic: Topic, process: int) -> bytes:
        """Return the latest value that `process` published; empty if there is none."""
        return b""

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited = NOTHING) -> bool:
        """Return whether ``ready()``, once it is or when the boards' time is `until`.

        `ready` reads what others post, publish or decide, and their states. It may return False
        earlier, when one of the `awaited` boards is broken. Optional: by default this looks again
        and again, with growing pauses.
        """
        begin = now = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now >= until:
                return False
            pause = min(_LONGEST_PAUSE, (now - begin) / 4)
            time.sleep(min(pause, until - now))
            if now - begin >= _INFORM_AFTER:
                for board in awaited.boards:
                    board.inform()
        return True

    # -- ability: `reform` ------------------------------------------------------------------------

    def state(self, process: int) -> State:
        """Return the state of `process`; "unknown" if there is none."""
        return "unknown"

    def arrived(self) -> list[int]:
        """Return the living processes that have come later and wait to be members, ascending.

        At no great cost: it is called at every check of a trigger, if processes may join.
        """
        return []

    def enter(self, epoch: int, members: Sequence[int], topology: Topology) -> None:
        """Begin `epoch`, of these processes by rank, in which this one has `topology`.

        All boards are closed. Those that are opened from now on are not those of another epoch.
        """
        self.epoch, self.members, self.topology = epoch, tuple(members), topology

    # -- ability: a default group of ``torch.distributed`` ----------------------------------------

    def open_process_group(self) -> None:  # noqa: B027 - optional
        """Open ``torch.distributed``'s default group of all ranks; they call this at one time.

        Optional, as :attr:`has_process_group` says. What it opens, :meth:`close` closes.
        """

    def abort_process_group(self) -> None:  # noqa: B027 - optional
        """End what :meth:`open_process_group` has opened; other ranks that wait in it raise.

        Optional. It waits for no rank. `reform` calls it before the next epoch.
        """

    # -- the end ----------------------------------------------------------------------------------

    @abstractmethod
    def close(self, failure: bytes | None = None) -> None:
        """Leave the world: others now see this rank as finished, or as failed with `failure`."""

    def abandon(self) -> None:  # noqa: B027 - optional
        """Release everything, unnoticed by others: this process is a forked child, not a rank."""
