"""Measure the control plane: barriers, flags and small objects on the file and torch backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jobs
from catalogue import CONTROL, OURS
from table import Seen, head, row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scale import Scale

#: Name of a library in the tables -> kind of its jobs.
ONE_HOST = {OURS: "syncprims, torchrun", "Gloo": "Gloo", "Accelerate": "Accelerate"}
TWO_HOSTS = {OURS: "syncprims, two hosts", "Gloo": "Gloo, two hosts"}
LOCAL = {name: name for name in jobs.KINDS}


def control_plane(scale: Scale) -> dict[str, Any]:
    """Measure the file backend and all its peers."""
    return _measured(LOCAL, scale.control, scale)


def under_torchrun(scale: Scale) -> dict[str, Any]:
    """Measure the torch backend on one host."""
    return _measured(ONE_HOST, scale.control, scale)


def two_hosts(scale: Scale) -> dict[str, Any]:
    """Measure the torch backend on two pretended hosts."""
    return _measured(TWO_HOSTS, scale.hosts, scale)


def _measured(libraries: Mapping[str, str], ranks: Iterable[int], scale: Scale) -> dict[str, Any]:
    seen = Seen()
    plan: dict[str, object] = {"what": "control", "seconds": scale.seconds}
    for count in ranks:
        for _ in range(scale.runs):  # in turn, so that a slow minute affects all
            for name, kind in libraries.items():
                jobs.measure(seen, kind, count, plan, CONTROL, name)
    return {**seen.stored(), "runs": scale.runs}


def local_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures of the file backend as a section of the results."""
    notes = [
        "Our figures are of the file backend, started by `syncprims run`. Broadcasts of MPICH and",
        "Gloo let the source continue before the others arrive. Each of our calls returns when all",
        "ranks have arrived, so it can name the missing ones.",
    ]
    return _lines("Control plane", data, "control", notes)


def torchrun_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures of the torch backend on one host."""
    notes = ["Our figures are of the torch backend. torchrun starts all libraries."]
    return _lines("One host, under torchrun", data, "torchrun", notes)


def hosts_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures of the torch backend on two pretended hosts."""
    notes = ["Ranks of one machine that share no directory, so they can meet only at the store."]
    return _lines("Two pretended hosts, over the loopback", data, "hosts", notes)


def _lines(title: str, data: Mapping[str, Any], section: str, notes: list[str]) -> list[str]:
    seen = Seen.restored(data)
    columns = [f"{ranks} ranks" for ranks in seen.ranks()]
    lines = [
        "",
        f"## {title}",
        "",
        *notes,
        f"Ratios of the medians of {data['runs']} runs: the peer's",
    ]
    lines += [
        "time divided by our time, so higher is better. `-` means that there is no such call."
    ]
    lines += head("ours", "beside", *columns)
    compared = {library for _, library, _ in seen.names()} - {OURS}
    for operation, calls in CONTROL.items():
        for library, call in calls.items():
            if library in compared:
                cells = [seen.ratio(ranks, library, operation) for ranks in seen.ranks()]
                lines.append(row(calls[OURS], f"{library}: {call}", *cells))
    for ranks in seen.ranks():
        lines += ["", f"### {ranks} ranks, microseconds per call"]
        lines += head("by", "call", "median", "range", "times ours")
        for operation, calls in CONTROL.items():
            known = {library: call for library, call in calls.items() if library in LOCAL}
            if section != "control":  # only the ranks that were measured
                known = {name: call for name, call in known.items() if name in compared | {OURS}}
            lines += seen.rows(ranks, operation, known)
    return lines
