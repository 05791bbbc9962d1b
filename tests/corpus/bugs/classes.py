"""Programs by rule: the error classes of the MPI Bugs Initiative that torch.distributed can have.

A rule is a class, a call with a hole, and what is right and wrong there. One rank, or all, has the
wrong text, alone or after other calls. https://github.com/mquinson/MBI names the classes. Races of
messages are left out, since the worlds refuse a receive without a source.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

from . import bug as shared
from .bug import Bug

# Each call of all ranks, with a tensor, and a root or an operation where it has one.
CALLS = {
    "all_reduce": "dist.all_reduce(@x, @op@group)",
    "broadcast": "dist.broadcast(@x, @root@group)",
    "reduce": "dist.reduce(@x, @root, @op@group)",
    "all_gather": "dist.all_gather([torch.empty_like(@x) for _ in three()], @x@group)",
    "gather": "dist.gather(@x, three() if rank == @root else None, @root@group)",
    "scatter": "dist.scatter(@x, three() if rank == @root else None, @root@group)",
    "all_to_all": "dist.all_to_all_single(torch.empty_like(@x), @x@group)",
    "barrier": "dist.barrier(@group)",
}
RIGHT = {"@x": "ones(6)", "@op": "dist.ReduceOp.SUM", "@root": "0", "@group": ""}
SENT, RECEIVED = "dist.send(@x, @peer, tag=@tag)", "dist.recv(ones(6), 0, tag=4)"
SEND = f"{SENT} if rank == 0 else {RECEIVED} if rank == 1 else None"
BOTH = "rank < 2 and [f(ones(6), 1 - rank) for f in (dist.send, dist.recv){}]"
FLOAT64 = "ones(6).double()"

# class: what is wrong, in which part of which calls
PARTS = {
    "RootMatching": ("@root", "1"),
    "OperatorMatching": ("@op", "dist.ReduceOp.MAX"),
    "DatatypeMatching": ("@x", FLOAT64),
    "OtherArgMatching": ("@x", "ones(9)"),
    "CommunicatorMatching": ("@group", ", group=other"),
    "InvalidRoot": ("@root", "7"),
    "InvalidOperator": ("@op", "dist.ReduceOp.BAND"),
}
# Rules of messages and of work: class, right text, wrong text, the ranks that differ
OTHERS = [
    ("CallMatching", SEND, SEND.replace(SENT, "None"), (0,)),
    ("CallMatching", SEND, SEND.replace(RECEIVED, "None"), (1,)),
    ("TagMatching", SEND, SEND.replace("@tag", "5"), (0, 1)),
    ("DatatypeMatching", SEND, SEND.replace("@x", FLOAT64), (0, 1)),
    ("OtherArgMatching", SEND, SEND.replace("@x", "ones(9)"), (0, 1)),
    ("InvalidSrcDest", SEND, SEND.replace("@peer", "7"), (0,)),
    ("InvalidSrcDest", SEND, SEND.replace("@peer", "0"), (0,)),
    ("InvalidSrcDest", SEND, SEND.replace("@peer", "2"), (0,)),
    ("BufferingHazard", BOTH.format("[:: 1 - 2 * rank]"), BOTH.format(""), (0, 1)),
    ("OutOfInitFini", "dist.barrier()", "[dist.destroy_process_group(), dist.barrier()]", ()),
    ("InvalidCommunicator", "rank < 2 and dist.all_reduce(ones(6), group=pair)",
     "dist.all_reduce(ones(6), group=pair)", (2,)),
]  # fmt: skip
BEFORE = ["pass", "dist.all_reduce(ones(3)); dist.broadcast(ones(5), 2)"]


def filled(call: str, **parts: str) -> str:
    right = {**RIGHT, "@peer": "1", "@tag": "4", **parts}
    for hole, text in sorted(right.items(), reverse=True):
        call = call.replace(hole, text)
    return call.replace("(, ", "(")


def rules() -> Any:
    """Yield class, right text, wrong text and the ranks that differ."""
    calls = {name: filled(call) for name, call in CALLS.items()}
    for (a, b), rank in product(permutations(calls, 2), range(3)):
        if (len(a) + len(b) + rank) % 3 == 0:  # each pair with one rank
            yield "CallMatching", calls[a], calls[b], (rank,)
    for (a, b), rank in product(permutations(calls, 2), range(3)):
        if a < b and (len(a) + len(b) + rank) % 3 == 1:
            yield "CallMatching", f"[{calls[a]}, {calls[b]}]", f"[{calls[b]}, {calls[a]}]", (rank,)
    for name, rank in product(calls, range(3)):
        yield "CallMatching", calls[name], "None", (rank,)
    for (kind, (hole, wrong)), name in product(PARTS.items(), calls):
        if hole in CALLS[name]:
            bad = filled(CALLS[name], **{hole: wrong})
            each: list[tuple[int, ...]] = [(0,), (1,), (2,)]
            for ranks in [()] if kind.startswith("Invalid") else each:
                yield kind, calls[name], bad, ranks
    for name in calls:
        work = f"{calls[name][:-1]}, async_op=True)".replace("(, ", "(")
        yield "MissingWait", f"{work}.wait()", work, ()
        if name not in ("barrier", "gather", "scatter"):
            text = work.replace(RIGHT["@x"], "x")
            yield (
                "LocalConcurrency", f"[work := {text}, work.wait(), x.zero_()]",
                f"[work := {text}, x.zero_(), work.wait()]", (),
            )  # fmt: skip
    for kind, right, wrong, ranks in OTHERS:
        yield kind, filled(right), filled(wrong), ranks


def programs() -> list[Bug]:
    """Return the programs, each with a twin."""
    found = list[Bug]()
    for (kind, right, wrong, ranks), before in product(rules(), BEFORE):
        # A message has its ranks in its text, and an argument that no rank may give is in all.
        bad = wrong
        if len(ranks) == 1 and "rank == 1" not in right and "rank <" not in right:
            bad = f"({wrong}) if rank == {ranks[0]} else ({right})"
        lines = [
            "def program(rank, folder):",
            "    x, other, pair = ones(6), dist.new_group(), dist.new_group([0, 1])",
            f"    {before}",
            f"    {bad}  # bug",
        ]
        found.append(
            Bug(
                "program", "\n".join(lines) + "\n", 1, f"{kind}{len(found)}.py", {**vars(shared)},
                kind, ranks, (bad, right), ranks=5 if len(ranks) > 1 else 3,
            )
        )  # fmt: skip
    return found
