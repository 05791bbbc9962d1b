"""Rank bugs, most of which people reported in public, each with its mended twin."""

from __future__ import annotations

from . import (
    checked,
    ends,
    files,
    loops,
    messages,
    order,
    pairing,
    sharded,
    signals,
    skipped,
    values,
)  # isort: skip
from .bug import ALL, Bug, Kind, Program, is_named, outcome, run_bug

KINDS = [skipped, order, pairing, loops, values, messages, sharded, ends, files, signals, checked]
BUGS = [bug for kind in KINDS for bug in ALL if bug.scope["__name__"] == kind.__name__]
FIFTY = [bug for bug in BUGS if not bug.check]
CHECKED = [bug for bug in BUGS if bug.check]

__all__ = [
    "BUGS", "CHECKED", "FIFTY", "KINDS", "Bug", "Kind", "Program", "is_named", "outcome", "run_bug",
]  # fmt: skip
