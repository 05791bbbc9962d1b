"""The place in the user's program where a primitive was called, and its cached notes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import CodeType, FrameType, TracebackType

from syncprims.interface import Label, Mark, Note

from .validation import check_name, plain_name

_Cached = tuple[Note, Note, CodeType]

# pathlib is slow to import
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
#: Frames of these stand between the user's line and ours.
_NOT_USERS = (_LIBRARY, contextlib.__file__, _STANDARD + "asyncio", _STANDARD + "logging")
_LONGEST_PATH = 200
_getframe = sys._getframe  # pyright: ignore[reportPrivateUsage]
_MOST_NOTES = 4096


def users_part(trace: TracebackType | None, between: tuple[str, ...] = ()) -> TracebackType | None:
    """Return `trace` up to the user's last line, without the library's frames after it.

    Frames of files below the folders `between` are not the user's either.
    """
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    short: TracebackType | None = None
    for one in reversed(frames):
        if short or _is_users(one.tb_frame, (_LIBRARY, *between)):
            short = type(one)(short, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return short


def _is_users(frame: FrameType, not_users: tuple[str, ...]) -> bool:
    """Return whether this is a frame of the user's program, or of a library's program or test."""
    module = frame.f_globals.get("__name__") or ""
    if not (frame.f_code.co_filename.startswith(not_users) or module.startswith(not_users)):
        return True
    # `python -m library.program`, `library.testing`
    return module == "__main__" or (".test" in module and not module.startswith("syncprims."))


def users_frames(between: tuple[str, ...], until: str) -> list[FrameType]:
    """Return the user's frames outwards, up to the function `until` of the library.

    Frames of files below the folders `between` are not the user's. In a thread that the user has
    started, there are none.
    """
    found: list[FrameType] = []
    not_users = _NOT_USERS + between
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        if _is_users(frame, not_users):
            found.append(frame)
        elif frame.f_code.co_name == until:
            return found
        frame = frame.f_back
    return []


def describe_line(path: str, number: int) -> str:
    """Return ``file:line``; the path is relative if the file is below this directory."""
    try:
        here = os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118
    except OSError:  # the working directory is gone
        here = ""
    relative = path[len(here) :] if path.startswith(here) else os.path.basename(path)  # noqa: PTH119
    return f"{relative[-_LONGEST_PATH:]}:{number}"


def is_standard(frame: FrameType) -> bool:
    """Return whether this is a frame of Python's own modules."""
    path = frame.f_code.co_filename
    return path.startswith((_STANDARD, "<frozen ")) and "site-packages" not in path


def describe_users_line(frame: FrameType) -> str:
    """Return the innermost line of the user's in this stack, as ``file:line``.

    It is one of no installed package, if there is such a line.
    """
    outer: FrameType | None = frame
    while outer is not None:
        path = outer.f_code.co_filename
        if not (path.startswith(_LIBRARY) or is_standard(outer) or "site-packages" in path):
            return describe_line(path, outer.f_lineno)
        outer = outer.f_back
    return describe_line(frame.f_code.co_filename, frame.f_lineno)


def describe_call() -> str:
    """Return the public call that this code runs in, as ``barrier 'saved' (job.py:4)``."""
    frame = call = _getframe(1)
    while (code := frame.f_code).co_filename.startswith(_NOT_USERS) and frame.f_back:
        if code.co_filename.startswith(_LIBRARY):
            call = frame
        frame = frame.f_back
    name = call.f_locals.get("name")
    kind = call.f_code.co_qualname.partition(".<locals>")[0]
    site = describe_line(code.co_filename, frame.f_lineno)
    return str(Label(kind, name if isinstance(name, str) else None, site=site))


@functools.lru_cache(_MOST_NOTES)
def notes_of(
    kind: str, name: str | None, src: int | None, op: str | None, site: str, data: bytes = b""
) -> tuple[Note, Note]:
    """Return the plain note with this label, and the one with the mark YES.

    Ranks that are threads get the same objects, which nobody has to compare.
    """
    label = Label(kind, name, src, op, site, data)
    return Note(label), Note(label, Mark.YES)


class NoteCache:
    """The notes of one group's calls, made once for each call site in the user's program.

    Frames of files below the folders `between` are not the user's either.
    """

    def __init__(self, between: tuple[str, ...] = ()) -> None:
        self._not_users = _NOT_USERS + between
        self._notes: dict[tuple[object, ...], _Cached] = {}
        self._library_files: set[str] = set()  # whose frames are not the user's, as far as seen

    def note(
        self,
        kind: str,
        name: str | None = None,
        src: int | None = None,
        op: str | None = None,
        yes: bool = False,
    ) -> Note:
        """Return the note of a call that carries no payload, labeled with the user's call site.

        With `yes`, it has that mark. The call site is searched from ``sys._getframe(2)`` outwards:
        call this only in a function that the user calls, or in one that such a function calls.
        """
        if name is not None and name.__class__ is not str:  # it may not even be hashable
            name = plain_name(name)
        frame, known = _getframe(2), self._library_files
        while (code := frame.f_code).co_filename in known and (caller := frame.f_back):
            frame = caller
        key = (kind, name, src, op, id(code), frame.f_lasti)
        cached = self._notes.get(key) or self._add(frame, kind, name, src, op)
        return cached[1] if yes else cached[0]

    def _add(
        self, frame: FrameType, kind: str, name: str | None, src: int | None, op: str | None
    ) -> _Cached:
        while not _is_users(frame, self._not_users) and frame.f_back:
            self._library_files.add(frame.f_code.co_filename)
            frame = frame.f_back
        code = frame.f_code
        key = (kind, name, src, op, id(code), frame.f_lasti)
        cached = self._notes.get(key)
        if cached is None:
            if name is not None:
                check_name(name)
            if len(self._notes) > _MOST_NOTES:  # names made from a counter must not fill memory
                self._notes.clear()
            site = describe_line(code.co_filename, frame.f_lineno)
            notes = notes_of(kind, name, src, op, site)
            # The code object is kept, so that no other one gets its id.
            cached = self._notes[key] = (*notes, code)
        return cached
