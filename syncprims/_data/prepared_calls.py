"""Calls with a value that has a layout: prepared once for each call site, then one round each.

A training loop makes the same call again and again. All that does not change is in a
:class:`PreparedCall`, so that a call only writes its slot, posts a note, and reads the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from syncprims.interface import Label, Note

from .arrays import mark_written, may_fill
from .results import copy_into

if TYPE_CHECKING:
    from .layouts import Layout
    from .plane import DataPlane


#: What a call makes its first round of: the arguments of :meth:`Rounds.meet`.
FirstRound = tuple[Note, float | None, Callable[[Sequence[Note]], Any], Callable[[], object] | None]


class PreparedCall:
    """What is the same in all calls of one site with values of one layout."""

    def __init__(self, plane: DataPlane, layout: Layout, note: Note, own_at: int = 0) -> None:
        """Prepare the calls whose plain note is `note`; this rank's slot begins at `own_at`.

        :raises OSError: if there is no space for the slots.
        """
        self.note = note
        self.layout = layout
        self._rounds, self._board = plane.rounds, plane.board
        self.window = plane.place(layout)
        if self.window is not None:
            self._memory, self._fence = self.window
        self._half, self._own_at, self._write_slot = layout.half, own_at, layout.write
        plain = note.label
        label = Label(plain.kind, plain.name, plain.src, plain.op, plain.site, layout.data)
        #: The note, with the description of the value.
        self.header = note._replace(label=label)

    def write(self, packed: Any) -> None:
        """Write this rank's slot for the round that it posts next."""
        at = self._half * (self._board.posted + 1 & 1)
        self._write_slot(self._memory, at + self._own_at, 0, packed)
        self._fence()


class PreparedReduction(PreparedCall):
    """An ``all_reduce`` of values of one layout."""

    def __init__(
        self,
        plane: DataPlane,
        layout: Layout,
        note: Note,
        op: str,
        in_pieces: Callable[..., None],
        otherwise: Callable[..., Any],
    ) -> None:
        """Prepare it.

        ``in_pieces(timeout, value, place)`` fills `place` where that takes more rounds, and
        ``otherwise(timeout, notes, value, out)`` returns the result where layouts differ.

        :raises OSError: if there is no space for the slots.
        """
        super().__init__(plane, layout, note, plane.index * layout.stride)
        reducer = layout.reducer(op)
        self._place_for, self._reduce = reducer.place_for, reducer.reduce
        self._in_window = self.window is not None and layout.one_round
        self._in_pieces, self._otherwise = in_pieces, otherwise

    def start(self, packed: Any, value: Any, out: Any, timeout: float | None) -> FirstRound:
        """Return the round that reduces `value`."""
        place = self._place_for(out)
        if self._in_window:
            read = partial(self._read, timeout, value, out, place)
            return self.header, timeout, read, partial(self.write, packed)
        header = self.header
        if self.window is None:
            header = header._replace(payload=self.layout.to_bytes(packed))
        elif place is out and not may_fill(out, value):
            place = self._place_for(None)
        return header, timeout, partial(self._read, timeout, value, out, place), None

    def _read(
        self, timeout: float | None, value: Any, out: Any, place: Any, notes: Sequence[Note]
    ) -> Any:
        header = self.header
        for other in notes:
            if other is not header and other.label.data != self.layout.data:
                return self._otherwise(timeout, notes, value, out)
        if self._in_window:
            self._fence()
            at = self._half * (self._board.collected & 1)
            result = self._reduce(self._memory, at, place)
            self._fence()  # read before this rank says so
        elif self.window is None:
            payloads = bytearray().join([note.payload for note in notes])
            result = self._reduce(payloads, 0, place)
        else:
            result = place
            self._in_pieces(timeout, value, place)
            mark_written(place)
        if out is None or result is out:
            return result
        return copy_into(self._rounds, out, result)


class PreparedBroadcast(PreparedCall):
    """A ``broadcast`` of values of one layout.

    A receiver makes it from what the last call of its site brought. Then all notes are equal, which
    the board proves with one comparison. It may be another value this time: the source's note
    decides.
    """

    def send(
        self, packed: Any, timeout: float | None, read: Callable[[Sequence[Note]], Any]
    ) -> FirstRound:
        """Return the source's round."""
        if self.window is None:
            header = self.header._replace(payload=self.layout.to_bytes(packed))
            return header, timeout, read, None
        return self.header, timeout, read, partial(self.write, packed)

    def brings(self, note: Note) -> bool:
        """Return whether what came with the source's note has this layout."""
        return note is self.header or note.label.data == self.layout.data

    def read(self, note: Note, out: Any) -> Any:
        """Return the value that came with the source's note: in `out`, if that fits."""
        layout = self.layout
        place = out if out is not None and layout.fits(out) else None
        if self.window is None:
            value = layout.read(bytearray(note.payload), 0, 0, place)
        else:
            self._fence()
            value = layout.read(self._memory, self._half * (self._board.collected & 1), 0, place)
            self._fence()  # read before this rank says so
        if value is out:
            mark_written(out)
        return copy_into(self._rounds, out, value)


class PreparedGather(PreparedCall):
    """An ``all_gather`` of values of one layout.

    Small slots have one size, whatever is in them: each member may bring another value.
    """

    def __init__(
        self,
        plane: DataPlane,
        layout: Layout,
        note: Note,
        otherwise: Callable[[float | None, Any, Sequence[Note]], list[Any]],
    ) -> None:
        """Prepare it.

        ``otherwise(timeout, obj, notes)`` returns the result where layouts differ, or where it
        takes more rounds.

        :raises OSError: if there is no space for the slots.
        """
        size, index = max(plane.small_slot, layout.stride), plane.index
        super().__init__(plane, layout, note, index * size)
        self._others = [(i, i * size) for i in range(plane.count) if i != index]
        self._count, self._otherwise = plane.count, otherwise

    def start(self, packed: Any, obj: Any, timeout: float | None) -> FirstRound:
        """Return the round that gathers `obj`."""
        write = partial(self.write, packed) if self.layout.one_round else None
        return self.header, timeout, partial(self._read, timeout, obj), write

    def _read(self, timeout: float | None, obj: Any, notes: Sequence[Note]) -> list[Any]:
        header, read, memory = self.header, self.layout.read, self._memory
        if not self.layout.one_round:
            return self._otherwise(timeout, obj, notes)
        for other in notes:
            if other is not header and other.label.data != self.layout.data:
                return self._otherwise(timeout, obj, notes)
        self._fence()
        begin = self._half * (self._board.collected & 1)
        values = [obj] * self._count
        for index, at in self._others:
            values[index] = read(memory, begin + at, 0)
        self._fence()  # read before this rank says so
        return values
