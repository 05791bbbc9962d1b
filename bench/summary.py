"""The first table: promises, measurements, and where peers are faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from catalogue import CONTROL, DATA, OURS, ROWS, named
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from catalogue import Aim, Row

    Sections = Mapping[str, Mapping[str, Any]]

#: From this ratio on, a peer is faster. Less is noise.
MARGIN = 1.05
TITLES = {
    "control": "ours on `file`",
    "torchrun": "ours under torchrun",
    "hosts": "ours on two pretended hosts",
    "data": "ours on `file`",
}


def lines(sections: Sections) -> list[str]:
    """Return the table of all promises, and the list of comparisons that peers win."""
    return [
        "",
        "## Promises",
        "",
        "Medians, by the number of ranks if there are several. *Measured* is the value that the",
        "aim limits: our figure divided by the peer's for `<= x`, the peer's divided by ours for",
        "`>= x as fast` and `ahead`, otherwise our figure. To measure a line again, run",
        "`python bench/measure.py --only SECTION`.",
        *table(sections),
        "",
        "## Where peers are faster",
        "",
        *(lost(sections) or ["In none of the measurements."]),
        "",
        *WHY,
    ]


#: What limits the calls for which a peer is faster.
WHY = [
    "Small arrays: after a call of ours, each rank knows that all ranks came. So a barrier is",
    "its floor, in Python. `Bcast` of MPICH waits for no receiver: it takes less time than",
    "`Barrier`.",
    "",
    "A load into a model in use reads the file once to verify it, and once more into the",
    "model. So a damaged file changes nothing, and no second copy of the model is in memory.",
    "The floor is two reads.",
    "",
    "Two hosts: a round is one exchange with the store, made by a thread beside the rank,",
    "because no signal and no deadline ends a wait inside of torch. Here two ranks, their",
    "threads and the store share two processors. An array takes two more rounds around its",
    "transfer, so that a lost rank is named.",
]


def table(sections: Sections) -> list[str]:
    """Return one line for every aim of every promise."""
    found = head("what", "ranks", "ours", "range", "beside", "aim", "measured", "reached",
                 "section")  # fmt: skip
    for promise in ROWS:
        stored = sections.get(promise.section, {}).get("data", {})
        seen = Seen.restored(stored)
        for number, aim in enumerate(promise.aims):
            found.append(_line(promise, aim, seen, first=number == 0))
    return found


def _line(promise: Row, aim: Aim, seen: Seen, *, first: bool) -> str:
    """Return the line of one aim. Only the first line of a promise repeats its figures."""
    ranks = [count for count in promise.ranks if count in seen.ranks()] or list(promise.ranks)
    operation = aim.operation or promise.operation
    beside = [(aim.operation or aim.peer, aim.peer, operation)] if aim.peer else []
    beside += [(peer, peer, promise.operation) for peer in promise.shown if first]
    unit = promise.unit
    texts = [f"{name} {_several(seen, ranks, peer, of, unit)}" for name, peer, of in beside]
    verdicts = [seen.verdict(n, aim, promise.operation, promise.ours) for n in ranks]
    ranges = [seen.figures(n, promise.ours, promise.operation) for n in ranks]
    return row(
        promise.what if first else '"',
        "/".join(map(str, ranks)) if ranks != [1] else "",
        _several(seen, ranks, promise.ours, promise.operation, unit) if first else "",
        " / ".join(span(times) for times in ranges if times) if first else "",
        "; ".join(texts),
        aim.text(unit),
        " / ".join(dict.fromkeys(shown for shown, _ in verdicts)),
        _reached(ranks, [reached for _, reached in verdicts]),
        f"`{promise.section}`",
    )


def _reached(ranks: list[int], verdicts: list[bool | None]) -> str:
    missed = [
        str(count) for count, reached in zip(ranks, verdicts, strict=True) if reached is False
    ]
    if missed:
        return "**missed**" if len(ranks) == 1 else f"**missed** at {', '.join(missed)}"
    return "" if None in verdicts else "yes"


def _several(seen: Seen, ranks: list[int], library: str, operation: str, unit: str) -> str:
    medians = [seen.median(count, library, operation) for count in ranks]
    if all(median is None for median in medians):
        return seen.why_not(ranks[0], library, operation)
    shown = ["-" if median is None else short(median) for median in medians]
    return f"{' / '.join(shown)} {unit}"


def lost(sections: Sections) -> list[str]:
    """Return a line for every call at which a peer is faster, with the ratio."""
    found: list[str] = []
    for section, title in TITLES.items():
        seen = Seen.restored(sections.get(section, {}).get("data", {}))
        for library, operation in dict.fromkeys(name[1:] for name in seen.names()):
            ahead = _ahead(seen, seen.ranks(), library, operation, OURS)
            if library != OURS and ahead:
                found.append(f"- {library}, {_call(operation, library)}, against {title}: {ahead}")
    for promise in ROWS:
        if promise.section not in TITLES:
            seen = Seen.restored(sections.get(promise.section, {}).get("data", {}))
            for peer in (*promise.shown, *(aim.peer for aim in promise.aims if aim.peer)):
                ahead = _ahead(seen, list(promise.ranks), peer, promise.operation, promise.ours)
                if ahead:
                    found.append(f"- {peer}, against {promise.what}: {ahead}")
    return found


def _ahead(seen: Seen, ranks: list[int], library: str, operation: str, ours: str) -> str:
    """Return by how much and where a peer is faster; an empty text if nowhere."""
    found: list[str] = []
    for count in ranks:
        mine, theirs = (seen.median(count, name, operation) for name in (ours, library))
        if mine and theirs and mine > MARGIN * theirs:
            at = f" at {count} ranks" if count > 1 else ""
            found.append(f"{short(mine / theirs)} x{at}")
    return ", ".join(found)


def _call(operation: str, library: str) -> str:
    """Return a call as users write it."""
    if operation in CONTROL:
        return f"`{CONTROL[operation][library]}`"
    name, _, size = operation.partition(" ")
    return f"`{DATA[name][library]}` of {named(int(size))}"
