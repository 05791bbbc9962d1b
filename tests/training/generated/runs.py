"""Runs generated programs, compares them with their oracles, and makes failing ones simpler."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks

import syncprims
from syncprims.testing import run_world

from . import text
from .oracle import Reference, Round, rounds
from .parts import FORMS
from .programs import Program, is_possible, simpler

#: How far values may be apart, beside what other orders make.
FLOORS = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 0.05, "float16": 0.01,
          "bf16": 0.02, "fp16": 5e-3}  # fmt: skip
#: Other orders of the same sums, which round in other ways.
ORDERS: list[Any] = [{"order": -1}, {"times": 3.0}, {"times": 5.0}]

Phases = list[list[dict[str, Any]]]


def run(p: Program) -> Phases:
    """Run a program; return the logs of its ranks, of each phase."""
    if p.world == "gloo":
        return [_on_gloo(p, text.program(p), syncprims.init)]
    space: dict[str, Any] = {}
    exec(text.program(p), space)
    kind: Any = "threads" if p.world == "threads" else "processes"
    options: Any = {"kind": kind, "torch": text.needs_torch(p), "seed": p.seed}
    with tempfile.TemporaryDirectory() as folder:
        phases = [run_world(lambda: space["program"](folder), p.ranks, **options)]
        if phases[0][0]["saved"]:
            ranks = p.resume[1]
            phases.append(run_world(lambda: space["program"](folder, True), ranks, **options))
    return phases


def _on_gloo(p: Program, source: str, world: Callable[[], Any]) -> list[Any]:
    """Run a program on Gloo, in a world that this opens; return the logs of its ranks."""
    space: dict[str, Any] = {}
    exec(source, space)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "meet")
        place.mkdir(mode=0o700)

        def program() -> Any:
            with world():
                return space["program"](folder)

        return Ranks(Kind("torch", p.ranks), place).run_alone(with_gloo(program, Path(folder)))


def find_fault(p: Program) -> str:
    """Run a program; return what is wrong with it, or nothing."""
    try:
        phases = run(p)
    except Exception as error:
        return "" if _may_refuse(p, str(error)) else f"{type(error).__name__}: {error}"
    if p.seed % 16 == 0 and repr(run(p)) != repr(phases):
        return "two runs of it differ"
    for logs in phases:
        # A rank without a batch has not noted the last norms.
        long = [log for log in logs if [*map(len, log["seen"])] == [*map(len, logs[0]["seen"])]]
        for name in ("values", "norms", "rates", "gathered"):
            values = [log[name] for log in (logs if name == "values" else long)]
            if any(repr(value) != repr(values[0]) for value in values):
                return f"ranks differ in {name}:\n" + "\n".join(f"  {value}" for value in values)
    found = rounds(p, phases)
    if fault := _find_wrong_items(p, phases, found):
        return fault
    wanted, got = Reference(p).run(found), phases[-1][0]
    if p.world == "gloo" and p.has_twin:
        theirs = _on_gloo(p, text.program(p, of_accelerate=True), contextlib.nullcontext)
        if fault := _compare(p, theirs[0], wanted, [], ("norms", "rates")):
            return f"Accelerate and the reference differ: {fault}"
    others = [Reference(p, **order).run(found) for order in ORDERS]
    return _compare(p, got, wanted, others, ("norms", "rates") if len(phases) == 1 else ())


def _may_refuse(p: Program, said: str) -> bool:
    if "a backward pass is running" in said:
        return p.inside and p.ranks > 1
    return "is padding in part" in said and FORMS[p.form].whole and p.way in ("map", "split")


def _compare(p: Program, log: Any, wanted: Any, others: list[Any], names: tuple[str, ...]) -> str:
    """Return how a log differs from the reference, by more than the reference in other orders."""
    triples = [(name, log[name], wanted[name], [o[name] for o in others]) for name in names]
    for i, mine in enumerate(log["values"]):
        right, orders = wanted["values"][i], [o["values"][i] for o in others]
        triples.append((f"values of m{i}", mine, right, orders))
    for name, mine, right, orders in triples:
        if len(mine) != len(right):
            return f"{name}: {len(mine)} and not {len(right)}"
        apart = max((_between(other, right) for other in orders), default=0.0)
        floor = FLOORS[p.dtype if p.mode == "no" else p.mode]
        allowed = 50 * apart + floor * (not p.is_exact or apart > 0 or name in ("rates", "norms"))
        if not (worst := _between(mine, right)) <= allowed:
            what = f"{name}: {worst:.3g} apart where {allowed:.3g} is allowed"
            return f"{what}:\n  got    {mine}\n  wanted {right}"
    return ""


def _between(some: list[float], right: list[float]) -> float:
    """Return the greatest distance to the right numbers, relative to those that are above one.

    Numbers that are not finite have to be alike.
    """
    pairs = [(a, b) for a, b in zip(some, right, strict=True) if repr(a) != repr(b)]
    far = (abs(a - b) / max(1.0, abs(b)) if math.isfinite(a - b) else math.inf for a, b in pairs)
    return max(far, default=0.0)


def _find_wrong_items(p: Program, phases: Phases, found: list[Round]) -> str:
    """Return which items an epoch lacks, or which results do not come once."""
    for epoch in range(p.epochs if p.way != "by hand" and p.event[1] != "break" else 0):
        seen = {n for r in found if r.epoch == epoch for ids in r.batches for n in ids or ()}
        missing = {*range(p.items)} - seen
        if missing and not p.drop_last:
            return f"epoch {epoch}: items {sorted(missing)} were not read"
        gathered: Counter[int] = Counter()
        for logs in phases:
            own, saved = logs[0]["gathered"][epoch], phases[0][0]["saved"]
            if len(phases) > 1 and logs is phases[0]:  # what came after the save was lost
                own = own[: saved[1]] if epoch == saved[0] else own * (epoch < saved[0])
            gathered.update(n for part in own for n in part)
        if p.gather and gathered != Counter(seen):
            return f"epoch {epoch}: gathered {sorted(gathered.elements())}, read {sorted(seen)}"
    return ""


def shrink(p: Program, fault: str) -> tuple[Program, str]:
    """Return a simpler program that fails in the same way, and what is wrong with it."""
    tried = {p}
    for other in simpler(p):
        if other not in tried and is_possible(other):
            tried.add(other)
            if (found := find_fault(other)).split(":")[0][:12] == fault.split(":")[0][:12]:
                return shrink(other, found)
    return p, fault
