"""Cursors: the iterations of prepared loaders that run now."""

from __future__ import annotations


class Cursor:
    """One iteration of one prepared loader."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.serial = 0  #: of its latest batch
        self.at_end = False  #: the latest batch is the last
        self.beside: tuple[Cursor, ...] = ()  #: others that alternate with it, as in ``zip``
        self.real: int | None = None  #: items of all ranks' latest batches that are not padding


class OpenLoaders:
    """The iterations of prepared loaders that run now, outermost first."""

    def __init__(self) -> None:
        self.serial = 0  #: the number of batches yielded so far
        self._open: list[Cursor] = []

    def enter(self, cursor: Cursor) -> None:
        """Record that an iteration begins."""
        self._open.append(cursor)

    def leave(self, cursor: Cursor) -> None:
        """Record that an iteration is over, by exhaustion, ``break`` or an exception."""
        if cursor in self._open:
            self._open.remove(cursor)

    def advance(self, cursor: Cursor) -> None:
        """Record that `cursor` yields a batch, so that the loops inside of its own are over.

        If a cursor that was taken to be over goes on, it is not a loop inside of others: it runs
        beside them.
        """
        self.serial = cursor.serial = self.serial + 1
        if cursor not in self._open:
            cursor.beside = tuple(self._open)
            self._open.append(cursor)
        elif cursor is not self._open[-1]:
            del self._open[self._open.index(cursor) + 1 :]

    @property
    def innermost(self) -> Cursor | None:
        """The iteration that the current code is in."""
        return self._open[-1] if self._open else None

    def since(self, serial: int) -> list[Cursor]:
        """Return the iterations with a batch newer than `serial`, outermost first."""
        return [cursor for cursor in self._open if cursor.serial > serial]

    def is_open(self, cursor: Cursor | None) -> bool:
        """Return whether `cursor` is still being iterated."""
        return cursor in self._open
