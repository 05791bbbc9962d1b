"""The members of a group as text, and no longer than it has to be: worlds have thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONGEST_NAME = 80


def members_text(members: Iterable[int]) -> str:
    """Return ranks as ``0-3,8``."""
    spans: list[tuple[int, int]] = []
    for rank in members:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def members_of(text: str) -> list[int]:
    """Return the ranks that :func:`members_text` wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def members_name(members: Sequence[int]) -> str:
    """Return a short text that these have and no others: ``[0, 1]``, or of many ``[0-63]``."""
    name = str(list(members))
    if len(name) > _LONGEST_NAME:
        name = f"[{members_text(members)}]"
    if len(name) > _LONGEST_NAME:
        import hashlib  # slow to import, and rarely needed

        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        head = name[:40].rpartition(",")[0]
        name = f"{head},...,{members[-1]}] ({len(members)}, digest {digest})"
    return name
