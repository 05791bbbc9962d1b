"""The standard streams, such that a command can rely on them however it was started."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


def open_closed() -> None:
    """Let every standard stream be one; what was closed, as by ``>&-``, is the null device.

    Daemons start programs that way. Python has None for such a stream, and the next file or pipe
    that anybody opens would take its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # 0, 1, 2
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123 - it stays
            os.set_inheritable(stream.fileno(), True)  # as a standard stream is
            setattr(sys, name, stream)


def escape_unwritable() -> None:
    r"""Let the standard output spell what its encoding lacks as ``\xe9``, as errors do anyway."""
    stream: Any = sys.stdout
    with contextlib.suppress(AttributeError):  # a stand-in for it has no encoding
        stream.reconfigure(errors="backslashreplace")


def drop_unwritable() -> None:
    """Let go of what a full disk or a closed pipe did not take: Python tries again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
