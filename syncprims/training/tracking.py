"""Which prepared loaders are being iterated, and which of them gives the batches of a window."""

from __future__ import annotations


class Cursor:
    """One iteration of one prepared loader."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.serial = 0  #: of its latest batch
        self.at_end = False  #: the latest batch is the last
        self.beside: tuple[Cursor, ...] = ()  #: others that take turns with it, as in ``zip``
        self.real: int | None = None  #: items of the world's latest batches that are no padding


class OpenLoaders:
    """The iterations that run now, outermost first."""

    def __init__(self) -> None:
        self.serial = 0  #: the number of batches handed out so far
        self._open: list[Cursor] = []

    def enter(self, cursor: Cursor) -> None:
        """Note that an iteration begins."""
        self._open.append(cursor)

    def leave(self, cursor: Cursor) -> None:
        """Note that an iteration is over, by exhaustion, ``break`` or an exception."""
        if cursor in self._open:
            self._open.remove(cursor)

    def advance(self, cursor: Cursor) -> None:
        """Note that `cursor` hands out a batch: loops inside of its own are over.

        One that was taken for over and goes on is no loop inside, but runs beside the others.
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
        """Tell whether `cursor` is still being iterated."""
        return cursor in self._open
