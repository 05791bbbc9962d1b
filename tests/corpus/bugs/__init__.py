"""Fifty rank bugs that people reported in public, each with its mended twin."""

from __future__ import annotations

from . import counts, ends, files, order, pairing, signals, silent, skipped, values
from .bug import Bug, Kind, found, report, run_bug

KINDS = [skipped, order, pairing, counts, values, ends, files, signals, silent]
BUGS = [bug for kind in KINDS for bug in Bug.ALL if bug.__module__ == kind.__name__]

__all__ = ["BUGS", "Bug", "Kind", "found", "report", "run_bug"]
