"""The notes of calls, made once for each place in the user's program that calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from syncprims.interface import Label, Note

from .call_site import describe, users_frame
from .validation import check_name

if TYPE_CHECKING:
    from types import CodeType, FrameType

    _Known = tuple[Note, Note, CodeType]

_MOST = 4096


class Notes:
    """The notes of one group's calls."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Known] = {}
        self._between: set[str] = set()  # files whose frames are not the user's, as far as seen

    def of(
        self,
        kind: str,
        name: str | None = None,
        src: int | None = None,
        op: str | None = None,
        flag: bool = False,
    ) -> Note:
        """Return the note of a call that carries no more than a flag, with the user's call site.

        Called by what the user calls, or by what that calls.
        """
        if name is not None and name.__class__ is not str:  # it might not even be a key
            check_name(name)
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while (code := frame.f_code).co_filename in self._between and frame.f_back is not None:
            frame = frame.f_back
        key = (kind, name, src, op, id(code), frame.f_lasti)
        known = self._known.get(key) or self._learn(key, frame, Label(kind, name, src, op))
        return known[1] if flag else known[0]

    def _learn(self, key: tuple[object, ...], frame: FrameType, label: Label) -> _Known:
        user = users_frame(frame)
        while frame is not user and frame.f_back is not None:
            self._between.add(frame.f_code.co_filename)
            frame = frame.f_back
        code = user.f_code
        key = (*key[:4], id(code), user.f_lasti)
        known = self._known.get(key)
        if known is None:
            check_name(label.name)
            if len(self._known) > _MOST:  # names made from a counter: forget, do not grow
                self._known.clear()
            label.site = describe(user)
            # The code object is kept, so that its id stays its own.
            known = self._known[key] = Note(label), Note(label, flag=True), code
        return known
