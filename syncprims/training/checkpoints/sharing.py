"""Which rank writes what: replicas share the work, and what is written is main's, always."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def owners(sizes: Sequence[int], digests: Sequence[Sequence[str]]) -> list[int]:
    """Return for each part the place of the rank that writes it.

    `digests` are those of each rank's parts. A rank may write what is the same as main's, bit for
    bit; so what differs between ranks, as the running statistics of a batch norm, is main's own.
    The largest parts are given away first, each to the rank with the least to do.
    """
    load = [0] * len(digests)
    chosen = [0] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda part: -sizes[part]):
        able = [r for r, of_rank in enumerate(digests) if of_rank[part] == digests[0][part]]
        place = min(able, key=lambda r: (load[r], r))
        chosen[part] = place
        load[place] += sizes[part]
    return chosen
