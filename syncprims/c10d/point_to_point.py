"""Sends and receives: each direction and tag between two ranks is a board of these two.

A tensor travels in pieces, each of them a round. The sender may be some rounds ahead, so a send is
over when all of its pieces are posted, and its tensor may be changed. (In the world of a test it is
over when its receive has begun, as with Gloo.) A piece that does not fit waits in a queue. Every
later wait of this rank, in a collective, a transfer or a store, also sends from that queue. So no
rank waits forever for a transfer that the other side has started.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from syncprims._data import LARGE
from syncprims._data.arrays import raw
from syncprims._protocol.rounds import PendingRound, Rounds
from syncprims._world.world import RunningWorld
from syncprims.errors import PeerLost, SyncError, dump
from syncprims.interface import Awaited, Label, Note

from .tensors import OutputTensors, items_of
from .torch_internals import BETWEEN, finished_work, make_backend_error


class Transfer(Work):
    """One send or one receive of this rank, and its handle."""

    def __init__(
        self, channel: Channel, tensor: torch.Tensor, timeout: float | None, src: int | None
    ) -> None:
        """Send `tensor` through `channel`; or receive into it from the group rank `src`."""
        super().__init__()
        self.channel = channel
        self.note: Note = channel.note_of(tensor)
        self.piece_timeout = timeout  #: seconds; `timeout` is an attribute of torch's Work
        self.done: bool = False
        self.posted = self.collected = 0  #: pieces
        self._tensor, self._src = tensor, src
        self._outputs = None if src is None else OutputTensors(tensor)
        self.data: memoryview = raw(
            items_of(tensor) if self._outputs is None else self._outputs.items[0]
        )
        #: How often the channel posts for it.
        self.pieces: int = max(1, -(-len(self.data) // channel.piece_size))
        channel.add(self)

    def piece(self, number: int) -> memoryview:
        """Return the bytes of one piece."""
        size = self.channel.piece_size
        return self.data[number * size : (number + 1) * size]

    def finish(self) -> None:
        """Fill the tensor of a receive: all pieces have passed."""
        if self._outputs is not None:
            self._outputs.finish()
        self.done = True
        self.data = memoryview(b"")  # the memory is not needed any more

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the transfer is over; `timeout` is for each piece, by default the group's."""
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

    is_success: Callable[..., bool] = is_completed  # a transfer that fails raises

    def get_future(self) -> Future[Any]:
        """Return its future, when it is over."""
        self.wait()
        future: Future[Any] = finished_work(self.result()).get_future()
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the received tensors; an empty list for a send."""
        return [] if self._src is None else [self._tensor]

    def source_rank(self) -> int:
        """Return the group rank that sends it.

        :raises ValueError: if it is a send.
        """
        if self._src is None:
            raise ValueError("the handle of a send has no source rank; ask the one of a receive")
        return self._src

    _source_rank: Callable[..., int] = source_rank


class Channel:
    """One direction and tag between this rank and another one."""

    #: Whether a send is over only when its receive has begun: in worlds of tests.
    sends_meet: bool = False

    def __init__(self, world: RunningWorld, rounds: Rounds, src: int, dst: int, tag: int) -> None:
        self.rounds = rounds
        self._world = world
        self._background = world.background
        self._promised = 0  # pieces that this rank will post without another call, as room comes
        self._background.deadlocks.add(rounds.board, lambda: self._promised)
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
        self.piece_size: int = len(self._window.memory) // self._slots if self._window else limit

    def note_of(self, tensor: torch.Tensor) -> Note:
        """Return the note of a transfer that the user's line, on the stack now, has asked for."""
        kind = "send" if self._sends else "recv"
        tag = f", tag {self._tag}" if self._tag else ""
        what = f"{tensor.numel()} x {str(tensor.dtype)[6:]} to rank {self._dst}{tag}"
        return _note_of(kind, what, self._src, self.rounds.note(kind, what, self._src).label.site)

    def add(self, transfer: Transfer) -> None:
        """Begin a transfer, as far as there is room."""
        self._queue.append(transfer)
        with self._background.lock:  # another thread of this rank may post a piece meanwhile
            self._promised += transfer.pieces
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
        self._background.drop(self)
        self._world.close_rounds(self.rounds, why)

    # -- going on -------------------------------------------------------------------------------

    def has_note(self) -> bool:
        """Return whether the other rank has posted to the oldest round that is not collected."""
        board = self.rounds.board
        if self._seen <= board.collected:
            self._seen = board.status(self._peer).rounds
        return self._seen > board.collected

    def can_move(self) -> bool:
        """Return whether there is a step that needs no waiting."""
        return not self._moving and (self._can_post() or self._can_collect())

    def give_turn(self) -> None:
        """Pass the turn on, where one rank runs at a time."""
        board = self.rounds.board
        self._background.wait(self.has_note, board.now(), Awaited("a transfer", [board]))

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
            if self._queue:
                self._background.add(self)
            else:
                self._background.drop(self)
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
            with self._background.lock:
                self._promised -= 1
            return rounds.post_deferred(note, transfer.piece_timeout)

        self._under_way.append((transfer, rounds.atomic_call(label, post)))
        transfer.posted += 1
        if transfer.posted == transfer.pieces:
            self._queue.popleft()
            if self._sends and not self.sends_meet:
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
        limit = transfer.piece_timeout if timeout is None else timeout

        def collect() -> None:
            notes = rounds.collect_deferred(pending, limit)
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

    def __init__(self, world: RunningWorld, board: str, ranks: Sequence[int], me: int) -> None:
        self._world = world
        self._board = board
        self._ranks = ranks
        self._me = me
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._closed: Callable[[], SyncError] | None = None

    def transfer(
        self, tensor: torch.Tensor, src: int, dst: int, tag: int, timeout: float | None
    ) -> Transfer:
        """Send from the group rank `src` to `dst`, of which one is this rank.

        :raises ValueError: if a rank is not in the group, or both are the same rank.
        """
        if self._closed is not None:
            raise self._closed()
        for what, rank in (("src", src), ("dst", dst)):
            if not 0 <= rank < len(self._ranks):
                raise ValueError(
                    f"{what}={rank} is not a rank of a group of {len(self._ranks)} ranks"
                )
        if src == dst:
            raise ValueError(f"rank {src} of the group sends to itself: copy the tensor instead")
        channel = self._channels.get((src, dst, tag))
        if channel is None:
            a, b = self._ranks[src], self._ranks[dst]
            name = f"{self._board}: rank {a} to rank {b}, tag {tag}"
            rounds = self._world.open_rounds(sorted((a, b)), name, BETWEEN)
            channel = self._channels[src, dst, tag] = Channel(self._world, rounds, a, b, tag)
        return Transfer(channel, tensor, timeout, src if dst == self._me else None)

    def close(self, why: Callable[[], SyncError]) -> None:
        """Make every later call raise ``why()``; what no rank can finish fails on the others."""
        self._closed = why
        for channel in self._channels.values():
            channel.close(why)
        self._channels.clear()
