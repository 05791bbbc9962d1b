"""The data plane of one board: where values pass through, and what is prepared for them.

A value with a :class:`~syncprims._data.layouts.Layout` takes one round: each rank writes its slot,
posts a note that says what is in it, and reads all slots once all notes are there. The slots are in
memory that the members share, or, where they share none, in the notes.

What is posted with round k lies in half k % 2 of that memory. A rank writes there when it has
collected round k - 1: so all have posted that, and have read what came with round k - 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from . import codec
from .layouts import Layout, key_of, make_layout, read_layout
from .shared_memory import SharedMemoryTransport
from .transport import DeviceTransport, EngineTransport, Transport

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Note, Window

T = TypeVar("T")

_MOST_KNOWN = 4096  # layouts, and prepared calls
#: Bytes in all slots up to which one round is faster than dividing the work of a reduction: with up
#: to so many members, and with more. Each member then reads all slots.
_FEW_MEMBERS, _ONE_ROUND, _ONE_ROUND_OF_MANY = 4, 2 << 20, 1 << 20
#: Bytes up to which a broadcast is one piece: to read it while it is written saves less time than
#: more rounds cost.
_ONE_PIECE = 1 << 20


class DataPlane:
    """What one rank has prepared for the values that pass through a board."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.board = board = rounds.board
        self.count = len(board.members)
        self.index = board.members.index(rounds.rank)  #: of this rank among the members
        self._small = board.small_window
        #: Bytes of one member's part of the small window, for one round.
        self.small_slot = len(self._small.memory) // 2 // self.count if self._small else 0
        self._window: Window | None = None
        self._transport: Transport | None = None
        self._layouts: dict[Hashable, Layout] = {}
        self._described: dict[bytes, Layout] = {}
        #: The prepared calls, by the identities of the plain note and of the layout; what a source
        #: is expected to send, by that of the note. A call keeps both: no other has their identity.
        self.calls: dict[Hashable, Any] = {}
        #: Whether all members are known to have the window.
        self.window_is_shared = False

    @classmethod
    def of(cls, rounds: Rounds) -> DataPlane:
        """Return the data plane of a board.

        :raises SyncError: if the board is closed.
        """
        if rounds.data is None:
            if rounds.closed is not None:
                raise rounds.closed()
            rounds.data = cls(rounds)
        plane: DataPlane = rounds.data
        return plane

    # -- how arrays travel ---------------------------------------------------------------------

    def window(self) -> Window | None:
        """Return the window of the board, if it has one.

        :raises OSError: if there is no space for it.
        """
        if self._window is None:
            self._window = self.board.window()
        return self._window

    def transport(self) -> Transport | None:
        """Return what carries arrays between all members; all have one, or none has.

        :raises OSError: if there is no space for a window.
        """
        if self._transport is None:
            host: Transport | None = None
            if (window := self.window()) is not None:
                host = SharedMemoryTransport(window)
            elif self.board.engine is not None:
                host = EngineTransport(self.board.engine)
            self._transport = host and DeviceTransport(host, self.board.device_engine)
        return self._transport

    def place(self, layout: Layout) -> Window | None:
        """Return where the slots of a layout are; None if notes carry them.

        :raises OSError: if there is no space for it.
        """
        if not layout.is_placed:
            layout.window = window = self._small
            if layout.stride > self.small_slot:
                layout.window = window = self.window()
                if window is not None:
                    most = _ONE_ROUND if self.count <= _FEW_MEMBERS else _ONE_ROUND_OF_MANY
                    most = min(most, len(window.memory) // 2)
                    layout.one_round = self.count * layout.stride <= most
            layout.half = 0 if window is None else len(window.memory) // 2
            layout.is_placed = True
        return layout.window

    def reaches_all(self, layout: Layout) -> bool:
        """Return whether a slot of this layout is in memory that all members are known to have."""
        window = self.place(layout)
        if window is None or window is self._small:
            return True
        return self.window_is_shared and layout.stride <= min(_ONE_PIECE, layout.half)

    # -- what values are -----------------------------------------------------------------------

    def find(self, note: Note, value: Any) -> tuple[Layout, Any, Any] | None:
        """Return the layout of a value, the value packed, and the call that is prepared, or None.

        All of it is None if the value has no layout, or does not fit into it.
        """
        key = key_of(value)
        layout = self._layouts.get(key)
        if layout is None:
            layout = None if key is None else self._add_layout(key, value)
        packed = None if layout is None else layout.pack(value)
        if layout is None or packed is None:
            return None
        return layout, packed, self.calls.get((id(note), id(layout)))

    def _add_layout(self, key: Hashable, value: Any) -> Layout | None:
        made = make_layout(value, self.count)
        if made is None or (made.stride >= codec.LARGE and self.board.engine is not None):
            return None  # and forget the key: it may hold objects of the user
        if len(self._layouts) > _MOST_KNOWN:
            self._layouts.clear()
        found = self._layouts[key] = self.described(made.data)
        return found

    def described(self, data: bytes) -> Layout:
        """Return the layout that a member's label describes."""
        found = self._described.get(data)
        if found is None:
            if len(self._described) > _MOST_KNOWN:
                self._described.clear()
            found = self._described[data] = read_layout(data, self.count)
        return found

    def layouts_of(self, notes: Sequence[Note]) -> list[Layout | None]:
        """Return the layouts of the values that came with these notes; None for those without."""
        return [self.described(note.label.data) if note.label.data else None for note in notes]

    def encodings(self, number: int, notes: Sequence[Note]) -> list[bytes]:
        """Return the encodings of the values that came with the notes of round `number`.

        A large array is represented by its spec, and so is a value of which no slot can be read:
        where the slots of the members differ in size, they overlap.
        """
        layouts = self.layouts_of(notes)
        overlap = len({layout.stride for layout in layouts if layout is not None}) > 1
        found: list[bytes] = []
        for index, (note, layout) in enumerate(zip(notes, layouts, strict=True)):
            if layout is None:
                found.append(note.payload)
            elif overlap or layout.is_large:
                found.append(layout.data)
            elif (window := self.place(layout)) is None:
                found.append(codec.encode(layout.read(bytearray(note.payload), 0, 0)))
            else:
                window.fence()
                at = layout.half * (number & 1)
                found.append(codec.encode(layout.read(window.memory, at, index)))
        return found

    def small_encodings(self, number: int, notes: Sequence[Note]) -> list[bytes]:
        """Return the encodings of the values in the small slots, or in the notes, of a round."""
        found: list[bytes] = []
        for index, (note, layout) in enumerate(zip(notes, self.layouts_of(notes), strict=True)):
            if layout is None or self._small is None:
                found.append(note.payload)
                continue
            self._small.fence()
            begin = len(self._small.memory) // 2 * (number & 1) + index * self.small_slot
            found.append(codec.encode(layout.read(self._small.memory, begin, 0)))
        return found

    def keep(self, key: Hashable, call: T) -> T:
        """Return `call`, which is kept for later calls."""
        if len(self.calls) > _MOST_KNOWN:
            self.calls.clear()
        self.calls[key] = call
        return call
