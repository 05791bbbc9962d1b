"""The notes of calls, made once for each place in the user's program that calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import check_name
from .callsite import calling_frame, describe
from .interface import Label, Note

if TYPE_CHECKING:
    from types import CodeType

_MOST = 4096


class Notes:
    """The notes of one group's calls."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Note, Note, CodeType]] = {}

    def of(
        self,
        kind: str,
        name: str | None = None,
        src: int | None = None,
        op: str | None = None,
        flag: bool = False,
    ) -> Note:
        """Return the note of a call that carries no more than a flag, with the user's call site."""
        if name.__class__ is not str:  # or it might not even be a key
            check_name(name)
        frame = calling_frame()
        code = frame.f_code
        key = (kind, name, src, op, id(code), frame.f_lasti)
        found = self._known.get(key)
        if found is None:
            check_name(name)
            if len(self._known) > _MOST:  # names made from a counter: forget, do not grow
                self._known.clear()
            label = Label(kind, name, src, op, describe(frame))
            # The code object is kept, so that its id stays its own.
            found = self._known[key] = Note(label), Note(label, flag=True), code
        return found[1] if flag else found[0]
