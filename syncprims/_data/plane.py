"""The data plane of one board: the memory and transports for values, and prepared calls.

A value with a :mod:`layout <syncprims._data.layouts>` takes one round if its slots fit into memory
that the members share: each rank writes its slot, posts a note that says what is in it, and reads
all slots once all notes are there. A larger array goes through the transport of the board. All
other values are encoded, and travel in the notes.

What is posted with round k lies in half k % 2 of that memory. A rank writes there when it has
collected round k - 1: so all have posted that, and have read what came with round k - 2.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from syncprims._protocol.rounds import Rounds
from syncprims.interface import Note, Window

from . import FEW_MEMBERS, LARGE, ONE_PIECE, ONE_ROUND, ONE_ROUND_OF_MANY, Value
from .arrays import LINE, library_of
from .layouts import ArrayLayout, Layout, key_of, make_layout, read_layout
from .transport import EngineTransport, SharedMemoryTransport, Transport

T = TypeVar("T")

_MOST_KNOWN = 4096  # layouts, and prepared calls


class DataPlane:
    """The prepared memory and transports of one rank at one board."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.board = board = rounds.board
        self.count = len(board.members)
        self.small_window = board.small_window
        small = 0 if self.small_window is None else len(self.small_window.memory)
        self._small_slot = small // 2 // self.count // LINE * LINE
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
        plane = rounds.prepared
        if not isinstance(plane, cls):
            if rounds.closed is not None:
                raise rounds.closed()
            plane = rounds.prepared = cls(rounds)
        return plane

    # -- how arrays travel ---------------------------------------------------------------------

    def transport(self) -> Transport | None:
        """Return what carries arrays between all members; all have one, or none has.

        :raises OSError: if there is no space for a window.
        """
        if self._transport is None:
            self._window, engine = self.board.window(), self.board.engine
            if self._window is not None:
                self._transport = SharedMemoryTransport(self._window, self.board.device_engine)
            elif engine is not None:
                self._transport = EngineTransport(engine, self.board.device_engine)
        return self._transport

    def needed_transport(self) -> Transport:
        """Return what carries arrays, where another member has one.

        :raises OSError: if there is no space for a window.
        """
        transport = self.transport()
        assert transport is not None, "all members have one, or none has"
        return transport

    def window_of(self, layout: Layout) -> Window | None:
        """Return the memory in which there are slots for this layout; None if there are none.

        :raises OSError: if there is no space for it.
        """
        if self.is_small(layout):
            return self.small_window
        self.transport()
        return self._window

    def half(self, window: Window) -> int:
        """Return the bytes of a window that are for one round."""
        return len(window.memory) // 2 // LINE * LINE

    def is_small(self, layout: Layout) -> bool:
        """Return whether each member has a slot for this layout in the small window."""
        return layout.stride <= self._small_slot

    def takes_one_round(self, layout: Layout) -> bool:
        """Return whether it is best, and possible, that all members read all slots."""
        window = self.window_of(layout)
        if window is None or self.is_small(layout):
            return window is not None
        few = self.count <= FEW_MEMBERS
        most = ONE_ROUND if few else ONE_ROUND_OF_MANY
        return self.count * layout.stride <= min(most, self.half(window))

    def reaches_all(self, layout: Layout) -> bool:
        """Return whether a slot of this layout is in memory that all members are known to have."""
        if self.is_small(layout):
            return True
        window = self._window if self.window_is_shared else None
        return window is not None and layout.stride <= min(ONE_PIECE, self.half(window))

    # -- what values are -----------------------------------------------------------------------

    def find(self, note: Note, value: Value) -> tuple[Layout, Any, Any] | None:
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

    def _add_layout(self, key: Hashable, value: Value) -> Layout | None:
        if not self._small_slot and library_of(value) is None:
            return None  # only an array has another place than the small window
        made = make_layout(value, self.count, self._small_slot)
        is_large = isinstance(made, ArrayLayout) and made.spec.nbytes >= LARGE
        if made is None or not (self.is_small(made) or (is_large and self.transport())):
            return None  # and forget the key: it may hold objects of the user
        if len(self._layouts) > _MOST_KNOWN:
            self._layouts.clear()
        layout = self._layouts[key] = self.described(made.data)
        return layout

    def described(self, data: bytes) -> Layout:
        """Return the layout that a member's label describes."""
        layout = self._described.get(data)
        if layout is None:
            if len(self._described) > _MOST_KNOWN:
                self._described.clear()
                self._layouts.clear()
            layout = read_layout(data, self.count)
            if self.is_small(layout):  # then each member's slot has one place, whatever is in it
                layout.spread(self._small_slot)
            self._described[data] = layout  # complete: an exception may come anywhere
        return layout

    def keep(self, key: Hashable, call: T) -> T:
        """Return `call`, which is kept for later calls."""
        if len(self.calls) > _MOST_KNOWN:
            self.calls.clear()
        self.calls[key] = call
        return call
