"""Sends and receives: each direction and tag between two ranks is a board of these two.

A tensor travels in pieces, each of them a round. The sender may be some rounds ahead, so a send is
over when all of its pieces are posted, and its tensor may be changed. A piece that does not
fit waits in a queue. Every later wait of this rank, in a collective, a transfer or a store, also
sends from that queue. So no rank waits forever for a transfer that the other side has started.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from syncprims._data import LARGE
from syncprims._data.arrays import raw
from syncprims._world.group import rounds_of
from syncprims._world.world import background_of, close_rounds, open_rounds, wait_any
from syncprims.errors import PeerLost, SyncError, dump
from syncprims.interface import Label, Note

from .tensors import OutputTensors, items_of
from .torch_internals import BETWEEN, finished_work, make_backend_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch
    from torch.futures import Future

    from syncprims._protocol.rounds import PendingRound, Rounds
    from syncprims._world.world import World

_ENDED = frozenset(("lost", "failed", "finished"))  # states


class Transfer(Work):
    """One send or one receive of this rank, and its handle."""

    channel: Channel
    note: Note
    pieces: int  #: how often the channel posts for it
    _src: int | None  # the group rank that sends; None: it is this one, or not known yet

    def __init__(
        self,
        tensor: torch.Tensor,
        timeout: float | None,
        outputs: OutputTensors | None = None,
        src: int | None = None,
    ) -> None:
        """Send `tensor`; or, with `outputs`, receive into it from the group rank `src`."""
        super().__init__()
        self.timeout = timeout  #: seconds for each piece
        self.data = raw(items_of(tensor) if outputs is None else outputs.items[0])
        self.done = False
        self.posted = self.collected = 0  #: pieces
        self._outputs = outputs
        self._received = [] if outputs is None else [tensor]
        self._src = src

    def begin(self, channel: Channel, note: Note) -> None:
        """Go through `channel`, as far as there is room."""
        self.channel, self.note = channel, note
        self.pieces = max(1, -(-len(self.data) // channel.piece_size))
        channel.add(self)

    def piece(self, number: int) -> memoryview:
        """Return the bytes of one piece."""
        size = self.channel.piece_size
        return self.data[number * size : (number + 1) * size]

    def finish(self) -> None:
        """Fill the tensor of a receive: all pieces have passed."""
        if self._outputs is not None:
            self._outputs.finish()
        self.done, self.data = True, memoryview(b"")  # the memory is not needed any more

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over; without a timeout, that of the group holds for each piece."""
        while not self.done:
            self.channel.move(timeout.total_seconds() if timeout else None, waits=True)
        return True

    def synchronize(self) -> None:
        """Return when it is over."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, after all transfers have gone on as far as they can."""
        self.channel.move(collects=True)
        if not self.done:
            self.channel.give_turn()
            self.channel.move(collects=True)
        return self.done

    def is_success(self) -> bool:
        """Return as :meth:`is_completed`: a transfer that fails raises."""
        return self.is_completed()

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


class Channel:
    """One direction and tag between this rank and another one."""

    def __init__(self, world: World, rounds: Rounds, src: int, dst: int, tag: int) -> None:
        self.rounds = rounds
        self._world = world
        self._background = background_of(world)
        self._moving = False  # a step is under way
        self._seen = 0  # rounds to which the other rank has posted, at least
        self._src, self._dst, self._tag = src, dst, tag
        self._sends = rounds.rank == src
        self._peer = dst if self._sends else src
        self._source = rounds.members.index(src)
        self._queue: deque[Transfer] = deque()  # not wholly posted
        self._under_way: deque[tuple[Transfer, PendingRound]] = deque()  # posted, not collected
        board = rounds.board
        self._window = board.window()
        # The cell of a round is free again after twice the depth of the board, as are these slots.
        self._slots = 2 * board.depth
        limit = board.note_limit or 1 << 62
        self.piece_size = len(self._window.memory) // self._slots if self._window else limit

    def note_of(self, tensor: torch.Tensor) -> Note:
        """Return the note of a transfer that the user's line, on the stack now, has asked for."""
        kind = "send" if self._sends else "recv"
        tag = f", tag {self._tag}" if self._tag else ""
        what = f"{tensor.numel()} x {str(tensor.dtype)[6:]} to rank {self._dst}{tag}"
        return _note_of(kind, what, self._src, self.rounds.note(kind, what, self._src).label.site)

    def add(self, transfer: Transfer) -> None:
        """Begin a transfer, as far as there is room."""
        self._queue.append(transfer)
        self.rounds.promised += transfer.pieces
        self.move()

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

    def move(
        self, timeout: float | None = None, *, collects: bool = False, waits: bool = False
    ) -> bool:
        """Take all steps of the queue that need no waiting, and return whether there were any.

        With `collects`, take also those of transfers that have left the queue. With `waits`, take
        one step at least, and wait for the other rank if it needs that: for `timeout` seconds, or,
        by default, as long as the transfer says.
        """
        with self._background.lock:
            if self._moving and not waits:
                return False
            self._moving = True
        moved = False
        try:
            while True:
                if self._can_post():
                    self._post()
                elif (waits and not moved) or ((collects or self._queue) and self._can_collect()):
                    self._collect(timeout)
                else:
                    return moved
                moved = True
        except SyncError as error:
            make_backend_error(error)
            raise
        finally:
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
            note = self._fill(transfer, rounds.board.posted + 1)
            rounds.promised -= 1
            return rounds.post_deferred(note, transfer.timeout)

        self._under_way.append((transfer, rounds.atomic_call(label, post)))
        transfer.posted += 1
        if transfer.posted == transfer.pieces:
            self._queue.popleft()
            if self._sends:
                transfer.finish()

    def _fill(self, transfer: Transfer, number: int) -> Note:
        """Return the note of a piece; its bytes are in the window if they are many."""
        if not self._sends:
            return transfer.note
        piece = transfer.piece(transfer.posted)
        if self._window is None or len(piece) < LARGE:
            return Note(transfer.note.label, payload=bytes(piece)) if len(piece) else transfer.note
        self._slot(number, len(piece))[:] = piece
        self._window.fence()
        return transfer.note

    def _slot(self, number: int, size: int) -> memoryview:
        begin = number % self._slots * self.piece_size
        return self._window.memory[begin : begin + size]  # type: ignore[union-attr]

    def _collect(self, timeout: float | None) -> None:
        transfer, pending = self._under_way[0]
        rounds, label = self.rounds, transfer.note.label
        number = rounds.board.collected + 1
        if timeout is not None:
            pending.timeout = timeout

        def collect() -> None:
            notes = rounds.collect_deferred(pending)
            if not self._sends:
                room = transfer.piece(transfer.collected)
                if self._window is None or len(room) < LARGE:
                    room[:] = notes[self._source].payload
                else:
                    self._window.fence()
                    room[:] = self._slot(number, len(room))
                    self._window.fence()

        rounds.atomic_call(label, collect)
        self._under_way.popleft()
        transfer.collected += 1
        if transfer.collected == transfer.pieces:
            transfer.finish()


@functools.lru_cache(maxsize=4096)
def _note_of(kind: str, what: str, src: int, site: str) -> Note:
    """Return a note of the one call that both sides make; each shows its own."""
    return Note(Label("send/recv", what, src, site=f"{kind} at {site}"))


class PointToPoint:
    """The sends and receives of one rank in one process group."""

    def __init__(self, world: World, board: str, ranks: Sequence[int], me: int) -> None:
        self.world = world
        self._board = board
        self._ranks = ranks
        self._me = me
        self.background = background_of(world)
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._from_any: set[_ReceiveFromAny] = set()  # that no rank has sent to yet
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
            rounds = open_rounds(self.world, sorted((a, b)), name, BETWEEN)
            channel = self._channels[src, dst, tag] = Channel(self.world, rounds, a, b, tag)
        return channel

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"{what}={rank} is no rank of a group of {len(self._ranks)} ranks")

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout: float | None) -> Transfer:
        """Send to the group rank `dst`.

        :raises ValueError: if there is none of that number, or it is this one.
        """
        self._check_rank("dst", dst)
        channel = self._channel(self._me, dst, tag)
        transfer = Transfer(tensor, timeout)
        transfer.begin(channel, channel.note_of(tensor))
        return transfer

    def receive(self, tensor: torch.Tensor, src: int, tag: int, timeout: float | None) -> Transfer:
        """Receive from the group rank `src`.

        :raises ValueError: if there is none of that number, or it is this one.
        """
        self._check_rank("src", src)
        channel = self._channel(src, self._me, tag)
        transfer = Transfer(tensor, timeout, OutputTensors(tensor), src)
        transfer.begin(channel, channel.note_of(tensor))
        return transfer

    def receive_from_any(self, tensor: torch.Tensor, tag: int, timeout: float | None) -> Transfer:
        """Receive from the first other group rank that sends with this tag.

        :raises ValueError: if there is no other rank.
        """
        others = [rank for rank in range(len(self._ranks)) if rank != self._me]
        if not others:
            raise ValueError("a group of one rank has nobody to receive from")
        channels = {rank: self._channel(rank, self._me, tag) for rank in others}
        transfer = _ReceiveFromAny(self, channels, tensor, timeout)
        self._from_any.add(transfer)
        if not transfer.move():
            self.background.keep(transfer, unfinished=True)
        return transfer

    def close(self, why: Callable[[], SyncError]) -> None:
        """Make every later call raise ``why()``; what no rank can finish fails on the others."""
        self._closed = why
        for transfer in tuple(self._from_any):
            self.forget(transfer)
        for channel in self._channels.values():
            channel.close(why)
        self._channels.clear()

    def check_open(self) -> None:
        """Accept a call, unless the group is destroyed.

        :raises SyncError: that says so.
        """
        if self._closed is not None:
            raise self._closed()

    def forget(self, transfer: _ReceiveFromAny) -> None:
        """Look for a sender no more."""
        self._from_any.discard(transfer)
        self.background.keep(transfer, unfinished=False)


class _ReceiveFromAny(Transfer):
    """A receive from any rank: a task of every wait until a rank has sent."""

    def __init__(
        self,
        owner: PointToPoint,
        channels: dict[int, Channel],
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> None:
        super().__init__(tensor, timeout, OutputTensors(tensor))
        self._owner, self._channels = owner, channels
        self._notes = {rank: channel.note_of(tensor) for rank, channel in channels.items()}

    def can_move(self) -> bool:
        """Return whether a rank has sent, and this has not begun to receive from it."""
        return self._src is None and self._find_sender() is not None

    def move(self) -> bool:
        """Receive from a rank that has sent, and return whether there was one."""
        with self._owner.background.lock:
            src = self._find_sender() if self._src is None else None
            if src is not None:
                self._receive_from(src)
            return src is not None

    def _find_sender(self) -> int | None:
        channels = self._channels.items()
        return next((rank for rank, channel in channels if channel.has_unclaimed_note()), None)

    def _receive_from(self, src: int) -> None:
        self._src = src
        self._owner.forget(self)
        self.begin(self._channels[src], self._notes[src])

    def _wait_for_sender(self, timeout: float | None) -> None:
        """Return once a rank has sent, none of them can any more, or the time is up."""
        channels = [*self._channels.values()]

        def settled() -> bool:
            begun = self._src is not None or self.can_move()
            return begun or all(channel.has_ended() for channel in channels)

        wait_any(self._owner.world, [channel.rounds for channel in channels], settled, timeout)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over; without a timeout, that of the group holds."""
        limit = self.timeout if timeout is None else timeout.total_seconds()
        now = rounds_of(self._owner.world.group).board.now
        begin = now()
        while self._src is None and not self.move():
            self._owner.check_open()
            waited = now() - begin
            ended = [rank for rank, channel in self._channels.items() if channel.has_ended()]
            if len(ended) < len(self._channels) and (limit is None or waited < limit):
                self._wait_for_sender(None if limit is None else limit - waited)
            elif not self.move():  # a note may have come before the end
                # This receive fails, and says what has become of one that could have sent.
                self.timeout = None if limit is None else 0.001
                self._receive_from(next(iter(ended or self._channels)))
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Return whether the tensor is filled."""
        if self._src is None and not self.move():
            self._wait_for_sender(0.0)  # where one rank runs at a time, the others get their turn
            self.move()
        return self._src is not None and super().is_completed()

    def source_rank(self) -> int:
        """Return the group rank that has sent it, when it is over."""
        self.wait()
        return super().source_rank()
