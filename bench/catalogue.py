"""The catalogue of measurements: operations, the calls of each library, and the aims."""

from __future__ import annotations

from typing import NamedTuple

OURS = "syncprims"
KB, MB = 2**10, 2**20

#: Operation of the control plane -> library -> call.
CONTROL = {
    "barrier": {
        OURS: "barrier()",
        "pthread": "pthread_barrier_wait(), in C",
        "MPICH": "Barrier()",
        "Open MPI": "Barrier()",
        "multiprocessing": "Barrier.wait()",
        "Gloo": "dist.barrier()",
        "Accelerate": "wait_for_everyone()",
    },
    "named barrier": {OURS: 'barrier("epoch end")'},
    "flag": {
        OURS: "any_rank(flag)",
        "MPICH": "allreduce(flag, LOR)",
        "Open MPI": "allreduce(flag, LOR)",
        "Gloo": "dist.all_reduce(flag)",
        "Accelerate": "check_trigger()",
    },
    "lagging check, no late rank": {OURS: "Trigger(lag=1).check(), once in a step, no late rank"},
    "number": {
        OURS: "all_reduce(1.0)",
        "MPICH": "allreduce(1.0)",
        "Open MPI": "allreduce(1.0)",
        "Gloo": "dist.all_reduce(tensor(1.0)).item()",
    },
    "metrics": {OURS: "all_reduce(a small dict of metrics)"},
    "small arrays": {
        OURS: "all_reduce(a dict of two small arrays)",
        "Gloo": "dist.all_reduce of two small tensors, in place",
        "Accelerate": "reduce(a dict of two small tensors)",
    },
    "all_gather": {
        OURS: "all_gather(rank)",
        "MPICH": "allgather(rank)",
        "Open MPI": "allgather(rank)",
        "Gloo": "dist.all_gather_object(rank)",
    },
    "gathered arrays": {
        OURS: "all_gather(an array of 64 KB)",
        "MPICH": "Allgather of 64 KB",
        "Open MPI": "Allgather of 64 KB",
        "Gloo": "dist.all_gather of 64 KB",
        "Accelerate": "gather(a tensor of 64 KB)",
    },
    "small dict": {
        OURS: "broadcast(a small dict)",
        "MPICH": "bcast(a small dict)",
        "Open MPI": "bcast(a small dict)",
        "Gloo": "dist.broadcast_object_list([a small dict])",
    },
}

#: The same for the data plane. Every array is received into a given buffer.
DATA = {
    "broadcast": {
        OURS: "broadcast(array, out=)",
        "MPICH": "Bcast",
        "Open MPI": "Bcast",
        "Gloo": "dist.broadcast",
    },
    "all_reduce": {
        OURS: "all_reduce(array, out=)",
        "MPICH": "Allreduce",
        "Open MPI": "Allreduce",
        "Gloo": "dist.all_reduce, in place",
    },
}

#: Operation of torch.distributed -> call.
C10D = {
    "barrier": "dist.barrier()",
    "all_reduce 4": "dist.all_reduce, 4 B",
    "all_reduce 1024": "dist.all_reduce, 1 KB",
    "all_reduce 65536": "dist.all_reduce, 64 KB",
    "all_reduce 1048576": "dist.all_reduce, 1 MB",
    "objects": "dist.all_gather_object",
    "transfer 65536": "dist.send and dist.recv, 64 KB, there and back",
    "DDP 2.1 M": "a step of DDP, 2.1 M parameters",
    "DDP 25 M": "a step of DDP, 25 M parameters",
}


def named(size: float) -> str:
    """Return a number of bytes as text, with its unit."""
    for unit, text in ((MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:g} {text}"
    return f"{size:g} B"


class Aim(NamedTuple):
    """The aim for one of our figures, relative to a peer, to another of our calls, or absolute."""

    peer: str | None = None  #: None: the aim is absolute
    at_most: float | None = None  #: times the peer's figure, or an absolute limit
    at_least: float | None = None  #: times as fast as the peer. If both are None, there is no aim
    operation: str | None = None  #: the peer's, if it is another one than ours

    def text(self, unit: str) -> str:
        """Return the aim as text; `unit` is the unit of the figures."""
        if self.at_most is not None:
            beside = f"x {self.operation or self.peer}" if self.peer else unit
            return f"<= {self.at_most:g} {beside}"
        if self.at_least is None:
            return "none"
        if self.at_least == 1:
            return f"ahead of {self.peer}"
        return f">= {self.at_least:g} x as fast as {self.peer}"

    def measured(self, ours: float, peer: float | None) -> float:
        """Return the value that the aim limits: a ratio of the two figures, or our figure."""
        if peer is None:
            return ours
        return ours / peer if self.at_most is not None else peer / ours

    def reached(self, ours: float, peer: float | None) -> bool | None:
        """Return whether the figures reach the aim; None if there is no aim."""
        measured = self.measured(ours, peer)
        if self.at_most is not None:
            return measured <= self.at_most
        return None if self.at_least is None else measured >= self.at_least


class Row(NamedTuple):
    """A row of the first table: a promised figure, under the name that the docs use."""

    what: str
    section: str  #: the section that measures it
    operation: str
    ranks: tuple[int, ...]
    unit: str
    aims: tuple[Aim, ...]
    ours: str = OURS
    shown: tuple[str, ...] = ()  #: peers without an aim


_PAIR, _ALL = (2, 4), (2, 4, 8)

_SMALL = (
    Aim(OURS, at_most=3, operation="barrier"),
    Aim("MPICH", at_most=4),
    Aim("Gloo", at_least=10),
)
_MIDDLE = (Aim("MPICH", at_most=2), Aim("Gloo", at_least=1))
_LARGE = (Aim("MPICH", at_least=1), Aim("Gloo", at_least=1))
_ARRAYS = tuple(
    Row(f"`{operation}` of {named(size)}, `file`", "data", f"{operation} {size}", _ALL, "us", aims)
    for operation in DATA
    for size, aims in (
        (4, _SMALL), (4 * KB, _SMALL), (64 * KB, _MIDDLE), (256 * KB, _MIDDLE),
        (MB, _LARGE), (16 * MB, _LARGE),
    )
)  # fmt: skip

_C10D = tuple(
    Row(f"`syncprims.c10d`: {call}", "c10d", operation, _PAIR, "us", (aim,))
    for operation, call in C10D.items()
    for aim in [
        Aim("Gloo", at_least=5) if operation == "barrier"
        else Aim("Gloo", at_least=2) if operation == "objects"
        else Aim("Gloo", at_least=1) if operation.startswith("all_reduce")
        else Aim("Gloo", at_most=1.05)
    ]
)  # fmt: skip

ROWS = (
    Row("`from syncprims import barrier`, on top of a bare interpreter", "alone", "import", (1,),
        "ms", (Aim(at_most=25),), shown=("torch", "Accelerate")),
    Row("barrier, world of one", "alone", "barrier", (1,), "us", (Aim(at_most=0.3),),
        shown=("Accelerate",)),
    Row("barrier, `file`", "control", "barrier", _ALL, "us",
        (Aim("pthread", at_most=1.5), Aim("MPICH", at_least=1), Aim("Gloo", at_least=20))),
    Row("barrier under torchrun, one host", "torchrun", "barrier", _ALL, "us",
        (Aim("Accelerate", at_least=20), Aim("Gloo", at_least=20))),
    Row("flag, `file`", "control", "flag", _ALL, "us", (Aim("Accelerate", at_least=20),),
        shown=("MPICH", "Gloo")),
    Row("flag under torchrun, one host", "torchrun", "flag", _ALL, "us",
        (Aim("Accelerate", at_least=20),), shown=("Gloo",)),
    Row("flag with `lag=1`, no late rank", "control", "lagging check, no late rank", _ALL, "us",
        ()),
    Row("`all_reduce(1.0)`, `file`", "control", "number", _ALL, "us",
        (Aim(OURS, at_most=3, operation="barrier"), Aim("MPICH", at_most=4),
         Aim("Gloo", at_least=10))),
    Row("`all_reduce` of a dict of metrics, `file`", "control", "metrics", _ALL, "us",
        (Aim(OURS, at_most=4, operation="barrier"),)),
    Row("`all_reduce` of a dict of two small arrays, `file`", "control", "small arrays", _ALL,
        "us", (Aim("Gloo", at_least=10), Aim("Accelerate", at_least=10))),
    Row("`all_gather` of arrays of 64 KB, `file`", "control", "gathered arrays", _ALL, "us",
        (Aim("Gloo", at_least=1), Aim("MPICH", at_most=2)), shown=("Accelerate",)),
    Row("small object broadcast, `file`", "control", "small dict", _ALL, "us",
        (Aim("Gloo", at_least=25),), shown=("MPICH",)),
    Row("small object broadcast under torchrun", "torchrun", "small dict", _ALL, "us",
        (Aim("Gloo", at_least=20),)),
    *_ARRAYS,
    Row("64 MB broadcast into a given array", "data", f"broadcast {64 * MB}", _ALL, "us",
        (Aim("Gloo", at_least=2), Aim("MPICH", at_least=1))),
    Row("64 MB all-reduce", "data", f"all_reduce {64 * MB}", _PAIR, "us",
        (Aim("MPICH", at_least=1), Aim("Gloo", at_least=1))),
    Row("a passing test, ranks in threads", "worlds", "a passing test", (4,), "ms",
        (Aim(at_most=5),), "a marked test in threads",
        shown=("torchrun", "spawn + Gloo", "debug_launcher")),
    Row("a passing test, ranks in processes", "worlds", "a passing test", (4,), "ms",
        (Aim(at_most=150),), "a marked test in processes"),
    Row("a skipped barrier is reported, threads", "worlds", "a skipped barrier", (4,), "ms",
        (Aim(at_most=10),), "run_world(kind='threads')"),
    Row("a skipped barrier is reported, processes", "worlds", "a skipped barrier", (4,), "ms",
        (Aim(at_most=250),), "run_world(kind='processes')"),
    Row("a killed rank is reported and named, 99 in 100", "kills", "quiet, p99", (3,), "ms",
        (Aim(at_most=50),), shown=("Gloo",)),
    Row("the same, every processor busy", "kills", "every processor busy, p99", (3,), "ms",
        (Aim(at_most=50),)),
    *_C10D,
    Row("a passing DDP test, ranks in threads", "c10d", "a passing DDP test", (4,), "ms",
        (Aim(at_most=50),), "in threads"),
    Row("a passing DDP test, ranks in processes", "c10d", "a passing DDP test", (4,), "ms",
        (Aim(at_most=400),), "in processes"),
    *(Row(f"`torch.distributed`: {fault} is named on all ranks", "c10d", fault, (4,), "ms",
          (Aim(at_most=100),)) for fault in ("a kill", "a skipped call", "a wrong shape")),
    Row("`accumulate` context, per step", "training", "context", (1,), "us", (Aim(at_most=3),),
        shown=("Accelerate",)),
    Row("`save_model`, 1 GiB, over a plain write", "checkpoints", "of a plain write", (1,), "x",
        (Aim(at_most=1.1),), "save_model", shown=("Accelerate", "torch.save")),
    Row("`save_model`, 1 GiB: extra memory", "checkpoints", "extra memory", (1,), "MB",
        (Aim(at_most=64),), "save_model", shown=("Accelerate", "torch.save")),
    Row("load into a model in use, 1 GiB, over safetensors", "checkpoints", "of safetensors", (1,),
        "x", (Aim(at_most=1.3),), "load_checkpoint_in_model", shown=("safetensors", "Accelerate")),
    Row("load into a new model, 1 GiB, over safetensors", "checkpoints", "of safetensors, new",
        (1,), "x", (Aim(at_most=1.1),), "load_checkpoint_in_model",
        shown=("safetensors", "Accelerate")),
    Row("the same, from the disk", "checkpoints", "of safetensors, new, cold", (1,), "x",
        (Aim(at_most=1.1),), "load_checkpoint_in_model", shown=("safetensors", "Accelerate")),
)  # fmt: skip
