"""Sends and receives: each direction and tag between two ranks is a board of these two.

A tensor travels in pieces, each of them a round. The sender may be some rounds ahead, so a send is
over when all of its pieces are posted, and its tensor may be changed. A piece that does not
fit waits in a queue. Every later wait of this rank, in a collective, a transfer or a store, also
sends from that queue. So no rank waits forever for a transfer that the other side has started.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from syncprims._data.arrays import raw
from syncprims._data.limits import LARGE
from syncprims._world.group import rounds_of
from syncprims._world.world import background_of, close_rounds, open_rounds, wait_any
from syncprims.errors import PeerLost, SyncError, dump
from syncprims.interface import Label, Note

from .tensors import OutputTensors, items_of
from .torch_internals import BETWEEN, finished_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch
    from torch.futures import Future

    from syncprims._protocol.rounds import PendingRound, Rounds
    from syncprims._world.world import World
    from syncprims.interface import Window

_MOST_NOTES = 4096
_ENDED = frozenset(("lost", "failed", "finished"))  # states


class Transfer:
    """One send or one receive of this rank."""

    def __init__(self, channel: Channel, note: Note, data: memoryview) -> None:
        self.channel = channel
        self.note = note
        self.data = data
        self.done = False
        #: how often the channel posts for it, and has posted and collected already
        self.pieces = max(1, -(-len(data) // channel.piece_size))
        self.posted = self.collected = 0

    def piece(self, number: int) -> memoryview:
        """Return the bytes of one piece."""
        size = self.channel.piece_size
        return self.data[number * size : (number + 1) * size]


class Channel:
    """One direction and tag between this rank and another one."""

    def __init__(self, world: World, rounds: Rounds, src: int, dst: int, tag: int) -> None:
        self.rounds = rounds
        self._world = world
        self._background = background_of(world)
        self._moving = False  # a step is under way
        self._seen = 0  # rounds to which the other rank has posted, at least
        self.src, self.dst, self.tag = src, dst, tag
        self.sends = rounds.rank == src
        self._peer = dst if self.sends else src
        self._source = rounds.members.index(src)
        self._queue: deque[Transfer] = deque()  # not wholly posted
        self._under_way: deque[tuple[Transfer, PendingRound]] = deque()  # posted, not collected
        self._notes: dict[int, tuple[Note, Note]] = {}  # by what the rounds have made for a call
        board = rounds.board
        self._window: Window | None = board.window()
        # The cell of a round is free again after twice the depth of the board, as are these slots.
        self._slots = 2 * board.depth
        limit = board.note_limit or 1 << 62
        self.piece_size = len(self._window.memory) // self._slots if self._window else limit

    def note_of(self, what: str) -> Note:
        """Return the note of a transfer that the user's line, on the stack now, has asked for."""
        kind = "send" if self.sends else "recv"
        tag = f", tag {self.tag}" if self.tag else ""
        made = self.rounds.note(kind, f"{what} to rank {self.dst}{tag}", self.src)
        note = self._notes.get(id(made))
        if note is None or note[0] is not made:
            # Both sides make one call, and each shows its own.
            name, src, site = made.label.name, made.label.src, f"{kind} at {made.label.site}"
            note = made, Note(Label("send/recv", name, src, site=site))
            if len(self._notes) > _MOST_NOTES:
                self._notes.clear()
            self._notes[id(made)] = note
        return note[1]

    def add(self, note: Note, data: memoryview, timeout: float | None) -> Transfer:
        """Return a new transfer, begun as far as there is room."""
        transfer = Transfer(self, note, data)
        self._queue.append(transfer)
        self._timeout = timeout
        self.rounds.promised += transfer.pieces
        self.move()
        return transfer

    def close(self, why: Callable[[], SyncError]) -> None:
        """Leave the board; the other rank cannot wait for what is left in the queue."""
        if self._queue:
            rank, label = self.rounds.rank, self._queue[0].note.label
            error = PeerLost(
                f"rank {rank} has destroyed its process group before {label} was over; call wait() "
                f"on the handle of every isend() and irecv() before destroy_process_group()",
                rank=rank,
                call=str(label),
                missing=[rank],
            )
            self.rounds.abort(dump(error))
        self._background.keep(self, unfinished=False)
        close_rounds(self._world, self.rounds, why)

    # -- going on -------------------------------------------------------------------------------

    def has_note(self) -> bool:
        """Return whether the other rank has posted to the oldest round that is not collected."""
        board = self.rounds.board
        if self._seen <= board.collected:
            self._seen = board.status(self._peer).rounds
        return self._seen > board.collected

    def has_unclaimed_note(self) -> bool:
        """Return whether the other rank has posted more than this rank has asked to receive."""
        board = self.rounds.board
        return board.status(self._peer).rounds > board.posted + self.rounds.promised

    def has_ended(self) -> bool:
        """Return whether the other rank will post no more, or this board is broken."""
        board = self.rounds.board
        return board.verdict() is not None or board.status(self._peer).state in _ENDED

    def can_move(self) -> bool:
        """Return whether there is a step that needs no waiting."""
        return not self._moving and (self._can_post() or self._can_collect())

    def give_turn(self) -> None:
        """Let the others go on, where one rank runs at a time."""
        wait_any(self._world, [self.rounds], self.has_note, 0.0)

    def move(self, *, collects: bool = False) -> bool:
        """Take all steps of the queue that need no waiting, and return whether there were any.

        With `collects`, take also those of transfers that have left the queue.
        """
        with self._background.lock:
            if self._moving:
                return False
            self._moving = True
        moved = False
        try:
            while True:
                if self._can_post():
                    self._post()
                elif (collects or self._queue) and self._can_collect():
                    self._collect()
                else:
                    return moved
                moved = True
        finally:
            self._rest()

    def go_on(self, timeout: float | None) -> None:
        """Take the next step of this channel, and wait for the other rank if it needs that.

        :param timeout: how long to wait, if not as long as the transfer says.
        """
        with self._background.lock:
            self._moving = True
        try:
            if self._can_post():
                self._post()
            else:
                if timeout is not None:
                    self._under_way[0][1].timeout = timeout
                self._collect()
        finally:
            self._rest()

    def _rest(self) -> None:
        self._background.keep(self, unfinished=bool(self._queue))
        self._moving = False

    def _can_post(self) -> bool:
        board = self.rounds.board
        return bool(self._queue) and board.posted - board.collected < board.depth

    def _can_collect(self) -> bool:
        return bool(self._under_way) and self.has_note()

    def _post(self) -> None:
        transfer = self._queue[0]
        rounds, label = self.rounds, transfer.note.label

        def post() -> PendingRound:
            note = self._note_of(transfer, rounds.board.posted + 1)
            rounds.promised -= 1
            return rounds.post_deferred(note, self._timeout)

        self._under_way.append((transfer, rounds.atomic_call(label, post)))
        transfer.posted += 1
        if transfer.posted == transfer.pieces:
            self._queue.popleft()
            if self.sends:
                transfer.done = True
                transfer.data = memoryview(b"")  # the tensor is not needed any more

    def _note_of(self, transfer: Transfer, number: int) -> Note:
        """Return the note of a piece; its bytes are in the window if they are many."""
        if not self.sends:
            return transfer.note
        piece = transfer.piece(transfer.posted)
        if self._window is None or len(piece) < LARGE:
            return Note(transfer.note.label, payload=bytes(piece)) if len(piece) else transfer.note
        self._slot(self._window, number, len(piece))[:] = piece
        self._window.fence()
        return transfer.note

    def _slot(self, window: Window, number: int, size: int) -> memoryview:
        begin = number % self._slots * self.piece_size
        return window.memory[begin : begin + size]

    def _collect(self) -> None:
        transfer, pending = self._under_way[0]
        rounds, label = self.rounds, transfer.note.label
        number = rounds.board.collected + 1

        def collect() -> None:
            notes = rounds.collect_deferred(pending)
            if not self.sends:
                room = transfer.piece(transfer.collected)
                if self._window is None or len(room) < LARGE:
                    room[:] = notes[self._source].payload
                else:
                    self._window.fence()
                    room[:] = self._slot(self._window, number, len(room))
                    self._window.fence()

        rounds.atomic_call(label, collect)
        self._under_way.popleft()
        transfer.collected += 1
        if transfer.collected == transfer.pieces:
            transfer.done = True


class PointToPoint:
    """The sends and receives of one rank in one process group."""

    def __init__(self, world: World, board: str, ranks: Sequence[int], me: int) -> None:
        self._world = world
        self._board = board
        self._ranks = ranks
        self.me = me
        self.background = background_of(world)
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._from_any: set[_AnyReceive] = set()  # that no rank has sent to yet
        self._closed: Callable[[], SyncError] | None = None

    def _channel(self, src: int, dst: int, tag: int) -> Channel:
        """Return the channel between two group ranks.

        :raises ValueError: if they are one.
        """
        self.check_open()
        if src == dst:
            raise ValueError(f"rank {src} of the group sends to itself: copy the tensor instead")
        channel = self._channels.get((src, dst, tag))
        if channel is None:
            a, b = self._ranks[src], self._ranks[dst]
            name = f"{self._board}: rank {a} to rank {b}, tag {tag}"
            rounds = open_rounds(self._world, sorted((a, b)), name, BETWEEN)
            channel = Channel(self._world, rounds, a, b, tag)
            self._channels[src, dst, tag] = channel
        return channel

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout: float | None) -> Any:
        """Send to the group rank `dst`."""
        channel = self._channel(self.me, dst, tag)
        note = channel.note_of(_describe(tensor))
        transfer = channel.add(note, raw(items_of(tensor)), timeout)
        return finished_work() if transfer.done else _TransferWork(transfer)

    def receive(self, tensor: torch.Tensor, src: int, tag: int, timeout: float | None) -> Any:
        """Receive from the group rank `src`."""
        channel = self._channel(src, self.me, tag)
        return _begin_receive(channel, channel.note_of(_describe(tensor)), tensor, src, timeout)

    def receive_from_any(self, tensor: torch.Tensor, tag: int, timeout: float | None) -> Any:
        """Receive from the first other group rank that sends with this tag.

        :raises ValueError: if there is no other rank.
        """
        others = [rank for rank in range(len(self._ranks)) if rank != self.me]
        if not others:
            raise ValueError("a group of one rank has nobody to receive from")
        channels = {rank: self._channel(rank, self.me, tag) for rank in others}
        work = _AnyReceive(self, channels, tensor, timeout)
        self._from_any.add(work)
        if not work.move():
            self.background.keep(work, unfinished=True)
        return work

    def close(self, why: Callable[[], SyncError]) -> None:
        """Make every later call raise ``why()``; what no rank can finish fails on the others."""
        self._closed = why
        for work in tuple(self._from_any):
            self.forget(work)
        for channel in self._channels.values():
            channel.close(why)
        self._channels.clear()

    def check_open(self) -> None:
        """Accept a call, unless the group is destroyed.

        :raises SyncError: that says so.
        """
        if self._closed is not None:
            raise self._closed()

    def forget(self, work: _AnyReceive) -> None:
        """Look for a sender no more."""
        self._from_any.discard(work)
        self.background.keep(work, unfinished=False)

    def wait(
        self, channels: Sequence[Channel], ready: Callable[[], bool], timeout: float | None
    ) -> None:
        """Return when ``ready()``, after `timeout` seconds, or when one of the boards is broken."""
        wait_any(self._world, [one.rounds for one in channels], ready, timeout)

    def now(self) -> float:
        """Return the time of the world, in seconds."""
        return rounds_of(self._world.group).board.now()


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype)[6:]}"


def _begin_receive(
    channel: Channel, note: Note, tensor: torch.Tensor, src: int, timeout: float | None
) -> _TransferWork:
    """Return the handle of a receive from the other rank of `channel`."""
    outputs = OutputTensors(tensor)
    transfer = channel.add(note, raw(outputs.items[0]), timeout)
    return _TransferWork(transfer, outputs, tensor, src)


# -- handles ---------------------------------------------------------------------------------------


class _TransferWork(Work):
    """The handle of a send, or of a receive into `tensor`, that may not be over."""

    def __init__(
        self,
        transfer: Transfer | None,
        outputs: OutputTensors | None = None,
        tensor: torch.Tensor | None = None,
        src: int | None = None,
    ) -> None:
        super().__init__()
        self._transfer, self._outputs = transfer, outputs
        self._received = [] if tensor is None else [tensor]
        self._src = src

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over; without a timeout, that of the group holds."""
        self._finish(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        """Return when it is over."""
        self.wait()

    def _finish(self, timeout: float | None) -> None:
        """Return when it is over; `timeout` is for each of its pieces."""
        transfer = self._transfer
        while transfer is not None and not transfer.done:
            transfer.channel.go_on(timeout)
        self._fill()

    def _fill(self) -> None:
        if self._outputs is not None:
            self._outputs.finish()
            self._outputs = None

    def is_completed(self) -> bool:
        """Return whether it is over, after all transfers have gone on as far as they can."""
        transfer = self._transfer
        if transfer is None:
            return False
        transfer.channel.move(collects=True)
        if not transfer.done:
            transfer.channel.give_turn()
            transfer.channel.move(collects=True)
        if transfer.done:
            self._fill()
        return transfer.done

    is_success = is_completed

    def get_future(self) -> Future[Any]:
        """Return its future, when it is over."""
        self.wait()
        future: Future[Any] = finished_work(self.result()).get_future()
        return future

    def result(self) -> list[torch.Tensor]:
        """Return what was received; nothing for a send."""
        return self._received

    def source_rank(self) -> int:
        """Return the group rank that has sent it, when that is known.

        :raises ValueError: if it is a send.
        """
        if self._src is None:
            raise ValueError("the handle of a send has no source rank; ask the one of a receive")
        return self._src

    def _source_rank(self) -> int:
        return self.source_rank()


class _AnyReceive(_TransferWork):
    """The handle of a receive from any rank: a task of every wait until a rank has sent."""

    def __init__(
        self,
        owner: PointToPoint,
        channels: dict[int, Channel],
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> None:
        super().__init__(None, None, tensor)
        self._owner, self._channels = owner, channels
        self._tensor, self._timeout = tensor, timeout
        self._notes = {rank: one.note_of(_describe(tensor)) for rank, one in channels.items()}

    def can_move(self) -> bool:
        """Return whether a rank has sent."""
        return self._transfer is None and self._find_sender() is not None

    def move(self) -> bool:
        """Receive from a rank that has sent, and return whether there was one."""
        with self._owner.background.lock:
            src = None if self._transfer is not None else self._find_sender()
            if src is not None:
                self._receive_from(src, self._timeout)
            return src is not None

    def _find_sender(self) -> int | None:
        senders = (rank for rank, one in self._channels.items() if one.has_unclaimed_note())
        return next(senders, None)

    def _receive_from(self, src: int, timeout: float | None) -> None:
        work = _begin_receive(self._channels[src], self._notes[src], self._tensor, src, timeout)
        self._transfer, self._outputs, self._src = work._transfer, work._outputs, src
        self._owner.forget(self)

    def _finish(self, timeout: float | None) -> None:
        owner, channels = self._owner, [*self._channels.values()]
        limit = self._timeout if timeout is None else timeout

        def settled() -> bool:
            begun = self._transfer is not None or self.can_move()
            return begun or all(one.has_ended() for one in channels)

        begin = owner.now()
        while self._transfer is None and not self.move():
            owner.check_open()
            waited = owner.now() - begin
            ended = [rank for rank, one in self._channels.items() if one.has_ended()]
            if len(ended) < len(channels) and (limit is None or waited < limit):
                owner.wait(channels, settled, None if limit is None else limit - waited)
            elif not self.move():  # a note may have come before the end
                # This receive fails, and says what has become of one that could have sent.
                src = next(iter(ended or self._channels))
                self._receive_from(src, None if limit is None else 0.001)
        super()._finish(timeout)

    def is_completed(self) -> bool:
        """Return whether the tensor is filled."""
        if self._transfer is None and not self.move():
            # Where one rank runs at a time, the others get their turn.
            self._owner.wait([*self._channels.values()], self.can_move, 0.0)
            self.move()
        return super().is_completed()

    is_success = is_completed

    def source_rank(self) -> int:
        """Return the group rank that has sent it, when it is over."""
        self.wait()
        return super().source_rank()
