"""The standard streams, such that a command can rely on them however it was started."""

from __future__ import annotations

import io
import os
import sys


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
