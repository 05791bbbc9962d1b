"""Where in the user's program a primitive was called: of interest, unlike our own frames."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

# pathlib is slow to import
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
#: Frames of these stand between the user's line and ours.
_BETWEEN = (_HERE, contextlib.__file__, _STANDARD + "asyncio", _STANDARD + "logging")
_LONGEST = 200


def users_frame(frame: FrameType) -> FrameType:
    """Return the nearest frame from `frame` on outwards that is the user's."""
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` down to the user's last line: what the library did then helps nobody."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while frames and frames[-1].tb_frame.f_code.co_filename.startswith(_HERE):
        frames.pop()
    short: TracebackType | None = None
    for one in reversed(frames):
        short = type(one)(short, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return short


def describe(frame: FrameType) -> str:
    """Return ``file:line`` of `frame`, the file as short as it stays findable from here."""
    path = frame.f_code.co_filename
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        relative = path
    if relative.startswith(os.pardir):
        relative = os.path.basename(path)  # noqa: PTH119
    return f"{relative[-_LONGEST:]}:{frame.f_lineno}"
