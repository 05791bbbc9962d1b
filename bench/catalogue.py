"""What is measured, by whose calls, and what was aimed at."""

from __future__ import annotations

from typing import NamedTuple

OURS = "syncprims"

#: Operation of the control plane -> library -> its call.
CONTROL = {
    "barrier": {
        OURS: "barrier()",
        "pthread": "pthread_barrier_wait(), in C",
        "MPICH": "Barrier()",
        "multiprocessing": "Barrier.wait()",
        "Gloo": "dist.barrier()",
        "Accelerate": "wait_for_everyone()",
    },
    "named barrier": {OURS: 'barrier("epoch end")'},
    "flag": {
        OURS: "any_rank(flag)",
        "MPICH": "allreduce(flag, LOR)",
        "Gloo": "dist.all_reduce(flag)",
        "Accelerate": "check_trigger()",
    },
    "lagging check": {OURS: "Trigger(lag=1).check(), in a tight loop"},
    "lagging check, nobody behind": {OURS: "Trigger(lag=1).check(), nobody behind"},
    "all_gather": {
        OURS: "all_gather(rank)",
        "MPICH": "allgather(rank)",
        "Gloo": "dist.all_gather_object(rank)",
    },
    "small dict": {
        OURS: "broadcast(a small dict)",
        "MPICH": "bcast(a small dict)",
        "Gloo": "dist.broadcast_object_list([a small dict])",
    },
}

#: The same of the data plane; every array is received into a given buffer.
DATA = {
    "broadcast": {OURS: "broadcast(array, out=)", "MPICH": "Bcast", "Gloo": "dist.broadcast"},
    "all_reduce": {
        OURS: "all_reduce(array, out=)",
        "MPICH": "Allreduce",
        "Gloo": "dist.all_reduce, in place",
    },
}


class Aim(NamedTuple):
    """A figure of ours, beside a peer's or alone, and what it was to be."""

    operation: str
    peer: str | None = None  #: none: the aim is a figure, in microseconds
    at_most: float | None = None  #: times the peer's time, or microseconds
    at_least: float | None = None  #: times as fast as the peer; neither: shown, nothing aimed at

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {'us' if self.peer is None else 'x its time'}"
        if self.at_least is not None:
            return "ahead" if self.at_least == 1 else f">= {self.at_least:g} x as fast"
        return "none"

    def verdict(self, ours: float, peer: float) -> str:
        """Return the measured ratio, and whether it is what was aimed at."""
        if self.at_most is not None:
            reached, measured = ours / peer, f"{ours / peer:.2f}"
            if self.peer is None:
                reached, measured = ours, f"{ours:.1f} us"
            return f"{measured} {_said(reached <= self.at_most)}"
        measured = f"{peer / ours:.2f}"
        if self.at_least is None:
            return measured
        return f"{measured} {_said(peer / ours >= self.at_least)}"


def _said(reached: bool) -> str:
    return "reached" if reached else "**missed**"


CONTROL_AIMS = (
    Aim("barrier", "pthread", at_most=1.5),
    Aim("barrier", "MPICH", at_least=1),
    Aim("barrier", "Gloo", at_least=20),
    Aim("barrier", "multiprocessing"),
    Aim("barrier", "Accelerate"),
    Aim("flag", "MPICH"),
    Aim("flag", "Gloo"),
    Aim("flag", "Accelerate"),
    Aim("all_gather", "MPICH"),
    Aim("all_gather", "Gloo"),
    Aim("small dict", "MPICH"),
    Aim("small dict", "Gloo", at_least=20),
    Aim("lagging check, nobody behind", at_most=5),
    Aim("lagging check", at_most=5),
)

DATA_AIMS = (
    Aim("broadcast", "MPICH", at_least=1),
    Aim("broadcast", "Gloo", at_least=2),
    Aim("all_reduce", "MPICH", at_least=1),
    Aim("all_reduce", "Gloo", at_least=1),
)
