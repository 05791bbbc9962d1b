"""Whether an epoch has dealt each sample of a data set to one rank, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, cast

from syncprims import RankMismatch, all_gather

_SHOWN = 8


def assert_dealt(
    seen: Iterable[Any],
    of: int | Iterable[Hashable],
    *,
    key: Callable[[Any], Any] | None = None,
    padding: bool = False,
) -> None:
    """Return only if the ranks have together seen each sample once. Collective.

    `seen` has what this rank sees in an epoch, in order: the ids of samples, or batches of them,
    such as a loader; with `key`, things from which it returns the ids. `of` has all ids, or is
    their number: then they are 0, 1, and so on.

    What completes the last batches, so that ranks have equally many, is *padding*: samples that
    were dealt before, at the end of a rank. With `padding` it is accepted.

    :raises RankMismatch: on all ranks otherwise. It lists the samples that are missing, doubled,
        padding or unknown, with the ranks that have seen them.
    """
    batches = [_ids(item if key is None else key(item)) for item in seen]
    mine = [sample for batch in batches for sample in batch]
    largest = max(map(len, batches), default=1)
    gathered = all_gather((mine, largest), name="assert_dealt")
    dealt = [ids for ids, _ in gathered]
    every = list(range(of) if isinstance(of, int) else of)
    known = set(every)
    counts = Counter(sample for ids in dealt for sample in ids)
    most = len(dealt) * max(size for _, size in gathered)
    is_padded = sum(counts.values()) < len(counts) + most and len(set(map(len, dealt))) == 1
    pads = _find_padding(dealt) if is_padded else [0] * len(dealt)
    real = Counter(
        sample for ids, pad in zip(dealt, pads, strict=True) for sample in ids[: len(ids) - pad]
    )
    found: dict[str, list[Any]] = {
        "missing": [sample for sample in every if not counts[sample]],
        "doubled": [sample for sample, count in real.items() if count > 1],
        "padding": [] if padding else [s for s in counts if counts[s] > max(real[s], 1)],
        "unknown": [sample for sample in counts if sample not in known],
    }
    if any(found.values()):
        lines = "\n".join(f"  {what}: {_shown(ids, dealt)}" for what, ids in found.items() if ids)
        raise RankMismatch(
            f"the ranks have not seen each of {len(every)} samples once:\n{lines}\n"
            f"  ranks {[*range(len(dealt))]} have seen {[*map(len, dealt)]} samples\n"
            f"Give each rank its own share, from one order on all ranks: a prepared loader, or a "
            f"DistributedSampler with one seed and set_epoch(). Padding is dropped by "
            f"syncprims.training.gather, or accepted with padding=True."
        )


def _ids(item: Any) -> list[Any]:
    """Return the ids in an item, which is one, or a batch in lists, tuples, arrays or tensors."""
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, list | tuple):
        return [sample for part in cast("Sequence[Any]", item) for sample in _ids(part)]
    return [item]


def _find_padding(dealt: Sequence[Sequence[Any]]) -> list[int]:
    """Return how many samples at the end of each rank only repeat earlier ones."""
    pads, known = [0] * len(dealt), set[Any]()
    for place in range(max(map(len, dealt))):
        for rank, ids in enumerate(dealt):
            if place < len(ids):
                pads[rank] = pads[rank] + 1 if ids[place] in known else 0
        known.update(ids[place] for ids in dealt if place < len(ids))
    return pads


def _shown(samples: Sequence[Any], dealt: Sequence[Sequence[Any]]) -> str:
    """Return ``3 (rank 0), 5 (ranks 0, 1)``."""
    texts: list[str] = []
    for sample in samples[:_SHOWN]:
        ranks = [str(rank) for rank, ids in enumerate(dealt) for seen in ids if seen == sample]
        where = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        texts.append(f"{sample!r} ({where})" if ranks else repr(sample))
    more = f" and {len(samples) - _SHOWN} more" if samples[_SHOWN:] else ""
    return ", ".join(texts) + more
